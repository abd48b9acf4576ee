package mesh

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	mvpv1 "github.com/mvp-mesh/mvp-node/proto/mvp/v1"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/reflection"
)

// alpn is what mesh connections speak inside TLS.
const alpn = "h2"

// Options are the parts and settings of a Server. All are required unless said otherwise.
type Options struct {
	Name      string // of this node
	ClusterID string
	// TLS proves who calls.
	TLS authz.MeshTLS
	// Catalog, Gossip and Explain are what MeshService shows.
	Catalog Catalog
	Gossip  Gossip
	Explain Explainer
	// Register adds further services. Each of their methods must be in the table of access. May be empty.
	Register []func(grpc.ServiceRegistrar)
	// StreamInterceptors of those services run last. May be empty.
	StreamInterceptors []grpc.StreamServerInterceptor
	Logger             *slog.Logger
	Registerer         prometheus.Registerer
}

// Server is the mesh port.
type Server struct {
	o       Options
	metrics *serverMetrics
	grpc    *grpc.Server
	health  *health.Server
}

// NewServer connects the parts. It starts nothing. It fails if a registered method is missing in the table of access.
func NewServer(o Options) (*Server, error) {
	var errs []error
	for _, r := range []struct {
		name    string
		missing bool
	}{
		{"Name", o.Name == ""}, {"ClusterID", o.ClusterID == ""}, {"TLS", o.TLS.Certificate == nil || o.TLS.Roots == nil},
		{"Catalog", o.Catalog == nil}, {"Gossip", o.Gossip == nil}, {"Explain", o.Explain == nil}, {"Logger", o.Logger == nil},
		{"Registerer", o.Registerer == nil},
	} {
		if r.missing {
			errs = append(errs, fmt.Errorf("mesh: option %s is missing", r.name))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	o.Logger = o.Logger.With("component", "mesh")
	s := &Server{o: o, metrics: newServerMetrics(o.Registerer), health: health.NewServer()}

	options := append(serverLimits(), s.chain()...)
	options = append(options,
		grpc.Creds(credentials.NewTLS(o.TLS.Server(alpn, authz.RoleNode, authz.RoleOperator))),
		grpc.WaitForHandlers(true), // Stop returns when the handlers have
	)
	s.grpc = grpc.NewServer(options...)
	mvpv1.RegisterMeshServiceServer(s.grpc, &service{o: &s.o})
	for _, register := range o.Register {
		register(s.grpc)
	}
	healthv1.RegisterHealthServer(s.grpc, s.health)
	reflection.Register(s.grpc) // v1 and v1alpha
	for _, method := range methodsOf(s.grpc.GetServiceInfo()) {
		if _, ok := access[method]; !ok {
			return nil, fmt.Errorf("mesh: method %s has no line in the table of access", method)
		}
	}
	s.SetServing(false)
	return s, nil
}

// SetServing sets what the health service answers, for the server as a whole and for each of its services. It begins as not
// serving, and stays so once Shutdown was called.
func (s *Server) SetServing(ok bool) {
	st := healthv1.HealthCheckResponse_NOT_SERVING
	if ok {
		st = healthv1.HealthCheckResponse_SERVING
	}
	s.health.SetServingStatus("", st)
	for service := range s.grpc.GetServiceInfo() {
		s.health.SetServingStatus(service, st)
	}
}

// Serve accepts connections until Shutdown, and then returns nil. Any other return is the listener's failure, and must end the
// process. It takes over the listener.
func (s *Server) Serve(l net.Listener) error {
	if err := s.grpc.Serve(l); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
		return fmt.Errorf("mesh: serve on %v: %w", l.Addr(), err)
	}
	return nil
}

// Shutdown tells the health service and all clients that the server is going, lets calls that are under way end until ctx does,
// and then cuts off the rest, watches among them. It returns after every handler has; the error is the context's if any was cut.
func (s *Server) Shutdown(ctx context.Context) error {
	s.health.Shutdown()
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.grpc.GracefulStop()
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		s.grpc.Stop()
		<-done
		return ctx.Err()
	}
}
