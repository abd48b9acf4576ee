package forward

import (
	"github.com/mvp-mesh/mvp-node/internal/route"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// resultOK is the result label of an attempt or answer without a cause.
const resultOK = "OK"

// clientMetrics of the ingress node's end. Peers are names from certificates of the mesh CA, causes a closed set.
type clientMetrics struct {
	attempts     *prometheus.CounterVec // peer, result
	failed       *prometheus.CounterVec // cause
	unaffordable prometheus.Counter
	long         prometheus.Gauge
	short        prometheus.Gauge
}

func newClientMetrics(reg prometheus.Registerer) *clientMetrics {
	f := promauto.With(reg)
	inflight := f.NewGaugeVec(prometheus.GaugeOpts{
		Name: "mvp_forward_inflight",
		Help: "Requests under way to peers, by class, from the place taken to the end of the answer.",
	}, []string{"class"})
	m := &clientMetrics{
		attempts: f.NewCounterVec(prometheus.CounterOpts{
			Name: "mvp_forward_attempts_total",
			Help: "Attempts to have a request answered by a peer, by peer and result: OK when an answer began, else the cause.",
		}, []string{"peer", "result"}),
		failed: f.NewCounterVec(prometheus.CounterOpts{
			Name: "mvp_forward_failed_total",
			Help: "Requests that no peer answered, by the cause that the client was told.",
		}, []string{"cause"}),
		unaffordable: f.NewCounter(prometheus.CounterOpts{
			Name: "mvp_forward_retries_denied_total",
			Help: "Reads that were not sent to a second peer because the retry budget was used up.",
		}),
		long:  inflight.WithLabelValues("long"),
		short: inflight.WithLabelValues("short"),
	}
	for _, c := range route.Causes() {
		m.failed.WithLabelValues(c.String())
	}
	return m
}

func (m *clientMetrics) attempt(peer string, e *Error) {
	result := resultOK
	if e != nil {
		result = e.Cause.String()
	}
	m.attempts.WithLabelValues(peer, result).Inc()
}

func (m *clientMetrics) inflight(long bool) prometheus.Gauge {
	if long {
		return m.long
	}
	return m.short
}

// serverMetrics of the serving node's end.
type serverMetrics struct {
	served    *prometheus.CounterVec // result
	loopGuard prometheus.Counter
}

func newServerMetrics(reg prometheus.Registerer) *serverMetrics {
	f := promauto.With(reg)
	m := &serverMetrics{
		served: f.NewCounterVec(prometheus.CounterOpts{
			Name: "mvp_forward_served_total",
			Help: "Forwarded requests that arrived at this node, by result: OK when answered in full, Canceled when the ingress node gave up, else the refusal's cause.",
		}, []string{"result"}),
		loopGuard: f.NewCounter(prometheus.CounterOpts{
			Name: "mvp_forward_loop_guard_total",
			Help: "Forwarded requests that this node could only have answered by forwarding them again, or whose hop count was wrong; refused.",
		}),
	}
	m.served.WithLabelValues(resultOK)
	m.served.WithLabelValues(resultCanceled)
	for c := range sendable {
		m.served.WithLabelValues(c.String())
	}
	return m
}

// resultCanceled is the result of a forward that the ingress node ended.
const resultCanceled = "Canceled"
