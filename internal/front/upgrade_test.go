package front

import (
	"bufio"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/catalog"
	"github.com/mvp-mesh/mvp-node/internal/reqctx"
	"github.com/mvp-mesh/mvp-node/internal/route"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

// Only what is known is passed on, alone, over HTTP/1.1, and if Connection says so as well.
func TestUpgradeOf(t *testing.T) {
	for _, tc := range []struct {
		proto               string
		connection, upgrade []string
		want                string
	}{
		{"HTTP/1.1", []string{"Upgrade"}, []string{"websocket"}, "websocket"},
		{"HTTP/1.1", []string{"keep-alive, UPGRADE"}, []string{" WebSocket "}, "websocket"},
		{"HTTP/1.1", []string{"keep-alive", "upgrade"}, []string{"spdy/3.1"}, "SPDY/3.1"},
		{"HTTP/1.1", nil, []string{"websocket"}, ""},
		{"HTTP/1.1", []string{"upgraded"}, []string{"websocket"}, ""},
		{"HTTP/1.1", []string{"Upgrade"}, nil, ""},
		{"HTTP/1.1", []string{"Upgrade, HTTP2-Settings"}, []string{"h2c"}, ""},
		{"HTTP/1.1", []string{"Upgrade"}, []string{"websocket, h2c"}, ""},
		{"HTTP/1.1", []string{"Upgrade"}, []string{"websocket", "h2c"}, ""},
		{"HTTP/1.1", []string{"Upgrade"}, []string{"SPDY/3.0"}, ""},
		{"HTTP/1.1", []string{"Upgrade"}, []string{"websocket/13"}, ""},
		{"HTTP/1.0", []string{"Upgrade"}, []string{"websocket"}, ""},
		{"HTTP/2.0", []string{"Upgrade"}, []string{"websocket"}, ""},
	} {
		r := &http.Request{Header: http.Header{}}
		r.ProtoMajor, r.ProtoMinor, _ = http.ParseHTTPVersion(tc.proto)
		if tc.proto == "HTTP/2.0" {
			r.ProtoMajor, r.ProtoMinor = 2, 0
		}
		if tc.connection != nil {
			r.Header["Connection"] = tc.connection
		}
		if tc.upgrade != nil {
			r.Header["Upgrade"] = tc.upgrade
		}
		if got := upgradeOf(r); got != tc.want {
			t.Errorf("%s, Connection %q, Upgrade %q: %q, want %q", tc.proto, tc.connection, tc.upgrade, got, tc.want)
		}
	}
}

// CASES F-04: a redirect that names a host does not reach the client of another node's apiserver; a path does, and so does whatever
// the backend of a proxy subresource answers.
func TestLeadsAway(t *testing.T) {
	pods := &reqctx.Request{Attributes: route.Attributes{Resource: true, Key: catalog.Key{Version: "v1", Resource: "pods"}}}
	proxy := &reqctx.Request{Attributes: route.Attributes{Resource: true, Key: catalog.Key{Version: "v1", Resource: "pods", Subresource: "proxy"}}}
	for _, tc := range []struct {
		rc       *reqctx.Request
		code     int
		location string
		want     bool
	}{
		{pods, 301, "/api/v1/pods/", false},
		{pods, 302, "pods?x=http://a/", false},
		{pods, 307, "https://attacker.example/", true},
		{pods, 308, "//attacker.example/", true},
		{pods, 303, "javascript:alert(1)", true},
		{pods, 302, "\\\\attacker.example/", true},
		{pods, 302, "/\\attacker.example/", true},
		{pods, 302, "http://[::1", true}, // nobody knows what a client makes of it
		{pods, 304, "https://attacker.example/", false},
		{pods, 201, "https://attacker.example/", false},
		{pods, 302, "", false},
		{proxy, 302, "https://attacker.example/", false},
	} {
		h := http.Header{}
		if tc.location != "" {
			h.Set("Location", tc.location)
		}
		if got := leadsAway(tc.rc, &http.Response{StatusCode: tc.code, Header: h}); got != tc.want {
			t.Errorf("%d to %q: %v, want %v", tc.code, tc.location, got, tc.want)
		}
	}
}

func TestRedirectOfAPeerIsRefused(t *testing.T) {
	bothProtocols(t, func(t *testing.T, w *world) {
		w.client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
		away := func(*http.Request) *http.Response {
			resp := answered(302, "")
			resp.Header.Set("Location", "https://attacker.example/")
			return resp
		}
		w.forward = func(r *http.Request) (*http.Response, Served, error) { return away(r), Served{Node: "b"}, nil }
		w.local = func(r *http.Request) (*http.Response, error) { return away(r), nil }
		resp, s := w.status("GET", widgetsPath, nil)
		if resp.StatusCode != 502 || s.Details.Causes[0].Type != "BadAnswer" || resp.Header.Get("Location") != "" || resp.Header.Get("Retry-After") != "" {
			t.Errorf("redirect of a peer: %d %+v %v", resp.StatusCode, s, resp.Header)
		}
		if resp, _ := w.do("GET", podsPath, nil); resp.StatusCode != 302 {
			t.Errorf("redirect of the local apiserver: %d, want it as it is", resp.StatusCode)
		}
	})
}

// White space in a target, which only HTTP/2 can carry, is the client's fault and says so.
func TestTargetThatCannotBeSent(t *testing.T) {
	w := newWorld(t, true)
	for _, target := range []string{"/api/v1/pods?x=a b", "/api/v1/pods/a b"} {
		r := httptest.NewRequest("GET", "/", nil)
		r.URL, r.RequestURI = &url.URL{Path: "/api/v1/pods"}, target
		rec := httptest.NewRecorder()
		w.server.Config.Handler.ServeHTTP(rec, r)
		if rec.Code != 400 || !strings.Contains(rec.Body.String(), `"Status"`) {
			t.Errorf("target %q: %d %s, want a 400 Status", target, rec.Code, rec.Body)
		}
	}
	if w.count() != 0 {
		t.Error("it was sent on")
	}
}

// Informational answers reach the client before the answer and leave nothing in it.
func TestInformationalAnswers(t *testing.T) {
	bothProtocols(t, func(t *testing.T, w *world) {
		w.local = func(r *http.Request) (*http.Response, error) {
			trace := httptrace.ContextClientTrace(r.Context())
			for _, code := range []int{100, 103} {
				if err := trace.Got1xxResponse(code, textproto.MIMEHeader{"Link": {"</a>"}, "Connection": {"X-Hop"}, "X-Hop": {"1"}}); err != nil {
					return nil, err
				}
			}
			return answered(200, "done"), nil
		}
		var got []string
		req, _ := http.NewRequest("GET", w.server.URL+podsPath, nil)
		req = req.WithContext(httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
			got = append(got, fmt.Sprint(code, h))
			return nil
		}}))
		resp, err := w.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, _ := io.ReadAll(resp.Body)
		if string(body) != "done" || resp.Header.Get("Link") != "" {
			t.Errorf("%s, Link %q", body, resp.Header.Get("Link"))
		}
		if len(got) != 1 || got[0] != "103 map[Link:[</a>]]" {
			t.Errorf("informational answers %v, want the 103 alone", got)
		}
	})
}

