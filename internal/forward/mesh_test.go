package forward_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	"github.com/mvp-mesh/mvp-node/internal/catalog"
	"github.com/mvp-mesh/mvp-node/internal/forward"
	"github.com/mvp-mesh/mvp-node/internal/mesh"
	"github.com/mvp-mesh/mvp-node/internal/pki"
	"github.com/mvp-mesh/mvp-node/internal/reqctx"
	"github.com/mvp-mesh/mvp-node/internal/route"
	mvpv1 "github.com/mvp-mesh/mvp-node/proto/mvp/v1"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const cluster = "demo"

// world is a mesh CA with everything that the nodes of a test share.
type world struct {
	t  testing.TB
	ca *pki.CA
}

func newWorld(t testing.TB) *world {
	t.Helper()
	ca, err := pki.NewMeshCA(cluster, time.Now(), time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	return &world{t, ca}
}

// tls is the mesh identity of a node, or of an operator if its name says so.
func (w *world) tls(name string) authz.MeshTLS {
	w.t.Helper()
	issue := w.ca.IssueNode
	if strings.HasPrefix(name, "operator") {
		issue = w.ca.IssueOperator
	}
	pair, err := issue(cluster, name, pki.Extra{}, time.Now(), time.Hour)
	if err != nil {
		w.t.Fatal(err)
	}
	cert, err := tls.X509KeyPair(pair.CertPEM, pair.KeyPEM)
	if err != nil {
		w.t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(w.ca.CertPEM())
	return authz.MeshTLS{
		Certificate: func() *tls.Certificate { return &cert },
		Roots:       func() *x509.CertPool { return roots },
		Rules:       authz.PeerRules{ClusterID: cluster},
	}
}

// roundTripper is an apiserver in a function.
type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// pathResolver reads /apis/<group>/<version>/[namespaces/<ns>/]<resource>[/<name>[/<subresource>]].
type pathResolver struct{}

func (pathResolver) Resolve(method, target string) (forward.ResolvedRequest, error) {
	u, err := url.ParseRequestURI(target)
	if err != nil {
		return forward.ResolvedRequest{}, err
	}
	parts := strings.Split(strings.Trim(u.Path, "/"), "/")
	if len(parts) < 4 || parts[0] != "apis" {
		return forward.ResolvedRequest{}, nil
	}
	var out forward.ResolvedRequest
	out.Attributes.Resource = true
	k := &out.Attributes.Key
	k.Group, k.Version, parts = parts[1], parts[2], parts[3:]
	if parts[0] == "namespaces" && len(parts) > 2 {
		out.Namespace, parts = parts[1], parts[2:]
	}
	k.Resource = parts[0]
	if len(parts) > 1 {
		out.Name = parts[1]
	}
	if len(parts) > 2 {
		k.Subresource = parts[2]
	}
	verbs := map[string]string{"GET": "list", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
	verb := verbs[method]
	if method == "GET" && out.Name != "" {
		verb = "get"
	}
	if u.Query().Get("watch") != "" {
		verb, out.LongRunning = "watch", true
	}
	out.Attributes.Verb = catalog.ParseVerb(verb)
	return out, nil
}

var widgets = func() *catalog.Catalog {
	all := catalog.ParseVerbs([]string{"get", "list", "watch", "create", "update", "patch", "delete"})
	c, err := catalog.New("v1.36.0", []catalog.GroupVersion{{
		GV: catalog.GV{Group: "example.com", Version: "v1"}, Source: catalog.SourceBuiltin,
		Resources: []catalog.Resource{{Name: "widgets", Kind: "Widget", Namespaced: true, Verbs: all}},
	}})
	if err != nil {
		panic(err)
	}
	return c
}()

// server is a serving node.
type server struct {
	member     *route.Member
	mesh       *mesh.Server
	stop       func()
	registry   *prometheus.Registry
	generation uint64
}

type noGossip struct{ mesh.Gossip }

// serve starts a serving node before an apiserver. change may alter the options.
func (w *world) serve(name string, upstream http.RoundTripper, change ...func(*forward.ServerOptions)) *server {
	w.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		w.t.Fatal(err)
	}
	return w.serveOn(l, name, upstream, change...)
}

func (w *world) serveOn(
	l net.Listener, name string, upstream http.RoundTripper, change ...func(*forward.ServerOptions),
) *server {
	w.t.Helper()
	s := &server{registry: prometheus.NewRegistry(), generation: 7}
	o := forward.ServerOptions{
		Name: name, ClusterID: cluster, Upstream: upstream, Resolver: pathResolver{},
		Catalog:     func() (*catalog.Catalog, uint64) { return widgets, s.generation },
		Ready:       func() error { return nil },
		Peer:        mesh.PeerFromContext,
		HeaderNames: authz.DefaultHeaderNames(),
		Logger:      slog.New(slog.DiscardHandler),
		Registerer:  s.registry,
	}
	for _, f := range change {
		f(&o)
	}
	fwd, err := forward.NewServer(o)
	if err != nil {
		w.t.Fatal(err)
	}
	s.mesh, err = mesh.NewServer(mesh.Options{
		Name: name, ClusterID: cluster, TLS: w.tls(name),
		Catalog: o.Catalog, Gossip: noGossip{},
		Explain:            func(string, string, string) (mesh.Explanation, error) { return mesh.Explanation{}, nil },
		Register:           []func(grpc.ServiceRegistrar){fwd.Register},
		StreamInterceptors: []grpc.StreamServerInterceptor{forward.RequireDeadline()},
		Logger:             o.Logger, Registerer: s.registry,
	})
	if err != nil {
		w.t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.mesh.Serve(l) }()
	s.stop = sync.OnceFunc(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel() // at once
		_ = s.mesh.Shutdown(ctx)
		if err := <-served; err != nil {
			w.t.Error(err)
		}
	})
	w.t.Cleanup(s.stop)
	s.member = &route.Member{
		Name: name, Address: l.Addr().String(), State: route.Ready, Mode: route.Enabled, ServerVersion: "v1.36.0",
		Digest: widgets.Digest(), Generation: 7, Catalog: widgets,
	}
	return s
}

// client is an ingress node.
type client struct {
	*forward.Client
	pool     *mesh.Pool
	wire     *recorder
	registry *prometheus.Registry
}

func (w *world) client(name string, change ...func(*forward.ClientOptions)) *client {
	w.t.Helper()
	reg := prometheus.NewRegistry()
	pool, err := mesh.NewPool(mesh.PoolOptions{TLS: w.tls(name), Logger: slog.New(slog.DiscardHandler), Registerer: reg})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(pool.Close)
	rec := &recorder{conns: pool}
	o := forward.ClientOptions{
		Name: name, ClusterID: cluster, Conns: rec, HeaderNames: authz.DefaultHeaderNames(),
		Logger: slog.New(slog.DiscardHandler), Registerer: reg,
	}
	for _, f := range change {
		f(&o)
	}
	c, err := forward.NewClient(o)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(c.Close)
	return &client{c, pool, rec, reg}
}

// newRequest is what front hands to a Client.
func newRequest(t testing.TB, method, target string, body io.Reader, change ...func(*reqctx.Request)) *http.Request {
	t.Helper()
	r := httptest.NewRequest(method, target, body)
	res, err := pathResolver{}.Resolve(method, target)
	if err != nil {
		t.Fatal(err)
	}
	rc := &reqctx.Request{
		User:        &authz.User{Name: "jane", UID: "42", Groups: []string{"devs", "system:authenticated"}, Extra: map[string][]string{"scopes": {"a", "b"}}},
		AuditID:     "11111111-2222-3333-4444-555555555555",
		ClientAddrs: []string{"192.0.2.1"},
		Attributes:  res.Attributes,
		Namespace:   res.Namespace,
		Name:        res.Name,
		LongRunning: res.LongRunning,
	}
	for _, f := range change {
		f(rc)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	if rc.LongRunning {
		ctx, cancel = context.WithCancel(t.Context())
	}
	t.Cleanup(cancel)
	return r.WithContext(reqctx.With(ctx, rc))
}

const (
	listPath  = "/apis/example.com/v1/namespaces/default/widgets"
	getPath   = listPath + "/w1"
	watchPath = listPath + "?watch=1"
)

// upstreamTo asks a real HTTP server, as internal/upstream does.
func upstreamTo(t testing.TB, h http.Handler) http.RoundTripper {
	t.Helper()
	srv := httptest.NewServer(h)
	tr := &http.Transport{DisableCompression: true}
	t.Cleanup(func() { tr.CloseIdleConnections(); srv.Close() })
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		out := r.WithContext(r.Context())
		u := *r.URL
		u.Scheme, u.Host = "http", srv.Listener.Addr().String()
		out.URL, out.RequestURI = &u, ""
		return tr.RoundTrip(out)
	})
}

