package stream_test

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	mvpv1 "github.com/mvp-mesh/mvp-node/proto/mvp/v1"
)

const spdyUpgrade = "Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: v4.channel.k8s.io\r\n"

// second is what a client smuggles behind its request for an upgrade.
const second = "GET /api/v1/namespaces/smuggled/secrets HTTP/1.1\r\nHost: test\r\nX-Remote-User: root\r\n\r\n"

// ends waits until a connection is closed by the other side and returns what came before.
func (p *pipe) ends(t testing.TB, what string) []byte {
	t.Helper()
	_ = p.SetReadDeadline(time.Now().Add(time.Second))
	rest, err := io.ReadAll(p)
	if ne, ok := err.(interface{ Timeout() bool }); ok && ne.Timeout() {
		t.Errorf("%s is not closed within a second", what)
	}
	return rest
}

// TestS03RefusedUpgrade: CASES S-03. Whatever else than the 101 that was asked for answers a request for an upgrade: the client is told, both
// connections are closed, and no byte that the client wrote after its request arrives anywhere.
func TestS03RefusedUpgrade(t *testing.T) {
	t.Parallel()
	m := newMesh(t, setup{})
	api := m.servers["b"]
	const whole = 1 << 20
	for i, tc := range []struct {
		name, answer string // what the apiserver writes, up to the body
		body         int
		code         int // what the client sees
	}{
		{"403", "403 Forbidden\r\nContent-Type: text/plain", 300, 403},
		{"404", "404 Not Found\r\nContent-Type: text/plain\r\nConnection: keep-alive", 0, 404},
		{"426", "426 Upgrade Required\r\nUpgrade: websocket\r\nConnection: Upgrade", 10, 426},
		{"500", "500 Internal Server Error\r\nContent-Type: text/plain", whole, 500},
		{"too long", "400 Bad Request\r\nContent-Type: text/plain", whole + 1000, 400},
		{"200", "200 OK\r\nContent-Type: text/plain", 300, 502},
		{"204", "204 No Content", 0, 502},
		{"302", "302 Found\r\nLocation: https://attacker.example/", 0, 502},
		{"302 of the same host", "302 Found\r\nLocation: /api/v1/namespaces/smuggled/x", 10, 502},
		{"304", "304 Not Modified", 0, 502},
		{"101 to another protocol", "101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c", 0, 502},
		{"101 to two protocols", "101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nUpgrade: SPDY/3.1", 0, 502},
		{"101 to nothing", "101 Switching Protocols", 0, 502},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m.eachPath(t, func(t *testing.T, w way) {
				for _, upgrade := range []string{webSocketUpgrade, spdyUpgrade} {
					key := fmt.Sprintf("s03-%d-%s-%d", i, w.path(), len(upgrade))
					captured := make(chan []byte, 1)
					api.on(key, func(w http.ResponseWriter, _ *http.Request) {
						p := hijack(t, w)
						defer p.Close()
						fmt.Fprintf(p, "HTTP/1.1 %s\r\n", tc.answer)
						if tc.code != 502 || tc.body > 0 {
							fmt.Fprintf(p, "Content-Length: %d\r\n", tc.body)
						}
						_, _ = io.WriteString(p, "\r\n")
						_ = writeNoise(p, noise(key), int64(tc.body))
						captured <- p.ends(t, "the apiserver's connection")
					})
					p := w.dial(t)
					fmt.Fprintf(p, "POST /api/v1/namespaces/%s/pods/p/exec HTTP/1.1\r\nHost: test\r\nAccept: application/json\r\n%s\r\n%s", key, upgrade, second)
					resp := p.answer(t, "POST")
					body := new(bytes.Buffer)
					_, err := body.ReadFrom(resp.Body)
					_, _ = io.WriteString(p, second)
					if resp.StatusCode != tc.code {
						t.Errorf("%s: the client sees %s", key, resp.Status)
					}
					if tc.code == 502 {
						if cause := ownStatus(t, answer{resp.StatusCode, resp.Header, body.Bytes()}); cause != "BadAnswer" {
							t.Errorf("%s: cause %s", key, cause)
						}
					} else {
						got := newChecked(key)
						_, _ = got.Write(body.Bytes())
						switch complete := tc.body <= whole; {
						case got.bad || complete && (err != nil || got.n != int64(tc.body)):
							t.Errorf("%s: %d of %d bytes, wrong ones: %v, %v", key, got.n, tc.body, got.bad, err)
						case !complete && (err == nil || got.n > whole):
							t.Errorf("%s: %d bytes of a body that is too long, %v", key, got.n, err)
						}
					}
					if rest := p.ends(t, "the client's connection"); len(rest) > 0 {
						t.Errorf("%s: after the answer came %.100q", key, rest)
					}
					if got := arrived(t, captured, 3*time.Second, "the end at the apiserver"); len(got) > 0 {
						t.Errorf("%s: the apiserver's connection got %.100q", key, got)
					}
					if n := len(api.seen(key)); n != 1 {
						t.Errorf("%s: %d requests arrived", key, n)
					}
				}
			})
		})
	}
	for name, s := range m.servers {
		if n := len(s.seen("smuggled")); n > 0 {
			t.Errorf("%d smuggled requests came to apiserver %s", n, name)
		}
	}
}

