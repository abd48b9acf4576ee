package stream_test

import (
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// relay is the network before a port: it passes bytes, half-closes and resets as they come, and can be made to fail. What it does to
// its connections is what the kernel of a host does when the process behind the port dies.
type relay struct {
	address string
	to      atomic.Pointer[string]
	// dropIdle makes it a middlebox that forgets flows on which nothing passed for so long; 0 is never. Set before the first use.
	dropIdle atomic.Int64
	opened   atomic.Int64 // connections so far

	mu       sync.Mutex
	listener net.Listener
	links    map[*link]struct{}
	running  sync.WaitGroup
}

// link is one connection through a relay.
type link struct {
	near, far *net.TCPConn
	last      atomic.Int64 // when something passed, in nanoseconds
}

// ending is how a connection ends when its process is gone.
type ending int

const (
	orderly ending = iota // FIN: all was read before
	reset                 // RST: something was not
)

func (e ending) String() string { return [...]string{"FIN", "RST"}[e] }

func newRelay(t *testing.T, address, to string) *relay {
	t.Helper()
	r := &relay{address: address, links: map[*link]struct{}{}}
	r.to.Store(&to)
	if err := r.up(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		r.down(reset)
		r.running.Wait()
	})
	return r
}

// up accepts connections, again after down.
func (r *relay) up() error {
	l, err := net.Listen("tcp", r.address)
	if err != nil {
		return err
	}
	r.mu.Lock()
	r.listener = l
	r.mu.Unlock()
	r.running.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			r.opened.Add(1)
			r.running.Go(func() { r.serve(c.(*net.TCPConn)) })
		}
	})
	return nil
}

// down ends all connections and refuses new ones, as the kernel does for a port that nobody listens on.
func (r *relay) down(how ending) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.listener != nil {
		_ = r.listener.Close()
		r.listener = nil
	}
	r.endAll(how)
}

// cut ends all connections; new ones are accepted.
func (r *relay) cut(how ending) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.endAll(how)
}

func (r *relay) endAll(how ending) {
	for l := range r.links {
		l.end(how)
	}
}

// count is how many connections are open.
func (r *relay) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.links)
}

func (l *link) end(how ending) {
	for _, c := range []*net.TCPConn{l.near, l.far} {
		if how == reset {
			_ = c.SetLinger(0)
		}
		_ = c.Close()
	}
}

func (r *relay) serve(near *net.TCPConn) {
	far, err := net.DialTimeout("tcp", *r.to.Load(), 3*time.Second)
	if err != nil {
		_ = near.SetLinger(0)
		_ = near.Close()
		return
	}
	l := &link{near: near, far: far.(*net.TCPConn)}
	l.last.Store(time.Now().UnixNano())
	r.mu.Lock()
	alive := r.listener != nil
	if alive {
		r.links[l] = struct{}{}
	}
	r.mu.Unlock()
	if !alive {
		l.end(reset)
		return
	}
	defer func() {
		l.end(orderly)
		r.mu.Lock()
		delete(r.links, l)
		r.mu.Unlock()
	}()
	if limit := time.Duration(r.dropIdle.Load()); limit > 0 {
		stop := make(chan struct{})
		defer close(stop)
		r.running.Go(func() { l.watch(limit, stop) })
	}
	var both sync.WaitGroup
	both.Go(func() { l.pass(l.near, l.far) })
	both.Go(func() { l.pass(l.far, l.near) })
	both.Wait()
}

func (l *link) watch(limit time.Duration, stop chan struct{}) {
	tick := time.NewTicker(limit / 20)
	defer tick.Stop()
	for {
		select {
		case <-stop:
			return
		case now := <-tick.C:
			if now.Sub(time.Unix(0, l.last.Load())) > limit {
				l.end(reset)
				return
			}
		}
	}
}

// pass copies in one direction until it ends, and passes the kind of end on.
func (l *link) pass(from, to *net.TCPConn) {
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			l.last.Store(time.Now().UnixNano())
			if _, werr := to.Write(buf[:n]); werr != nil {
				l.end(reset)
				return
			}
		}
		if err == nil {
			continue
		}
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == io.EOF {
			_ = to.CloseWrite()
		} else {
			l.end(reset)
		}
		return
	}
}
