package stream_test

import (
	"crypto/sha256"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
)

const (
	largeList = 64 << 20
	largePost = 2_900_000
)

// TestF07LargeBodies: CASES F-07, what arrives and when.
func TestF07LargeBodies(t *testing.T) {
	m := newMesh(t, setup{})
	api := m.servers["b"]
	direct := sha256.New()
	_ = writeNoise(direct, noise("f07"), largeList)
	want := fmt.Sprintf("%x", direct.Sum(nil))
	received := make(chan struct{})
	api.on("f07list", func(w http.ResponseWriter, r *http.Request) {
		src := noise("f07")
		_ = writeNoise(w, src, 1)
		_ = http.NewResponseController(w).Flush()
		select {
		case <-received: // by the client, while all the rest is still here
		case <-r.Context().Done():
			return
		}
		_ = writeNoise(w, src, largeList-1)
	})
	sums := make(chan string, 1)
	api.on("f07post", func(w http.ResponseWriter, r *http.Request) {
		sum := sha256.New()
		if _, err := io.CopyN(sum, r.Body, 1000); err != nil {
			t.Errorf("the beginning of a body: %v", err)
		}
		received <- struct{}{}
		n, err := io.Copy(sum, r.Body)
		if err != nil || n != largePost-1000 || r.ContentLength >= 0 && r.ContentLength != largePost {
			t.Errorf("%d bytes, Content-Length %d, %v", n, r.ContentLength, err)
		}
		sums <- fmt.Sprintf("%x", sum.Sum(nil))
		w.WriteHeader(http.StatusCreated)
	})
	m.eachWay(t, func(t *testing.T, w way) {
		c := w.client(t)
		resp := w.open(t, c, "GET", "/api/v1/namespaces/f07list/pods", nil, nil)
		sum := sha256.New()
		if _, err := io.CopyN(sum, resp.Body, 1); err != nil {
			t.Fatal(err)
		}
		received <- struct{}{}
		start := time.Now()
		n, err := io.Copy(sum, resp.Body)
		if got := fmt.Sprintf("%x", sum.Sum(nil)); err != nil || n != largeList-1 || got != want {
			t.Errorf("%d bytes, %v, SHA-256 %s instead of %s", n+1, err, got, want)
		}
		t.Logf("64 MiB in %v", time.Since(start).Round(time.Millisecond))

		for _, chunked := range []bool{false, true} {
			body := sha256.New()
			_ = writeNoise(body, noise("post"), largePost)
			r, pw := io.Pipe()
			var writing sync.WaitGroup
			writing.Go(func() {
				src := noise("post")
				_ = writeNoise(pw, src, 5000)
				<-received // by the apiserver, which has the beginning only
				_ = writeNoise(pw, src, largePost-5000)
				pw.Close()
			})
			req := w.request(t, "POST", "/api/v1/namespaces/f07post/pods", r, http.Header{"Content-Type": {"application/json"}})
			req.ContentLength = largePost
			if chunked {
				req.ContentLength = -1
			}
			resp, err := c.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if got, want := arrived(t, sums, 5*time.Second, "the body's sum"), fmt.Sprintf("%x", body.Sum(nil)); got != want || resp.StatusCode != 201 {
				t.Errorf("chunked %v: %s, SHA-256 %s instead of %s", chunked, resp.Status, got, want)
			}
			writing.Wait()
		}
	})
}

