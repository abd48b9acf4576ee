package forward_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/forward"
	"github.com/mvp-mesh/mvp-node/internal/route"
)

// apiserver counts what reaches it.
type apiserver struct {
	calls  atomic.Int32
	answer func(*http.Request) (*http.Response, error)
}

func (a *apiserver) RoundTrip(r *http.Request) (*http.Response, error) {
	a.calls.Add(1)
	if _, err := io.Copy(io.Discard, r.Body); err != nil {
		return nil, err
	}
	return a.answer(r)
}

func answers(r *http.Request) (*http.Response, error) { return answer(r, 200, "ok"), nil }

// deadMember is where nobody listens.
func deadMember(t testing.TB, name string) *route.Member {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return &route.Member{Name: name, Address: l.Addr().String(), State: route.Ready, Mode: route.Enabled, Catalog: widgets}
}

// The rows S0 to S2 of RELIABILITY section 3: who is asked, how often, and what the client is told. c always answers.
func TestWriteSafety(t *testing.T) {
	fails := func(err error) func(*http.Request) (*http.Response, error) {
		return func(*http.Request) (*http.Response, error) { return nil, err }
	}
	cut := func(r *http.Request) (*http.Response, error) { // the head arrived, the body breaks off at once
		resp := answer(r, 200, "")
		resp.ContentLength, resp.Body = 10, io.NopCloser(&brokenReader{err: io.ErrUnexpectedEOF})
		return resp, nil
	}
	broken := errors.New("connection reset")
	big := 100 << 10
	for _, tc := range []struct {
		name     string
		method   string
		body     int
		b        func(*http.Request) (*http.Response, error) // nil: nobody listens
		change   func(*forward.ServerOptions)
		want     route.Cause // CauseNone: c answers
		sent     bool        // the error says dispatched
		asked    int32       // calls at b's apiserver
		attempts int
	}{
		// S0: certain that no apiserver saw it. Any verb may go elsewhere.
		{name: "get, dead peer", method: "GET", attempts: 2},
		{name: "post, dead peer", method: "POST", body: 5, attempts: 2},
		{name: "large post, dead peer", method: "POST", body: big, attempts: 2},
		{name: "post, apiserver got nothing", method: "POST", body: 5, b: fails(notSent{errRefused}), asked: 1, attempts: 2},
		{
			name: "large post, apiserver got nothing, but the body was begun", method: "POST", body: big,
			b: fails(notSent{errRefused}), asked: 1, attempts: 1, want: route.LocalUnavailable,
		},
		{
			name: "post, peer drains", method: "POST", body: 5, b: answers, attempts: 2,
			change: func(o *forward.ServerOptions) { o.Ready = func() error { return errors.New("draining") } },
		},
		{
			name: "post, peer of another cluster", method: "POST", body: 5, b: answers, attempts: 2,
			change: func(o *forward.ServerOptions) { o.ClusterID = "other" },
		},
		{
			name: "post, user denied: not shopped around", method: "POST", body: 5, b: answers, attempts: 1, want: route.AssertionDenied,
			change: func(o *forward.ServerOptions) { o.Policy.DeniedUsers = []string{"jane"} },
		},
		// S1: a read without an answer.
		{name: "get, apiserver breaks", method: "GET", b: fails(broken), asked: 1, attempts: 2},
		{name: "get, answer cut before its first byte", method: "GET", b: cut, asked: 1, attempts: 2},
		{name: "get, peer panics", method: "GET", b: func(*http.Request) (*http.Response, error) { panic("bug") }, asked: 1, attempts: 2},
		// S2: a write without an answer: never again, outcome unknown.
		{name: "post, apiserver breaks", method: "POST", body: 5, b: fails(broken), asked: 1, attempts: 1, want: route.OutcomeUnknown, sent: true},
		{name: "put, apiserver breaks", method: "PUT", body: 5, b: fails(broken), asked: 1, attempts: 1, want: route.OutcomeUnknown, sent: true},
		{name: "patch, apiserver breaks", method: "PATCH", body: 5, b: fails(broken), asked: 1, attempts: 1, want: route.OutcomeUnknown, sent: true},
		{name: "delete, apiserver breaks", method: "DELETE", b: fails(broken), asked: 1, attempts: 1, want: route.OutcomeUnknown, sent: true},
		{name: "large post, apiserver breaks", method: "POST", body: big, b: fails(broken), asked: 1, attempts: 1, want: route.OutcomeUnknown, sent: true},
		{name: "post, answer cut", method: "POST", body: 5, b: cut, asked: 1, attempts: 1, want: route.OutcomeUnknown, sent: true},
		{
			name: "post, peer panics", method: "POST", body: 5, asked: 1, attempts: 1, want: route.OutcomeUnknown, sent: true,
			b: func(*http.Request) (*http.Response, error) { panic("bug") },
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			b, c := &apiserver{answer: tc.b}, &apiserver{answer: answers}
			first := deadMember(t, "b")
			if tc.b != nil {
				var change []func(*forward.ServerOptions)
				if tc.change != nil {
					change = append(change, tc.change)
				}
				first = w.serve("b", b, change...).member
			}
			second := w.serve("c", c).member
			third := w.serve("d", &apiserver{answer: func(*http.Request) (*http.Response, error) {
				t.Error("a third peer was asked")
				return nil, errRefused
			}}).member

			target := getPath
			if tc.method == "POST" {
				target = listPath
			}
			var body io.Reader
			if tc.body > 0 {
				body = strings.NewReader(strings.Repeat("x", tc.body))
			}
			resp, served, err := w.client("a").RoundTrip(newRequest(t, tc.method, target, body), []*route.Member{first, second, third})
			if tc.want == route.CauseNone {
				if err != nil {
					t.Fatal(err)
				}
				if readAll(t, resp) != "ok" || served.Node != "c" {
					t.Errorf("served %+v", served)
				}
			} else {
				wantError(t, err, tc.want, tc.sent)
				if c.calls.Load() != 0 {
					t.Error("the second peer was asked")
				}
			}
			if served.Attempts != tc.attempts {
				t.Errorf("%d attempts, want %d", served.Attempts, tc.attempts)
			}
			if n := b.calls.Load(); n != tc.asked {
				t.Errorf("first apiserver was asked %d times, want %d", n, tc.asked)
			}
		})
	}
}

