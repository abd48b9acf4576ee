package forward_test

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/mvp-mesh/mvp-node/internal/reqctx"
	"github.com/mvp-mesh/mvp-node/internal/route"
)

// A small GET is one message each way, and everything about it arrives.
func TestSmallGetIsOneMessageEachWay(t *testing.T) {
	w := newWorld(t)
	var got *reqctx.Request
	var seen *http.Request
	b := w.serve("b", roundTripper(func(r *http.Request) (*http.Response, error) {
		got, _ = reqctx.From(r.Context())
		seen = r
		resp := answer(r, 200, `{"kind":"Widget"}`)
		resp.ContentLength = -1 // kube-apiserver rarely says
		resp.Header = http.Header{"Content-Type": {"application/json"}, "Audit-Id": {"x"}, "Connection": {"X-Gone"}, "X-Gone": {"1"}}
		return resp, nil
	}))
	c := w.client("a")
	req := newRequest(t, "GET", getPath+"?x=%7C|%2f", nil)
	req.Header.Set("Accept", "application/json")
	req.Header["User-Agent"] = []string{"k\xe4se"} // Latin-1
	req.Host = "api.example.com:6443"
	resp, served, err := c.RoundTrip(req, []*route.Member{b.member})
	if err != nil {
		t.Fatal(err)
	}
	if body := readAll(t, resp); body != `{"kind":"Widget"}` || resp.StatusCode != 200 {
		t.Errorf("answer %d %q", resp.StatusCode, body)
	}
	if d := cmp.Diff(http.Header{"Content-Type": {"application/json"}, "Audit-Id": {"x"}}, resp.Header); d != "" {
		t.Errorf("answer headers (-want +got):\n%s", d)
	}
	if served.Node != "b" || served.Attempts != 1 || served.ServerVersion != "v1.36.0" {
		t.Errorf("served %+v", served)
	}
	first := struct {
		got  *reqctx.Request
		seen *http.Request
	}{got, seen}
	c.wantOneMessageEachWay(t, func() {
		resp, _, err := c.RoundTrip(newRequest(t, "GET", getPath, nil), []*route.Member{b.member})
		if err != nil {
			t.Fatal(err)
		}
		readAll(t, resp)
	})
	for _, h := range c.wire.received[0].GetHead().GetHeaders() {
		if h.GetName() == "Connection" || h.GetName() == "X-Gone" {
			t.Errorf("hop-by-hop header %s on the wire", h.GetName())
		}
	}
	got, seen = first.got, first.seen
	want := *mustRequest(t, req)
	want.ClientAddrs = []string{"192.0.2.1", "127.0.0.1"}
	want.IngressNode, want.Hop = "a", 1
	if d := cmp.Diff(&want, got); d != "" {
		t.Errorf("context at the apiserver (-want +got):\n%s", d)
	}
	if seen.RequestURI != getPath+"?x=%7C|%2f" || seen.Host != "api.example.com:6443" || seen.Method != "GET" {
		t.Errorf("request %s %s host %s", seen.Method, seen.RequestURI, seen.Host)
	}
	if d := cmp.Diff(http.Header{"Accept": {"application/json"}, "User-Agent": {"k\xe4se"}}, seen.Header); d != "" {
		t.Errorf("headers at the apiserver (-want +got):\n%s", d)
	}
}

func mustRequest(t testing.TB, r *http.Request) *reqctx.Request {
	t.Helper()
	rc, ok := reqctx.From(r.Context())
	if !ok {
		t.Fatal("no reqctx.Request")
	}
	return rc
}

// A small POST carries its body in the head and is answered in one message.
func TestSmallPost(t *testing.T) {
	w := newWorld(t)
	b := w.serve("b", roundTripper(func(r *http.Request) (*http.Response, error) {
		body, err := io.ReadAll(r.Body)
		if err != nil || r.ContentLength != int64(len(body)) {
			t.Errorf("body %q, length %d, err %v", body, r.ContentLength, err)
		}
		return answer(r, 201, string(body)), nil
	}))
	c := w.client("a")
	resp, _, err := c.RoundTrip(newRequest(t, "POST", listPath, strings.NewReader("hello")), []*route.Member{b.member})
	if err != nil {
		t.Fatal(err)
	}
	if body := readAll(t, resp); body != "hello" || resp.StatusCode != 201 {
		t.Errorf("answer %d %q", resp.StatusCode, body)
	}
	c.wantOneMessageEachWay(t, func() {
		resp, _, err := c.RoundTrip(newRequest(t, "POST", listPath, strings.NewReader("hello")), []*route.Member{b.member})
		if err != nil {
			t.Fatal(err)
		}
		readAll(t, resp)
	})
}

