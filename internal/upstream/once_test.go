package upstream

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// rawServer accepts TLS connections and leaves what is on them to a function.
type rawServer struct {
	certs *certs
	l     net.Listener
	wg    sync.WaitGroup

	mu       sync.Mutex
	requests map[string]int // how often each path was seen, whole head read
	conns    []net.Conn
}

func newRawServer(t testing.TB, proto string, serve func(s *rawServer, c *tls.Conn)) *rawServer {
	t.Helper()
	s := &rawServer{certs: newCerts(t), requests: make(map[string]int)}
	l, err := tls.Listen("tcp", "127.0.0.1:0", s.certs.serverTLS(proto))
	if err != nil {
		t.Fatal(err)
	}
	s.l = l
	s.wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			s.mu.Lock()
			s.conns = append(s.conns, c)
			s.mu.Unlock()
			s.wg.Go(func() {
				defer c.Close()
				tc := c.(*tls.Conn)
				if tc.Handshake() == nil {
					serve(s, tc)
				}
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		s.mu.Lock()
		for _, c := range s.conns {
			c.Close()
		}
		s.mu.Unlock()
		s.wg.Wait()
	})
	return s
}

func (s *rawServer) count(path string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.requests[path]++
}

func (s *rawServer) seen(path string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.requests[path]
}

// attempt sends a request of any method and closes what comes back.
func attempt(t testing.TB, tr *Transport, method, path string, body []byte) (int, error) {
	t.Helper()
	req := request(t, alice(), method, path, body)
	req.Header.Set("Idempotency-Key", "permission that must not count")
	resp, err := tr.RoundTrip(req)
	if err != nil {
		return 0, err
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	resp.Body.Close()
	return resp.StatusCode, nil
}

// allMethods with and without body: that a request has none is what lets http.Transport send it again.
var allMethods = []struct {
	method string
	body   []byte
}{
	{"GET", nil}, {"HEAD", nil}, {"OPTIONS", nil}, {"POST", nil}, {"POST", []byte(`{"metadata":{"generateName":"x"}}`)}, {"PUT", []byte("{}")},
	{"PATCH", []byte("{}")}, {"DELETE", nil}, {"DELETE", []byte(`{"kind":"DeleteOptions"}`)},
}

// The apiserver reads a request on a connection that was used before and goes away without an answer (CASES E-02).
func TestOnceHTTP1(t *testing.T) {
	s := newRawServer(t, "http/1.1", func(s *rawServer, c *tls.Conn) {
		br := bufio.NewReader(c)
		for {
			req, err := http.ReadRequest(br)
			if err != nil {
				return
			}
			_, _ = io.Copy(io.Discard, req.Body)
			s.count(req.URL.Path)
			if strings.HasPrefix(req.URL.Path, "/vanish") {
				return
			}
			io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
		}
	})
	tr := newTransport(t, options(t, s.l.Addr().String(), s.certs))
	for i, m := range allMethods {
		path := "/vanish/" + string(rune('a'+i))
		if _, err := attempt(t, tr, "GET", "/ok", nil); err != nil {
			t.Fatal(err)
		}
		_, err := attempt(t, tr, m.method, path, m.body)
		wantSent(t, err)
		if n := s.seen(path); n != 1 {
			t.Errorf("%s with %d bytes was seen %d times", m.method, len(m.body), n)
		}
	}
}

// h2script answers streams of one HTTP/2 connection by their path.
func h2script(act func(fr *http2.Framer, path string, stream uint32) (more bool)) func(*rawServer, *tls.Conn) {
	return func(s *rawServer, c *tls.Conn) {
		br := bufio.NewReader(c)
		preface := make([]byte, len(http2.ClientPreface))
		if _, err := io.ReadFull(br, preface); err != nil {
			return
		}
		fr := http2.NewFramer(c, br)
		fr.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
		_ = fr.WriteSettings()
		paths := make(map[uint32]string)
		for {
			f, err := fr.ReadFrame()
			if err != nil {
				return
			}
			var ended uint32
			switch f := f.(type) {
			case *http2.SettingsFrame:
				if !f.IsAck() {
					_ = fr.WriteSettingsAck()
				}
			case *http2.PingFrame:
				if !f.IsAck() {
					_ = fr.WritePing(true, f.Data)
				}
			case *http2.MetaHeadersFrame:
				paths[f.StreamID] = f.PseudoValue("path")
				s.count(f.PseudoValue("path"))
				if f.StreamEnded() {
					ended = f.StreamID
				}
			case *http2.DataFrame:
				if f.StreamEnded() {
					ended = f.StreamID
				}
			}
			if ended != 0 && !act(fr, paths[ended], ended) {
				return
			}
		}
	}
}

func h2ok(fr *http2.Framer, stream uint32) {
	var b bytes.Buffer
	_ = hpack.NewEncoder(&b).WriteField(hpack.HeaderField{Name: ":status", Value: "200"})
	_ = fr.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: b.Bytes(), EndHeaders: true, EndStream: true})
}