// TestF07EarlyAnswer: CASES F-07. An apiserver that answers before the request's body is there (a proxied backend that echoes) still gets
// the whole body, and the client the answer's head meanwhile.
func TestF07EarlyAnswer(t *testing.T) {
	t.Parallel()
	m := newMesh(t, setup{})
	const first, pieces = "the beginning", 200
	rest := strings.Repeat("and the rest, ", pieces)
	bodies := make(chan string, 1)
	m.servers["b"].on("f07early", func(w http.ResponseWriter, r *http.Request) {
		beginning := make([]byte, len(first))
		_, _ = io.ReadFull(r.Body, beginning)
		_ = http.NewResponseController(w).EnableFullDuplex() // an error only says that it is a matter of course
		w.WriteHeader(200)
		_ = http.NewResponseController(w).Flush()
		body, err := io.ReadAll(r.Body)
		bodies <- fmt.Sprintf("%s%s, %v", beginning, body, err)
		fmt.Fprint(w, "done")
	})
	m.eachWay(t, func(t *testing.T, w way) {
		r, pw := io.Pipe()
		var writing sync.WaitGroup
		writing.Go(func() { _, _ = io.WriteString(pw, first) })
		defer writing.Wait()
		defer pw.Close()
		// The head should come while half of the body is still here; if not, the rest is sent all the same: it must arrive.
		head := make(chan *http.Response, 1)
		req := w.request(t, "POST", "/api/v1/namespaces/f07early/services/s/proxy/echo", r, nil)
		c := w.client(t)
		var waiting sync.WaitGroup
		defer waiting.Wait()
		waiting.Go(func() {
			resp, err := c.Do(req)
			if err != nil {
				t.Errorf("no answer: %v", err)
				return
			}
			head <- resp
		})
		early := true
		var resp *http.Response
		select {
		case resp = <-head:
		case <-time.After(2 * time.Second):
			early = false
			t.Error("the head of the answer waits for the end of the request's body")
		}
		for i := range pieces {
			_, _ = io.WriteString(pw, rest[i*len(rest)/pieces:(i+1)*len(rest)/pieces])
		}
		pw.Close()
		if !early {
			resp = arrived(t, head, 10*time.Second, "the answer")
		}
		if text, err := io.ReadAll(resp.Body); err != nil || string(text) != "done" {
			t.Errorf("the client got %q, %v", text, err)
		}
		resp.Body.Close()
		if got, want := arrived(t, bodies, 10*time.Second, "the body"), first+rest+", <nil>"; got != want {
			t.Errorf("the apiserver got %d bytes of %d, ending in %.60q", len(got), len(want), got[max(0, len(got)-40):])
		}
	})
}

// live is the memory that is in use after a garbage collection, stacks included.
func live() int64 {
	runtime.GC()
	runtime.GC() // what sync.Pools hold goes with the second
	var s runtime.MemStats
	runtime.ReadMemStats(&s)
	return int64(s.HeapAlloc + s.StackInuse)
}

// TestF07Memory: CASES F-07, a large answer that its client reads slowly, or not at all, holds at most 4 MiB of each node. All are in one
// process with the apiserver, whose share counts as the nodes' here.
func TestF07Memory(t *testing.T) {
	const requests, perNode = 8, 4 << 20
	m := newMesh(t, setup{direct: true})
	api := m.servers["b"]
	api.forget(false)
	var begun sync.WaitGroup
	block := make([]byte, 64<<10)
	api.on("f07mem", func(w http.ResponseWriter, _ *http.Request) {
		begun.Done()
		for range largeList / len(block) {
			if _, err := w.Write(block); err != nil {
				return
			}
		}
	})
	m.eachPath(t, func(t *testing.T, w way) {
		nodes := map[string]int64{"local": 1, "forwarded": 2}[w.path()]
		w.send(t, w.client(t), "GET", "/api/v1/namespaces/none/pods", nil, nil) // connections are up
		before := live()
		begun.Add(requests)
		var pipes []*pipe
		for range requests {
			p, resp := w.ask(t, "GET", "/api/v1/namespaces/f07mem/pods", "")
			if resp.StatusCode != 200 {
				t.Fatal(resp.Status)
			}
			pipes = append(pipes, p)
		}
		begun.Wait()
		peak := int64(0)
		// Nobody reads: in the end all is full that can be. Then in steps, so that it is looked at while it moves as well.
		for step := range 5 {
			settled := int64(0)
			m.eventually(5*time.Second, "memory comes to rest", func() error {
				now := live()
				grown := now - settled
				settled = now
				peak = max(peak, now-before)
				if grown > 64<<10 {
					return fmt.Errorf("%d bytes more", grown)
				}
				return nil
			})
			if step == 4 {
				break
			}
			for _, p := range pipes {
				if _, err := io.CopyN(io.Discard, p, 4<<20); err != nil {
					t.Fatal(err)
				}
			}
		}
		each := peak / requests / nodes
		t.Logf("at most %.1f MiB in use for %d answers of 64 MiB: %.2f MiB per request and node", float64(peak)/(1<<20), requests, float64(each)/(1<<20))
		if each > perNode {
			t.Errorf("%d bytes per request and node", each)
		}
		for _, p := range pipes {
			p.Reset()
		}
	})
}