// CASES F-07: bodies of any size pass in both directions, in frames of at most 32 KiB.
func TestLargeBodies(t *testing.T) {
	size := int64(64 << 20)
	w := newWorld(t)
	b := w.serve("b", upstreamTo(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		h := sha256.New()
		n, err := io.Copy(h, r.Body)
		if err != nil || n != size {
			t.Errorf("upload: %d bytes, %v", n, err)
		}
		rw.Header().Set("X-Sum", hex.EncodeToString(h.Sum(nil)))
		_, _ = io.Copy(rw, pattern(2, size))
	})))
	c := w.client("a")
	c.wire.off = true
	for _, known := range []bool{true, false} {
		if !known {
			size = 4 << 20 // the other way to say the same
		}
		req := newRequest(t, "POST", listPath, pattern(1, size))
		if req.ContentLength = -1; known {
			req.ContentLength = size
		}
		resp, _, err := c.RoundTrip(req, []*route.Member{b.member})
		if err != nil {
			t.Fatal(err)
		}
		if want := hex.EncodeToString(sumOf(pattern(1, size))); resp.Header.Get("X-Sum") != want {
			t.Errorf("upload sum %s, want %s", resp.Header.Get("X-Sum"), want)
		}
		if got, want := hex.EncodeToString(sumOf(resp.Body)), hex.EncodeToString(sumOf(pattern(2, size))); got != want {
			t.Errorf("download sum %s, want %s", got, want)
		}
		resp.Body.Close()
	}
}

func TestFramesAreBounded(t *testing.T) {
	const size = 1 << 20
	w := newWorld(t)
	b := w.serve("b", upstreamTo(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(rw).EnableFullDuplex()
		_, _ = io.Copy(rw, r.Body)
	})))
	c := w.client("a")
	resp, _, err := c.RoundTrip(newRequest(t, "POST", listPath, pattern(3, size)), []*route.Member{b.member})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := sumOf(resp.Body), sumOf(pattern(3, size)); string(got) != string(want) {
		t.Error("body changed")
	}
	resp.Body.Close()
	for _, m := range c.wire.sent {
		if n := len(m.GetChunk().GetData()); n > 32<<10 {
			t.Errorf("request chunk of %d bytes", n)
		}
	}
	for _, m := range c.wire.received {
		if n := max(len(m.GetChunk().GetData()), len(m.GetHead().GetBody())); n > 32<<10 {
			t.Errorf("answer chunk of %d bytes", n)
		}
	}
}

// pattern is a stream of bytes that depend on seed and position, cheap to make twice: one random block again and again, each
// time with its number in front.
func pattern(seed uint64, size int64) io.Reader {
	p := &patternReader{block: make([]byte, 64<<10)}
	_, _ = rand.NewChaCha8([32]byte{byte(seed)}).Read(p.block)
	return io.LimitReader(p, size)
}

type patternReader struct {
	block []byte
	at, n int
}

func (p *patternReader) Read(b []byte) (int, error) {
	if p.at == 0 {
		binary.BigEndian.PutUint64(p.block, uint64(p.n))
		p.n++
	}
	n := copy(b, p.block[p.at:])
	p.at = (p.at + n) % len(p.block)
	return n, nil
}

func sumOf(r io.Reader) []byte {
	h := sha256.New()
	_, _ = io.Copy(h, r)
	return h.Sum(nil)
}

// CASES S-01, S-02: the head of a quiet watch, and each small event, arrive at once.
func TestWatchIsLive(t *testing.T) {
	w := newWorld(t)
	events := make(chan string)
	b := w.serve("b", upstreamTo(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Content-Type", "application/json;stream=watch")
		rc := http.NewResponseController(rw)
		rc.Flush()
		for e := range events {
			_, _ = io.WriteString(rw, e)
			rc.Flush()
		}
	})))
	c := w.client("a")
	var resp *http.Response
	within(t, time.Second, "the head", func() {
		var err error
		resp, _, err = c.RoundTrip(newRequest(t, "GET", watchPath, nil), []*route.Member{b.member})
		if err != nil {
			t.Error(err)
		}
	})
	if len(c.wire.received) != 1 || c.wire.received[0].GetHead() == nil {
		t.Fatalf("received %v, want the head alone", c.wire.received)
	}
	event := strings.Repeat("e", 199) + "\n"
	for range 3 {
		within(t, 100*time.Millisecond, "an event", func() {
			events <- event
			buf := make([]byte, 1024)
			n, err := resp.Body.Read(buf)
			if err != nil || string(buf[:n]) != event {
				t.Errorf("read %d bytes, %v", n, err)
			}
		})
	}
	close(events)
	if n, err := resp.Body.Read(make([]byte, 10)); n != 0 || err != io.EOF {
		t.Errorf("after the end: %d bytes, %v", n, err)
	}
	resp.Body.Close()
}