// TestS03NotAnUpgrade: what asks for another protocol than the two, or for several, or by HTTP/1.0, asks for none as far as the node is concerned:
// the apiserver gets no Upgrade header, and nothing that follows is taken for anything but a request.
func TestS03NotAnUpgrade(t *testing.T) {
	t.Parallel()
	m := newMesh(t, setup{})
	api := m.servers["b"]
	api.on("s03", func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "" || r.Header.Get("Connection") != "" {
			t.Errorf("the apiserver sees %q, %q", r.Header["Connection"], r.Header["Upgrade"])
		}
		w.WriteHeader(http.StatusBadRequest)
	})
	m.eachPath(t, func(t *testing.T, w way) {
		for i, headers := range []string{
			"Connection: Upgrade\r\nUpgrade: h2c\r\n", "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",
			"Connection: Upgrade\r\nUpgrade: websocket, h2c\r\n", "Connection: Upgrade\r\nUpgrade: websocket\r\nUpgrade: SPDY/3.1\r\n",
			"Connection: Upgrade\r\nUpgrade: SPDY/3.2\r\n", "Upgrade: websocket\r\n", "Connection: Upgrade\r\n", "Connection: close\r\nUpgrade: websocket\r\n",
		} {
			key := fmt.Sprintf("s03-%s-%d", w.path(), i)
			_, resp := w.ask(t, "GET", "/api/v1/namespaces/"+key+"/pods/p/exec", headers)
			if resp.StatusCode != 400 || len(api.seen(key)) != 1 {
				t.Errorf("%q: %s, %d arrivals", headers, resp.Status, len(api.seen(key)))
			}
		}
		// A body in a request for an upgrade could be the beginning of the other protocol, or not: refused before anything is sent.
		key := "s03-body-" + w.path()
		p, resp := w.ask(t, "POST", "/api/v1/namespaces/"+key+"/pods/p/exec", spdyUpgrade+"Content-Length: 5\r\n")
		if resp.StatusCode != 400 || len(api.seen(key)) != 0 {
			t.Errorf("with a body: %s, %d arrivals", resp.Status, len(api.seen(key)))
		}
		_, _ = io.WriteString(p, "12345"+second)
		_, _ = io.Copy(io.Discard, resp.Body)
		p.ends(t, "the client's connection")
	})
	for _, s := range m.servers {
		if n := len(s.seen("smuggled")); n > 0 {
			t.Errorf("%d smuggled requests arrived", n)
		}
	}
}

