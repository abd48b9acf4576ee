package upstream

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"golang.org/x/net/http2"

	"github.com/mvp-mesh/mvp-node/internal/catalog"
	"github.com/mvp-mesh/mvp-node/internal/reqctx"
	"github.com/mvp-mesh/mvp-node/internal/route"
)

// connections counts the connections that the apiserver saw requests on.
func connections(ss []seen) int {
	m := make(map[string]struct{})
	for _, s := range ss {
		m[s.Conn] = struct{}{}
	}
	return len(m)
}

func (t *Transport) open() int {
	n := t.pool.size()
	if t.reads != nil {
		n += t.reads.size()
	}
	return n
}

// read makes a request that counts as a short read.
func read(t testing.TB, path string) *http.Request {
	rc := alice()
	rc.Attributes = route.Attributes{Resource: true, Verb: catalog.VerbGet, Key: catalog.Key{Version: "v1", Resource: "pods"}}
	return request(t, rc, "GET", path, nil)
}

// Short reads have HTTP/1.1 connections of their own, up to a number; everything else goes by HTTP/2.
func TestShortReads(t *testing.T) {
	var release sync.WaitGroup
	release.Add(1)
	a := newAPIServer(t, true, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/wait" {
			w.(http.Flusher).Flush()
			release.Wait()
		}
	})
	tr := a.transport(t, func(o *Options) { o.ReadConnections = 2; o.Connections = 1 })
	protocol := func(req *http.Request) string {
		t.Helper()
		send(t, tr, req)
		return a.one(t).Proto
	}
	watch, connect, body := read(t, "/"), read(t, "/"), read(t, "/")
	rc := func(r *http.Request) *reqctx.Request { c, _ := reqctx.From(r.Context()); return c }
	rc(watch).LongRunning = true
	rc(connect).Attributes.Key.Subresource = "proxy"
	body.Body, body.ContentLength = io.NopCloser(strings.NewReader("{}")), 2
	for name, test := range map[string]struct {
		req  *http.Request
		want string
	}{
		"read":         {read(t, "/"), "HTTP/1.1"},
		"watch":        {watch, "HTTP/2.0"},
		"connect":      {connect, "HTTP/2.0"},
		"with body":    {body, "HTTP/2.0"},
		"write":        {request(t, alice(), "POST", "/", nil), "HTTP/2.0"},
		"non-resource": {request(t, alice(), "GET", "/version", nil), "HTTP/2.0"},
	} {
		if got := protocol(test.req); got != test.want {
			t.Errorf("%s went by %s, want %s", name, got, test.want)
		}
	}
	var open []*http.Response
	for range 4 {
		resp, err := tr.RoundTrip(read(t, "/wait"))
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, resp)
	}
	by := make(map[string]int)
	for _, s := range a.take() {
		by[s.Proto]++
	}
	if by["HTTP/1.1"] != 2 || by["HTTP/2.0"] != 2 {
		t.Errorf("4 reads at a time with 2 connections for them went by %v", by)
	}
	release.Done()
	for _, r := range open {
		r.Body.Close()
	}
}

// A read whose reused connection ends without an answer goes once more, by another connection; on a new connection it does not.
func TestShortReadAgain(t *testing.T) {
	var mu sync.Mutex
	vanish := make(map[string]int)
	a := newAPIServer(t, true, func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if vanish[r.URL.Path] > 0 {
			vanish[r.URL.Path]--
			panic(http.ErrAbortHandler)
		}
	})
	tr := a.transport(t)
	vanish["/fresh"], vanish["/once"], vanish["/twice"] = 1, 1, 2
	_, err := tr.RoundTrip(read(t, "/fresh"))
	wantSent(t, err)
	for _, test := range []struct {
		path string
		ok   bool
	}{{"/once", true}, {"/twice", false}} {
		send(t, tr, read(t, "/")) // a connection to reuse
		a.take()
		resp, err := tr.RoundTrip(read(t, test.path))
		if test.ok {
			if err != nil {
				t.Errorf("%s: %v", test.path, err)
			} else {
				resp.Body.Close()
			}
		} else {
			wantSent(t, err)
		}
		if got := a.take(); len(got) != 2 || got[0].Proto == got[1].Proto {
			t.Errorf("%s: apiserver saw %+v", test.path, got)
		}
	}
}

