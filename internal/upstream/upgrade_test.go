package upstream

import (
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/duplex"
	"github.com/mvp-mesh/mvp-node/internal/reqctx"
)

// switching is an apiserver that answers an upgrade with a 101 to a token and then sends everything back until the client half-closes.
func switching(token string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		defer conn.Close()
		_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+token+"\r\nX-Stream-Protocol-Version: v4\r\n\r\n"+"at once:")
		_, _ = io.Copy(conn, rw)
	}
}

func upgradeRequest(t *testing.T, token string) *http.Request {
	rc := alice()
	rc.Upgrade, rc.LongRunning = token, true
	return request(t, rc, "POST", "/api/v1/namespaces/n/pods/p/exec?command=id", nil)
}

// CASES S-04, S-06: an upgrade goes over a fresh HTTP/1.1 connection, whatever the pool speaks; what follows the 101 is the client's.
func TestUpgrade(t *testing.T) {
	overBoth(t, func(t *testing.T, http2 bool) {
		a := newAPIServer(t, http2, func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Upgrade") != "" {
				switching("spdy/3.1")(w, r) // the case of a token says nothing
			}
		})
		tr := a.transport(t)
		send(t, tr, request(t, alice(), "GET", "/before", nil))
		before := a.one(t)
		for range 2 {
			req := upgradeRequest(t, reqctx.UpgradeSPDY)
			req.Header.Set("X-Stream-Protocol-Version", "v4.channel.k8s.io")
			resp, err := tr.RoundTrip(req)
			if err != nil {
				t.Fatal(err)
			}
			c, ok := resp.Body.(duplex.Conn)
			if !ok || resp.StatusCode != 101 || resp.Header.Get("X-Stream-Protocol-Version") != "v4" {
				t.Fatalf("answer %d %v with a %T", resp.StatusCode, resp.Header, resp.Body)
			}
			s := a.one(t)
			if s.Proto != "HTTP/1.1" || s.Conn == before.Conn || s.Method != "POST" {
				t.Errorf("%s %s over the connection of another request: %v", s.Method, s.Proto, s.Conn == before.Conn)
			}
			if s.Header.Get("Upgrade") != "SPDY/3.1" || s.Header.Get("Connection") != "Upgrade" || s.Header.Get("X-Remote-User") != "alice" ||
				s.Header.Get("X-Stream-Protocol-Version") != "v4.channel.k8s.io" {
				t.Errorf("headers %v", s.Header)
			}
			before = s
			_, _ = io.WriteString(c, "hello")
			_ = c.CloseWrite()
			got, err := io.ReadAll(c)
			if string(got) != "at once:hello" || err != nil {
				t.Errorf("read %q, %v", got, err)
			}
			if err := c.WaitClosed(); err != nil {
				t.Error(err)
			}
			c.Close()
		}
		eventually(t, "no connection is kept", func() bool { return tr.fresh.size() == 0 })
	})
}

// CASES S-03: only a 101 to what was asked for makes a tunnel; every other answer ends the connection with its body.
func TestUpgradeNotTaken(t *testing.T) {
	a := newAPIServer(t, true, func(w http.ResponseWriter, r *http.Request) {
		switch _, what, _ := strings.Cut(r.URL.RawQuery, "="); what {
		case "other":
			switching("h2c")(w, r)
		case "both":
			switching("SPDY/3.1, websocket")(w, r)
		case "forbidden":
			http.Error(w, "no", http.StatusForbidden)
		case "moved":
			http.Redirect(w, r, "https://attacker.example/", http.StatusFound)
		}
	})
	tr := a.transport(t)
	for _, what := range []string{"other", "both"} {
		req := upgradeRequest(t, reqctx.UpgradeSPDY)
		req.URL.RawQuery, req.RequestURI = "x="+what, req.URL.Path+"?x="+what
		_, err := tr.RoundTrip(req)
		e, ok := errors.AsType[*Error](err)
		if !ok || !e.BadAnswer() || e.NotSent() {
			t.Errorf("101 to %s: %v, want a bad answer", what, err)
		}
	}
	for what, code := range map[string]int{"forbidden": 403, "moved": 302} {
		req := upgradeRequest(t, reqctx.UpgradeWebSocket)
		req.URL.RawQuery, req.RequestURI = "x="+what, req.URL.Path+"?x="+what
		resp, _ := send(t, tr, req)
		if resp.StatusCode != code {
			t.Errorf("%s: status %d", what, resp.StatusCode)
		}
	}
	eventually(t, "no connection is kept", func() bool { return tr.fresh.size() == 0 })
	// An apiserver that is away: nothing was sent.
	a.Server.Close()
	_, err := tr.RoundTrip(upgradeRequest(t, reqctx.UpgradeWebSocket))
	wantNotSent(t, err)
}

