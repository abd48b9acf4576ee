package discovery

import "github.com/prometheus/client_golang/prometheus"

// Label values of mvp_discovery_source_errors_total.
const (
	sourceAPIServices = "apiservices"
	sourceCRDs        = "customresourcedefinitions"
	sourceUnsynced    = "unsynced"
)

// Results of a refresh, label values of mvp_discovery_refreshes_total.
const (
	resultChanged   = "changed"
	resultUnchanged = "unchanged"
	resultNotReady  = "not_ready"
	resultError     = "error"
)

type metrics struct {
	refreshes     *prometheus.CounterVec
	sourceErrors  *prometheus.CounterVec
	dropped       prometheus.Counter
	generation    prometheus.Gauge
	lastSuccess   prometheus.Gauge
	groupVersions *prometheus.GaugeVec
	stale         prometheus.Gauge
	form          *prometheus.GaugeVec
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		refreshes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "mvp_discovery_refreshes_total",
			Help: "Readings of the local apiserver's discovery, by result. not_ready and error keep the last good catalog.",
		}, []string{"result"}),
		sourceErrors: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "mvp_discovery_source_errors_total",
			Help: "Failures to learn whether group-versions come from CRDs or aggregated APIs; unsynced counts catalogs made without knowing.",
		}, []string{"source"}),
		dropped: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "mvp_discovery_dropped_entries_total",
			Help: "Entries of discovery documents left out of a new catalog because they were empty, overlong or listed twice.",
		}),
		generation: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "mvp_discovery_generation",
			Help: "Generation of the local catalog, counted since the start of the node; 0 while it is unknown.",
		}),
		lastSuccess: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "mvp_discovery_last_success_timestamp_seconds",
			Help: "Unix time of the last complete reading of the local apiserver's discovery.",
		}),
		groupVersions: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "mvp_discovery_group_versions",
			Help: "Group-versions in the local catalog, by source.",
		}, []string{"source"}),
		stale: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "mvp_discovery_stale_group_versions",
			Help: "Group-versions of the local catalog whose resources the apiserver could not learn.",
		}),
		form: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "mvp_discovery_form",
			Help: "1 for the form of discovery document that the local apiserver gave last.",
		}, []string{"form"}),
	}
	for _, r := range []string{resultChanged, resultUnchanged, resultNotReady, resultError} {
		m.refreshes.WithLabelValues(r)
	}
	for _, s := range []string{sourceAPIServices, sourceCRDs, sourceUnsynced} {
		m.sourceErrors.WithLabelValues(s)
	}
	for _, s := range allSources {
		m.groupVersions.WithLabelValues(s.String())
	}
	for _, f := range forms {
		m.form.WithLabelValues(string(f))
	}
	return m, register(reg, m.refreshes, m.sourceErrors, m.dropped, m.generation, m.lastSuccess, m.groupVersions, m.stale, m.form)
}

type probeMetrics struct {
	up     prometheus.Gauge
	probes *prometheus.CounterVec
}

func newProbeMetrics(reg prometheus.Registerer) (*probeMetrics, error) {
	m := &probeMetrics{
		up: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "mvp_discovery_apiserver_up",
			Help: "1 while the local apiserver is ready, by its /readyz.",
		}),
		probes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "mvp_discovery_probes_total",
			Help: "Questions for the local apiserver's /readyz, by result.",
		}, []string{"result"}),
	}
	for _, r := range []probeResult{probeReady, probeForbidden, probeNotReady, probeStopping, probeRefused, probeError} {
		m.probes.WithLabelValues(string(r))
	}
	return m, register(reg, m.up, m.probes)
}

func register(reg prometheus.Registerer, cs ...prometheus.Collector) error {
	for _, c := range cs {
		if err := reg.Register(c); err != nil {
			return err
		}
	}
	return nil
}