type brokenReader struct{ err error }

func (r *brokenReader) Read([]byte) (int, error) { return 0, r.err }

// A peer that stops in the middle of a write leaves its outcome unknown; of a read, the other peer answers.
func TestPeerDiesDuringRequest(t *testing.T) {
	for _, method := range []string{"POST", "GET"} {
		t.Run(method, func(t *testing.T) {
			w := newWorld(t)
			arrived := make(chan struct{})
			b := w.serve("b", roundTripper(func(r *http.Request) (*http.Response, error) {
				close(arrived)
				<-r.Context().Done()
				return nil, r.Context().Err()
			}))
			other := &apiserver{answer: answers}
			c := w.serve("c", other)
			go func() { <-arrived; b.stop() }()
			resp, served, err := w.client("a").RoundTrip(newRequest(t, method, listPath, nil), []*route.Member{b.member, c.member})
			if method == "GET" {
				if err != nil || served.Attempts != 2 {
					t.Fatalf("served %+v, err %v", served, err)
				}
				readAll(t, resp)
				return
			}
			wantError(t, err, route.OutcomeUnknown, true)
			if other.calls.Load() != 0 {
				t.Error("the write was sent again")
			}
		})
	}
}

// NotServed is the cause only if every peer that was asked said so, and the hook hears of each.
func TestNotServed(t *testing.T) {
	w := newWorld(t)
	var told []string
	c := w.client("a", func(o *forward.ClientOptions) {
		o.OnNotServed = func(peer string, generation uint64) { told = append(told, fmt.Sprint(peer, generation)) }
	})
	never := &apiserver{answer: answers}
	b1, b2 := w.serve("b1", never), w.serve("b2", never)
	b2.generation = 9
	const gadgets = "/apis/example.com/v1/gadgets"
	_, served, err := c.RoundTrip(newRequest(t, "POST", gadgets, strings.NewReader("x")), []*route.Member{b1.member, b2.member})
	e := wantError(t, err, route.NotServed, false)
	if e.Generation != 9 || served.Attempts != 2 || fmt.Sprint(told) != "[b17 b29]" {
		t.Errorf("generation %d, attempts %d, told %v", e.Generation, served.Attempts, told)
	}
	_, _, err = c.RoundTrip(newRequest(t, "GET", gadgets, nil), []*route.Member{b1.member, deadMember(t, "dead")})
	wantError(t, err, route.NoPeerAvailable, false)
	if never.calls.Load() != 0 {
		t.Error("an apiserver was asked")
	}
}

