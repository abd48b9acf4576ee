package stream_test

import (
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/gorilla/websocket"
)

// noTunnels waits until no upgraded connection is counted anywhere any more.
func (m *mesh) noTunnels(t *testing.T) {
	t.Helper()
	err := poll(3*time.Second, func() error {
		for name := range m.nodes {
			if n := m.metric(name, "mvp_front_upgraded_connections", nil); n != 0 {
				return fmt.Errorf("%v upgraded connections at %s", n, name)
			}
			if n := m.metric(name, "mvp_forward_inflight", nil); n != 0 {
				return fmt.Errorf("%v forwards under way at %s", n, name)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// TestS04FreshConnection: CASES S-04. An upgrade goes over a connection of its own that speaks nothing but HTTP/1.1, and that carries no other
// request, whether it was accepted or refused.
func TestS04FreshConnection(t *testing.T) {
	t.Parallel()
	m := newMesh(t, setup{})
	api := m.servers["b"]
	api.on("s04", func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Header.Get("Upgrade") == "":
		case strings.Contains(r.RequestURI, "refuse"):
			w.WriteHeader(http.StatusForbidden)
		default:
			accept(t, w, r).Close()
		}
	})
	m.eachPath(t, func(t *testing.T, w way) {
		c := way{m, w.node, true}.client(t)
		ns := "/api/v1/namespaces/s04-" + w.path()
		for range 5 {
			for _, target := range []string{ns + "/pods?plain", ns + "/pods?watch=true&plain"} {
				if a := (way{m, w.node, true}).send(t, c, "GET", target, nil, nil); a.code != 200 {
					t.Fatal(a.code)
				}
			}
			p, resp := w.ask(t, "GET", ns+"/pods/p/exec?refuse", webSocketUpgrade)
			if resp.StatusCode != 403 {
				t.Fatal(resp.Status)
			}
			p.ends(t, "the client's connection")
			w.upgrade(t, ns+"/pods/p/exec").ends(t, "the client's connection")
		}
		plain, upgrades := map[int64]int{}, map[int64]int{}
		h2 := false
		for _, r := range api.seen("s04-" + w.path()) {
			if strings.Contains(r.target, "exec") {
				upgrades[r.conn]++
				if r.alpn != "http/1.1" || !strings.EqualFold(r.header.Get("Connection"), "upgrade") || r.header.Get("Upgrade") != "websocket" {
					t.Errorf("%s came by ALPN %q with %v", r.target, r.alpn, r.header)
				}
				continue
			}
			plain[r.conn]++
			h2 = h2 || r.alpn == "h2"
		}
		for conn, n := range upgrades {
			if n != 1 || plain[conn] > 0 {
				t.Errorf("connection %d carried %d upgrades and %d other requests", conn, n, plain[conn])
			}
		}
		if len(upgrades) != 10 || !h2 {
			t.Errorf("%d upgrades arrived; HTTP/2 beside them: %v", len(upgrades), h2)
		}
		t.Logf("%d upgrades on as many connections, %d connections for the rest", len(upgrades), len(plain))
	})
	m.noTunnels(t)
}

// slow reads at a given rate, as a terminal or a thin line does.
type slow struct {
	r    io.Reader
	rate int64 // bytes per second
	n    int64
	from time.Time
}

// Read implements io.Reader.
func (s *slow) Read(p []byte) (int, error) {
	if s.from.IsZero() {
		s.from = time.Now()
	}
	time.Sleep(time.Until(s.from.Add(time.Duration(s.n) * time.Second / time.Duration(s.rate)))) // the rate
	n, err := s.r.Read(p)
	s.n += int64(n)
	return n, err
}

// TestS05LastBytes: CASES S-05. The writer of much data ends at once, the reader is slow, and everything arrives, again and again.
func TestS05LastBytes(t *testing.T) {
	size, runs := scaled[int64](64<<20, 1<<30), scaled(2, 20)
	rate := int64(scaled(32<<20, 50<<20)) // long: 20 runs of 1 GiB side by side; the machine itself is the slow reader
	m := newMesh(t, setup{direct: true})
	sum := sha256.New()
	_ = writeNoise(sum, noise("s05"), size)
	want := fmt.Sprintf("%x", sum.Sum(nil))
	sums := make(chan string, 100)
	hash := func(r io.Reader, what string) {
		sum := sha256.New()
		n, err := io.CopyBuffer(sum, &slow{r: r, rate: rate}, make([]byte, 256<<10))
		sums <- fmt.Sprintf("%s: %d bytes, %x, %v", what, n, sum.Sum(nil), err)
	}
	m.servers["b"].on("s05", func(w http.ResponseWriter, r *http.Request) {
		p := accept(t, w, r)
		defer p.Close()
		if strings.Contains(r.RequestURI, "upload") {
			hash(p, "upload")
			return
		}
		_ = writeNoise(p, noise("s05"), size)
	})
	m.eachPath(t, func(t *testing.T, w way) {
		m.converge()
		var downloads, uploads []*pipe
		for range runs {
			downloads = append(downloads, w.upgrade(t, "/api/v1/namespaces/s05/pods/p/exec?download"))
			uploads = append(uploads, w.upgrade(t, "/api/v1/namespaces/s05/pods/p/exec?upload"))
		}
		start := time.Now()
		var all sync.WaitGroup
		for _, p := range downloads {
			all.Go(func() {
				hash(p, "download")
				p.Close()
			})
		}
		for _, p := range uploads {
			all.Go(func() {
				_ = writeNoise(p, noise("s05"), size)
				p.Close()
			})
		}
		all.Wait()
		for range 2 * runs {
			got := arrived(t, sums, 60*time.Second, "a sum")
			what, _, _ := strings.Cut(got, ":")
			if got != fmt.Sprintf("%s: %d bytes, %s, <nil>", what, size, want) {
				t.Errorf("%s, want %s", got, want)
			}
		}
		t.Logf("%d times %d MiB each way: all arrived, after %v", runs, size>>20, time.Since(start).Round(time.Millisecond))
		m.noTunnels(t)
	})
}

// TestS06Opaque: CASES S-06. After the 101 bytes in are bytes out, both ways at once, in pieces of any size; the first may come with the head.
func TestS06Opaque(t *testing.T) {
	t.Parallel()
	const size = 8 << 20
	m := newMesh(t, setup{})
	verdicts := make(chan string, 2)
	both := func(p *pipe, me, other string) {
		var done sync.WaitGroup
		done.Go(func() {
			src, rnd := noise(me), rand.New(noise(me+" sizes"))
			for left := int64(size); left > 0; {
				n := min(left, 1+rnd.Int64N(1<<rnd.IntN(17)))
				if err := writeNoise(p, src, n); err != nil {
					verdicts <- fmt.Sprintf("%s writes: %v", me, err)
					return
				}
				left -= n
			}
			_ = p.CloseWrite()
		})
		got := newChecked(other)
		_, err := io.Copy(got, p)
		done.Wait()
		verdicts <- fmt.Sprintf("%s got %d bytes, %v", me, got.n, err)
	}
	m.servers["b"].on("s06", func(w http.ResponseWriter, r *http.Request) {
		p := hijack(t, w)
		defer p.Close()
		// The first bytes come in one packet with the head.
		fmt.Fprintf(p, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\nX-Stream-Protocol-Version: v4.channel.k8s.io\r\nX-Odd: a\r\nX-Odd: b\r\n\r\nearly", r.Header.Get("Upgrade"))
		both(p, "apiserver", "client")
	})
	m.eachPath(t, func(t *testing.T, w way) {
		for _, upgrade := range []string{spdyUpgrade + "X-Stream-Protocol-Version: v3.channel.k8s.io\r\n", webSocketUpgrade} {
			p, resp := w.ask(t, "POST", "/api/v1/namespaces/s06/pods/p/exec?"+w.path(), upgrade)
			wantHeader := http.Header{
				"Connection": {"Upgrade"}, "Upgrade": resp.Header["Upgrade"], "X-Stream-Protocol-Version": {"v4.channel.k8s.io"}, "X-Odd": {"a", "b"},
			}
			if d := cmp.Diff(wantHeader, resp.Header); resp.StatusCode != 101 || d != "" {
				t.Errorf("%s (-want +got):\n%s", resp.Status, d)
			}
			early := make([]byte, 5)
			if _, err := io.ReadFull(p, early); err != nil || string(early) != "early" {
				t.Fatalf("%q, %v", early, err)
			}
			go both(p, "client", "apiserver")
			for range 2 {
				got := arrived(t, verdicts, 20*time.Second, "the end of a direction")
				who, _, _ := strings.Cut(got, " ")
				if got != fmt.Sprintf("%s got %d bytes, <nil>", who, size) {
					t.Error(got)
				}
			}
			p.Close()
		}
		arrivals := m.servers["b"].seen("s06/pods/p/exec?" + w.path())
		if got := arrivals[0].header["X-Stream-Protocol-Version"]; arrivals[0].method != "POST" || !cmp.Equal(got, []string{"v4.channel.k8s.io", "v3.channel.k8s.io"}) {
			t.Errorf("%s with X-Stream-Protocol-Version %q", arrivals[0].method, got)
		}
	})
	m.noTunnels(t)
}

// TestS06WebSocket: CASES S-06, by a client and a server that know the protocol: subprotocols, messages, the exit status, the close frame.
func TestS06WebSocket(t *testing.T) {
	t.Parallel()
	m := newMesh(t, setup{})
	const exit = `{"metadata":{},"status":"Failure","reason":"NonZeroExitCode","details":{"causes":[{"reason":"ExitCode","message":"7"}]}}`
	upgrader := websocket.Upgrader{Subprotocols: []string{"v5.channel.k8s.io"}}
	closed := make(chan error, 1)
	m.servers["b"].on("s06", func(w http.ResponseWriter, r *http.Request) {
		c, err := upgrader.Upgrade(w, r, nil)
		if err != nil {
			t.Errorf("the apiserver: %v", err)
			return
		}
		defer c.Close()
		kind, data, err := c.ReadMessage()
		if err != nil || kind != websocket.BinaryMessage {
			t.Errorf("the apiserver reads %d, %v", kind, err)
		}
		_ = c.WriteMessage(websocket.BinaryMessage, append([]byte{1}, data...))
		_ = c.WriteMessage(websocket.BinaryMessage, append([]byte{3}, exit...))
		_ = c.WriteControl(websocket.CloseMessage, websocket.FormatCloseMessage(4007, "exit 7"), time.Now().Add(time.Second))
		_, _, err = c.ReadMessage()
		closed <- err
	})
	token := "base64url.bearer.authorization.k8s.io." + base64.RawURLEncoding.EncodeToString([]byte("secret-token"))
	m.eachPath(t, func(t *testing.T, w way) {
		for _, subprotocols := range [][]string{{"v5.channel.k8s.io", "v4.channel.k8s.io"}, {token, "v5.channel.k8s.io"}, {"v5.channel.k8s.io", token, "x"}} {
			d := websocket.Dialer{TLSClientConfig: m.clientTLS("http/1.1"), Subprotocols: subprotocols, HandshakeTimeout: 10 * time.Second}
			target := "/api/v1/namespaces/s06/pods/p/exec?" + w.path()
			c, resp, err := d.DialContext(t.Context(), "wss"+strings.TrimPrefix(w.url(target), "https"), nil)
			if err != nil {
				t.Fatalf("%v, %+v", err, resp)
			}
			if c.Subprotocol() != "v5.channel.k8s.io" {
				t.Errorf("subprotocol %q", c.Subprotocol())
			}
			_ = c.WriteMessage(websocket.BinaryMessage, []byte("hello"))
			_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
			for _, want := range []string{"\x01hello", "\x03" + exit} {
				if _, data, err := c.ReadMessage(); err != nil || string(data) != want {
					t.Errorf("%q, %v, want %q", data, err, want)
				}
			}
			_, _, err = c.ReadMessage() // answers the close frame in kind
			var ce *websocket.CloseError
			if !errors.As(err, &ce) || ce.Code != 4007 || ce.Text != "exit 7" {
				t.Errorf("the client sees the end as %v", err)
			}
			if err := arrived(t, closed, 5*time.Second, "the close frame"); !errors.As(err, &ce) || ce.Code != 4007 {
				t.Errorf("the apiserver sees the end as %v", err)
			}
			c.Close()
			arrivals := m.servers["b"].seen(target)
			var want []string
			for _, s := range subprotocols {
				if s != token {
					want = append(want, s)
				}
			}
			got := arrivals[len(arrivals)-1].header
			if h := strings.Join(got["Sec-Websocket-Protocol"], ", "); h != strings.Join(want, ", ") {
				t.Errorf("subprotocols %q arrived as %q", subprotocols, h)
			}
			if text := fmt.Sprint(got); strings.Contains(text, "bearer") || strings.Contains(text, "Authorization:") {
				t.Errorf("a credential reached the apiserver: %v", got)
			}
		}
	})
	m.noTunnels(t)
}
