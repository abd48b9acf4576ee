package mesh

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	"github.com/mvp-mesh/mvp-node/internal/route"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
)

// ErrClosed reports a pool that was closed.
var ErrClosed = errors.New("mesh: connection pool is closed")

// PoolOptions are the parts and settings of a Pool. All are required unless said otherwise.
type PoolOptions struct {
	// TLS proves who this node and its peers are.
	TLS authz.MeshTLS
	// ShortTimeout bounds short calls that their caller gave no deadline; 0 means 61 s.
	ShortTimeout time.Duration
	// Dial connects to a host:port; nil means TCP.
	Dial       func(ctx context.Context, address string) (net.Conn, error)
	Logger     *slog.Logger
	Registerer prometheus.Registerer
}

// Pool holds connections to peers: for each name and address a few for short calls, and others for long-running ones, so that
// watches neither use up the streams nor fill the buffers that short calls need (CASES S-09). It is safe for concurrent use.
type Pool struct {
	o       PoolOptions
	metrics *poolMetrics
	closing sync.WaitGroup // retired connections that are being closed

	mu     sync.RWMutex
	peers  map[peerAddr]*conns
	closed bool
}

type peerAddr struct{ name, address string }

// conns are the connections to one peer, by class.
type conns struct{ short, long []*conn }

// NewPool makes an empty Pool. It starts nothing; connections are made when they are asked for.
func NewPool(o PoolOptions) (*Pool, error) {
	if o.TLS.Certificate == nil || o.TLS.Roots == nil || o.Logger == nil || o.Registerer == nil {
		return nil, errors.New("mesh: options TLS, Logger and Registerer of a pool are required")
	}
	if o.ShortTimeout <= 0 {
		o.ShortTimeout = shortTimeout
	}
	if o.Dial == nil {
		o.Dial = dialTCP
	}
	o.Logger = o.Logger.With("component", "mesh")
	return &Pool{o: o, metrics: newPoolMetrics(o.Registerer), peers: make(map[peerAddr]*conns)}, nil
}

func dialTCP(ctx context.Context, address string) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, "tcp", address)
}

// Conn gives the connection to a peer that has the fewest calls, for calls without (long) or with (short) a deadline. It does not
// block: the first call on a connection waits until it is up, and fails at once while it cannot be made. Errors of calls that come
// from a TLS handshake implement HandshakeFailed() bool.
func (p *Pool) Conn(m *route.Member, long bool) (grpc.ClientConnInterface, error) {
	if m.Address == "" {
		return nil, fmt.Errorf("mesh: node %q has no address", m.Name)
	}
	key := peerAddr{m.Name, m.Address}
	p.mu.RLock()
	cs, closed := p.peers[key], p.closed
	p.mu.RUnlock()
	if closed {
		return nil, ErrClosed
	}
	if cs == nil {
		var err error
		if cs, err = p.add(key); err != nil {
			return nil, err
		}
	}
	return cs.least(long), nil
}

func (cs *conns) least(long bool) *conn {
	list := cs.short
	if long {
		list = cs.long
	}
	best := list[0]
	for _, c := range list[1:] {
		if c.active.Load() < best.active.Load() {
			best = c
		}
	}
	return best
}

func (cs *conns) all() []*conn { return append(cs.short[:len(cs.short):len(cs.short)], cs.long...) }

func (p *Pool) add(key peerAddr) (*conns, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, ErrClosed
	}
	if cs := p.peers[key]; cs != nil {
		return cs, nil
	}
	cs := &conns{}
	for _, class := range []struct {
		long bool
		n    int
		list *[]*conn
	}{{false, shortConns, &cs.short}, {true, longConns, &cs.long}} {
		for range class.n {
			c, err := p.dial(key, class.long)
			if err != nil {
				for _, c := range cs.all() {
					_ = c.ClientConn.Close()
				}
				return nil, fmt.Errorf("mesh: connection to %q at %s: %w", key.name, key.address, err)
			}
			*class.list = append(*class.list, c)
		}
	}
	// The first requests should not wait for a handshake. What else there is for watches connects when it is needed.
	for _, c := range append(cs.short[:len(cs.short):len(cs.short)], cs.long[0]) {
		c.Connect()
	}
	p.peers[key] = cs
	p.metrics.conns.Add(shortConns + longConns)
	return cs, nil
}