// Expect: 100-continue is the apiserver's to answer: a body that it does not want is not asked for.
func TestExpectContinue(t *testing.T) {
	overBoth(t, func(t *testing.T, http2 bool) {
		a := newAPIServer(t, http2, nil)
		refuse := false
		a.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if refuse {
				http.Error(w, "too large", http.StatusRequestEntityTooLarge)
				return
			}
			a.ServeHTTP(w, r)
		})
		tr := a.transport(t)
		for _, refuse = range []bool{false, true} {
			body := &readNoter{Reader: strings.NewReader("payload")}
			req := request(t, alice(), "POST", "/x", []byte("payload"))
			req.Body = io.NopCloser(body)
			req.Header.Set("Expect", "100-continue")
			start := time.Now()
			resp, _ := send(t, tr, req)
			if took := time.Since(start); took > expectWait/2 {
				t.Errorf("refuse %v: took %v", refuse, took)
			}
			if want := map[bool]int{false: 200, true: 413}[refuse]; resp.StatusCode != want || body.read == refuse {
				t.Errorf("refuse %v: status %d, body read: %v", refuse, resp.StatusCode, body.read)
			}
			if !refuse {
				// Go's HTTP/2 server takes the header away when it has acted on it.
				if s := a.one(t); s.Body != "payload" || !http2 && s.Header.Get("Expect") != "100-continue" {
					t.Errorf("apiserver got %q with Expect %q", s.Body, s.Header.Get("Expect"))
				}
			}
		}
	})
}

type readNoter struct {
	io.Reader
	read bool
}

func (r *readNoter) Read(p []byte) (int, error) {
	r.read = true
	return r.Reader.Read(p)
}

// Trailers that the client announces arrive, but for those that could be taken for an identity.
func TestRequestTrailers(t *testing.T) {
	overBoth(t, func(t *testing.T, http2 bool) {
		got := make(chan http.Header, 1)
		a := newAPIServer(t, http2, func(_ http.ResponseWriter, r *http.Request) { got <- r.Trailer.Clone() })
		tr := a.transport(t)
		req := request(t, alice(), "POST", "/x", []byte("payload"))
		req.ContentLength = -1
		req.Trailer = http.Header{"X-Sum": nil, "X-Remote-User": nil}
		req.Body = io.NopCloser(&atEnd{strings.NewReader("payload"), func() {
			req.Trailer["X-Sum"], req.Trailer["X-Remote-User"] = []string{"42"}, []string{"root"}
		}})
		send(t, tr, req)
		if h := <-got; len(h) != 1 || h.Get("X-Sum") != "42" {
			t.Errorf("trailers %v", h)
		}
	})
}

// atEnd calls a function before it gives io.EOF, as net/http's server fills in trailers.
type atEnd struct {
	io.Reader
	f func()
}

func (a *atEnd) Read(p []byte) (int, error) {
	n, err := a.Reader.Read(p)
	if err == io.EOF {
		a.f()
	}
	return n, err
}

// A small body that cannot be read is nobody's failure but the client's, and nothing was sent.
func TestBrokenSmallBody(t *testing.T) {
	a := newAPIServer(t, true, nil)
	tr := a.transport(t)
	req := request(t, alice(), "POST", "/x", []byte("payload"))
	req.Body = io.NopCloser(strings.NewReader("pay"))
	_, err := tr.RoundTrip(req)
	if e, ok := errors.AsType[*Error](err); !ok || !e.BodyBroken() || !e.NotSent() || len(a.take()) != 0 {
		t.Errorf("a body of 3 bytes of 7: %v", err)
	}
}
