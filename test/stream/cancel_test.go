package stream_test

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// starvation watches how long the machine keeps this process waiting: what is promised in seconds is promised on a machine that runs
// the program. The function returns the worst so far.
func starvation(t *testing.T) func() time.Duration {
	var worst atomic.Int64
	stop := make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() {
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for last := time.Now(); ; {
			select {
			case <-stop:
				return
			case <-tick.C:
			}
			now := time.Now()
			worst.Store(max(worst.Load(), int64(now.Sub(last)-5*time.Millisecond)))
			last = now
		}
	})
	t.Cleanup(func() {
		close(stop)
		watching.Wait()
	})
	return func() time.Duration { return time.Duration(worst.Load()) }
}

// descriptors is how many files this process has open.
func descriptors(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

// ledger notes when requests came to and left the apiserver, and when their clients let go of them.
type ledger struct {
	mu   sync.Mutex
	of   map[string]*entry
	next atomic.Int64
}

type entry struct {
	came, left, let time.Time
	kind            string
	onCame          func()
}

func (l *ledger) note(id string, f func(*entry)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.of[id]
	if e == nil {
		e = &entry{}
		l.of[id] = e
	}
	f(e)
}

// closed is nil when all that came to the apiserver has left it.
func (l *ledger) closed() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	open := map[string]int{}
	for _, e := range l.of {
		if !e.came.IsZero() && e.left.IsZero() {
			open[e.kind]++
		}
	}
	if len(open) > 0 {
		return fmt.Errorf("still at the apiserver: %v", open)
	}
	return nil
}

func (l *ledger) serve(t *testing.T) http.HandlerFunc {
	block := make([]byte, 4<<10)
	return func(w http.ResponseWriter, r *http.Request) {
		id := r.Header.Get("X-Id")
		l.note(id, func(e *entry) {
			e.came = time.Now()
			if e.onCame != nil {
				e.onCame()
			}
		})
		defer func() { l.note(id, func(e *entry) { e.left = time.Now() }) }()
		switch {
		case r.Header.Get("Upgrade") != "":
			p := accept(t, w, r)
			defer p.Close()
			_, _ = io.Copy(io.Discard, p)
		case r.URL.Query().Get("kind") == "stream":
			for r.Context().Err() == nil {
				if _, err := w.Write(block); err != nil {
					break
				}
			}
		case r.URL.Query().Get("kind") == "head":
			_ = http.NewResponseController(w).Flush()
			fallthrough
		default:
			_, _ = io.Copy(io.Discard, r.Body)
			<-r.Context().Done()
		}
	}
}

