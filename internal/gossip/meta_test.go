package gossip

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/memberlist"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	"github.com/mvp-mesh/mvp-node/internal/route"
)

// randomMeta is any legal metadata; with longest, the longest.
func randomMeta(r *rand.Rand, longest bool) meta {
	length := func(most int) int {
		if longest {
			return most
		}
		return r.IntN(most + 1)
	}
	text := func(n int, alphabet string) string {
		b := make([]byte, n)
		for i := range b {
			b[i] = alphabet[r.IntN(len(alphabet))]
		}
		return string(b)
	}
	m := meta{
		format: metaFormat, known: true, state: route.State(1 + r.IntN(4)), leaving: r.IntN(2) == 0, mode: route.Mode(1 + r.IntN(3)),
		boot: r.Uint64(), generation: r.Uint64(),
		serverVersion: text(length(maxVersion), "v1.36+-abc "), nodeVersion: text(length(maxVersion), "v1.36+-abc"),
	}
	for i := range m.digest {
		m.digest[i] = byte(r.Uint32())
	}
	for i := range m.viewHash {
		m.viewHash[i] = byte(r.Uint32())
	}
	switch r.IntN(3) {
	case 0:
		m.meshAddress = net.JoinHostPort(text(max(1, length(maxHost)), "abc.-"), "65535")
	case 1: // the longest that an IPv6 address with a zone may be
		m.meshAddress = net.JoinHostPort("fe80::1%"+text(max(1, length(maxHost-8)), "eth0"), "65535")
	case 2:
		m.meshAddress = "[2001:db8:ffff:ffff:ffff:ffff:255.255.255.255]:65535"
	}
	return m
}

// CASES G-02: whatever is legal fits, and comes out as it went in.
func TestLongestMetaFits(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	most := 0
	for i := range 20000 {
		m := randomMeta(r, i%2 == 0)
		if err := m.check(); err != nil {
			t.Fatalf("%+v: %v", m, err)
		}
		b := m.encode()
		if len(b) > memberlist.MetaMaxSize {
			t.Fatalf("%d bytes: %+v", len(b), m)
		}
		most = max(most, len(b))
		got, err := decodeMeta(b)
		if err != nil || got != m {
			t.Fatalf("%v: %s", err, cmp.Diff(m, got, cmp.AllowUnexported(meta{})))
		}
	}
	if most != maxMeta {
		t.Errorf("the longest metadata was %d bytes, maxMeta is %d", most, maxMeta)
	}
}

// The longest legal names must work in a real mesh too: they share packets with metadata and label.
func TestLongestNamesConverge(t *testing.T) {
	m := newMesh(t)
	cluster := strings.Repeat("c", 251) + ".x"
	long := func(p string) string { return p + strings.Repeat("n", maxName-1) }
	edit := func(name string) func(*Options) {
		return func(o *Options) {
			o.ClusterID, o.NodeVersion = cluster, strings.Repeat("v", maxVersion)
			o.TLS = m.ca.meshTLS("spiffe://"+cluster+"/mvp-node/"+name, authz.PeerRules{ClusterID: cluster})
		}
	}
	a := m.node(long("a"), nil, edit(long("a")))
	b := m.node(long("b"), []string{a.Addr()}, edit(long("b")))
	for _, p := range []*peer{a, b} {
		c := testCatalog(t, "old")
		m.origins.serve(p.o.Name, c, 1)
		l := ready(p.o.Name, c, 1)
		l.MeshAddress = strings.Repeat("h", maxHost) + ":65535"
		l.ServerVersion = strings.Repeat("s", maxVersion)
		if err := p.Announce(l); err != nil {
			t.Fatal(err)
		}
	}
	m.converge(a, b)
}

