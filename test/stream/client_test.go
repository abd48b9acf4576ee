package stream_test

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"testing"
	"time"

	"golang.org/x/net/http2"
)

// way is one path of a request through the mesh, with one protocol of the client.
type way struct {
	m    *mesh
	node string
	h2   bool
}

func (w way) path() string {
	if w.node == "b" {
		return "local"
	}
	return "forwarded"
}

func (w way) proto() string {
	if w.h2 {
		return "HTTP2"
	}
	return "HTTP1"
}

// String is fit for the name of a subtest and for a namespace.
func (w way) String() string { return w.path() + "-" + w.proto() }

// eachPath runs a test on the local and on the forwarded path.
func (m *mesh) eachPath(t *testing.T, f func(t *testing.T, w way)) {
	for _, node := range []string{"b", "a"} {
		w := way{m, node, false}
		t.Run(w.path(), func(t *testing.T) { f(t, w) })
	}
}

// eachWay runs a test on both paths with both protocols.
func (m *mesh) eachWay(t *testing.T, f func(t *testing.T, w way)) {
	for _, node := range []string{"b", "a"} {
		for _, h2 := range []bool{false, true} {
			w := way{m, node, h2}
			t.Run(w.String(), func(t *testing.T) { f(t, w) })
		}
	}
}

func (w way) url(target string) string { return "https://" + w.m.ip(w.node) + ":6443" + target }

func (m *mesh) clientTLS(protos ...string) *tls.Config {
	return &tls.Config{RootCAs: m.roots, Certificates: []tls.Certificate{m.user}, NextProtos: protos, MinVersion: tls.VersionTLS12}
}

// client makes an HTTP client of its own, which follows no redirects and opens no compressed bodies.
func (w way) client(t testing.TB) *http.Client {
	tr := &http.Transport{
		TLSClientConfig: w.m.clientTLS(), DisableCompression: true, ForceAttemptHTTP2: w.h2, MaxIdleConnsPerHost: 100,
		ResponseHeaderTimeout: 20 * time.Second, // a test that hangs tells less than one that fails
	}
	if !w.h2 {
		tr.TLSNextProto = map[string]func(string, *tls.Conn) http.RoundTripper{} // net/http's way of saying never
	}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// request makes a request that ends with the test.
func (w way) request(t testing.TB, method, target string, body io.Reader, header http.Header) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, w.url(target), body)
	if err != nil {
		t.Fatal(err)
	}
	for name, values := range header {
		req.Header[name] = values
	}
	return req
}

// open sends a request and returns the answer with its body still to be read; the test's end closes it.
func (w way) open(t testing.TB, c *http.Client, method, target string, body io.Reader, header http.Header) *http.Response {
	t.Helper()
	resp, err := c.Do(w.request(t, method, target, body, header))
	if err != nil {
		t.Fatalf("%s %s through %s: %v", method, target, w.node, err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	if want := map[bool]int{false: 1, true: 2}[w.h2]; resp.ProtoMajor != want {
		t.Fatalf("the node speaks %s", resp.Proto)
	}
	return resp
}

type answer struct {
	code   int
	header http.Header
	body   []byte
}

// send returns the whole answer.
func (w way) send(t testing.TB, c *http.Client, method, target string, body io.Reader, header http.Header) answer {
	t.Helper()
	resp := w.open(t, c, method, target, body, header)
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("%s %s through %s: %d bytes, then %v", method, target, w.node, len(data), err)
	}
	return answer{resp.StatusCode, resp.Header, data}
}

// pipe is a TLS connection, some of which was read ahead.
type pipe struct {
	*tls.Conn
	r *bufio.Reader
}

// Read implements io.Reader.
func (p *pipe) Read(b []byte) (int, error) { return p.r.Read(b) }

// Reset ends the connection as a kernel does whose process is killed with unread bytes.
func (p *pipe) Reset() {
	tcp := p.NetConn().(*net.TCPConn)
	_ = tcp.SetLinger(0)
	_ = tcp.Close()
}

// dial opens an HTTP/1.1 connection to the node, to be written to by hand.
func (w way) dial(t testing.TB) *pipe {
	t.Helper()
	p, err := w.tryDial()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.NetConn().Close() })
	return p
}