func TestHTTP2Connections(t *testing.T) {
	a := newAPIServer(t, true, nil)
	tr := a.transport(t, func(o *Options) { o.Connections = 3 })
	send(t, tr, request(t, alice(), "GET", "/", nil))
	eventually(t, "three connections are open", func() bool {
		send(t, tr, request(t, alice(), "GET", "/", nil))
		return tr.open() == 3
	})
	a.take()
	for range 30 {
		send(t, tr, request(t, alice(), "GET", "/", nil))
	}
	if n := connections(a.take()); n != 3 {
		t.Errorf("30 requests came on %d connections, want 3", n)
	}
	if n := tr.open(); n != 3 {
		t.Errorf("%d connections are open, want 3", n)
	}
}

// More watches than the streams of the connections: others are opened, nobody waits.
func TestStreamLimit(t *testing.T) {
	release := make(chan struct{})
	a := newAPIServerWith(t, func(s *http.Server) { s.HTTP2 = &http.HTTP2Config{MaxConcurrentStreams: 5} }, func(w http.ResponseWriter, r *http.Request) {
		w.(http.Flusher).Flush()
		<-release
	})
	tr := a.transport(t)
	// The first request learns the server's limit; before it, net/http assumes 100.
	var open []*http.Response
	for range 60 {
		resp, err := tr.RoundTrip(request(t, alice(), "GET", "/api/v1/pods?watch=true", nil))
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, resp)
	}
	if n := connections(a.take()); n < 12 {
		t.Errorf("60 watches run on %d connections with 5 streams each", n)
	}
	close(release)
	for _, r := range open {
		r.Body.Close()
	}
}

func TestFloodOfNewWatches(t *testing.T) {
	release := make(chan struct{})
	a := newAPIServerWith(t, func(s *http.Server) { s.HTTP2 = &http.HTTP2Config{MaxConcurrentStreams: 20} }, func(w http.ResponseWriter, r *http.Request) {
		w.(http.Flusher).Flush()
		<-release
	})
	tr := a.transport(t)
	var wg sync.WaitGroup
	var arrived sync.WaitGroup
	const n = 200
	arrived.Add(n)
	for range n {
		wg.Go(func() {
			resp, err := tr.RoundTrip(request(t, alice(), "GET", "/api/v1/pods?watch=true", nil))
			arrived.Done()
			if err != nil {
				t.Error(err)
				return
			}
			io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		})
	}
	arrived.Wait()
	close(release)
	wg.Wait()
}

func TestHTTP1Connections(t *testing.T) {
	var release sync.WaitGroup
	release.Add(1)
	a := newAPIServer(t, false, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/wait" {
			w.(http.Flusher).Flush()
			release.Wait()
		}
	})
	var now atomic.Int64
	tr := a.transport(t)
	tr.pool.now = func() time.Time { return time.Unix(now.Load(), 0) }
	for range 10 {
		send(t, tr, request(t, alice(), "GET", "/", nil))
	}
	if n := connections(a.take()); n != 1 {
		t.Errorf("10 requests in a row came on %d connections, want 1", n)
	}
	var open []*http.Response
	for range 5 {
		resp, err := tr.RoundTrip(request(t, alice(), "GET", "/wait", nil))
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, resp)
	}
	if n := connections(a.take()); n != 5 {
		t.Errorf("5 requests at a time came on %d connections, want 5", n)
	}
	release.Done()
	for _, r := range open {
		io.Copy(io.Discard, r.Body)
		r.Body.Close()
	}
	for range 10 {
		send(t, tr, request(t, alice(), "GET", "/", nil))
	}
	if n := connections(a.take()); n != 1 {
		t.Errorf("10 more requests in a row came on %d connections, want 1", n)
	}
	// Unused for too long, the old ones are not trusted.
	before := tr.open()
	now.Add(int64(tr.pool.idleFor/time.Second) + 1)
	send(t, tr, request(t, alice(), "GET", "/", nil))
	eventually(t, "the old connections are closed", func() bool { return tr.open() == 1 })
	if before < 5 {
		t.Errorf("%d connections were open, want at least 5", before)
	}
}

