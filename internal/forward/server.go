package forward

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	"github.com/mvp-mesh/mvp-node/internal/catalog"
	"github.com/mvp-mesh/mvp-node/internal/loopguard"
	"github.com/mvp-mesh/mvp-node/internal/reqctx"
	"github.com/mvp-mesh/mvp-node/internal/route"
	mvpv1 "github.com/mvp-mesh/mvp-node/proto/mvp/v1"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

// ResolvedRequest is what a request means to this node.
type ResolvedRequest struct {
	Attributes  route.Attributes // Affinity is not read
	Namespace   string
	Name        string
	LongRunning bool
}

// AttributesResolver reads a request as the local apiserver would. It is called on the stream's goroutine and must not block.
type AttributesResolver interface {
	Resolve(method, target string) (ResolvedRequest, error)
}

// ServerOptions are the parts and settings of a Server. All are required unless said otherwise.
type ServerOptions struct {
	Name      string // of this node
	ClusterID string
	// Upstream asks the local apiserver. The request's context carries a reqctx.Request; RequestURI is the exact target. An error
	// that implements NotSent() bool and returns true promises that the apiserver did not execute the request; one whose
	// NotServed() returns true, that it does not serve it either.
	Upstream http.RoundTripper
	Resolver AttributesResolver
	// Catalog gives what the local apiserver serves now and its generation; nil while unknown. It must not block.
	Catalog func() (*catalog.Catalog, uint64)
	// CatalogRead is when the last complete reading of that catalog began. It must not be ahead of Catalog, nor block. May be nil.
	CatalogRead func() time.Time
	// Ready is nil while this node may serve others, else it says why not: draining, or its apiserver is down. It must not block.
	Ready func() error
	// Peer tells who is at the other end of a stream, from the certificate of its connection. It must not block.
	Peer func(context.Context) (authz.Peer, error)
	// Policy limits what users peers may speak for; its zero value does not.
	Policy authz.AssertPolicy
	// HeaderNames are stripped from every request, besides the names that are always stripped.
	HeaderNames authz.HeaderNames
	Logger      *slog.Logger
	Registerer  prometheus.Registerer
}

// Server answers forwarded requests from the local apiserver. It implements mvpv1.ForwardServiceServer, and relies on the
// RequireDeadline interceptor and on one that admits nodes only (internal/mesh).
type Server struct {
	mvpv1.UnimplementedForwardServiceServer
	o       ServerOptions
	metrics *serverMetrics
}