// answer is an apiserver's answer without an apiserver.
func answer(r *http.Request, code int, body string) *http.Response {
	return &http.Response{
		StatusCode: code, Header: http.Header{"Content-Type": {"text/plain"}}, ContentLength: int64(len(body)),
		Body: io.NopCloser(strings.NewReader(body)), Request: r,
	}
}

// notSent is internal/upstream's promise that the apiserver saw nothing.
type notSent struct{ error }

func (notSent) NotSent() bool { return true }

var errRefused = errors.New("connection refused")

// readAll reads and closes a body.
func readAll(t testing.TB, resp *http.Response) string {
	t.Helper()
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("body: %v", err)
	}
	return string(b)
}

// recorder keeps a copy of every message on the wire.
type recorder struct {
	conns    forward.Conns
	change   func(*mvpv1.ForwardRequest) // before it is sent
	mu       sync.Mutex
	sent     []*mvpv1.ForwardRequest
	received []*mvpv1.ForwardResponse
	off      bool
}

func (r *recorder) Conn(m *route.Member, long bool) (grpc.ClientConnInterface, error) {
	c, err := r.conns.Conn(m, long)
	if err != nil || r.off {
		return c, err
	}
	return &recordingConn{c, r}, nil
}

// wantOneMessageEachWay looks at what was recorded. An answer travels with its head unless it keeps that waiting, and a busy machine may
// let any answer do so, so the request is then made again, a few times.
func (c *client) wantOneMessageEachWay(t testing.TB, again func()) {
	t.Helper()
	for try := 0; len(c.wire.sent) != 1 || len(c.wire.received) != 1; try++ {
		if try == 5 {
			t.Fatalf("%d messages there, %d back, want 1 and 1", len(c.wire.sent), len(c.wire.received))
		}
		c.wire.sent, c.wire.received = nil, nil
		again()
	}
}

