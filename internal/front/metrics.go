package front

import (
	"log/slog"
	"strconv"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/route"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// metrics of the front. All label values come from closed sets of ours, so that nothing a stranger types can add a series
// (CASES A-03).
type metrics struct {
	requests  *prometheus.CounterVec   // outcome, reason, code
	duration  *prometheus.HistogramVec // outcome, verb; requests that are not long-running
	errors    *prometheus.CounterVec   // cause
	aborted   prometheus.Counter
	inflight  prometheus.Gauge
	upgraded  prometheus.Gauge
	panics    prometheus.Counter
	forwarded *prometheus.CounterVec // peer
}

func newMetrics(reg prometheus.Registerer) *metrics {
	f := promauto.With(reg)
	m := &metrics{
		requests: f.NewCounterVec(prometheus.CounterOpts{
			Name: "mvp_front_requests_total",
			Help: "Requests answered, by outcome and reason of the routing decision and by status code; code 0 means the client left before an answer, outcome None that the request was answered before a decision.",
		}, []string{"outcome", "reason", "code"}),
		duration: f.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "mvp_front_request_duration_seconds",
			Help:    "Time from reading a request's head to the end of its answer, long-running requests left out.",
			Buckets: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60},
		}, []string{"outcome", "verb"}),
		errors: f.NewCounterVec(prometheus.CounterOpts{
			Name: "mvp_front_errors_total",
			Help: "Answers made by mvp-node itself instead of an apiserver, by cause.",
		}, []string{"cause"}),
		aborted: f.NewCounter(prometheus.CounterOpts{
			Name: "mvp_front_aborted_total",
			Help: "Answers cut off after their head was sent, because either side broke off.",
		}),
		inflight: f.NewGauge(prometheus.GaugeOpts{
			Name: "mvp_front_inflight_requests",
			Help: "Requests being served now, long-running ones included.",
		}),
		upgraded: f.NewGauge(prometheus.GaugeOpts{
			Name: "mvp_front_upgraded_connections",
			Help: "Client connections that carry another protocol now: exec, attach, port-forward, cp, watches over WebSocket.",
		}),
		panics: f.NewCounter(prometheus.CounterOpts{
			Name: "mvp_front_panics_total",
			Help: "Panics while serving a request. Any is a bug.",
		}),
		forwarded: f.NewCounterVec(prometheus.CounterOpts{
			Name: "mvp_front_forwarded_total",
			Help: "Requests answered by a peer, by peer.",
		}, []string{"peer"}),
	}
	for _, c := range route.Causes() {
		m.errors.WithLabelValues(c.String())
	}
	return m
}

func (m *metrics) observe(rec *requestRecord, took time.Duration) {
	d := rec.rc.Decision
	outcome, reason := "None", "None"
	if d.Outcome != 0 {
		outcome, reason = d.Outcome.String(), d.Reason.String()
	}
	m.requests.WithLabelValues(outcome, reason, strconv.Itoa(rec.w.code())).Inc()
	if !rec.rc.LongRunning {
		m.duration.WithLabelValues(outcome, rec.rc.Attributes.Verb.String()).Observe(took.Seconds())
	}
	if rec.cause != route.CauseNone {
		m.errors.WithLabelValues(rec.cause.String()).Inc()
	}
	if rec.aborted {
		m.aborted.Inc()
	}
	if rec.served.Node != "" && rec.err == nil {
		m.forwarded.WithLabelValues(rec.served.Node).Inc()
	}
}

// levelOf is Debug for an ordinary local answer, Warn for one that mvp-node had to make itself, Info for the rest.
func levelOf(rec *requestRecord) slog.Level {
	switch {
	case rec.cause != route.CauseNone:
		return slog.LevelWarn
	case rec.rc.Decision.Outcome == route.Forward, rec.aborted && !rec.gone:
		return slog.LevelInfo
	}
	return slog.LevelDebug
}