// raw sends bytes to the front over a connection of its own.
func raw(t *testing.T, w *world, head string) (*tls.Conn, *bufio.Reader) {
	t.Helper()
	c, err := tls.Dial("tcp", w.server.Listener.Addr().String(), &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"http/1.1"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := io.WriteString(c, head); err != nil {
		t.Fatal(err)
	}
	return c, bufio.NewReader(c)
}

// CASES S-03: what is no 101 goes to the client and ends its connection; a second request on it is never read.
func TestUpgradeRefused(t *testing.T) {
	w := newWorld(t, false)
	for _, tc := range []struct {
		name string
		resp func() *http.Response
		want int
		cut  bool
	}{
		{"forbidden", func() *http.Response { return answered(403, `{"kind":"Status"}`) }, 403, false},
		{"a long refusal", func() *http.Response { return answered(500, strings.Repeat("x", maxRefusal+1)) }, 500, true},
		{"the longest refusal", func() *http.Response { return answered(500, strings.Repeat("x", maxRefusal)) }, 500, false},
		{"OK", func() *http.Response { return answered(200, "list") }, 502, false},
		{"moved", func() *http.Response { return answered(302, "") }, 502, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w.local = func(*http.Request) (*http.Response, error) { return tc.resp(), nil }
			before := w.count()
			head := "GET " + podsPath + "/p/exec?command=id HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
			c, br := raw(t, w, head+"GET "+podsPath+"/secret HTTP/1.1\r\nHost: x\r\n\r\n")
			resp, err := http.ReadResponse(br, nil)
			if err != nil {
				t.Fatal(err)
			}
			_, err = io.Copy(io.Discard, resp.Body)
			if resp.StatusCode != tc.want || !resp.Close || (err != nil) != tc.cut {
				t.Errorf("status %d, close %v, body %v", resp.StatusCode, resp.Close, err)
			}
			if _, err := br.ReadByte(); err == nil {
				t.Error("something follows the answer")
			}
			c.Close()
			if got := w.count() - before; got != 1 {
				t.Errorf("%d requests were sent on, want 1", got)
			}
			if r, rc := w.last(); rc.Upgrade != "websocket" || !rc.LongRunning || r.Header.Get("Upgrade") != "" {
				t.Errorf("upgrade %q, long-running %v, header %q", rc.Upgrade, rc.LongRunning, r.Header.Get("Upgrade"))
			}
		})
	}
	_, br := raw(t, w, "POST "+podsPath+"/p/exec HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 1\r\n\r\nx")
	if resp, err := http.ReadResponse(br, nil); err != nil || resp.StatusCode != 400 || !resp.Close {
		t.Errorf("an upgrade with a body: %+v, %v, want 400 and the end", resp, err)
	}
}

