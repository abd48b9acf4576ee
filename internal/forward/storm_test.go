package forward_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	"github.com/mvp-mesh/mvp-node/internal/forward"
	"github.com/mvp-mesh/mvp-node/internal/reqctx"
	"github.com/mvp-mesh/mvp-node/internal/route"
)

// CASES S-10: requests of every kind, cancelled at random moments, with a peer that goes away in the middle. Afterwards nothing is
// left: no goroutine, no place, no request at the apiserver.
func TestCancelledRequestsLeaveNothing(t *testing.T) {
	w := newWorld(t)
	var running atomic.Int64
	handler := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		running.Add(1)
		defer running.Add(-1)
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			return
		}
		if r.URL.Query().Get("watch") == "" {
			_, _ = io.CopyN(rw, pattern(1, 100<<10), 100<<10)
			return
		}
		for r.Context().Err() == nil {
			_, _ = io.WriteString(rw, "event\n")
			_ = http.NewResponseController(rw).Flush()
			time.Sleep(time.Millisecond) // an apiserver with something to say now and then
		}
	})
	b := w.serve("b", upstreamTo(t, handler))
	c := w.client("a")
	c.wire.off = true
	other := w.serve("c", upstreamTo(t, handler))
	send := func(r *rand.Rand) {
		method, target, body := "GET", getPath, io.Reader(nil)
		switch r.IntN(4) {
		case 0:
			target = watchPath
		case 1:
			method, target, body = "POST", listPath, strings.NewReader("small")
		case 2:
			method, target, body = "POST", listPath, pattern(2, 200<<10)
		}
		req := newRequest(t, method, target, body)
		ctx, cancel := context.WithTimeout(req.Context(), time.Duration(r.IntN(30_000))*time.Microsecond)
		defer cancel()
		resp, _, err := c.RoundTrip(req.WithContext(ctx), []*route.Member{b.member, other.member})
		if err != nil {
			return
		}
		if r.IntN(2) == 0 {
			_, _ = io.Copy(io.Discard, resp.Body)
		}
		resp.Body.Close()
	}
	storm := func(n int) {
		var wg sync.WaitGroup
		for seed := range 16 {
			wg.Go(func() {
				r := rand.New(rand.NewPCG(uint64(seed), 1))
				for range n {
					send(r)
				}
			})
		}
		wg.Wait()
	}
	time.AfterFunc(100*time.Millisecond, b.stop)
	storm(20) // also opens the connections that there will be
	quiet := func() int {
		waitFor(t, func() bool {
			return running.Load() == 0 && value(c.registry, "mvp_forward_inflight", "short") == 0 &&
				value(c.registry, "mvp_forward_inflight", "long") == 0
		})
		c.Close()
		runtime.GC()
		return runtime.NumGoroutine()
	}
	before := quiet()
	storm(60)
	waitFor(t, func() bool { n := quiet(); return n <= before+before/20+20 })
	for _, class := range []bool{false, true} {
		// Every place can be taken again.
		target := getPath
		if class {
			target = watchPath
		}
		resp, _, err := c.RoundTrip(newRequest(t, "GET", target, nil), []*route.Member{other.member})
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
	}
}

// CASES I-09: many users through one connection at once, each answered for who it is.
func TestIdentityIsPerRequest(t *testing.T) {
	w := newWorld(t)
	b := w.serve("b", roundTripper(func(r *http.Request) (*http.Response, error) {
		rc, _ := reqctx.From(r.Context())
		return answer(r, 200, fmt.Sprint(*rc.User, rc.AuditID)), nil
	}))
	c := w.client("a")
	c.wire.off = true
	var wg sync.WaitGroup
	for user := range 100 {
		wg.Go(func() {
			for i := range 20 {
				u := &authz.User{
					Name: fmt.Sprintf("user-%d", user), UID: fmt.Sprint(i), Groups: []string{fmt.Sprintf("group-%d", user%7)},
					Extra: map[string][]string{fmt.Sprintf("Key-%d/x%%\xff", user%3): {fmt.Sprint(user)}},
				}
				id := fmt.Sprintf("audit-%d-%d", user, i)
				resp, _, err := c.RoundTrip(newRequest(t, "GET", getPath, nil, func(rc *reqctx.Request) { rc.User, rc.AuditID = u, id }),
					[]*route.Member{b.member})
				if e, ok := errors.AsType[*forward.Error](err); ok && e.Cause == route.PeerBusy {
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				if got, want := readAll(t, resp), fmt.Sprint(*u, id); got != want {
					t.Errorf("answered for %s, want %s", got, want)
				}
			}
		})
	}
	wg.Wait()
}
