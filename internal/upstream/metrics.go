package upstream

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	connections *prometheus.GaugeVec
	dials       *prometheus.CounterVec
	errors      *prometheus.CounterVec
	moved       prometheus.Counter
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		connections: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "mvp_upstream_connections",
			Help: "Open connections to the local apiserver, by protocol.",
		}, []string{"protocol"}),
		dials: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "mvp_upstream_dials_total",
			Help: "Attempts to open a connection to the local apiserver, by result.",
		}, []string{"result"}),
		errors: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "mvp_upstream_errors_total",
			Help: "Requests that got no response from the local apiserver, by step and by whether it may have seen them.",
		}, []string{"op", "sent"}),
		moved: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "mvp_upstream_moved_total",
			Help: "Requests moved to another connection because the first certainly had not delivered them.",
		}),
	}
	for _, p := range []string{"h1", "h2"} {
		m.connections.WithLabelValues(p)
	}
	for _, r := range []string{"ok", "error"} {
		m.dials.WithLabelValues(r)
	}
	for _, op := range Ops() {
		if op != OpUpgrade { // comes with an answer
			m.errors.WithLabelValues(op, "false")
		}
	}
	m.errors.WithLabelValues(OpSend, "true")
	m.errors.WithLabelValues(OpUpgrade, "true")
	for _, c := range []prometheus.Collector{m.connections, m.dials, m.errors, m.moved} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}
