package mesh

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	"github.com/mvp-mesh/mvp-node/internal/pki"
	"github.com/mvp-mesh/mvp-node/internal/route"
	mvpv1 "github.com/mvp-mesh/mvp-node/proto/mvp/v1"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// countingDialer dials TCP and counts connections and bytes.
type countingDialer struct {
	dials atomic.Int64
	read  atomic.Int64
	mu    sync.Mutex
	open  []net.Conn
}

func (d *countingDialer) dial(ctx context.Context, address string) (net.Conn, error) {
	d.dials.Add(1)
	c, err := dialTCP(ctx, address)
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	d.open = append(d.open, c)
	d.mu.Unlock()
	return &countingConn{c, d}, nil
}

type countingConn struct {
	net.Conn
	d *countingDialer
}

func (c *countingConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.d.read.Add(int64(n))
	return n, err
}

func view(ctx context.Context, t testing.TB, p *Pool, m *route.Member) error {
	t.Helper()
	c, err := p.Conn(m, false)
	if err != nil {
		return err
	}
	_, err = mvpv1.NewMeshServiceClient(c).GetView(ctx, &mvpv1.GetViewRequest{})
	return err
}

// A thousand calls use the connections there are.
func TestPoolReuses(t *testing.T) {
	w := newWorld(t)
	b := w.start("b")
	d := &countingDialer{}
	p := w.pool("a", func(o *PoolOptions) { o.Dial = d.dial })
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			for range 50 {
				if err := view(t.Context(), t, p, b.member); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if n := d.dials.Load(); n > shortConns+longConns {
		t.Errorf("%d connections", n)
	}
}

// More watches than one connection has streams find a place: they spread, and short calls do not notice.
func TestManyWatches(t *testing.T) {
	w := newWorld(t)
	b := w.start("b")
	p := w.pool("a")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for range maxStreams + maxStreams/2 {
		st, err := mvpv1.NewForwardServiceClient(connTo(t, p, b.member, true)).Forward(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := st.Recv(); err != nil {
			t.Fatal(err)
		}
	}
	short, cancelShort := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancelShort()
	if err := view(short, t, p, b.member); err != nil {
		t.Error(err)
	}
	cancel()
	cs := p.peers[peerAddr{"b", b.member.Address}]
	waitFor(t, "all calls are counted out", func() bool {
		n := int64(0)
		for _, c := range cs.all() {
			n += c.active.Load()
		}
		return n == 0
	})
}

// A call on a dead peer fails at once, not at its deadline, and a peer that comes back is used within about a second.
func TestPeerRestarts(t *testing.T) {
	w := newWorld(t)
	first, err := net.Listen("tcp", "127.0.0.2:0") // where nobody else takes the port meanwhile
	if err != nil {
		t.Fatal(err)
	}
	b := w.startOn(first, "b")
	p := w.pool("a")
	if err := view(t.Context(), t, p, b.member); err != nil {
		t.Fatal(err)
	}
	b.stop()
	start := time.Now()
	for range 20 {
		if err := view(t.Context(), t, p, b.member); status.Code(err) != codes.Unavailable {
			t.Fatalf("dead peer: %v", err)
		}
	}
	if took := time.Since(start); took > time.Second {
		t.Errorf("20 calls on a dead peer took %v", took)
	}
	l, err := net.Listen("tcp", b.member.Address)
	if err != nil {
		t.Fatal(err)
	}
	start = time.Now()
	w.startOn(l, "b")
	waitFor(t, "the peer is used again", func() bool { return view(t.Context(), t, p, b.member) == nil })
	if took := time.Since(start); took > 2500*time.Millisecond {
		t.Errorf("used again after %v", took)
	}
}

// A peer whose host swallows packets costs one time-out to connect, not the call's deadline.
func TestBlackHole(t *testing.T) {
	w := newWorld(t)
	p := w.pool("a", func(o *PoolOptions) {
		o.Dial = func(ctx context.Context, _ string) (net.Conn, error) { <-ctx.Done(); return nil, ctx.Err() }
	})
	start := time.Now()
	err := view(t.Context(), t, p, &route.Member{Name: "b", Address: "192.0.2.1:1"})
	if took := time.Since(start); status.Code(err) != codes.Unavailable || took > connectTimeout+2*time.Second {
		t.Errorf("%v after %v", err, took)
	}
}

// A member that left the view loses its connections, but not before its last call has ended.
func TestRetain(t *testing.T) {
	w := newWorld(t)
	b, c := w.start("b"), w.start("c")
	p := w.pool("a")
	if err := errors.Join(view(t.Context(), t, p, b.member), view(t.Context(), t, p, c.member)); err != nil {
		t.Fatal(err)
	}
	watch, err := mvpv1.NewForwardServiceClient(connTo(t, p, b.member, true)).Forward(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := watch.Recv(); err != nil {
		t.Fatal(err)
	}
	p.Retain([]*route.Member{c.member})
	waitFor(t, "only the watch is left of b", func() bool { return testutil.ToFloat64(p.metrics.conns) == shortConns+longConns+1 })
	if err := view(t.Context(), t, p, c.member); err != nil {
		t.Errorf("the member that stayed: %v", err)
	}
	// The watch lives on, and goes on living when b is back: with connections of its own.
	if err := view(t.Context(), t, p, b.member); err != nil {
		t.Errorf("the member that came back: %v", err)
	}
	if err := watch.Send(&mvpv1.ForwardRequest{}); err != nil {
		t.Errorf("watch: %v", err)
	}
	b.stop()
	if _, err := watch.Recv(); err == nil {
		t.Error("the watch survived its peer")
	}
	waitFor(t, "the last connection is closed", func() bool { return testutil.ToFloat64(p.metrics.conns) == 2*(shortConns+longConns) })
}

func TestPoolClose(t *testing.T) {
	w := newWorld(t)
	b := w.start("b")
	p := w.pool("a")
	watch, err := mvpv1.NewForwardServiceClient(connTo(t, p, b.member, true)).Forward(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := watch.Recv(); err != nil {
		t.Fatal(err)
	}
	p.Close()
	if _, err := watch.Recv(); err == nil {
		t.Error("the watch survived the pool")
	}
	if _, err := p.Conn(b.member, false); !errors.Is(err, ErrClosed) {
		t.Errorf("error %v", err)
	}
	if n := testutil.ToFloat64(p.metrics.conns); n != 0 {
		t.Errorf("%v connections", n)
	}
}

// Every way in which two ends may not accept each other is told from a peer that is gone.
func TestHandshakeFailures(t *testing.T) {
	w := newWorld(t)
	expired := func(name string) authz.MeshTLS {
		pair, err := w.ca.IssueNode(cluster, name, pki.Extra{}, time.Now().Add(-2*time.Hour), time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		cert, err := tls.X509KeyPair(pair.CertPEM, pair.KeyPEM)
		if err != nil {
			t.Fatal(err)
		}
		m := w.tls(name)
		m.Certificate = func() *tls.Certificate { return &cert }
		return m
	}
	b := w.start("b")
	old := w.start("b", func(o *Options) { o.TLS = expired("b") })
	operator := w.start("b", func(o *Options) { o.TLS = w.tls("operator-jane") })
	strict := w.start("b", func(o *Options) { o.TLS.Rules.AllowedNames = []string{"c"} })
	for _, tc := range []struct {
		name   string
		client authz.MeshTLS
		member *route.Member
	}{
		{"another name", w.tls("a"), &route.Member{Name: "c", Address: b.member.Address}},
		{"the server's CA is unknown", newWorld(t).tls("a"), b.member},
		{"the server's certificate is over", w.tls("a"), old.member},
		{"the server is an operator", w.tls("a"), operator.member},
		{"the client's certificate is over", expired("a"), b.member},
		{"the client is not on the list", w.tls("a"), strict.member},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := w.pool("a", func(o *PoolOptions) { o.TLS = tc.client })
			// A refusal by the server may be overtaken by the reset of its connection, so it may take a second try to learn why.
			var err error
			var failed *HandshakeError
			waitFor(t, "the reason", func() bool {
				if err = view(t.Context(), t, p, tc.member); status.Code(err) != codes.Unavailable {
					t.Fatalf("error %v", err)
				}
				return errors.As(err, &failed)
			})
			if !failed.HandshakeFailed() || failed.Err == nil {
				t.Errorf("error %v", err)
			}
			if n := testutil.ToFloat64(p.metrics.handshakes.WithLabelValues(tc.member.Name)); n == 0 {
				t.Error("not counted")
			}
		})
	}
	if err := view(t.Context(), t, w.pool("a"), &route.Member{Name: "b", Address: "127.0.0.1:1"}); err == nil {
		t.Error("a call on a closed port succeeded")
	} else if failed, ok := errors.AsType[*HandshakeError](err); ok {
		t.Errorf("a closed port is a handshake failure: %v", failed)
	}
}

func TestDialOperator(t *testing.T) {
	w := newWorld(t)
	b := w.start("b")
	pair := w.pair("operator-jane")
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	c, err := DialOperator(ctx, b.member.Address, pair.CertPEM, pair.KeyPEM, w.ca.CertPEM(), cluster)
	if err != nil {
		t.Fatal(err)
	}
	if v, err := c.GetView(ctx, &mvpv1.GetViewRequest{}); err != nil || v.GetSelf() != "b" {
		t.Errorf("%v %v", v, err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if _, err := DialOperator(ctx, b.member.Address, pair.CertPEM, pair.KeyPEM, w.ca.CertPEM(), "other"); !errors.Is(err, authz.ErrForeignCluster) {
		t.Errorf("another cluster: %v", err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	var op *net.OpError
	if _, err := DialOperator(ctx, l.Addr().String(), pair.CertPEM, pair.KeyPEM, w.ca.CertPEM(), cluster); !errors.As(err, &op) {
		t.Errorf("nobody there: %v", err)
	}
	if _, err := DialOperator(ctx, b.member.Address, nil, nil, w.ca.CertPEM(), cluster); err == nil {
		t.Error("without a certificate")
	}
}