// Retain keeps the connections to the given members and retires all others: they are not handed out again and are closed when the
// last call on them has ended, so that a member that gossip lost sight of does not lose its watches over it. Call it with each new
// view.
func (p *Pool) Retain(members []*route.Member) {
	keep := make(map[peerAddr]bool, len(members))
	for _, m := range members {
		keep[peerAddr{m.Name, m.Address}] = true
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for key, cs := range p.peers {
		if !keep[key] {
			delete(p.peers, key)
			p.retire(cs)
		}
	}
}

func (p *Pool) retire(cs *conns) {
	for _, c := range cs.all() {
		c.retired.Store(true)
		c.closeIfUnused()
	}
}

// Close closes every connection, which ends the calls on them, and waits until that is done. Calls after it fail with ErrClosed.
func (p *Pool) Close() {
	p.mu.Lock()
	p.closed = true
	for key, cs := range p.peers {
		delete(p.peers, key)
		for _, c := range cs.all() {
			c.retired.Store(true)
			c.close()
		}
	}
	p.mu.Unlock()
	p.closing.Wait()
}

// conn is one connection with the number of calls on it.
type conn struct {
	*grpc.ClientConn
	pool       *Pool
	handshakes *handshakes
	timeout    time.Duration // for calls without a deadline; 0 leaves them without
	active     atomic.Int64
	retired    atomic.Bool
	closed     atomic.Bool
}

// dial makes a connection that will connect on its first call. passthrough hands the address to the dialer as it is: names are resolved at
// each try, and no resolver keeps goroutines.
func (p *Pool) dial(key peerAddr, long bool) (*conn, error) {
	c := &conn{pool: p, handshakes: newHandshakes(p.o.TLS.Client(alpn, key.name))}
	c.handshakes.onFailure = func(err error) {
		p.metrics.handshakes.WithLabelValues(key.name).Inc()
		p.o.Logger.Warn("no trusted connection", "peer", key.name, "address", key.address, "err", err)
	}
	if !long {
		c.timeout = p.o.ShortTimeout
	}
	cc, err := grpc.NewClient("passthrough:///"+key.address, append(clientLimits(long),
		grpc.WithTransportCredentials(c.handshakes),
		grpc.WithAuthority(p.o.TLS.Rules.ClusterID),
		grpc.WithContextDialer(c.handshakes.dialer(p.o.Dial)),
		grpc.WithChainUnaryInterceptor(c.unary),
		grpc.WithChainStreamInterceptor(c.stream),
	)...)
	if err != nil {
		return nil, err
	}
	c.ClientConn = cc
	return c, nil
}

// begin counts a call; end must be called when it is over.
func (c *conn) begin() { c.active.Add(1) }

func (c *conn) end() {
	if c.active.Add(-1) == 0 {
		c.closeIfUnused()
	}
}

// closeIfUnused closes a retired connection without calls. A call that was handed the connection and did not begin yet fails
// before anything was sent, which is as good as a peer that is gone.
func (c *conn) closeIfUnused() {
	if c.retired.Load() && c.active.Load() == 0 {
		c.close()
	}
}

// close closes the connection on a goroutine, because it may be called from within a call on it.
func (c *conn) close() {
	if c.closed.CompareAndSwap(false, true) {
		c.pool.metrics.conns.Dec()
		c.pool.closing.Go(func() { _ = c.ClientConn.Close() }) // fails only if closed before
	}
}

// unary gives a call a deadline if it has none, counts it, and tells handshake failures from others.
func (c *conn) unary(
	ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption,
) error {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, unaryTimeout)
		defer cancel()
	}
	c.begin()
	defer c.end()
	return c.handshakes.explain(invoke(ctx, method, req, reply, cc, opts...))
}

// stream does the same for streams, whose end gRPC reports through OnFinish, also when they never began.
func (c *conn) stream(
	ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption,
) (grpc.ClientStream, error) {
	cancel := func() {}
	if _, ok := ctx.Deadline(); !ok && c.timeout > 0 {
		ctx, cancel = context.WithTimeout(ctx, c.timeout)
	}
	c.begin()
	s, err := open(ctx, desc, cc, method, append(opts, grpc.OnFinish(func(error) {
		cancel()
		c.end()
	}))...)
	if err != nil {
		return nil, c.handshakes.explain(err)
	}
	return s, nil
}