// far is the other side of a tunnel over a net.Pipe, which knows one end only: the close.
type far struct{ net.Conn }

func (far) CloseWrite() error    { return nil }
func (f far) FinishWrite() error { return f.Conn.Close() }
func (far) WaitClosed() error    { return nil }
func (far) Abort() bool          { return false }

// CASES S-06: after the 101 the stream is opaque, from its first byte on, even if that came with the head.
func TestUpgradeTaken(t *testing.T) {
	w := newWorld(t, false)
	here, there := net.Pipe()
	go func() {
		_, _ = io.Copy(there, there)
		there.Close()
	}()
	w.local = func(*http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: 101, Body: far{here},
			Header: http.Header{"Connection": {"Upgrade"}, "Upgrade": {"websocket"}, "Sec-Websocket-Protocol": {"v5.channel.k8s.io"}}}, nil
	}
	c, br := raw(t, w, "GET "+podsPath+"/p/exec?command=id HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nearly")
	resp, err := http.ReadResponse(br, nil)
	if err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode != 101 || resp.Header.Get("Upgrade") != "websocket" || resp.Header.Get("Connection") != "Upgrade" ||
		resp.Header.Get("Sec-Websocket-Protocol") != "v5.channel.k8s.io" {
		t.Errorf("answer %d %v", resp.StatusCode, resp.Header)
	}
	_, _ = io.WriteString(c, " and late")
	got := make([]byte, len("early and late"))
	if _, err := io.ReadFull(br, got); err != nil || string(got) != "early and late" {
		t.Errorf("came back: %q, %v", got, err)
	}
	m := mustHandler(t, w).metrics
	if g := testutil.ToFloat64(m.upgraded); g != 1 {
		t.Errorf("%v upgraded connections, want 1", g)
	}
	c.Close()
	deadline := time.Now().Add(5 * time.Second)
	for testutil.ToFloat64(m.upgraded) != 0 {
		if time.Now().After(deadline) {
			t.Fatal("the upgraded connection is not given back")
		}
		time.Sleep(time.Millisecond)
	}
}

// CASES S-09: a client that takes nothing is cut off after the limit, over either protocol; a quiet stream is not.
func TestStalledAnswer(t *testing.T) {
	bothProtocols(t, func(t *testing.T, w *world) {
		h := mustHandler(t, w)
		h.StallTimeout = 200 * time.Millisecond
		over := make(chan error, 1)
		w.local = func(r *http.Request) (*http.Response, error) {
			pr, pw := io.Pipe()
			go func() {
				time.Sleep(3 * h.StallTimeout) // quiet for longer than the limit
				for {
					if _, err := pw.Write(make([]byte, 64<<10)); err != nil {
						over <- err
						return
					}
				}
			}()
			return &http.Response{StatusCode: 200, ContentLength: -1, Header: http.Header{}, Body: pr}, nil
		}
		resp, err := w.client.Get(w.server.URL + podsPath)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if _, err := io.ReadFull(resp.Body, make([]byte, 1<<10)); err != nil {
			t.Fatalf("after the quiet time: %v", err)
		}
		select {
		case <-over:
		case <-time.After(20 * time.Second):
			t.Fatal("a client that takes nothing holds the stream for ever")
		}
		if _, err := io.Copy(io.Discard, resp.Body); err == nil {
			t.Error("what was cut off looks whole")
		}
	})
}