func (w way) tryDial() (*pipe, error) {
	conn, err := tls.DialWithDialer(&net.Dialer{Timeout: 10 * time.Second}, "tcp", w.m.ip(w.node)+":6443", w.m.clientTLS("http/1.1"))
	if err != nil {
		return nil, err
	}
	return &pipe{conn, bufio.NewReader(conn)}, nil
}

const webSocketUpgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"

// ask writes the head of a request by hand and returns the connection with the answer's head; the answer's body, or what comes after a
// 101, is still to be read.
func (w way) ask(t testing.TB, method, target, headers string) (*pipe, *http.Response) {
	t.Helper()
	p := w.dial(t)
	if _, err := fmt.Fprintf(p, "%s %s HTTP/1.1\r\nHost: test\r\n%s\r\n", method, target, headers); err != nil {
		t.Fatal(err)
	}
	return p, p.answer(t, method)
}

// answer reads the head of an answer.
func (p *pipe) answer(t testing.TB, method string) *http.Response {
	t.Helper()
	_ = p.SetReadDeadline(time.Now().Add(20 * time.Second))
	resp, err := http.ReadResponse(p.r, &http.Request{Method: method})
	if err != nil {
		t.Fatalf("answer: %v", err)
	}
	_ = p.SetReadDeadline(time.Time{})
	return resp
}

// upgrade opens an upgraded connection.
func (w way) upgrade(t testing.TB, target string) *pipe {
	t.Helper()
	p, resp := w.ask(t, "GET", target, webSocketUpgrade)
	if resp.StatusCode != http.StatusSwitchingProtocols {
		body, _ := io.ReadAll(resp.Body)
		t.Fatalf("GET %s through %s: %s %s", target, w.node, resp.Status, body)
	}
	return p
}

// accept is the apiserver's side of upgrade.
func accept(t testing.TB, w http.ResponseWriter, r *http.Request) *pipe {
	p := hijack(t, w)
	_, _ = fmt.Fprintf(p, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", r.Header.Get("Upgrade"))
	return p
}

// brokenOff reports whether an error is how a client learns that an answer broke off: of HTTP/1.1 the end without the last chunk, of
// HTTP/2 a reset of the stream.
func (w way) brokenOff(err error) bool {
	if !w.h2 {
		return errors.Is(err, io.ErrUnexpectedEOF)
	}
	var se http2.StreamError
	return errors.As(err, &se)
}

// noise is an endless stream of bytes that both ends can make.
func noise(seed string) *rand.ChaCha8 {
	var s [32]byte
	copy(s[:], seed)
	return rand.NewChaCha8(s)
}

// checked compares what is written to it with noise.
type checked struct {
	want *rand.ChaCha8
	n    int64
	bad  bool
	buf  []byte
}

func newChecked(seed string) *checked { return &checked{want: noise(seed)} }

// Write implements io.Writer.
func (c *checked) Write(p []byte) (int, error) {
	if len(c.buf) < len(p) {
		c.buf = make([]byte, len(p))
	}
	_, _ = c.want.Read(c.buf[:len(p)])
	c.n += int64(len(p))
	if !bytes.Equal(c.buf[:len(p)], p) {
		c.bad = true
		return 0, fmt.Errorf("wrong bytes before byte %d", c.n)
	}
	return len(p), nil
}

// writeNoise writes n bytes of a noise.
func writeNoise(w io.Writer, src *rand.ChaCha8, n int64) error {
	_, err := io.CopyN(w, src, n)
	return err
}

// within runs f on a goroutine of its own and fails the test if that is not over in time.
func within(t testing.TB, limit time.Duration, what string, f func()) time.Duration {
	t.Helper()
	start := time.Now()
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	select {
	case <-done:
	case <-time.After(limit):
		t.Fatalf("%s: not within %v", what, limit)
	}
	return time.Since(start)
}

// arrived waits for a value.
func arrived[T any](t testing.TB, c <-chan T, limit time.Duration, what string) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(limit):
		t.Fatalf("%s: not within %v", what, limit)
		panic("unreachable")
	}
}
