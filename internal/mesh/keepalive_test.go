package mesh

import (
	"context"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	mvpv1 "github.com/mvp-mesh/mvp-node/proto/mvp/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// pipes is a listener whose connections are in memory, so that time can be fake.
type pipes struct {
	conns  chan net.Conn
	done   chan struct{}
	close  func()
	dials  atomic.Int32
	frozen chan struct{} // closed: nothing passes any more, and nobody is told
}

func newPipes() *pipes {
	p := &pipes{conns: make(chan net.Conn), done: make(chan struct{}), frozen: make(chan struct{})}
	p.close = sync.OnceFunc(func() { close(p.done) })
	return p
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error   { p.close(); return nil }
func (p *pipes) Addr() net.Addr { return pipeAddr{} }

func (p *pipes) dial(ctx context.Context, _ string) (net.Conn, error) {
	here, there := net.Pipe()
	select {
	case p.conns <- there:
		p.dials.Add(1)
		return &freezingConn{here, p.frozen}, nil
	case <-p.done:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

type pipeAddr struct{}

func (pipeAddr) Network() string { return "pipe" }
func (pipeAddr) String() string  { return "pipe:1" }

// freezingConn swallows what is written once it is frozen, as a network does that has lost the other host.
type freezingConn struct {
	net.Conn
	frozen chan struct{}
}

func (c *freezingConn) Write(p []byte) (int, error) {
	select {
	case <-c.frozen:
		return len(p), nil
	default:
		return c.Conn.Write(p)
	}
}

// CASES S-11: what the client sends to keep a connection alive is what the server allows. Half an hour with an open watch on which
// nothing happens, and short connections without any call: no GOAWAY, no new connection.
func TestIdleWatchLives(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		l := newPipes()
		b := w.startOn(l, "b")
		p := w.pool("a", func(o *PoolOptions) { o.Dial = l.dial })
		watch, err := mvpv1.NewForwardServiceClient(connTo(t, p, b.member, true)).Forward(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := watch.Recv(); err != nil {
			t.Fatal(err)
		}
		if err := view(t.Context(), t, p, b.member); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		dials := l.dials.Load()
		ended := make(chan error, 1)
		go func() {
			_, err := watch.Recv()
			ended <- err
		}()
		time.Sleep(30 * time.Minute)
		select {
		case err := <-ended:
			t.Fatalf("the watch ended: %v", err)
		default:
		}
		if n := l.dials.Load(); n != dials {
			t.Errorf("%d connections, were %d", n, dials)
		}
		p.Close()
		if err := <-ended; err == nil || err == io.EOF {
			t.Errorf("the watch ended with %v", err)
		}
		b.stop()
		synctest.Wait()
	})
}

// CASES E-01: a peer that vanishes without a word is found by its silence, on both ends, well within 20 s.
func TestSilentPeerIsFound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		l := newPipes()
		b := w.startOn(l, "b")
		p := w.pool("a", func(o *PoolOptions) { o.Dial = l.dial })
		watch, err := mvpv1.NewForwardServiceClient(connTo(t, p, b.member, true)).Forward(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := watch.Recv(); err != nil {
			t.Fatal(err)
		}
		close(l.frozen)
		start := time.Now()
		if _, err = watch.Recv(); status.Code(err) != codes.Unavailable {
			t.Errorf("error %v", err)
		}
		if took := time.Since(start); took > pingAfter+pingTimeout+time.Second {
			t.Errorf("found after %v", took)
		}
		p.Close()
		b.stop()
		synctest.Wait()
	})
}

// A forward without a deadline gets the pool's, and its end is told as such.
func TestShortCallsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		l := newPipes()
		b := w.startOn(l, "b")
		p := w.pool("a", func(o *PoolOptions) { o.Dial, o.ShortTimeout = l.dial, 5*time.Second })
		st, err := mvpv1.NewForwardServiceClient(connTo(t, p, b.member, false)).Forward(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := st.Recv(); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		if _, err := st.Recv(); status.Code(err) != codes.DeadlineExceeded {
			t.Errorf("error %v", err)
		}
		if took := time.Since(start); took != 5*time.Second {
			t.Errorf("ended after %v", took)
		}
		p.Close()
		b.stop()
		synctest.Wait()
	})
}
