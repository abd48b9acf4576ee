package gossip

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/mvp-mesh/mvp-node/internal/authz"
)

// The greeting that the dialling end sends first, inside TLS: a kind byte, the length of the cluster ID in one byte, the cluster
// ID. Then packets follow, each behind its length in two bytes, and the accepting end answers each with one ack byte; or memberlist
// speaks its stream protocol both ways.
const (
	kindPackets byte = 'p'
	kindStream  byte = 's'
	ackByte     byte = 'a'
)

const (
	// packetBuffer is how much memberlist may put in a packet. We have no MTU to respect; it must hold the longest alive message
	// (name, metadata) several times, so that an update never waits for a packet with room.
	packetBuffer = 8 << 10
	// maxPacket bounds a packet on the wire, both ways: packetBuffer, the label, a checksum, and slack.
	maxPacket = packetBuffer + 1<<10
	// queueLength bounds the packets that wait for one peer. A probe a second and its answer make two; beyond this the peer does
	// not take them and they are worthless.
	queueLength = 64
	// maxLinks bounds the peers that packets are sent to at once: memberlist answers to addresses that packets name.
	maxLinks = 256
	// maxInbound bounds the accepted connections, two to each member in the long run.
	maxInbound = 512
	// maxHandshakes and maxHandshakesPerHost bound the ones whose other end is not known yet, so that a stranger can neither
	// occupy memory nor, from one address, keep members out.
	maxHandshakes        = 64
	maxHandshakesPerHost = 16
	// maxStream bounds what one stream may bring: 256 members take 200 KiB.
	maxStream = 4 << 20
	// maxAge is when a packet connection is replaced, so that changed certificates and roots come to effect on it.
	maxAge = 10 * time.Minute
)

var (
	errClosed = errors.New("transport is shut down")
	errSelf   = errors.New("the address is the own node's")
	errLabel  = errors.New("greeting names another cluster")
)

// transport carries memberlist's packets and streams over mTLS connections. memberlist calls it from many goroutines; nothing but
// the stream calls blocks.
type transport struct {
	name      string
	cluster   string
	tls       authz.MeshTLS
	server    *tls.Config
	listener  net.Listener
	advertise netip.AddrPort
	dialRaw   func(ctx context.Context, address string) (net.Conn, error)
	timing    Timing
	metrics   *metrics
	log       *slog.Logger

	packets chan *memberlist.Packet
	streams chan net.Conn
	// broken gets the error of a listener that died; the Node ends then.
	broken chan error

	// life ends with Shutdown. It is kept here because memberlist's calls bring no context.
	life context.Context
	end  context.CancelFunc
	wg   sync.WaitGroup

	// pending counts the packets that are queued or written and neither acknowledged nor given up.
	pending atomic.Int64

	// mu guards the fields below, and that wg gains nothing after closed.
	mu        sync.Mutex
	closed    bool
	conns     map[net.Conn]struct{} // every open TCP connection
	inbound   int                   // those that were accepted
	shaking   int                   // of these, in handshake
	shakingBy map[string]int        // of these, by host
	links     map[memberlist.Address]*link
	selves    map[string]bool // dialled addresses at which the own node answered
	told      map[rejectReason]time.Time
}

var _ memberlist.NodeAwareTransport = (*transport)(nil)

func newTransport(o Options, ln net.Listener, advertise netip.AddrPort, m *metrics, log *slog.Logger) *transport {
	t := &transport{
		name: o.Name, cluster: o.ClusterID, tls: o.TLS, server: o.TLS.Server(ALPN, authz.RoleNode), listener: ln,
		advertise: advertise, dialRaw: o.dial, timing: o.Timing, metrics: m, log: log,
		packets:   make(chan *memberlist.Packet),
		streams:   make(chan net.Conn),
		broken:    make(chan error, 1),
		conns:     make(map[net.Conn]struct{}),
		shakingBy: make(map[string]int),
		links:     make(map[memberlist.Address]*link),
		selves:    make(map[string]bool),
		told:      make(map[rejectReason]time.Time),
	}
	t.life, t.end = context.WithCancel(context.Background())
	return t
}

// start begins to accept.
func (t *transport) start() { t.spawn(t.accept) }

// spawn runs f in a goroutine that Shutdown waits for; false if it is too late for that.
func (t *transport) spawn(f func()) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return false
	}
	t.wg.Go(f)
	return true
}

// FinalAdvertiseAddr implements memberlist.Transport.
func (t *transport) FinalAdvertiseAddr(string, int) (net.IP, int, error) {
	return net.IP(t.advertise.Addr().AsSlice()), int(t.advertise.Port()), nil
}

// PacketCh implements memberlist.Transport.
func (t *transport) PacketCh() <-chan *memberlist.Packet { return t.packets }

// StreamCh implements memberlist.Transport.
func (t *transport) StreamCh() <-chan net.Conn { return t.streams }

// WriteTo implements memberlist.Transport.
func (t *transport) WriteTo(b []byte, addr string) (time.Time, error) {
	return t.WriteToAddress(b, memberlist.Address{Addr: addr})
}

// DialTimeout implements memberlist.Transport.
func (t *transport) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	return t.DialAddressTimeout(memberlist.Address{Addr: addr}, timeout)
}

// DialAddressTimeout implements memberlist.NodeAwareTransport. memberlist's timeout is that of the whole exchange; a host that is
// away is found out sooner, so that a round of sync over several such hosts stays short.
func (t *transport) DialAddressTimeout(addr memberlist.Address, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(t.life, min(timeout, t.timing.DialTimeout))
	defer cancel()
	c, err := t.connect(ctx, addr, kindStream)
	if err != nil {
		return nil, err
	}
	return &stream{Conn: c, left: maxStream}, nil
}