func TestOnceHTTP2(t *testing.T) {
	var mu sync.Mutex
	refused := make(map[string]bool)
	s := newRawServer(t, "h2", h2script(func(fr *http2.Framer, path string, stream uint32) bool {
		kind, _, _ := strings.Cut(strings.TrimPrefix(path, "/"), "/")
		mu.Lock()
		again := refused[path]
		refused[path] = true
		mu.Unlock()
		switch kind {
		case "vanish": // the connection breaks
			return false
		case "protocol", "internal", "cancel": // the stream is reset after who knows what
			code := map[string]http2.ErrCode{"protocol": http2.ErrCodeProtocol, "internal": http2.ErrCodeInternal, "cancel": http2.ErrCodeCancel}[kind]
			_ = fr.WriteRSTStream(stream, code)
		case "enhance": // the connection is ended, and the stream was processed
			_ = fr.WriteGoAway(stream, http2.ErrCodeEnhanceYourCalm, nil)
			return false
		case "refuse", "goaway": // the server says that it did nothing
			switch {
			case again:
				h2ok(fr, stream)
			case kind == "refuse":
				_ = fr.WriteRSTStream(stream, http2.ErrCodeRefusedStream)
			default:
				_ = fr.WriteGoAway(stream-2, http2.ErrCodeNo, nil)
				return false
			}
		default:
			h2ok(fr, stream)
		}
		return true
	}))
	o := options(t, s.l.Addr().String(), s.certs)
	o.Connections = 1
	tr := newTransport(t, o)
	for _, kind := range []string{"vanish", "protocol", "internal", "cancel", "enhance"} {
		for i, m := range allMethods {
			path := "/" + kind + "/" + string(rune('a'+i))
			if _, err := attempt(t, tr, "GET", "/ok", nil); err != nil {
				t.Fatal(err)
			}
			_, err := attempt(t, tr, m.method, path, m.body)
			wantSent(t, err)
			if n := s.seen(path); n != 1 {
				t.Errorf("%s: %s with %d bytes was seen %d times", kind, m.method, len(m.body), n)
			}
		}
	}
	// Certainly unprocessed: what has no body, or a small one, moves to another connection with all of it; what has a large one that was
	// begun is the caller's to send again.
	for _, kind := range []string{"refuse", "goaway"} {
		for i, m := range allMethods {
			path := "/" + kind + "/" + string(rune('a'+i))
			if _, err := attempt(t, tr, "GET", "/ok", nil); err != nil {
				t.Fatal(err)
			}
			status, err := attempt(t, tr, m.method, path, m.body)
			if status != http.StatusOK {
				t.Errorf("%s: %s with %d bytes got %d, %v", kind, m.method, len(m.body), status, err)
			}
			if n := s.seen(path); n != 2 {
				t.Errorf("%s: %s with %d bytes was seen %d times", kind, m.method, len(m.body), n)
			}
		}
		_, err := attempt(t, tr, "POST", "/"+kind+"/large", make([]byte, maxSmallBody+1))
		wantNotSent(t, err)
	}
}

// An apiserver that refuses everything does not keep a request for ever.
func TestMovesAreBounded(t *testing.T) {
	s := newRawServer(t, "h2", h2script(func(fr *http2.Framer, _ string, stream uint32) bool {
		_ = fr.WriteRSTStream(stream, http2.ErrCodeRefusedStream)
		return true
	}))
	tr := newTransport(t, options(t, s.l.Addr().String(), s.certs))
	_, err := attempt(t, tr, "GET", "/x", nil)
	wantNotSent(t, err)
	if n := s.seen("/x"); n != maxMoves+1 {
		t.Errorf("seen %d times, want %d", n, maxMoves+1)
	}
}

// The texts by which unprocessed knows net/http's errors are those of the Go that this is built with. TestOnceHTTP2 sees the
// GOAWAY one on a real connection; the other two need a connection that ends between its choice and its use.
func TestUnprocessedTexts(t *testing.T) {
	s := newRawServer(t, "h2", h2script(func(fr *http2.Framer, _ string, stream uint32) bool { h2ok(fr, stream); return true }))
	tr := newTransport(t, options(t, s.l.Addr().String(), s.certs))
	used := func(c *conn) {
		req := request(t, alice(), "GET", "/", nil)
		out, err := tr.outgoing(req, alice())
		if err != nil {
			t.Fatal(err)
		}
		resp, err := c.cc.RoundTrip(out)
		if err == nil {
			resp.Body.Close()
			return
		}
		if !unprocessed(err) {
			t.Errorf("%q is not known as unprocessed", err)
		}
	}
	for _, name := range []string{"fresh", "used"} {
		c, err := tr.pool.acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if name == "used" {
			used(c)
		}
		c.cc.Close()
		used(c)
	}
	for _, text := range []string{textUnusable, textNotEstablished, textGoAway} {
		if !unprocessed(errors.New(text)) {
			t.Errorf("%q is not known as unprocessed", text)
		}
	}
	if unprocessed(io.ErrUnexpectedEOF) || unprocessed(errors.New("http2: client connection lost")) {
		t.Error("a lost connection counts as unprocessed")
	}
}
