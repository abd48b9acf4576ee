package mesh

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	"github.com/mvp-mesh/mvp-node/internal/catalog"
	"github.com/mvp-mesh/mvp-node/internal/pki"
	"github.com/mvp-mesh/mvp-node/internal/route"
	mvpv1 "github.com/mvp-mesh/mvp-node/proto/mvp/v1"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const cluster = "demo"

// world is a mesh CA with what the nodes of a test share.
type world struct {
	t  testing.TB
	ca *pki.CA
}

func newWorld(t testing.TB) *world {
	t.Helper()
	ca, err := pki.NewMeshCA(cluster, time.Now(), 24*time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	return &world{t, ca}
}

// pair is the certificate of a node, or of an operator if its name says so.
func (w *world) pair(name string) pki.Pair {
	w.t.Helper()
	issue := w.ca.IssueNode
	if strings.HasPrefix(name, "operator") {
		issue = w.ca.IssueOperator
	}
	pair, err := issue(cluster, name, pki.Extra{}, time.Now(), 12*time.Hour)
	if err != nil {
		w.t.Fatal(err)
	}
	return pair
}

func (w *world) tls(name string) authz.MeshTLS {
	w.t.Helper()
	pair := w.pair(name)
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

func testCatalog(t testing.TB, version string) *catalog.Catalog {
	t.Helper()
	c, err := catalog.New(version, []catalog.GroupVersion{
		{GV: catalog.GV{Version: "v1"}, Source: catalog.SourceBuiltin, Resources: []catalog.Resource{
			{Name: "pods", Kind: "Pod", Namespaced: true, Verbs: catalog.ParseVerbs([]string{"get", "list", "watch"})},
			{Name: "pods", Subresource: "exec", Kind: "PodExecOptions", Namespaced: true, Verbs: catalog.ParseVerbs([]string{"create", "get"})},
		}},
		{GV: catalog.GV{Group: "example.com", Version: "v1"}, Source: catalog.SourceCRD},
		{GV: catalog.GV{Group: "metrics.k8s.io", Version: "v1"}, Source: catalog.SourceAggregated, Stale: true},
	})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// fakeGossip is a mesh that does not change.
type fakeGossip struct {
	view    *route.View
	details map[string]Detail
	dump    Dump
}

func (g *fakeGossip) View() *route.View         { return g.view }
func (g *fakeGossip) Converged() bool           { return true }
func (g *fakeGossip) Detail(name string) Detail { return g.details[name] }
func (g *fakeGossip) Dump() Dump                { return g.dump }

// node is a mesh port that runs.
type node struct {
	*Server
	member   *route.Member
	stop     func()
	registry *prometheus.Registry
}

func (w *world) options(name string) Options {
	c := testCatalog(w.t, "v1.36.0")
	v, err := route.NewView(name, []route.Member{{Name: name, State: route.Ready, Mode: route.Enabled, Catalog: c}})
	if err != nil {
		w.t.Fatal(err)
	}
	return Options{
		Name: name, ClusterID: cluster, TLS: w.tls(name),
		Catalog:  func() (*catalog.Catalog, uint64) { return c, 7 },
		Gossip:   &fakeGossip{view: v},
		Explain:  func(_, _, _ string) (Explanation, error) { return Explanation{}, errors.New("cannot be read") },
		Register: []func(grpc.ServiceRegistrar){func(r grpc.ServiceRegistrar) { mvpv1.RegisterForwardServiceServer(r, idle{}) }},
		Logger:   slog.New(slog.DiscardHandler), Registerer: prometheus.NewRegistry(),
	}
}

// idle is a ForwardService whose calls send one empty message and last until either end has enough.
type idle struct {
	mvpv1.UnimplementedForwardServiceServer
}

func (idle) Forward(s grpc.BidiStreamingServer[mvpv1.ForwardRequest, mvpv1.ForwardResponse]) error {
	if err := s.Send(&mvpv1.ForwardResponse{}); err != nil {
		return err
	}
	<-s.Context().Done()
	return s.Context().Err()
}

func (w *world) start(name string, change ...func(*Options)) *node {
	w.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		w.t.Fatal(err)
	}
	return w.startOn(l, name, change...)
}

func (w *world) startOn(l net.Listener, name string, change ...func(*Options)) *node {
	w.t.Helper()
	o := w.options(name)
	for _, f := range change {
		f(&o)
	}
	s, err := NewServer(o)
	if err != nil {
		w.t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	n := &node{Server: s, registry: o.Registerer.(*prometheus.Registry)}
	n.stop = sync.OnceFunc(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		_ = s.Shutdown(ctx)
		if err := <-served; err != nil {
			w.t.Errorf("serve: %v", err)
		}
	})
	w.t.Cleanup(n.stop)
	n.member = &route.Member{Name: name, Address: l.Addr().String()}
	return n
}

func (w *world) pool(name string, change ...func(*PoolOptions)) *Pool {
	w.t.Helper()
	o := PoolOptions{TLS: w.tls(name), Logger: slog.New(slog.DiscardHandler), Registerer: prometheus.NewRegistry()}
	for _, f := range change {
		f(&o)
	}
	p, err := NewPool(o)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(p.Close)
	return p
}

func connTo(t testing.TB, p *Pool, m *route.Member, long bool) grpc.ClientConnInterface {
	t.Helper()
	c, err := p.Conn(m, long)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// waitFor waits for a condition that some other goroutine brings about.
func waitFor(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !cond(); {
		if time.Now().After(deadline) {
			t.Fatalf("not reached: %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}