// CASES R-04: candidates without an address are skipped and are no attempt; nobody to ask is NoPeerAvailable.
func TestCandidatesWithoutAddress(t *testing.T) {
	w := newWorld(t)
	b := w.serve("b", &apiserver{answer: answers})
	c := w.client("a")
	resp, served, err := c.RoundTrip(newRequest(t, "GET", getPath, nil),
		[]*route.Member{{Name: "x"}, {Name: "y"}, {Name: "z"}, b.member})
	if err != nil || served.Attempts != 1 {
		t.Fatalf("served %+v, err %v", served, err)
	}
	readAll(t, resp)
	_, served, err = c.RoundTrip(newRequest(t, "GET", getPath, nil), []*route.Member{{Name: "x"}})
	wantError(t, err, route.NoPeerAvailable, false)
	if served.Attempts != 0 {
		t.Errorf("served %+v", served)
	}
}

// A peer whose certificate is for another name gets no byte of a request (CASES I-09).
func TestWrongCertificate(t *testing.T) {
	w := newWorld(t)
	never := &apiserver{answer: answers}
	b := w.serve("b", never)
	wrong := *b.member
	wrong.Name = "c"
	_, _, err := w.client("a").RoundTrip(newRequest(t, "POST", listPath, strings.NewReader("x")), []*route.Member{&wrong})
	wantError(t, err, route.PeerTLS, false)
	if never.calls.Load() != 0 {
		t.Error("the apiserver was asked")
	}
}

// The deadline of the client's request reaches the apiserver, and its end is told by what is certain.
func TestDeadlines(t *testing.T) {
	w := newWorld(t)
	left := make(chan time.Duration, 1)
	b := w.serve("b", roundTripper(func(r *http.Request) (*http.Response, error) {
		d, ok := r.Context().Deadline()
		if !ok {
			t.Error("no deadline at the apiserver")
		}
		left <- time.Until(d)
		<-r.Context().Done()
		return nil, r.Context().Err()
	}))
	c := w.client("a")
	send := func(method string, d time.Duration) error {
		r := newRequest(t, method, listPath, nil)
		ctx, cancel := context.WithTimeout(r.Context(), d)
		defer cancel()
		_, _, err := c.RoundTrip(r.WithContext(ctx), []*route.Member{b.member})
		return err
	}
	if err := send("POST", 300*time.Millisecond); err == nil {
		t.Fatal("answered")
	} else {
		wantError(t, err, route.OutcomeUnknown, true)
	}
	if d := <-left; d <= 0 || d > 300*time.Millisecond {
		t.Errorf("%v left at the apiserver", d)
	}
	wantError(t, send("GET", 300*time.Millisecond), route.OutcomeUnknown, true)
	<-left
	wantError(t, send("POST", time.Nanosecond), route.DeadlineBeforeDispatch, false)
}

