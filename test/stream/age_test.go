package stream_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// TestS11IdleWatch: CASES S-11 and S-08. A watch on which nothing happens lives through a network that forgets flows idle for 20 s, and the
// connections that carry it are neither closed nor made anew: what the pings of one side are, the other allows. The numbers themselves are in
// one place, internal/mesh, and tested there over half an hour of fake time.
func TestS11IdleWatch(t *testing.T) {
	t.Parallel() // with the others that only wait
	idle := scaled(25*time.Second, 5*time.Minute)
	m := newMesh(t, setup{})
	for _, r := range m.meshRelay {
		r.dropIdle.Store(int64(20 * time.Second))
		r.cut(orderly) // what there was is not watched
	}
	wake := make(chan struct{})
	m.servers["b"].on("s11", func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).Flush()
		select {
		case <-wake:
			_, _ = io.WriteString(w, event(1))
		case <-r.Context().Done():
		}
	})
	w := way{m, "a", true}
	c := w.client(t)
	m.eventually(10*time.Second, "the way to b", func() error {
		if a := w.send(t, c, "GET", "/api/v1/namespaces/none/pods", nil, nil); a.code != 404 {
			return fmt.Errorf("%d %s", a.code, a.body)
		}
		return nil
	})
	var watches []*http.Response
	for range 3 { // as many as there are connections for watches
		watches = append(watches, w.open(t, c, "GET", "/api/v1/namespaces/s11/pods?watch=true", nil, nil))
	}
	opened := m.meshRelay["b"].opened.Load()
	time.Sleep(idle) // what is measured
	if n := m.meshRelay["b"].opened.Load() - opened; n != 0 {
		t.Errorf("%d connections to the peer were made anew", n)
	}
	close(wake)
	for _, resp := range watches {
		text, err := io.ReadAll(resp.Body)
		if err != nil || string(text) != event(1) {
			t.Errorf("%q, %v", text, err)
		}
	}
	t.Logf("%d watches idle for %v on %d connections", len(watches), idle, m.meshRelay["b"].count())
}

// rotation runs requests while connections are retired under them, and checks that no client notices: every request is answered, came to the
// apiserver once, and watches that were open before are still open after.
func rotation(t *testing.T, w way, method func(i int64) string, retire func(i int)) {
	const workers, times = 6, 8
	m := w.m
	var next, failed atomic.Int64
	var came sync.Map
	events := make(chan int)
	m.servers["b"].on("s11", func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		n, _ := came.LoadOrStore(r.Header.Get("X-Id"), new(atomic.Int64))
		n.(*atomic.Int64).Add(1)
		if r.Method == "POST" && string(body) != "the body" {
			t.Errorf("body %q", body)
		}
		if strings.Contains(r.RequestURI, "retire") {
			w.Header().Set("Connection", "close") // of net/http's HTTP/2, and kube-apiserver's, this makes a GOAWAY
		}
	})
	m.servers["b"].on("s11watch", func(w http.ResponseWriter, r *http.Request) {
		out := flushing{w, http.NewResponseController(w)}
		_ = out.rc.Flush()
		for {
			select {
			case i := <-events:
				_, _ = io.WriteString(out, event(i))
			case <-r.Context().Done():
				return
			}
		}
	})
	c := w.client(t)
	m.eventually(10*time.Second, "the way to b", func() error {
		if a := w.send(t, c, "GET", "/api/v1/namespaces/s11/pods", nil, http.Header{"X-Id": {"first"}}); a.code != 200 {
			return fmt.Errorf("%d %s", a.code, a.body)
		}
		return nil
	})
	watch := bufio.NewReader(w.open(t, c, "GET", "/api/v1/namespaces/s11watch/pods?watch=true", nil, nil).Body)
	stop := make(chan struct{})
	var all sync.WaitGroup
	for range workers {
		all.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				i := next.Add(1)
				target := "/api/v1/namespaces/s11/pods?n=1"
				if retire == nil && i%10 == 0 {
					target += "&retire"
				}
				req, _ := http.NewRequestWithContext(context.Background(), method(i), w.url(target), strings.NewReader("the body"))
				if req.Method == "GET" {
					req.Body, req.ContentLength = nil, 0
				}
				req.Header.Set("X-Id", fmt.Sprint(i))
				resp, err := c.Do(req)
				if err != nil {
					t.Errorf("request %d: %v", i, err)
					return
				}
				text, _ := io.ReadAll(resp.Body)
				resp.Body.Close()
				n, _ := came.LoadOrStore(fmt.Sprint(i), new(atomic.Int64))
				if k := n.(*atomic.Int64).Load(); resp.StatusCode != 200 || k != 1 {
					if failed.Add(1) < 5 {
						t.Errorf("request %d, %s: %d %s, arrived %d times", i, req.Method, resp.StatusCode, text, k)
					}
				}
			}
		})
	}
	for i := range times {
		begin := next.Load()
		m.eventually(20*time.Second, "requests go on", func() error {
			if n := next.Load() - begin; n < 30 {
				return fmt.Errorf("%d in this round", n)
			}
			return nil
		})
		if retire != nil {
			retire(i)
		}
		events <- i
		if line, err := watch.ReadString('\n'); err != nil || line != event(i) {
			t.Fatalf("the watch says %q, %v", line, err)
		}
	}
	close(stop)
	all.Wait()
	t.Logf("%d requests while connections were retired, %d failed", next.Load(), failed.Load())
}

func reads(int64) string { return "GET" }

func writes(i int64) string { return []string{"POST", "GET", "DELETE"}[i%3] }

// TestS11PeerRetiresConnections: CASES S-11. The peer retires its connections: new requests take new ones, what had not been processed is tried again
// unnoticed, and watches live on on the old ones.
func TestS11PeerRetiresConnections(t *testing.T) {
	t.Parallel()
	m := newMesh(t, setup{})
	p := newPeer(t, m)
	rotation(t, way{m, "a", true}, writes, func(int) { p.rotate() })
}

// TestS11ApiserverRetiresConnections: the same of an apiserver that sends its clients elsewhere from time to time (--goaway-chance).
func TestS11ApiserverRetiresConnections(t *testing.T) {
	t.Parallel()
	m := newMesh(t, setup{})
	for _, node := range []string{"b", "a"} {
		w := way{m, node, true}
		t.Run(w.path(), func(t *testing.T) {
			t.Run("reads", func(t *testing.T) { rotation(t, w, reads, nil) })
			t.Run("writes", func(t *testing.T) { rotation(t, w, writes, nil) })
		})
	}
}
