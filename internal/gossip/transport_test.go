package gossip

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/mvp-mesh/mvp-node/internal/authz"
)

// wire is a transport without memberlist.
type wire struct {
	*transport
	peer *peer // only for its metrics
	got  chan *memberlist.Packet
}

func (m *mesh) wire(name string, edit func(*Options)) *wire {
	m.t.Helper()
	reg := prometheus.NewRegistry()
	o := Options{
		Name: name, ClusterID: testCluster, TLS: m.ca.nodeTLS(name), Logger: testLogger(m.t, name), Timing: fastTiming(),
		dial: m.net.dialer(name),
	}
	if edit != nil {
		edit(&o)
	}
	o = o.complete()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		m.t.Fatal(err)
	}
	w := &wire{
		transport: newTransport(o, ln, netip.MustParseAddrPort(ln.Addr().String()), newMetrics(reg), o.Logger),
		peer:      &peer{reg: reg},
		got:       make(chan *memberlist.Packet, 1000),
	}
	m.net.add(name, w.addr())
	w.start()
	w.spawn(func() {
		for {
			select {
			case p := <-w.packets:
				w.got <- p
			case <-w.life.Done():
				return
			}
		}
	})
	m.t.Cleanup(func() {
		if err := w.Shutdown(); err != nil {
			m.t.Error(err)
		}
		if n := w.pending.Load(); n < 0 {
			m.t.Errorf("%s: %d packets pending after the end", name, n)
		}
	})
	return w
}

func (w *wire) addr() string { return w.listener.Addr().String() }

// send writes a packet with a label, as memberlist would.
func (w *wire) send(t testing.TB, to *wire, payload string) {
	t.Helper()
	b, err := memberlist.AddLabelHeaderToPacket([]byte(payload), w.cluster)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.WriteToAddress(b, memberlist.Address{Addr: to.addr(), Name: to.name}); err != nil {
		t.Fatal(err)
	}
}

// wants waits for a packet that carries payload.
func (w *wire) wants(t testing.TB, payload string) {
	t.Helper()
	deadline := time.After(5 * time.Second)
	for {
		select {
		case p := <-w.got:
			if strings.HasSuffix(string(p.Buf), payload) {
				return
			}
		case <-deadline:
			t.Fatalf("packet %q did not arrive", payload)
		}
	}
}