// TestS10Cancelled: CASES S-10. Requests are cancelled at random moments, the peer is restarted meanwhile, and nothing is left of them; each end
// is seen at the peer's apiserver within a second.
func TestS10Cancelled(t *testing.T) {
	const workers = 32
	want, patience := int64(10000), scaled(10*time.Second, 10*time.Minute)
	m := newMesh(t, setup{drain: "500ms"})
	m.servers["b"].forget(false)
	l := &ledger{of: map[string]*entry{}}
	m.servers["b"].on("s10", l.serve(t))
	starved := starvation(t)
	var clients [4]*http.Client
	for i := range clients {
		clients[i] = way{m, "a", i < 3}.client(t)
	}
	kinds := map[string]*atomic.Int64{}
	for _, k := range []string{"before anything", "before the head", "body of the request", "body of the answer", "quiet watch", "upgraded"} {
		kinds[k] = new(atomic.Int64)
	}
	const span = 5 * time.Millisecond
	one := func(rnd *rand.Rand) {
		id := fmt.Sprint(l.next.Add(1))
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		let := func() {
			l.note(id, func(e *entry) { e.let = time.Now() })
			cancel()
		}
		method, target, kind := "GET", "/api/v1/namespaces/s10/pods?kind=none", "before the head"
		var body io.Reader
		wait := time.Duration(rnd.Int64N(int64(span)))
		later := rnd.IntN(2) == 0 // half of them not before they have come to the apiserver, be the machine as slow as it is
		switch n := rnd.IntN(100); {
		case n < 15:
			kind, wait, later = "before anything", time.Duration(rnd.Int64N(int64(300*time.Microsecond))), false
		case n < 40:
		case n < 50:
			method, kind, body = "POST", "body of the request", io.MultiReader(io.LimitReader(noise(id), 100<<10), never{ctx})
		case n < 70:
			target, kind = "/api/v1/namespaces/s10/pods?kind=stream", "body of the answer"
		case n < 92:
			target, kind = "/api/v1/namespaces/s10/pods?watch=true&kind=head", "quiet watch"
		default:
			kinds["upgraded"].Add(1)
			upgradeAndGo(l, way{m, "a", false}, id, wait, later, let)
			return
		}
		kinds[kind].Add(1)
		req, _ := http.NewRequestWithContext(ctx, method, way{m, "a", true}.url(target), body)
		req.Header.Set("X-Id", id)
		timer := l.schedule(id, kind, wait, later, let)
		resp, err := clients[rnd.IntN(len(clients))].Do(req)
		if err == nil {
			_, _ = io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
			if resp.StatusCode == http.StatusServiceUnavailable {
				time.Sleep(20 * time.Millisecond) // what it is told to do: to come again later
			}
		}
		if timer.Stop() {
			let() // over before it was cancelled: the peer was away
		}
	}
	load := func(until int64, limit time.Duration) {
		end := time.Now().Add(limit)
		var all sync.WaitGroup
		for i := range workers {
			all.Go(func() {
				for rnd := rand.New(rand.NewPCG(uint64(i), uint64(until))); l.next.Load() < until && time.Now().Before(end); {
					one(rnd)
				}
			})
		}
		all.Wait()
	}
	quiet := func() (goroutines, files int) {
		for _, c := range clients {
			c.CloseIdleConnections()
		}
		return runtime.NumGoroutine(), descriptors(t)
	}
	load(300, 5*time.Second) // what is pooled is in the pools now
	goroutines, files := quiet()
	_ = poll(2*time.Second, func() error { // until nothing ends any more
		g, f := quiet()
		settled := g >= goroutines && f >= files
		goroutines, files = min(goroutines, g), min(files, f)
		if !settled {
			return fmt.Errorf("still ending")
		}
		return nil
	})
	start := time.Now()
	var loading sync.WaitGroup
	loading.Go(func() { load(want, patience) })
	_ = poll(patience, func() error { // in the middle, by number or by time
		if l.next.Load() < want/3 && time.Since(start) < patience/3 {
			return fmt.Errorf("not yet")
		}
		return nil
	})
	m.stop("b")
	m.start("b")
	loading.Wait()
	took := time.Since(start)

	var after error
	within(t, 70*time.Second, "quiet", func() {
		after = poll(60*time.Second, func() error {
			g, f := quiet()
			if g > goroutines+goroutines/20+20 || f > files+files/20+20 {
				return fmt.Errorf("%d goroutines, were %d; %d descriptors, were %d", g, goroutines, f, files)
			}
			return nil
		})
	})
	if after != nil {
		t.Error(after)
		buf := make([]byte, 1<<20)
		t.Logf("%s", buf[:runtime.Stack(buf, true)])
	}
	if err := poll(2*time.Second, l.closed); err != nil {
		t.Error(err)
	}
	g, f := quiet()
	l.mu.Lock()
	defer l.mu.Unlock()
	arrivals, worst, what := 0, time.Duration(0), ""
	for _, e := range l.of {
		if e.came.IsZero() {
			continue
		}
		arrivals++
		if e.left.IsZero() {
			continue
		}
		since := e.let
		if e.came.After(since) {
			since = e.came
		}
		if took := e.left.Sub(since); took > worst {
			worst, what = took, e.kind
		}
	}
	if arrivals < 100 { // of which each that left something behind would show
		t.Errorf("only %d requests came to the apiserver in %v", arrivals, took)
	}
	// The word passes four parts, each of which the machine may have kept waiting.
	if limit := time.Second + 4*starved(); worst > limit {
		t.Errorf("an end was seen at the apiserver after %v (%s), limit %v", worst, what, limit)
	}
	t.Logf("%d requests in %v, %d of them came to the apiserver, the slowest end took %v; goroutines %d -> %d, descriptors %d -> %d, starved %v",
		l.next.Load(), took.Round(time.Millisecond), arrivals, worst.Round(time.Millisecond), goroutines, g, files, f, starved().Round(time.Millisecond))
	for k, n := range kinds {
		t.Logf("%-20s %d", k, n.Load())
	}
}

// never is a body that does not come.
type never struct{ ctx context.Context }

// Read implements io.Reader.
func (n never) Read([]byte) (int, error) {
	<-n.ctx.Done()
	return 0, n.ctx.Err()
}

// schedule calls f after a time, or that time after the request came to the apiserver; if it never does, then in the end.
func (l *ledger) schedule(id, kind string, wait time.Duration, later bool, f func()) *time.Timer {
	const end = 3 * time.Second
	timer := time.AfterFunc(map[bool]time.Duration{false: wait, true: end}[later], f)
	l.note(id, func(e *entry) {
		e.kind = kind
		if later {
			e.onCame = func() {
				if timer.Stop() {
					timer.Reset(wait)
				}
			}
		}
	})
	return timer
}

// upgradeAndGo opens an upgraded stream, or is on the way to it, and goes.
func upgradeAndGo(l *ledger, w way, id string, wait time.Duration, later bool, let func()) {
	p, err := w.tryDial()
	if err != nil {
		let()
		return
	}
	timer := l.schedule(id, "upgraded", wait, later, func() {
		let()
		if wait%2 == 0 {
			p.Reset()
		} else {
			p.Close()
		}
	})
	_, _ = fmt.Fprintf(p, "GET /api/v1/namespaces/s10/pods/p/exec HTTP/1.1\r\nHost: test\r\nX-Id: %s\r\n%s\r\n", id, webSocketUpgrade)
	_, _ = io.CopyN(p, noise(id), 20<<10)
	_ = p.SetReadDeadline(time.Now().Add(20 * time.Second))
	_, _ = io.Copy(io.Discard, p)
	if timer.Stop() {
		let()
	}
	p.Close()
}