func TestIllegalValuesAreRefused(t *testing.T) {
	m := newMesh(t)
	a := m.node("a", nil, nil)
	c := testCatalog(t, "old")
	m.serve(a, 1, "old")
	before := a.View()
	for name, edit := range map[string]func(*Local){
		"mesh address too long":      func(l *Local) { l.MeshAddress = strings.Repeat("h", maxHost+1) + ":1" },
		"mesh address without port":  func(l *Local) { l.MeshAddress = "10.0.0.1" },
		"mesh address with port 0":   func(l *Local) { l.MeshAddress = "10.0.0.1:0" },
		"mesh address without host":  func(l *Local) { l.MeshAddress = ":7443" },
		"mesh address with a blank":  func(l *Local) { l.MeshAddress = "a b:7443" },
		"server version too long":    func(l *Local) { l.ServerVersion = strings.Repeat("v", maxVersion+1) },
		"server version not ASCII":   func(l *Local) { l.ServerVersion = "v1.36.0\n" },
		"no state":                   func(l *Local) { l.State = 0 },
		"a state that others give":   func(l *Local) { l.State = route.Stale },
		"no mode":                    func(l *Local) { l.Mode = 0 },
		"ready without a catalog":    func(l *Local) { l.Catalog = nil },
		"ready without mesh address": func(l *Local) { l.MeshAddress = "" },
	} {
		l := ready("a", c, 2)
		edit(&l)
		if err := a.Announce(l); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if a.View() != before {
		t.Error("an announcement that was refused changed the view")
	}
}

func TestOptionsAreChecked(t *testing.T) {
	m := newMesh(t)
	good := Options{
		Name: "a", ClusterID: testCluster, BindAddress: "127.0.0.1:0", TLS: m.ca.nodeTLS("a"), Fetcher: m.origins,
	}
	for name, edit := range map[string]func(*Options){
		"no name":                     func(o *Options) { o.Name = "" },
		"name too long":               func(o *Options) { o.Name = strings.Repeat("n", maxName+1) },
		"name with a slash":           func(o *Options) { o.Name = "a/b" },
		"not the certificate's name":  func(o *Options) { o.Name = "b" },
		"an operator's certificate":   func(o *Options) { o.TLS = m.ca.meshTLS("spiffe://demo/mvp-operator/a", o.TLS.Rules) },
		"no cluster":                  func(o *Options) { o.ClusterID, o.TLS.Rules.ClusterID = "", "" },
		"cluster too long":            func(o *Options) { o.ClusterID = strings.Repeat("c", memberlist.LabelMaxSize+1) },
		"cluster not that of TLS":     func(o *Options) { o.ClusterID = "other" },
		"bind address":                func(o *Options) { o.BindAddress = "7946" },
		"no advertise address":        func(o *Options) { o.BindAddress = "0.0.0.0:0" },
		"advertise address":           func(o *Options) { o.AdvertiseAddress = "0.0.0.0:7946" },
		"seed":                        func(o *Options) { o.Seeds = []string{"10.0.0.1"} },
		"seed with port 0":            func(o *Options) { o.Seeds = []string{"10.0.0.1:0"} },
		"expected name":               func(o *Options) { o.Expected = []string{"a b"} },
		"expected and not allowed":    func(o *Options) { o.TLS.Rules.AllowedNames, o.Expected = []string{"a"}, []string{"a", "b"} },
		"no fetcher":                  func(o *Options) { o.Fetcher = nil },
		"no certificate":              func(o *Options) { o.TLS.Certificate = nil },
		"node version":                func(o *Options) { o.NodeVersion = strings.Repeat("v", maxVersion+1) },
		"negative grace":              func(o *Options) { o.StaleGrace = -1 },
		"negative interval":           func(o *Options) { o.Timing.ProbeInterval = -1 },
		"probe timeout over interval": func(o *Options) { o.Timing.ProbeTimeout = 1e12 },
	} {
		o := good
		edit(&o)
		if n, err := New(o); err == nil {
			n.Close()
			t.Errorf("%s: no error", name)
		}
	}
	n, err := New(good)
	if err != nil {
		t.Fatal(err)
	}
	// The port is taken now; nothing is left open by the failure, which goleak and the next New check.
	good.BindAddress = n.Addr()
	if _, err := New(good); err == nil {
		t.Error("a port was bound twice")
	}
	if v := n.View(); v.Self().State != route.Starting || v.Self().Name != "a" {
		t.Errorf("before Announce: %+v", v.Self())
	}
	n.Close()
	if n, err = New(good); err != nil {
		t.Fatal(err)
	}
	n.Close()
}

func TestAdvertiseAddress(t *testing.T) {
	m := newMesh(t)
	o := Options{
		Name: "a", ClusterID: testCluster, BindAddress: "0.0.0.0:0", AdvertiseAddress: "127.0.0.1:0", TLS: m.ca.nodeTLS("a"),
		Fetcher: m.origins,
	}
	n, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	_, port, _ := net.SplitHostPort(n.Addr())
	if got := n.Detail("a").GossipAddress; got != "127.0.0.1:"+port {
		t.Errorf("advertised %s, bound %s", got, n.Addr())
	}
}

func FuzzDecodeMeta(f *testing.F) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 20 {
		f.Add(randomMeta(r, false).encode())
	}
	f.Add([]byte{2, 1, 2, 3})
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := decodeMeta(b)
		switch {
		case err != nil:
		case m.known:
			if !bytes.Equal(m.encode(), b) {
				t.Errorf("%x decodes to %+v, which is %x", b, m, m.encode())
			}
			if err := m.check(); err != nil {
				t.Errorf("%x decodes to what must not be: %v", b, err)
			}
		case m != meta{format: b[0]} || b[0] <= metaFormat:
			t.Errorf("%x: %+v", b, m)
		}
	})
}

func TestDelegateRefuses(t *testing.T) {
	m := newMesh(t)
	n, err := New(Options{
		Name: "a", ClusterID: testCluster, BindAddress: "127.0.0.1:0", TLS: m.ca.nodeTLS("a"), Fetcher: m.origins,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	d := delegate{n}
	good := randomMeta(rand.New(rand.NewPCG(5, 6)), false).encode()
	newer := append([]byte{metaFormat + 1}, good[1:]...)
	short := binary.BigEndian.AppendUint16(nil, 1<<8)
	for _, tc := range []struct {
		name string
		meta []byte
		ok   bool
	}{
		{"b", good, true}, {"b", newer, true}, {"b", short, false}, {"b", nil, false}, {"b", append(good, 0), false},
		{"b<script>", good, false}, {"", good, false}, {strings.Repeat("b", 300), good, false},
	} {
		if err := d.NotifyAlive(&memberlist.Node{Name: tc.name, Meta: tc.meta}); (err == nil) != tc.ok {
			t.Errorf("%.20q with %d bytes: %v", tc.name, len(tc.meta), err)
		}
	}
	// A member of a newer version is one, of which nothing is known yet.
	d.NotifyJoin(&memberlist.Node{Name: "b", Addr: net.IPv4(10, 0, 0, 2), Port: 7946, Meta: newer})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); n.loop(ctx) }()
	eventually(t, 5*time.Second, "b is known", func() error {
		if n.View().Member("b") == nil {
			return errors.New("not yet")
		}
		return nil
	})
	cancel()
	<-done
	if b := n.View().Member("b"); b.State != route.Starting || !b.HoldsUp || b.Available() || n.Converged() {
		t.Errorf("%+v", b)
	}
	if got := n.Dump().Members[1]; got.Format != metaFormat+1 || got.GossipAddress != "10.0.0.2:7946" {
		t.Errorf("%+v", got)
	}
}