// An HTTP/1.1 connection that nobody put back is found before another is opened.
func TestStrayConnection(t *testing.T) {
	a := newAPIServer(t, false, nil)
	tr := a.transport(t)
	send(t, tr, request(t, alice(), "GET", "/", nil))
	eventually(t, "the connection is idle", func() bool {
		tr.pool.mu.Lock()
		defer tr.pool.mu.Unlock()
		return len(tr.pool.idle) == 1
	})
	tr.pool.mu.Lock()
	tr.pool.idle[0].isIdle = false
	tr.pool.idle = nil
	tr.pool.mu.Unlock()
	send(t, tr, request(t, alice(), "GET", "/", nil))
	if n := connections(a.take()); n != 1 {
		t.Errorf("%d connections were used, want 1", n)
	}
}

// A new front-proxy certificate: new requests come with it, running ones are left alone.
func TestCertificateRotation(t *testing.T) {
	overBoth(t, func(t *testing.T, http2 bool) {
		release := make(chan struct{})
		a := newAPIServer(t, http2, func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/wait" {
				w.(http.Flusher).Flush()
				<-release
				io.WriteString(w, "end")
			}
		})
		var current atomic.Pointer[tls.Certificate]
		current.Store(&a.certs.front)
		tr := a.transport(t, func(o *Options) { o.Certificate = current.Load })
		watch, err := tr.RoundTrip(request(t, alice(), "GET", "/wait", nil))
		if err != nil {
			t.Fatal(err)
		}
		send(t, tr, request(t, alice(), "GET", "/", nil))
		old := a.take()[0].Cert

		// The same certificate at another address is no change.
		same := a.certs.front
		current.Store(&same)
		open := tr.open()
		send(t, tr, request(t, alice(), "GET", "/", nil))
		if tr.open() < open || a.one(t).Cert != old {
			t.Error("a reload of the same certificate closed connections")
		}

		renewed := a.certs.issueFront(t)
		current.Store(&renewed)
		for range 4 {
			send(t, tr, request(t, alice(), "GET", "/", nil))
			if a.one(t).Cert == old {
				t.Error("a request came with the old certificate")
			}
		}
		close(release)
		b, err := io.ReadAll(watch.Body)
		watch.Body.Close()
		if string(b) != "end" || err != nil {
			t.Errorf("the running watch ended as %q, %v", b, err)
		}
		eventually(t, "connections with the old certificate are gone", func() bool {
			tr.pool.mu.Lock()
			defer tr.pool.mu.Unlock()
			for c := range tr.pool.all {
				if c.cert != &renewed && !c.isIdle {
					return false
				}
			}
			return true
		})
	})
}

// A connection that stops answering, without a reset, is found by pings (CASES E-01).
func TestDeadConnection(t *testing.T) {
	hang := make(chan struct{})
	s := newRawServer(t, "h2", h2script(func(fr *http2.Framer, path string, stream uint32) bool {
		if path == "/hang" {
			<-hang // and read nothing any more
			return false
		}
		h2ok(fr, stream)
		return true
	}))
	defer close(hang)
	o := options(t, s.l.Addr().String(), s.certs)
	o.PingAfter, o.PingTimeout = 50*time.Millisecond, 50*time.Millisecond
	tr := newTransport(t, o)
	start := time.Now()
	_, err := attempt(t, tr, "POST", "/hang", []byte("{}"))
	wantSent(t, err)
	if d := time.Since(start); d > 5*time.Second {
		t.Errorf("found after %s", d)
	}
	if _, err := attempt(t, tr, "GET", "/ok", nil); err != nil {
		t.Errorf("the next request: %v", err)
	}
}