// settled waits until all packets are acknowledged or given up.
func (w *wire) settled(t testing.TB) {
	t.Helper()
	eventually(t, 5*time.Second, "no packets pending", func() error {
		if n := w.pending.Load(); n != 0 {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
}

func (w *wire) eventuallyMetric(t testing.TB, want float64, name string, labels ...string) {
	t.Helper()
	eventually(t, 10*time.Second, name, func() error {
		if got := w.peer.metric(t, name, labels...); got != want {
			return fmt.Errorf("%v, want %v", got, want)
		}
		return nil
	})
}

func TestPacketsShareOneConnection(t *testing.T) {
	m := newMesh(t)
	a, b := m.wire("a", nil), m.wire("b", nil)
	for i := range 300 {
		a.send(t, b, fmt.Sprintf("packet %d.", i))
		if i%40 == 0 {
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			a.flush(ctx)
			cancel()
		}
	}
	b.wants(t, "packet 299.")
	if got := b.peer.metric(t, "mvp_gossip_connections", "in"); got != 1 {
		t.Errorf("%v connections", got)
	}
	big := strings.Repeat("x", packetBuffer-1) + "!"
	for range 20 { // more than the write buffer holds
		a.send(t, b, big)
	}
	b.wants(t, big)
	a.eventuallyMetric(t, 0, "mvp_gossip_packets_queued")
	if got := a.peer.metric(t, "mvp_gossip_packets_dropped_total"); got != 0 {
		t.Errorf("%v packets were dropped", got)
	}
	if a.pending.Load() < 0 {
		t.Errorf("pending %d", a.pending.Load())
	}
}

func TestWriteNeverBlocks(t *testing.T) {
	m := newMesh(t)
	a := m.wire("a", func(o *Options) {
		o.Timing.DialTimeout = 300 * time.Millisecond
		o.dial = func(ctx context.Context, _ string) (net.Conn, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}
	})
	start := time.Now()
	for i := range 1000 {
		if _, err := a.WriteTo([]byte("x"), fmt.Sprintf("192.0.2.1:%d", 1000+i%2)); err != nil {
			t.Fatal(err)
		}
	}
	if d := time.Since(start); d > 200*time.Millisecond {
		t.Errorf("1000 writes took %v", d)
	}
	if got := a.peer.metric(t, "mvp_gossip_packets_dropped_total", "queue_full"); got < 800 {
		t.Errorf("%v packets were dropped", got)
	}
	a.settled(t)
	for i := range 2 * maxLinks {
		a.WriteTo([]byte("x"), fmt.Sprintf("192.0.2.2:%d", 1000+i))
	}
	if got := a.peer.metric(t, "mvp_gossip_packets_dropped_total", "too_many_peers"); got == 0 {
		t.Error("the number of peers is not bounded")
	}
}

func TestPacketSizeLimit(t *testing.T) {
	m := newMesh(t)
	a, b := m.wire("a", nil), m.wire("b", nil)
	for _, n := range []int{0, maxPacket + 1} {
		if _, err := a.WriteTo(make([]byte, n), b.addr()); err == nil {
			t.Errorf("a packet of %d bytes was taken", n)
		}
	}
	for _, n := range []uint16{0, maxPacket + 1} {
		c, err := a.connect(context.Background(), memberlist.Address{Addr: b.addr()}, kindPackets)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write(binary.BigEndian.AppendUint16(nil, n)); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Read(make([]byte, 1)); err == nil {
			t.Errorf("after a packet of %d bytes the connection is still good", n)
		}
		c.Close()
	}
	c, err := a.connect(context.Background(), memberlist.Address{Addr: b.addr()}, kindPackets)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write([]byte("\x00\x03abc")); err != nil { // no label
		t.Fatal(err)
	}
	b.eventuallyMetric(t, 1, "mvp_gossip_foreign_cluster_rejected_total")
}

func TestBrokenConnectionIsRedialled(t *testing.T) {
	m := newMesh(t)
	a, b := m.wire("a", nil), m.wire("b", nil)
	a.send(t, b, "one")
	b.wants(t, "one")
	a.settled(t)
	b.mu.Lock()
	for c := range b.conns {
		c.Close()
	}
	b.mu.Unlock()
	a.eventuallyMetric(t, 0, "mvp_gossip_connections", "out")
	a.send(t, b, "two")
	b.wants(t, "two")
}

// A connection that swallows everything, as after a partition, is found out by the missing acknowledgement.
func TestSilentConnectionIsReplaced(t *testing.T) {
	m := newMesh(t)
	a, b := m.wire("a", func(o *Options) { o.Timing.WriteTimeout = 300 * time.Millisecond }), m.wire("b", nil)
	a.send(t, b, "one")
	b.wants(t, "one")
	a.settled(t)
	m.net.set(true, pair("a", "b"))
	a.send(t, b, "lost")
	a.eventuallyMetric(t, 0, "mvp_gossip_connections", "out")
	m.net.set(false, pair("a", "b"))
	a.send(t, b, "two")
	b.wants(t, "two")
}

func TestIdleConnectionIsClosed(t *testing.T) {
	m := newMesh(t)
	idle := func(o *Options) { o.Timing.IdleTimeout = 100 * time.Millisecond }
	a, b := m.wire("a", idle), m.wire("b", idle)
	a.send(t, b, "one")
	b.wants(t, "one")
	a.eventuallyMetric(t, 0, "mvp_gossip_connections", "out")
	b.eventuallyMetric(t, 0, "mvp_gossip_connections", "in")
	eventually(t, time.Second, "no link", func() error {
		a.mu.Lock()
		defer a.mu.Unlock()
		if len(a.links) != 0 {
			return errors.New("there is one")
		}
		return nil
	})
	a.send(t, b, "two")
	b.wants(t, "two")
}

func TestDialledNameIsChecked(t *testing.T) {
	m := newMesh(t)
	a, b := m.wire("a", nil), m.wire("b", nil)
	_, err := a.DialAddressTimeout(memberlist.Address{Addr: b.addr(), Name: "c"}, time.Second)
	var wrong *authz.WrongPeerError
	if !errors.As(err, &wrong) || wrong.Got != "b" {
		t.Errorf("dialling b as c: %v", err)
	}
	if got := a.peer.metric(t, "mvp_gossip_connections_rejected_total", "out", "wrong_peer"); got != 1 {
		t.Errorf("wrong_peer = %v", got)
	}
	if _, err := a.DialTimeout(a.addr(), time.Second); !errors.Is(err, errSelf) || !a.isSelf(a.addr()) {
		t.Errorf("dialling oneself: %v", err)
	}
	c, err := a.DialAddressTimeout(memberlist.Address{Addr: b.addr(), Name: "b"}, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s := <-b.streams
	defer s.Close()
	if _, err := c.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 5)
	if _, err := io.ReadFull(s, buf); err != nil || string(buf) != "hello" {
		t.Errorf("%q, %v", buf, err)
	}
	s.(*stream).left = 3
	c.Write([]byte("hello"))
	if n, err := io.ReadAll(s); err == nil || len(n) != 3 {
		t.Errorf("beyond the limit of a stream: %q, %v", n, err)
	}
}

// An operator's certificate is of the mesh CA and for this cluster, and still does not open the gossip port; nor does a client
// without a certificate, with another protocol, or with a greeting that is none.
func TestGossipPortIsForNodes(t *testing.T) {
	m := newMesh(t)
	b := m.wire("b", nil)
	rules := authz.PeerRules{ClusterID: testCluster}
	for _, tc := range []struct {
		name     string
		config   *tls.Config
		greeting string
		reason   rejectReason
	}{
		{"operator", m.ca.meshTLS("spiffe://demo/mvp-operator/eve", rules).Client(ALPN, ""), "p\x04demo", rejectNotAllowed},
		{"no identity", m.ca.meshTLS("spiffe://demo/something/else", rules).Client(ALPN, ""), "p\x04demo", rejectNoIdentity},
		{"foreign cluster", m.ca.meshTLS("spiffe://other/mvp-node/x", rules).Client(ALPN, ""), "p\x04demo", rejectForeignCluster},
		{"no certificate", &tls.Config{InsecureSkipVerify: true, NextProtos: []string{ALPN}}, "p\x04demo", rejectProtocol},
		{"other protocol", m.ca.nodeTLS("x").Client("h2", ""), "", rejectProtocol},
		{"wrong label", m.ca.nodeTLS("x").Client(ALPN, ""), "p\x05other", rejectForeignCluster},
		{"no greeting", m.ca.nodeTLS("x").Client(ALPN, ""), "GET / HTTP/1.1", rejectProtocol},
	} {
		t.Run(tc.name, func(t *testing.T) {
			before := b.peer.metric(t, "mvp_gossip_connections_rejected_total", "in", string(tc.reason))
			c, err := tls.Dial("tcp", b.addr(), tc.config)
			if err == nil {
				c.SetDeadline(time.Now().Add(5 * time.Second))
				c.Write([]byte(tc.greeting))
				if _, err := c.Read(make([]byte, 1)); err == nil {
					t.Error("b answered")
				}
				c.Close()
			}
			b.eventuallyMetric(t, before+1, "mvp_gossip_connections_rejected_total", "in", string(tc.reason))
		})
	}
	if got := b.peer.metric(t, "mvp_gossip_foreign_cluster_rejected_total"); got != 2 {
		t.Errorf("foreign clusters: %v", got)
	}
	b.eventuallyMetric(t, 0, "mvp_gossip_connections", "in")
}

func TestHandshakesAreBounded(t *testing.T) {
	m := newMesh(t)
	b := m.wire("b", func(o *Options) { o.Timing.HandshakeTimeout = 500 * time.Millisecond })
	var conns []net.Conn
	for range maxHandshakesPerHost + 5 {
		c, err := net.Dial("tcp", b.addr())
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
		defer c.Close()
	}
	b.eventuallyMetric(t, 5, "mvp_gossip_connections_rejected_total", "in", "limit")
	b.eventuallyMetric(t, maxHandshakesPerHost, "mvp_gossip_connections_rejected_total", "in", "timeout")
	for i, c := range conns {
		c.SetReadDeadline(time.Now().Add(5 * time.Second))
		if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("connection %d is still open: %v", i, err)
		}
	}
	a := m.wire("a", nil)
	a.send(t, b, "a member gets in again")
	b.wants(t, "a member gets in again")
}

// A listener that dies takes the Node down with it instead of leaving a member that nobody can reach.
func TestDeadListenerEndsRun(t *testing.T) {
	m := newMesh(t)
	n, err := New(Options{
		Name: "a", ClusterID: testCluster, BindAddress: "127.0.0.1:0", TLS: m.ca.nodeTLS("a"), Fetcher: m.origins, Timing: fastTiming(),
	})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- n.Run(context.Background()) }()
	eventually(t, 5*time.Second, "running", func() error {
		if !n.Dump().Running {
			return errors.New("not yet")
		}
		return nil
	})
	n.transport.listener.Close()
	select {
	case err := <-done:
		if !errors.Is(err, net.ErrClosed) {
			t.Errorf("Run returned %v", err)
		}
	case <-time.After(5 * time.Second):
		t.Fatal("Run goes on without a listener")
	}
}