// TestS03MaliciousPeer: CASES S-03, over the tunnel. A peer may send bytes of the other protocol only after a 101. One that does otherwise gets
// nothing through to the client but an error of the node.
func TestS03MaliciousPeer(t *testing.T) {
	t.Parallel()
	m := newMesh(t, setup{})
	evil := newPeer(t, m)
	const smuggled = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
	chunk := func(data string, end bool) *mvpv1.ForwardResponse {
		return &mvpv1.ForwardResponse{Part: &mvpv1.ForwardResponse_Chunk{Chunk: &mvpv1.Chunk{Data: []byte(data), End: end}}}
	}
	head := func(code int32, names ...string) *mvpv1.ForwardResponse {
		h := &mvpv1.ResponseHead{Status: code, ContentLength: -1}
		for i := 0; i < len(names); i += 2 {
			h.Headers = append(h.Headers, &mvpv1.Header{Name: names[i], Values: names[i+1 : i+2]})
		}
		return &mvpv1.ForwardResponse{Part: &mvpv1.ForwardResponse_Head{Head: h}}
	}
	early := head(200)
	early.GetHead().Body = []byte(smuggled)
	informational := &mvpv1.ForwardResponse{Part: &mvpv1.ForwardResponse_Informational{Informational: &mvpv1.Informational{Status: 101}}}
	switched := []string{"Connection", "Upgrade", "Upgrade", "websocket"}
	for _, tc := range []struct {
		name    string
		upgrade string
		parts   []*mvpv1.ForwardResponse
		codes   []int
	}{
		{"bytes before the 101", webSocketUpgrade, []*mvpv1.ForwardResponse{chunk(smuggled, false), head(101, switched...)}, []int{502, 503, 504}},
		{"bytes instead of it", webSocketUpgrade, []*mvpv1.ForwardResponse{chunk(smuggled, true)}, []int{502, 503, 504}},
		{"bytes with a 200", webSocketUpgrade, []*mvpv1.ForwardResponse{early, chunk(smuggled, false)}, []int{502}},
		{"a 101 that is informational", webSocketUpgrade, []*mvpv1.ForwardResponse{informational, chunk(smuggled, false)}, []int{502, 503, 504}},
		{"a 101 that nobody asked for", "", []*mvpv1.ForwardResponse{head(101, switched...), chunk(smuggled, false)}, []int{502, 503, 504}},
		{"a 100 that never ends", webSocketUpgrade, []*mvpv1.ForwardResponse{
			{Part: &mvpv1.ForwardResponse_Informational{Informational: &mvpv1.Informational{Status: 103}}}, chunk(smuggled, false),
		}, []int{502, 503, 504}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			evil.answer(func(ss grpc.ServerStream) error {
				var first []byte
				if err := ss.RecvMsg(&first); err != nil {
					return err
				}
				for _, p := range tc.parts {
					if err := ss.SendMsg(p); err != nil {
						return err
					}
				}
				for ss.RecvMsg(&first) == nil && !bytes.Contains(first, []byte("smuggled")) {
				}
				if bytes.Contains(first, []byte("smuggled")) {
					t.Errorf("the peer got what the client wrote after its request: %.100q", first)
				}
				return nil
			})
			w := way{m, "a", false}
			p := w.dial(t)
			fmt.Fprintf(p, "GET /api/v1/namespaces/s03/pods/p/exec HTTP/1.1\r\nHost: test\r\nAccept: application/json\r\n%s\r\n", tc.upgrade)
			if tc.upgrade != "" {
				_, _ = io.WriteString(p, second)
			}
			resp := p.answer(t, "GET")
			for resp.StatusCode == 103 {
				resp = p.answer(t, "GET")
			}
			body, _ := io.ReadAll(resp.Body)
			ok := false
			for _, code := range tc.codes {
				ok = ok || code == resp.StatusCode
			}
			if !ok {
				t.Errorf("the client sees %s", resp.Status)
			}
			cause := ownStatus(t, answer{resp.StatusCode, resp.Header, body})
			t.Logf("%s, cause %s", resp.Status, cause)
			var rest []byte
			if tc.upgrade != "" { // otherwise the connection may serve another request
				rest = p.ends(t, "the client's connection")
			}
			if strings.Contains(string(body)+string(rest), "hello") {
				t.Errorf("the client got the peer's bytes: %q %q", body, rest)
			}
		})
	}
}