// The apiserver goes away and comes back: one line of log each, no request lost after it is back.
func TestOutage(t *testing.T) {
	overBoth(t, func(t *testing.T, http2 bool) {
		a := newAPIServer(t, http2, nil)
		var logs bytes.Buffer
		reg := prometheus.NewPedanticRegistry()
		tr := a.transport(t, func(o *Options) {
			o.Logger = slog.New(slog.NewTextHandler(&logs, nil))
			o.Registerer = reg
			o.Connections = 1
		})
		send(t, tr, request(t, alice(), "GET", "/", nil))
		address := a.Listener.Addr().String()
		a.Close()
		eventually(t, "the connection is gone", func() bool { return tr.open() == 0 })
		for range 3 {
			_, err := tr.RoundTrip(request(t, alice(), "POST", "/", []byte("{}")))
			wantNotSent(t, err)
		}
		back := relisten(t, address, a.certs, http2)
		send(t, tr, request(t, alice(), "POST", "/", []byte("{}")))
		back.one(t)
		tr.Close()
		if n := strings.Count(logs.String(), "cannot be reached"); n != 1 {
			t.Errorf("the outage was logged %d times:\n%s", n, logs.String())
		}
		if n := strings.Count(logs.String(), "can be reached again"); n != 1 {
			t.Errorf("its end was logged %d times:\n%s", n, logs.String())
		}
		if err := testutil.GatherAndCompare(reg, strings.NewReader(`
# HELP mvp_upstream_dials_total Attempts to open a connection to the local apiserver, by result.
# TYPE mvp_upstream_dials_total counter
mvp_upstream_dials_total{result="error"} 3
mvp_upstream_dials_total{result="ok"} 2
# HELP mvp_upstream_connections Open connections to the local apiserver, by protocol.
# TYPE mvp_upstream_connections gauge
mvp_upstream_connections{protocol="h1"} 0
mvp_upstream_connections{protocol="h2"} 0
`), "mvp_upstream_dials_total", "mvp_upstream_connections"); err != nil {
			t.Error(err)
		}
	})
}

// The apiserver comes back with the other protocol.
func TestProtocolChange(t *testing.T) {
	for _, first := range []bool{true, false} {
		t.Run(fmt.Sprintf("http2 first %v", first), func(t *testing.T) {
			a := newAPIServer(t, first, nil)
			tr := a.transport(t)
			send(t, tr, request(t, alice(), "GET", "/", nil))
			a.Close()
			eventually(t, "the connections are gone", func() bool { return tr.open() == 0 })
			back := relisten(t, a.Listener.Addr().String(), a.certs, !first)
			for range 3 {
				send(t, tr, request(t, alice(), "GET", "/", nil))
				if got := back.one(t); (got.Proto == "HTTP/2.0") == first {
					t.Errorf("came as %s", got.Proto)
				}
			}
		})
	}
}

// Everything at once, for the race detector: requests, rotation, connections torn down, and Close at the end.
func TestConcurrentUse(t *testing.T) {
	overBoth(t, func(t *testing.T, http2 bool) {
		a := newAPIServer(t, http2, nil)
		var current atomic.Pointer[tls.Certificate]
		current.Store(&a.certs.front)
		tr := a.transport(t, func(o *Options) { o.Certificate = current.Load })
		var wg sync.WaitGroup
		var ok atomic.Int64
		for i := range 8 {
			wg.Go(func() {
				for j := range 60 {
					resp, err := tr.RoundTrip(request(t, alice(), "POST", "/api/v1/pods", []byte("{}")))
					if e := new(Error); err != nil && !errors.As(err, &e) {
						t.Errorf("error is %T", err)
					}
					if err == nil {
						_, _ = io.Copy(io.Discard, resp.Body)
						resp.Body.Close()
						ok.Add(1)
					}
					switch {
					case i == 0 && j%20 == 19:
						c := a.certs.issueFront(t)
						current.Store(&c)
					case i == 1 && j%20 == 19:
						a.CloseClientConnections()
					}
				}
			})
		}
		wg.Wait()
		if ok.Load() == 0 {
			t.Error("no request came through")
		}
		eventually(t, "requests come through after the storm", func() bool {
			_, err := attempt(t, tr, "GET", "/", nil)
			return err == nil
		})
	})
}
