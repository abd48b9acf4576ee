package upstream

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// pool keeps connections. Which kind it holds is the apiserver's choice, unless Options.HTTP1 makes it: a few HTTP/2 connections shared by all requests, or
// HTTP/1.1 connections, each out of the pool while it carries a request.
type pool struct {
	dialer  *dialer
	target  int // HTTP/2 connections to keep
	limit   int // HTTP/1.1 connections that size is compared with; open keeps to none
	idleFor time.Duration
	metrics *metrics
	log     *slog.Logger
	now     func() time.Time

	// shared holds the HTTP/2 connections. The slice is replaced, never changed, so that requests read it without a lock.
	shared atomic.Pointer[[]*conn]
	next   atomic.Uint32 // where the next request starts to look
	h1     atomic.Bool   // the last connection was HTTP/1.1

	mu      sync.Mutex
	idle    []*conn            // HTTP/1.1, last used last
	all     map[*conn]struct{} // every connection that is open
	call    *dialCall          // the shared dial under way
	failing bool               // the last dial failed; so that a long outage is logged once
	closed  bool

	// lifetime ends with close. Dials run under it and not under a request's context, because others wait for them too.
	lifetime context.Context
	cancel   context.CancelFunc
	dials    sync.WaitGroup
}

// dialCall is one dial that any number of requests wait for.
type dialCall struct {
	done   chan struct{} // closed when err is set
	err    error
	blamed atomic.Bool // a request that only joined it has gone on to dial anew
}

// patience bounds how long a request goes on dialling when other requests take each new connection's streams before it. With it
// a flood of new watches is served as fast as connections open.
const patience = 10 * time.Second

var errCrowded = errors.New("no connection had room")

func newPool(o Options, addr string, m *metrics) *pool {
	p := &pool{
		dialer:  newDialer(o, addr),
		target:  o.Connections,
		limit:   o.ReadConnections,
		idleFor: o.IdleHTTP1,
		metrics: m,
		log:     o.Logger.With("component", "upstream"),
		now:     time.Now,
		all:     make(map[*conn]struct{}),
	}
	p.shared.Store(new([]*conn))
	p.h1.Store(o.HTTP1)
	p.lifetime, p.cancel = context.WithCancel(context.Background())
	return p
}

// acquire returns a connection with a reserved place for one request. The caller calls RoundTrip or Release on it once.
func (p *pool) acquire(ctx context.Context) (*conn, error) {
	if c := p.take(); c != nil {
		return c, nil
	}
	start := p.now()
	for {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		c, err := p.grow(ctx)
		if err != nil {
			return nil, err
		}
		if c != nil {
			return c, nil
		}
		if c := p.take(); c != nil {
			return c, nil
		}
		if p.now().Sub(start) > patience {
			return nil, errCrowded
		}
	}
}

// take returns a connection that is there already, or nil.
func (p *pool) take() *conn {
	if p.h1.Load() {
		return p.takeIdle()
	}
	conns := *p.shared.Load()
	n := len(conns)
	if n == 0 {
		return nil
	}
	cert, roots := p.dialer.o.Certificate(), p.dialer.o.Roots()
	start := int(p.next.Add(1) % uint32(n))
	for i := range n {
		c := conns[(start+i)%n]
		if !c.current(cert, roots) {
			p.retire(c)
			continue
		}
		if !c.reserve() {
			continue // new, full, going away, or closed and about to be removed
		}
		if n < p.target {
			_, _, _ = p.share() // in the background; whoever needs the connection asks again
		}
		return c
	}
	return nil
}

// takeIdle returns an unused HTTP/1.1 connection, the one used last.
func (p *pool) takeIdle() *conn {
	cert, roots := p.dialer.o.Certificate(), p.dialer.o.Roots()
	for {
		p.mu.Lock()
		n := len(p.idle)
		if n == 0 {
			p.mu.Unlock()
			return nil
		}
		c := p.idle[n-1]
		p.idle = p.idle[:n-1]
		c.isIdle = false
		old := p.now().Sub(c.since) > p.idleFor
		p.mu.Unlock()
		if !old && c.current(cert, roots) && c.reserve() {
			return c
		}
		c.cc.Close()
	}
}