type recordingConn struct {
	grpc.ClientConnInterface
	r *recorder
}

func (c *recordingConn) NewStream(ctx context.Context, d *grpc.StreamDesc, m string, o ...grpc.CallOption) (grpc.ClientStream, error) {
	s, err := c.ClientConnInterface.NewStream(ctx, d, m, o...)
	if err != nil {
		return nil, err
	}
	return &recordingStream{s, c.r}, nil
}

type recordingStream struct {
	grpc.ClientStream
	r *recorder
}

func (s *recordingStream) SendMsg(m any) error {
	msg := m.(*mvpv1.ForwardRequest)
	if s.r.change != nil {
		msg = proto.CloneOf(msg)
		s.r.change(msg)
	}
	s.r.mu.Lock()
	s.r.sent = append(s.r.sent, proto.CloneOf(msg))
	s.r.mu.Unlock()
	return s.ClientStream.SendMsg(msg)
}

func (s *recordingStream) RecvMsg(m any) error {
	err := s.ClientStream.RecvMsg(m)
	if err == nil {
		s.r.mu.Lock()
		s.r.received = append(s.r.received, proto.CloneOf(m.(*mvpv1.ForwardResponse)))
		s.r.mu.Unlock()
	}
	return err
}

func wantError(t testing.TB, err error, cause route.Cause, dispatched bool) *forward.Error {
	t.Helper()
	e, ok := errors.AsType[*forward.Error](err)
	if !ok {
		t.Fatalf("error %v (%T), want a *forward.Error with cause %v", err, err, cause)
	}
	if e.Cause != cause || e.Dispatched != dispatched {
		t.Fatalf("error %v: cause %v dispatched %v, want %v %v", err, e.Cause, e.Dispatched, cause, dispatched)
	}
	return e
}

// within fails the test if f takes longer.
func within(t testing.TB, d time.Duration, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	start := time.Now()
	go func() { defer close(done); f() }()
	select {
	case <-done:
		if took := time.Since(start); took > d {
			t.Errorf("%s took %v, want at most %v", what, took, d)
		}
	case <-time.After(10 * d):
		t.Fatalf("%s did not happen within %v", what, 10*d)
	}
}

// waitFor waits for a condition that some other goroutine brings about.
func waitFor(t testing.TB, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(5 * time.Second); !cond(); {
		if time.Now().After(deadline) {
			t.Fatal("condition not reached")
		}
		time.Sleep(time.Millisecond)
	}
}

// value is a sample of a counter or gauge with the given label values, in the order of the labels' names.
func value(g prometheus.Gatherer, name string, labels ...string) float64 {
	families, err := g.Gather()
	if err != nil {
		panic(err)
	}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
	metrics:
		for _, m := range f.GetMetric() {
			for i, l := range m.GetLabel() {
				if i >= len(labels) || l.GetValue() != labels[i] {
					continue metrics
				}
			}
			return m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	return 0
}
