package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"k8s.io/apiserver/pkg/server/healthz"
	"k8s.io/component-base/metrics/legacyregistry"
)

// adminServer is the plain HTTP port for people and scrapers on the host: metrics, probes, profiles. Nothing on it is
// authenticated, so it listens on loopback only, and nothing on it changes anything.
type adminServer struct {
	listener net.Listener
	http     *http.Server
}

// newAdminServer takes over the listener. /livez says only that the process serves; it must never depend on peers, etcd or the
// local apiserver, or a static pod would be restarted for their sake. /readyz has a path for each check.
func newAdminServer(l net.Listener, reg *prometheus.Registry, ready []healthz.HealthChecker, logger *slog.Logger) *adminServer {
	mux := http.NewServeMux()
	healthz.InstallLivezHandler(mux, healthz.PingHealthz)
	healthz.InstallReadyzHandler(mux, ready...)
	// The libraries of Kubernetes keep their series (token reviews, client-go) in a registry of their own, which has those of
	// Go and of the process as well.
	gatherers := prometheus.Gatherers{reg, legacyregistry.DefaultGatherer}
	mux.Handle("GET /metrics", promhttp.HandlerFor(gatherers, promhttp.HandlerOpts{ErrorLog: slog.NewLogLogger(logger.Handler(), slog.LevelError)}))
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	return &adminServer{listener: l, http: &http.Server{
		Handler:           mux,
		ReadHeaderTimeout: 10 * time.Second,
		ErrorLog:          slog.NewLogLogger(logger.Handler(), slog.LevelDebug),
	}}
}

func (s *adminServer) serve() error {
	if err := s.http.Serve(s.listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve admin on %s: %w", s.listener.Addr(), err)
	}
	return nil
}

// stop ends the port last of all, so that a stop can be watched; profiles that are being taken are cut.
func (s *adminServer) stop(ctx context.Context) error {
	if err := s.http.Shutdown(ctx); err != nil {
		return errors.Join(err, s.http.Close())
	}
	return nil
}