// grow opens a connection, or waits for one that is being opened. It returns a reserved connection, or nil if the caller should
// look again.
func (p *pool) grow(ctx context.Context) (*conn, error) {
	if p.h1.Load() {
		if c := p.stray(); c != nil {
			return c, nil
		}
		c, err := p.open(ctx)
		if err != nil {
			return nil, err
		}
		if c.h2 {
			return nil, nil // the apiserver came back with HTTP/2; the connection is everybody's
		}
		if !c.reserve() {
			return nil, nil
		}
		return c, nil
	}
	for _, c := range *p.shared.Load() {
		if !c.isSettled.Load() {
			select {
			case <-c.settled:
				return nil, nil
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
	}
	call, own, err := p.share()
	if err != nil {
		return nil, err
	}
	select {
	case <-call.done:
		if call.err != nil && !own && !call.blamed.Swap(true) {
			// It began before this request and may have met the end of an apiserver that is back by now. The first to find
			// that out dials anew, and the others with it.
			return nil, nil
		}
		return nil, call.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// share starts the shared dial unless it is under way; own tells which.
func (p *pool) share() (call *dialCall, own bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, false, ErrClosed
	}
	if p.call != nil {
		return p.call, false, nil
	}
	call = &dialCall{done: make(chan struct{})}
	p.call = call
	p.dials.Go(func() {
		c, err := p.open(p.lifetime)
		if err == nil && !c.h2 {
			p.putIdle(c)
		}
		p.mu.Lock()
		p.call = nil
		p.mu.Unlock()
		call.err = err
		close(call.done)
	})
	return call, true, nil
}

// open dials and enters the connection into the pool's books; an HTTP/1.1 one is the caller's.
func (p *pool) open(ctx context.Context) (*conn, error) {
	c, err := p.dialer.open(ctx, p.gone)
	if err != nil {
		p.metrics.dials.WithLabelValues("error").Inc()
		p.noteDial(err)
		return nil, err
	}
	p.metrics.dials.WithLabelValues("ok").Inc()
	p.noteDial(nil)
	if !p.enter(c) {
		c.cc.Close()
		return nil, ErrClosed
	}
	if !c.h2 {
		// Without mu: the hook may run at once.
		c.cc.SetStateHook(func(cc *http.ClientConn) {
			if cc.Available() > 0 {
				p.putIdle(c)
			}
		})
	}
	return c, nil
}

// enter reports whether the pool is open.
func (p *pool) enter(c *conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	p.h1.Store(!c.h2)
	if c.raw.ended.Load() {
		return true // gone was called already; the caller will find it unusable
	}
	p.all[c] = struct{}{}
	p.metrics.connections.WithLabelValues(c.protocol()).Inc()
	if c.h2 {
		p.shared.Store(new(append(slices.Clone(*p.shared.Load()), c)))
	}
	return true
}

// noteDial logs the first of a row of failures, and the end of the row.
func (p *pool) noteDial(err error) {
	if errors.Is(err, context.Canceled) {
		return // the request went away, or the node stops
	}
	p.mu.Lock()
	was := p.failing
	p.failing = err != nil
	p.mu.Unlock()
	switch {
	case err != nil && !was:
		p.log.Warn("local apiserver cannot be reached", "address", p.dialer.addr, "err", err)
	case err == nil && was:
		p.log.Info("local apiserver can be reached again", "address", p.dialer.addr)
	}
}

// putIdle takes an HTTP/1.1 connection back.
func (p *pool) putIdle(c *conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, open := p.all[c]; open && !c.isIdle {
		c.isIdle, c.since = true, p.now()
		p.idle = append(p.idle, c)
	}
}

// stray finds an HTTP/1.1 connection that is free and not among the idle ones: net/http does not call the state hook again for
// what happens while it runs.
func (p *pool) stray() *conn {
	p.mu.Lock()
	var busy []*conn
	for c := range p.all {
		if !c.h2 && !c.isIdle {
			busy = append(busy, c)
		}
	}
	p.mu.Unlock()
	for _, c := range busy {
		if c.reserve() {
			return c
		}
	}
	return nil
}

// retire lets the requests on an HTTP/2 connection end and gives it no new ones.
func (p *pool) retire(c *conn) {
	p.mu.Lock()
	p.unshare(c)
	p.mu.Unlock()
	closeUnused := func(cc *http.ClientConn) {
		if cc.InFlight() == 0 {
			cc.Close()
		}
	}
	c.cc.SetStateHook(closeUnused)
	closeUnused(c.cc)
}

// unshare needs mu.
func (p *pool) unshare(c *conn) {
	conns := *p.shared.Load()
	if i := slices.Index(conns, c); i >= 0 {
		p.shared.Store(new(slices.Delete(slices.Clone(conns), i, i+1)))
	}
}

// gone is called when a connection has ended, by whoever ended it.
func (p *pool) gone(c *conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, ok := p.all[c]; !ok {
		return
	}
	delete(p.all, c)
	p.metrics.connections.WithLabelValues(c.protocol()).Dec()
	p.unshare(c)
	if i := slices.Index(p.idle, c); i >= 0 {
		p.idle = slices.Delete(p.idle, i, i+1)
	}
}

// size is the number of open connections.
func (p *pool) size() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.all)
}

func (p *pool) close() {
	p.mu.Lock()
	p.closed = true
	conns := slices.Collect(maps.Keys(p.all))
	p.mu.Unlock()
	p.cancel()
	for _, c := range conns {
		c.cc.Close()
	}
	p.dials.Wait()
}
