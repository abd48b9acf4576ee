package gossip

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	"github.com/mvp-mesh/mvp-node/internal/catalog"
	"github.com/mvp-mesh/mvp-node/internal/route"
)

// TestMain looks for leaks, with more patience than goleak has by itself: memberlist ends a probe that is under way only when its
// time is over.
func TestMain(m *testing.M) {
	code := m.Run()
	if code == 0 {
		err := goleak.Find()
		for range 4 {
			if err != nil {
				err = goleak.Find()
			}
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

const testCluster = "demo"

// testCA signs anything, also what a real mesh CA would not.
type testCA struct {
	t    testing.TB
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pool *x509.CertPool
}

func newCA(t testing.TB) *testCA {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test CA"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(cert)
	return &testCA{t: t, cert: cert, key: key, pool: pool}
}

// issue makes a certificate with one SAN: a URI if it is one, a DNS name otherwise.
func (ca *testCA) issue(san string) *tls.Certificate {
	ca.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		ca.t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	if u, err := url.Parse(san); err == nil && u.Scheme != "" {
		template.URIs = []*url.URL{u}
	} else {
		template.DNSNames = []string{san}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, ca.cert, key.Public(), ca.key)
	if err != nil {
		ca.t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		ca.t.Fatal(err)
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}
}

func (ca *testCA) meshTLS(san string, rules authz.PeerRules) authz.MeshTLS {
	cert := ca.issue(san)
	return authz.MeshTLS{
		Certificate: func() *tls.Certificate { return cert },
		Roots:       func() *x509.CertPool { return ca.pool },
		Rules:       rules,
	}
}

func (ca *testCA) nodeTLS(name string) authz.MeshTLS {
	return ca.meshTLS("spiffe://"+testCluster+"/mvp-node/"+name, authz.PeerRules{ClusterID: testCluster})
}

// origins is a Fetcher: the mesh ports of all nodes of a test, by name.
type origins struct {
	mu    sync.Mutex
	have  map[string]FetchResult
	fail  map[string]error
	calls map[string]int
}

func newOrigins() *origins {
	return &origins{have: make(map[string]FetchResult), fail: make(map[string]error), calls: make(map[string]int)}
}

func (o *origins) Fetch(_ context.Context, name, _ string, have catalog.Digest) (FetchResult, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.calls[name]++
	if err := o.fail[name]; err != nil {
		return FetchResult{}, err
	}
	r, ok := o.have[name]
	if !ok {
		return FetchResult{}, fmt.Errorf("no catalog of %q", name)
	}
	if r.Digest == have {
		r.Catalog = nil
	}
	return r, nil
}

func (o *origins) serve(name string, c *catalog.Catalog, generation uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.have[name] = FetchResult{Catalog: c, Generation: generation, Digest: c.Digest()}
}

func (o *origins) setFail(name string, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.fail[name] = err
}

func (o *origins) count(name string) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.calls[name]
}

// testCatalog is a catalog that serves the named resources of one group.
func testCatalog(t testing.TB, resources ...string) *catalog.Catalog {
	t.Helper()
	gv := catalog.GroupVersion{GV: catalog.GV{Group: "example.com", Version: "v1"}, Source: catalog.SourceBuiltin}
	for _, r := range resources {
		gv.Resources = append(gv.Resources, catalog.Resource{Name: r, Kind: r, Verbs: catalog.Verbs(catalog.VerbGet)})
	}
	c, err := catalog.New("v1.36.0", []catalog.GroupVersion{gv})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// fastTiming is for tests: deaths are found within about 2 s, on a machine that is busy with other tests.
func fastTiming() Timing {
	return Timing{
		ProbeInterval: 200 * time.Millisecond, ProbeTimeout: 120 * time.Millisecond, GossipInterval: 20 * time.Millisecond,
		UpdateInterval: 40 * time.Millisecond, SyncInterval: time.Second, RejoinInterval: 200 * time.Millisecond,
		RejoinMax: time.Second, FetchRetry: 20 * time.Millisecond, FetchRetryMax: 200 * time.Millisecond,
		RefetchInterval: 50 * time.Millisecond, DialTimeout: time.Second, HandshakeTimeout: 2 * time.Second,
	}
}

// mesh is the nodes of one test.
type mesh struct {
	t       testing.TB
	ca      *testCA
	origins *origins
	net     *network
	peers   map[string]*peer
}

func newMesh(t testing.TB) *mesh {
	return &mesh{t: t, ca: newCA(t), origins: newOrigins(), net: &network{}, peers: make(map[string]*peer)}
}

// peer is a running Node of a test.
type peer struct {
	*Node
	reg    *prometheus.Registry
	cancel context.CancelFunc
	done   chan error
}

// node makes and runs a node. edit may change its options.
func (m *mesh) node(name string, seeds []string, edit func(*Options)) *peer {
	m.t.Helper()
	reg := prometheus.NewRegistry()
	o := Options{
		Name: name, ClusterID: testCluster, BindAddress: "127.0.0.1:0", Seeds: seeds, TLS: m.ca.nodeTLS(name), Fetcher: m.origins,
		Logger: testLogger(m.t, name), Registerer: reg, NodeVersion: "v0.0.1", Timing: fastTiming(), dial: m.net.dialer(name),
	}
	if edit != nil {
		edit(&o)
	}
	n, err := New(o)
	if err != nil {
		m.t.Fatal(err)
	}
	m.net.add(name, n.Addr())
	ctx, cancel := context.WithCancel(context.Background())
	p := &peer{Node: n, reg: reg, cancel: cancel, done: make(chan error, 1)}
	go func() {
		defer close(p.done) // kill waits for it
		p.done <- n.Run(ctx)
	}()
	m.t.Cleanup(p.kill)
	m.peers[name] = p
	return p
}

// last is the newest node of that name.
func (m *mesh) last(name string) *peer { return m.peers[name] }

// kill stops a node without a good-bye, like a crash, and waits for it. It may be called more than once.
func (p *peer) kill() {
	p.cancel()
	if err := <-p.done; err != nil {
		panic(err)
	}
}

// serve announces a Ready node with a catalog, which the origins hand out from then on.
func (m *mesh) serve(p *peer, generation uint64, resources ...string) *catalog.Catalog {
	m.t.Helper()
	c := testCatalog(m.t, resources...)
	m.origins.serve(p.o.Name, c, generation)
	if err := p.Announce(ready(p.o.Name, c, generation)); err != nil {
		m.t.Fatal(err)
	}
	return c
}

func ready(name string, c *catalog.Catalog, generation uint64) Local {
	return Local{
		State: route.Ready, Mode: route.Enabled, MeshAddress: name + ".example:7443", ServerVersion: "v1.36.0", Catalog: c,
		Generation: generation,
	}
}

// three starts the usual mesh: a, b, c, ready and converged.
func (m *mesh) three(edit func(*Options)) (a, b, c *peer) {
	m.t.Helper()
	a = m.node("a", nil, edit)
	b = m.node("b", []string{a.Addr()}, edit)
	c = m.node("c", []string{a.Addr(), b.Addr()}, edit)
	m.serve(a, 1, "old")
	m.serve(b, 1, "old", "new")
	m.serve(c, 1, "old", "new")
	m.converge(a, b, c)
	return a, b, c
}

// converge waits until the nodes know exactly each other, all ready, and agree.
func (m *mesh) converge(ps ...*peer) {
	m.t.Helper()
	eventually(m.t, 20*time.Second, "converged", func() error {
		for _, p := range ps {
			v := p.View()
			if len(v.Members()) != len(ps) || !v.Complete() || !p.Converged() {
				return errors.New(show(ps...))
			}
			for _, mem := range v.Members() {
				if mem.State != route.Ready || mem.Catalog == nil || mem.Catalog.Digest() != mem.Digest {
					return errors.New(show(ps...))
				}
			}
			if v.Hash() != ps[0].View().Hash() {
				return errors.New(show(ps...))
			}
		}
		return nil
	})
}

// state waits until p sees the member in the state; zero means not at all.
func (m *mesh) state(p *peer, name string, within time.Duration, want route.State) {
	m.t.Helper()
	eventually(m.t, within, fmt.Sprintf("%s sees %s %s", p.o.Name, name, want), func() error {
		var got route.State
		if mem := p.View().Member(name); mem != nil {
			got = mem.State
		}
		if got != want {
			return errors.New(show(p))
		}
		return nil
	})
}

func show(ps ...*peer) string {
	var b strings.Builder
	for _, p := range ps {
		v := p.View()
		fmt.Fprintf(&b, "\n%s: converged=%v complete=%v holders=%v hash=%s", p.o.Name, p.Converged(), v.Complete(), v.Holders(), v.Hash())
		for _, m := range v.Members() {
			held := "-"
			if m.Catalog != nil {
				held = m.Catalog.Digest().Short()
			}
			fmt.Fprintf(&b, "\n  %s %s %s digest=%s held=%s gen=%d %+v", m.Name, m.State, m.Address, m.Digest.Short(), held, m.Generation, p.Detail(m.Name))
		}
	}
	return b.String()
}

// eventually polls until f has nothing to complain about.
func eventually(t testing.TB, within time.Duration, what string, f func() error) {
	t.Helper()
	deadline := time.Now().Add(within)
	for {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s: %v", within, what, err)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// testLogger logs to the test's output with MVP_TEST_LOG set, and nowhere otherwise.
func testLogger(t testing.TB, name string) *slog.Logger {
	if os.Getenv("MVP_TEST_LOG") == "" {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug})).With("node", name, "test", t.Name())
}

// metric sums a metric over the label values that are given.
func (p *peer) metric(t testing.TB, name string, labels ...string) float64 {
	t.Helper()
	families, err := p.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	sum, found := 0.0, false
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, s := range f.GetMetric() {
			all := true
			for _, want := range labels {
				has := false
				for _, l := range s.GetLabel() {
					has = has || l.GetValue() == want
				}
				all = all && has
			}
			if all {
				found = true
				sum += s.GetCounter().GetValue() + s.GetGauge().GetValue()
			}
		}
	}
	if !found {
		t.Fatalf("no metric %s%v", name, labels)
	}
	return sum
}

// network is a real network with switches: pairs of nodes can be cut from each other.
type network struct {
	mu    sync.Mutex
	names map[string]string // address -> node
	cuts  map[[2]string]bool
}

func (w *network) add(name, addr string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.names == nil {
		w.names, w.cuts = make(map[string]string), make(map[[2]string]bool)
	}
	w.names[addr] = name
}

func pair(a, b string) [2]string { return [2]string{min(a, b), max(a, b)} }

// dialer dials for one node. Over a cut, packets vanish: nothing answers, and what is connected goes silent.
func (w *network) dialer(from string) func(context.Context, string) (net.Conn, error) {
	return func(ctx context.Context, addr string) (net.Conn, error) {
		w.mu.Lock()
		to := w.names[addr]
		cut := w.cuts[pair(from, to)]
		w.mu.Unlock()
		if cut {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		var d net.Dialer
		c, err := d.DialContext(ctx, "tcp", addr)
		if err != nil {
			return nil, err
		}
		return &cuttable{Conn: c, cut: func() bool {
			w.mu.Lock()
			defer w.mu.Unlock()
			return w.cuts[pair(from, to)]
		}}, nil
	}
}

func (w *network) set(cut bool, pairs ...[2]string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range pairs {
		w.cuts[p] = cut
	}
}

// cuttable loses what is written and read over a cut. What was lost stays lost: the connection is good for nothing after the cut
// is healed, as with a TCP connection that is deep in its retransmission back-off.
type cuttable struct {
	net.Conn
	cut  func() bool
	mu   sync.Mutex
	dead bool
}

func (c *cuttable) isDead() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.dead = c.dead || c.cut()
	return c.dead
}

func (c *cuttable) Write(b []byte) (int, error) {
	if c.isDead() {
		return len(b), nil
	}
	return c.Conn.Write(b)
}

func (c *cuttable) Read(b []byte) (int, error) {
	for {
		n, err := c.Conn.Read(b)
		if err != nil || !c.isDead() {
			return n, err
		}
	}
}