// An answer that is not long-running and comes in pieces is not held back either: its head waits some milliseconds and no longer.
func TestSlowAnswerIsNotHeldBack(t *testing.T) {
	w := newWorld(t)
	proceed := make(chan struct{})
	b := w.serve("b", upstreamTo(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(rw, "first")
		_ = http.NewResponseController(rw).Flush()
		<-proceed
		_, _ = io.WriteString(rw, "second")
	})))
	c := w.client("a")
	resp, _, err := c.RoundTrip(newRequest(t, "GET", listPath, nil), []*route.Member{b.member})
	if err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 100)
	n, err := io.ReadFull(resp.Body, buf[:5])
	if err != nil || string(buf[:n]) != "first" {
		t.Errorf("%q %v", buf[:n], err)
	}
	close(proceed)
	if rest := readAll(t, resp); rest != "second" {
		t.Errorf("rest %q", rest)
	}
}

// A body that breaks off is never taken for complete, whatever was announced and whenever it happens (S3).
func TestCutOffAnswer(t *testing.T) {
	w := newWorld(t)
	for _, tc := range []struct {
		name, target string
		handler      http.HandlerFunc
		got          string
	}{
		{"watch", watchPath, func(rw http.ResponseWriter, r *http.Request) {
			_, _ = io.WriteString(rw, "event\n")
			_ = http.NewResponseController(rw).Flush()
			panic(http.ErrAbortHandler)
		}, "event\n"},
		{"list of unknown length", listPath, func(rw http.ResponseWriter, r *http.Request) {
			_, _ = io.CopyN(rw, pattern(1, 1<<20), 1<<20)
			_ = http.NewResponseController(rw).Flush()
			panic(http.ErrAbortHandler)
		}, ""},
		{"list of known length", listPath, func(rw http.ResponseWriter, r *http.Request) {
			rw.Header().Set("Content-Length", "2000000")
			_, _ = io.CopyN(rw, pattern(1, 1<<20), 1<<20)
			_ = http.NewResponseController(rw).Flush()
			panic(http.ErrAbortHandler)
		}, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b := w.serve("b", upstreamTo(t, tc.handler))
			c := w.client("a")
			resp, _, err := c.RoundTrip(newRequest(t, "GET", tc.target, nil), []*route.Member{b.member})
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			if err == nil {
				t.Fatalf("a cut-off body of %d bytes looked complete", len(body))
			}
			if tc.got != "" && string(body) != tc.got {
				t.Errorf("body %q before the cut, want %q", body, tc.got)
			}
			wantError(t, err, route.LocalUnavailable, true)
			if _, again := resp.Body.Read(make([]byte, 1)); again != err {
				t.Errorf("second read: %v, want %v again", again, err)
			}
		})
	}
}

// Trailers of the apiserver arrive, after the body.
func TestTrailers(t *testing.T) {
	w := newWorld(t)
	b := w.serve("b", upstreamTo(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Trailer", "X-Sum")
		_, _ = io.WriteString(rw, "body")
		rw.Header().Set("X-Sum", "7")
	})))
	c := w.client("a")
	resp, _, err := c.RoundTrip(newRequest(t, "GET", listPath, nil), []*route.Member{b.member})
	if err != nil {
		t.Fatal(err)
	}
	if body := readAll(t, resp); body != "body" {
		t.Errorf("body %q", body)
	}
	if d := cmp.Diff(http.Header{"X-Sum": {"7"}}, resp.Trailer); d != "" {
		t.Errorf("trailers (-want +got):\n%s", d)
	}
}

// An apiserver may answer before it has read the whole body; the upload then ends and nothing hangs.
func TestEarlyAnswer(t *testing.T) {
	w := newWorld(t)
	b := w.serve("b", upstreamTo(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		http.Error(rw, "too large", http.StatusRequestEntityTooLarge)
	})))
	c := w.client("a")
	c.wire.off = true
	pr, pw := io.Pipe()
	defer pw.Close()
	go func() { _, _ = pw.Write(make([]byte, 100<<10)) }() // and then nothing, without an end
	req := newRequest(t, "POST", listPath, pr)
	req.ContentLength = 10 << 20
	var resp *http.Response
	within(t, 2*time.Second, "the early answer", func() {
		var err error
		if resp, _, err = c.RoundTrip(req, []*route.Member{b.member}); err != nil {
			t.Error(err)
		}
	})
	if resp == nil {
		t.FailNow()
	}
	if body := readAll(t, resp); resp.StatusCode != 413 || body != "too large\n" {
		t.Errorf("answer %d %q", resp.StatusCode, body)
	}
}