// NewServer connects the parts. It starts nothing.
func NewServer(o ServerOptions) (*Server, error) {
	var errs []error
	for _, r := range []struct {
		name    string
		missing bool
	}{
		{"Name", o.Name == ""}, {"ClusterID", o.ClusterID == ""}, {"Upstream", o.Upstream == nil}, {"Resolver", o.Resolver == nil},
		{"Catalog", o.Catalog == nil}, {"Ready", o.Ready == nil}, {"Peer", o.Peer == nil}, {"Logger", o.Logger == nil},
		{"Registerer", o.Registerer == nil}, {"HeaderNames", len(o.HeaderNames.User) == 0},
	} {
		if r.missing {
			errs = append(errs, fmt.Errorf("forward: server option %s is missing", r.name))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	o.Logger = o.Logger.With("component", "forward")
	return &Server{o: o, metrics: newServerMetrics(o.Registerer)}, nil
}

// Register adds the service to a gRPC server.
func (s *Server) Register(r grpc.ServiceRegistrar) { mvpv1.RegisterForwardServiceServer(r, s) }

// stream is the serving node's end of a Forward.
type stream = grpc.BidiStreamingServer[mvpv1.ForwardRequest, mvpv1.ForwardResponse]

// Forward implements mvpv1.ForwardServiceServer.
func (s *Server) Forward(st stream) error {
	err := s.forward(st)
	result := resultOK
	switch code := status.Code(err); code {
	case codes.OK:
	case codes.Canceled:
		result = resultCanceled
	default:
		result = route.PeerRefused.String()
		if fe, ok := forwardError(status.Convert(err)); ok {
			result = fe.GetCause()
		}
		s.o.Logger.DebugContext(st.Context(), "forward refused or failed", "reason", result, "code", code, "err", err)
	}
	s.metrics.served.WithLabelValues(result).Inc()
	return err
}

func (s *Server) forward(st stream) error {
	ctx := st.Context()
	first, err := st.Recv()
	if err == io.EOF {
		return malformed.err(0, "no head")
	}
	if err != nil {
		return err // the transport's, or an interceptor's refusal
	}
	in, err := decodeHead(first.GetHead(), s.o.HeaderNames)
	if err != nil {
		return malformed.err(0, "head: %v", err)
	}
	rc, err := s.admit(ctx, in)
	if err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return s.failed(ctx, err, false)
	}

	req := (&http.Request{
		Method:        in.head.GetHttp().GetMethod(),
		URL:           in.url,
		RequestURI:    in.head.GetHttp().GetTarget(),
		Proto:         "HTTP/1.1",
		ProtoMajor:    1,
		ProtoMinor:    1,
		Header:        in.header,
		Host:          in.head.GetHttp().GetHost(),
		ContentLength: in.length,
	})
	st = &orderly{stream: st}
	news := &informer{stream: st}
	req = req.WithContext(news.watch(reqctx.With(ctx, rc)))
	body := attachBody(req, st, in.head)
	resp, err := s.o.Upstream.RoundTrip(req)
	news.stop()
	if err != nil {
		if berr := body.failure(); berr != nil {
			return s.bodyFailed(ctx, berr)
		}
		notSent, ok := errors.AsType[interface {
			error
			NotSent() bool
		}](err)
		if outdated, ok := errors.AsType[interface {
			error
			NotServed() bool
		}](err); ok && outdated.NotServed() {
			_, generation := s.o.Catalog()
			return notServed.err(generation, "%v", err)
		}
		if bad, ok := errors.AsType[interface {
			error
			BadAnswer() bool
		}](err); ok && bad.BadAnswer() {
			return badAnswer.err(0, "%v", err)
		}
		return s.failed(ctx, err, !(ok && notSent.NotSent()))
	}
	if resp.StatusCode == http.StatusSwitchingProtocols {
		return s.tunnel(st, resp)
	}
	defer resp.Body.Close()
	return s.respond(st, resp, rc.LongRunning)
}

// admit asks everything that must be true before the local apiserver sees a request, in order: from the same cluster, forwarded
// exactly once, by who it says, for a user that may be spoken for, understood alike on both nodes, and servable here.
func (s *Server) admit(ctx context.Context, in *incoming) (*reqctx.Request, error) {
	h := in.head
	if h.GetClusterId() != s.o.ClusterID {
		return nil, foreignCluster.err(0, "cluster %q, this is %q", h.GetClusterId(), s.o.ClusterID)
	}
	from, err := s.o.Peer(ctx)
	if err != nil {
		return nil, wrongIngress.err(0, "peer: %v", err)
	}
	if err := loopguard.Check(loopguard.Hop(h.GetHop())); err != nil {
		s.metrics.loopGuard.Inc()
		return nil, looped.err(0, "%v", err)
	}
	if name := h.GetAudit().GetIngressNode(); name != from.Name {
		return nil, wrongIngress.err(0, "head from %q on a connection of %q", name, from.Name)
	}
	if err := s.o.Policy.MayAssert(from, in.user); err != nil {
		s.o.Logger.WarnContext(ctx, "assertion denied", "peer", from.Name, "user", in.user.Name,
			"audit_id", h.GetAudit().GetAuditId(), "err", err)
		return nil, denied.err(0, "%v", err)
	}
	if err := s.o.Ready(); err != nil {
		return nil, notReady.err(0, "%v", err)
	}
	res, err := s.o.Resolver.Resolve(h.GetHttp().GetMethod(), h.GetHttp().GetTarget())
	if err != nil {
		return nil, otherReading.err(0, "%v", err)
	}
	rc := &reqctx.Request{
		User:        in.user,
		AuditID:     h.GetAudit().GetAuditId(),
		ClientAddrs: append(h.GetAudit().GetSourceIps(), addrOf(ctx)...),
		IngressNode: from.Name,
		Hop:         loopguard.Hop(h.GetHop()),
		Attributes:  res.Attributes,
		Namespace:   res.Namespace,
		Name:        res.Name,
		LongRunning: res.LongRunning || h.GetHttp().GetUpgrade() != "",
		Upgrade:     h.GetHttp().GetUpgrade(),
	}
	if what := difference(h, rc); what != "" {
		return nil, otherReading.err(0, "the ingress node reads another %s", what)
	}
	if rc.Attributes.Resource {
		if s.o.CatalogRead != nil {
			rc.CatalogRead = s.o.CatalogRead() // before the catalog: see reqctx
		}
		c, generation := s.o.Catalog()
		if c == nil {
			return nil, notReady.err(generation, "the local catalog is not known")
		}
		if !c.Serves(rc.Attributes.Key, rc.Attributes.Verb) {
			s.metrics.loopGuard.Inc()
			return nil, notServed.err(generation, "%s of %v is not served here", rc.Attributes.Verb, rc.Attributes.Key)
		}
	}
	return rc, nil
}

// difference names what the ingress node reads differently from this node, "" if nothing.
func difference(h *mvpv1.RequestHead, rc *reqctx.Request) string {
	a, k := h.GetAttributes(), rc.Attributes.Key
	long := h.GetDeadlineClass() != mvpv1.DeadlineClass_DEADLINE_CLASS_SHORT
	switch {
	case a.GetGroup() != k.Group:
		return "group"
	case a.GetVersion() != k.Version:
		return "version"
	case a.GetResource() != k.Resource:
		return "resource"
	case a.GetSubresource() != k.Subresource:
		return "subresource"
	case a.GetVerb() != verbName(rc):
		return "verb"
	case a.GetNamespace() != rc.Namespace:
		return "namespace"
	case a.GetName() != rc.Name:
		return "name"
	case long != rc.LongRunning:
		return "deadline class"
	}
	return ""
}

// addrOf is the address of the ingress node's connection, without port, as the next link of the chain of addresses.
func addrOf(ctx context.Context) []string {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil
	}
	host, _, err := net.SplitHostPort(p.Addr.String())
	if err != nil {
		return nil // in-memory connections of tests
	}
	return []string{host}
}

// failed is the status for a request that the local apiserver did not answer in full.
func (s *Server) failed(ctx context.Context, err error, dispatched bool) error {
	switch cerr := ctx.Err(); {
	case errors.Is(cerr, context.Canceled):
		return status.FromContextError(cerr).Err() // the ingress node gave up: nobody reads this
	case cerr != nil || errors.Is(err, context.DeadlineExceeded):
		if dispatched {
			return tooLate.err(0, "%v", err)
		}
		return expired.err(0, "%v", err)
	case errors.Is(err, authz.ErrNoUser):
		return internalBug.err(0, "%v", err)
	case dispatched:
		return broken.err(0, "%v", err)
	}
	return unreachable.err(0, "%v", err)
}

// bodyFailed is the status for a request whose body did not arrive in full.
func (s *Server) bodyFailed(ctx context.Context, err error) error {
	if cerr := ctx.Err(); cerr != nil {
		return s.failed(ctx, cerr, true)
	}
	return bodyBroken.err(0, "request body: %v", err)
}
