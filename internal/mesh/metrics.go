package mesh

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"google.golang.org/grpc/codes"
)

// serverMetrics of the mesh port. Methods are those of access: gRPC answers unknown ones before any interceptor sees them.
type serverMetrics struct {
	calls   *prometheus.CounterVec // method, code
	panics  prometheus.Counter
	methods map[string]methodMetrics // filled once, read only
}

type methodMetrics struct {
	inflight prometheus.Gauge
	ok       prometheus.Counter // calls{code="OK"}, looked up once because nearly every call needs it
}

func newServerMetrics(reg prometheus.Registerer) *serverMetrics {
	f := promauto.With(reg)
	m := &serverMetrics{
		calls: f.NewCounterVec(prometheus.CounterOpts{
			Name: "mvp_mesh_calls_total",
			Help: "Calls on the mesh port that ended, by method and gRPC code.",
		}, []string{"method", "code"}),
		panics: f.NewCounter(prometheus.CounterOpts{
			Name: "mvp_mesh_panics_total",
			Help: "Panics while serving a call on the mesh port. Any is a bug.",
		}),
		methods: make(map[string]methodMetrics, len(access)),
	}
	inflight := f.NewGaugeVec(prometheus.GaugeOpts{
		Name: "mvp_mesh_inflight_calls",
		Help: "Calls being served on the mesh port now, by method.",
	}, []string{"method"})
	for method := range access {
		m.methods[method] = methodMetrics{
			inflight: inflight.WithLabelValues(method),
			ok:       m.calls.WithLabelValues(method, codes.OK.String()),
		}
	}
	return m
}

func (m *serverMetrics) of(method string) methodMetrics { return m.methods[method] }

func (m *serverMetrics) handled(method string, code codes.Code) {
	if code == codes.OK {
		m.methods[method].ok.Inc()
		return
	}
	m.calls.WithLabelValues(method, code.String()).Inc()
}

// poolMetrics of the connections to peers.
type poolMetrics struct {
	handshakes *prometheus.CounterVec // peer; failed ones
	conns      prometheus.Gauge
}

func newPoolMetrics(reg prometheus.Registerer) *poolMetrics {
	f := promauto.With(reg)
	return &poolMetrics{
		handshakes: f.NewCounterVec(prometheus.CounterOpts{
			Name: "mvp_mesh_handshake_failures_total",
			Help: "TLS handshakes with a peer that failed because one side does not accept the other, by peer.",
		}, []string{"peer"}),
		conns: f.NewGauge(prometheus.GaugeOpts{
			Name: "mvp_mesh_connections",
			Help: "Connections to peers that are held, in whatever state.",
		}),
	}
}
