package stream_test

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

const (
	listSize = 20 << 20
	listPart = 7 << 20 // what is sent before the serving process dies
)

// TestF01CutOffAnswer: CASES F-01. The client must see that a list broke off, at whichever hop, and not one byte that the apiserver did
// not send.
func TestF01CutOffAnswer(t *testing.T) {
	t.Parallel()
	m := newMesh(t, setup{})
	api := m.servers["b"]
	type death struct {
		name string
		kill func() // what dies
		heal func()
		only string // "a": the death does not concern the local path
	}
	kinds := []death{{
		name: "handler aborts",
		// the handler itself panics, see below
		kill: func() {}, heal: func() {},
	}, {
		name: "node stops", only: "a",
		kill: func() { go m.nodes["b"].stop() },
		heal: func() {
			m.stop("b")
			m.start("b")
			m.converge()
		},
	}}
	for _, how := range []ending{orderly, reset} {
		kinds = append(kinds,
			death{"apiserver connection " + how.String(), func() { m.apiRelay["b"].cut(how) }, func() {}, ""},
			death{"mesh connection " + how.String(), func() { m.meshRelay["b"].cut(how) }, func() {}, "a"},
		)
	}
	for _, d := range kinds {
		m.eachWay(t, func(t *testing.T, w way) {
			if d.only != "" && d.only != w.node {
				return
			}
			t.Run(d.name, func(t *testing.T) {
				defer d.heal()
				key := fmt.Sprintf("f01-%s-%s", w, d.name[:3]+d.name[len(d.name)-3:])
				die := make(chan struct{})
				api.on(key, func(w http.ResponseWriter, r *http.Request) {
					w.Header().Set("Content-Type", "application/json")
					src := noise(key)
					_ = writeNoise(w, src, listPart)
					_ = http.NewResponseController(w).Flush()
					select {
					case <-die:
						if d.name == "handler aborts" {
							panic(http.ErrAbortHandler)
						}
						// The process is dead: what it would have sent comes to nobody.
						api.linger(r)
					case <-r.Context().Done():
					}
				})
				before := m.metric(w.node, "mvp_front_aborted_total", nil)
				resp := w.open(t, w.client(t), "GET", "/api/v1/namespaces/"+key+"/pods", nil, nil)
				got := newChecked(key)
				if n, err := io.CopyN(got, resp.Body, listPart); err != nil {
					t.Fatalf("only %d bytes before anything died: %v", n, err)
				}
				close(die)
				d.kill()
				var n int64
				var err error
				took := within(t, 10*time.Second, "the end", func() { n, err = io.Copy(got, resp.Body) })
				if n != 0 {
					t.Errorf("%d bytes that the apiserver never sent", n)
				}
				if !w.brokenOff(err) {
					t.Errorf("the client sees %v (%T)", err, err)
				}
				m.eventually(2*time.Second, "counted as aborted", func() error {
					if got := m.metric(w.node, "mvp_front_aborted_total", nil) - before; got != 1 {
						return fmt.Errorf("mvp_front_aborted_total rose by %v", got)
					}
					return nil
				})
				t.Logf("%d of %d bytes, then after %v: %v", got.n, int64(listSize), took.Round(time.Millisecond), err)
			})
		})
	}
}

// TestF01ChunkedByHand: CASES F-01, on the wire. An apiserver that speaks HTTP/1.1 and dies within its chunked list leaves the client
// of HTTP/1.1 without the last chunk, and the client's connection is closed.
func TestF01ChunkedByHand(t *testing.T) {
	t.Parallel()
	m := newMesh(t, setup{})
	die := make(chan struct{})
	m.servers["b"].on("f01raw", func(w http.ResponseWriter, r *http.Request) {
		if r.ProtoMajor != 1 {
			t.Errorf("a short read came by %s", r.Proto)
			return
		}
		p := hijack(t, w)
		defer p.Close()
		fmt.Fprintf(p, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{\"a\":\r\n7\r\n[1,2,")
		<-die
	})
	m.eachPath(t, func(t *testing.T, w way) {
		p, resp := w.ask(t, "GET", "/api/v1/namespaces/f01raw/pods", "Accept: application/json\r\n")
		if resp.StatusCode != 200 || len(resp.TransferEncoding) == 0 {
			t.Fatalf("%s, encoding %v", resp.Status, resp.TransferEncoding)
		}
		die <- struct{}{} // not before the head is out: until then a list that broke off may become an honest 503
		body, err := io.ReadAll(resp.Body)
		if err != io.ErrUnexpectedEOF || !strings.HasPrefix(`{"a":[1,2,`, string(body)) {
			t.Errorf("body %q, %v", body, err)
		}
		_ = p.SetReadDeadline(time.Now().Add(5 * time.Second))
		if n, err := p.Read(make([]byte, 1)); n != 0 || err == nil {
			t.Error("the connection lives on")
		}
	})
}