// Shutdown implements memberlist.Transport: it closes everything and returns when all goroutines of the transport have ended.
// It may be called more than once.
func (t *transport) Shutdown() error {
	t.mu.Lock()
	t.closed = true
	t.end()
	for c := range t.conns {
		c.Close()
	}
	t.mu.Unlock()
	err := t.listener.Close()
	t.wg.Wait()
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// connect dials, authenticates and greets. If the address has a name, the other end must prove it.
func (t *transport) connect(ctx context.Context, addr memberlist.Address, kind byte) (net.Conn, error) {
	raw, err := t.dialRaw(ctx, addr.Addr)
	if err != nil {
		return nil, err
	}
	raw, err = t.track(raw, outbound)
	if err != nil {
		return nil, err
	}
	c := tls.Client(raw, t.tls.Client(ALPN, addr.Name))
	if err := t.greet(ctx, c, kind); err != nil {
		raw.Close()
		switch {
		case t.life.Err() != nil:
		case errors.Is(err, errSelf):
			t.mu.Lock()
			t.selves[addr.Addr] = true
			t.mu.Unlock()
		default:
			t.reject(outbound, addr.Addr, err)
		}
		return nil, fmt.Errorf("connect to %s: %w", addr.String(), err)
	}
	return c, nil
}

// isSelf reports whether the own node answered at an address; a node is often among its own seeds.
func (t *transport) isSelf(addr string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.selves[addr]
}

func (t *transport) greet(ctx context.Context, c *tls.Conn, kind byte) error {
	if err := c.HandshakeContext(ctx); err != nil {
		return err
	}
	state := c.ConnectionState()
	if state.NegotiatedProtocol != ALPN {
		return fmt.Errorf("peer does not speak %s", ALPN)
	}
	if peer, err := t.tls.PeerFromTLS(state); err != nil {
		return err
	} else if peer.Name == t.name {
		return errSelf
	}
	if deadline, ok := ctx.Deadline(); ok {
		c.SetDeadline(deadline)
	}
	if _, err := c.Write(append([]byte{kind, byte(len(t.cluster))}, t.cluster...)); err != nil {
		return err
	}
	return c.SetDeadline(time.Time{})
}

// track makes a TCP connection one that Shutdown closes and the gauge counts, until it is closed.
func (t *transport) track(raw net.Conn, d direction) (net.Conn, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		raw.Close()
		return nil, errClosed
	}
	c := &tracked{Conn: raw}
	c.forget = sync.OnceFunc(func() {
		t.metrics.connections.WithLabelValues(string(d)).Dec()
		// Shutdown holds mu while it closes, and needs no bookkeeping any more.
		if t.life.Err() != nil {
			return
		}
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(t.conns, raw)
		if d == inbound {
			t.inbound--
		}
	})
	t.conns[raw] = struct{}{}
	if d == inbound {
		t.inbound++
	}
	t.metrics.connections.WithLabelValues(string(d)).Inc()
	return c, nil
}

type tracked struct {
	net.Conn
	forget func()
}

func (c *tracked) Close() error {
	c.forget()
	return c.Conn.Close()
}

// stream is a connection in memberlist's hands. memberlist does not close one that it could not write the label to, and reads as
// much as the other end says that there is.
type stream struct {
	net.Conn
	left int64 // only read by one goroutine at a time
}

func (s *stream) Read(b []byte) (int, error) {
	if s.left <= 0 {
		return 0, fmt.Errorf("stream brings more than %d bytes", maxStream)
	}
	n, err := s.Conn.Read(b[:min(int64(len(b)), s.left)])
	s.left -= int64(n)
	return n, err
}

func (s *stream) Write(b []byte) (int, error) {
	n, err := s.Conn.Write(b)
	if err != nil {
		s.Conn.Close()
	}
	return n, err
}

// tellEvery is how often a reason of rejection is logged: whoever is refused cannot tell why, so the operator should; but a
// stranger must not fill the log.
const tellEvery = 10 * time.Second

// reject counts a connection that did not come about.
func (t *transport) reject(d direction, peer string, err error) {
	reason := reasonOf(err)
	t.metrics.rejected.WithLabelValues(string(d), string(reason)).Inc()
	if reason == rejectForeignCluster {
		t.metrics.foreign.Inc()
	}
	level := slog.LevelDebug
	t.mu.Lock()
	if now := time.Now(); now.Sub(t.told[reason]) >= tellEvery {
		level, t.told[reason] = slog.LevelInfo, now
	}
	t.mu.Unlock()
	t.log.Log(context.Background(), level, "gossip connection rejected", "direction", string(d), "peer", peer, "reason", string(reason), "err", err)
}

var errLimit = errors.New("too many connections")

func reasonOf(err error) rejectReason {
	var (
		wrong     *authz.WrongPeerError
		authority x509.UnknownAuthorityError
		invalid   x509.CertificateInvalidError
		netErr    net.Error
	)
	switch {
	case errors.Is(err, authz.ErrForeignCluster), errors.Is(err, errLabel):
		return rejectForeignCluster
	case errors.Is(err, authz.ErrNotAllowed):
		return rejectNotAllowed
	case errors.Is(err, authz.ErrNoIdentity), errors.Is(err, authz.ErrManyIdentities):
		return rejectNoIdentity
	case errors.As(err, &wrong):
		return rejectWrongPeer
	case errors.As(err, &authority), errors.As(err, &invalid):
		return rejectUntrusted
	case errors.Is(err, errLimit):
		return rejectLimit
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded), errors.As(err, &netErr) && netErr.Timeout():
		return rejectTimeout
	}
	return rejectProtocol
}