// A call without a deadline of its own gets one from the connection (internal/mesh), so that the peer does not refuse it.
func TestDeadlineIsNeverForgotten(t *testing.T) {
	w := newWorld(t)
	b := w.serve("b", roundTripper(func(r *http.Request) (*http.Response, error) {
		if _, ok := r.Context().Deadline(); !ok {
			t.Error("no deadline at the apiserver")
		}
		return answer(r, 200, "ok"), nil
	}))
	r := newRequest(t, "GET", getPath, nil)
	resp, _, err := w.client("a").RoundTrip(r.WithContext(context.WithoutCancel(r.Context())), []*route.Member{b.member})
	if err != nil {
		t.Fatal(err)
	}
	readAll(t, resp)
}

// A client that leaves ends the apiserver's request within a second, at any stage, and is not a failure of the peer.
// Closing the body without reading it is the other way for a client to leave.
// A request body that breaks off never looks whole to the apiserver, and is the client's fault.
// Places are per peer and class; a request waits a moment for one, then another peer is asked.
// What no caller may ask for: a request without a user, and one that was forwarded already.
// Nothing that proves who the client is travels (CASES I-09), nor what could be taken for identity, hop or origin at the other end.
// CASES S-11, E-02: a peer that shuts down under a stream of writes. Each write is executed at most once; what was answered was
// executed; and because the shutdown is announced, each is answered, by one peer or the other.
func TestGracefulShutdownUnderWrites(t *testing.T) {
	w := newWorld(t)
	var mu sync.Mutex
	executed := make(map[string]int)
	apiserver := func(r *http.Request) (*http.Response, error) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return nil, err
		}
		mu.Lock()
		executed[string(body)]++
		mu.Unlock()
		return answer(r, 201, "ok"), nil
	}
	b, other := w.serve("b", roundTripper(apiserver)), w.serve("c", roundTripper(apiserver))
	c := w.client("a")
	c.wire.off = true
	var wg sync.WaitGroup
	var sent atomic.Int32
	stop := make(chan struct{})
	for worker := range 16 {
		wg.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				id := fmt.Sprintf("%d-%d", worker, i)
				sent.Add(1)
				resp, served, err := c.RoundTrip(newRequest(t, "POST", listPath, strings.NewReader(id)), []*route.Member{b.member, other.member})
				if err == nil {
					readAll(t, resp)
				}
				mu.Lock()
				n := executed[id]
				mu.Unlock()
				e, _ := errors.AsType[*forward.Error](err)
				switch {
				case n > 1:
					t.Errorf("%s was executed %d times", id, n)
				case err == nil && n != 1:
					t.Errorf("%s was answered by %s and executed %d times", id, served.Node, n)
				case err != nil && e == nil:
					t.Errorf("%s: %v", id, err)
				case err != nil && !e.Dispatched && n != 0:
					t.Errorf("%s is said not to be dispatched and was executed: %v", id, err)
				case err != nil:
					t.Errorf("%s got no answer from either peer: %v", id, err)
				}
			}
		})
	}
	waitFor(t, func() bool { return sent.Load() > 200 })
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if err := b.mesh.Shutdown(ctx); err != nil {
		t.Error(err)
	}
	after := sent.Load()
	waitFor(t, func() bool { return sent.Load() > after+200 })
	close(stop)
	wg.Wait()
}

// When every peer breaks off, reads are not all done twice: the budget bounds what we add to their trouble.
func TestRetryBudget(t *testing.T) {
	w := newWorld(t)
	b := &apiserver{answer: func(*http.Request) (*http.Response, error) { return nil, errors.New("connection reset") }}
	first, second := w.serve("b", b), w.serve("c", b)
	c := w.client("a")
	const requests = 400
	for range requests {
		_, _, err := c.RoundTrip(newRequest(t, "GET", getPath, nil), []*route.Member{first.member, second.member})
		wantError(t, err, route.LocalUnavailable, true)
	}
	if n := b.calls.Load(); n < requests+100 || n > requests+100+requests/10+30 {
		t.Errorf("%d attempts for %d requests", n, requests)
	}
	if value(c.registry, "mvp_forward_retries_denied_total") == 0 {
		t.Error("not counted")
	}
}
