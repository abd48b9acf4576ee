package stream_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"
)

const requestTimeout = 3 * time.Second

// TestS08LongRunning: CASES S-08. With a request timeout of 3 s, what is long-running lives idle for far longer.
func TestS08LongRunning(t *testing.T) {
	t.Parallel() // with the other one that only waits
	idle := scaled(8*time.Second, 60*time.Second)
	m := newMesh(t, setup{front: map[string]any{"requestTimeout": requestTimeout.String()}})
	wake := make(chan struct{})
	m.servers["b"].on("s08", func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "" {
			p := accept(t, w, r)
			defer p.Close()
			<-wake
			fmt.Fprint(p, "late\n")
			return
		}
		w.WriteHeader(200)
		_ = http.NewResponseController(w).Flush()
		<-wake
		fmt.Fprint(w, "late\n")
		if body, err := io.ReadAll(r.Body); r.Method == "POST" && (err != nil || string(body) != "early late") {
			t.Errorf("%s: body %q, %v", r.RequestURI, body, err)
		}
	})
	ns := "/api/v1/namespaces/s08"
	plain := []string{
		ns + "/pods?watch=true", ns + "/pods?watch=1&timeoutSeconds=1350", ns + "/pods?watch", "/api/v1/watch/namespaces/s08/pods", ns + "/pods/p/log?follow=true",
		ns + "/services/s/proxy/x", ns + "/pods/p/proxy", "/api/v1/nodes/s08/proxy/logs/", ns + "/pods/p/exec", ns + "/pods/p/attach", ns + "/pods/p/portforward",
	}
	upgrades := []string{
		ns + "/pods/p/exec", ns + "/pods/p/attach", ns + "/pods/p/portforward", ns + "/services/s/proxy/ws", ns + "/pods?watch=true",
		"/apis/console.example.com/v1/namespaces/s08/machines/m/vnc", // no list of subresources names it
	}
	type open struct {
		name string
		r    io.Reader
	}
	var all []open
	var uploads []*io.PipeWriter
	for _, node := range []string{"b", "a"} {
		for _, h2 := range []bool{false, true} {
			w := way{m, node, h2}
			c := w.client(t)
			for _, target := range plain {
				resp := w.open(t, c, "GET", target, nil, nil)
				if resp.StatusCode != 200 {
					t.Fatalf("%s %s: %s", w, target, resp.Status)
				}
				all = append(all, open{w.String() + " " + target, resp.Body})
			}
			if h2 { // a body that is not sent to its end yet
				r, pw := io.Pipe()
				go func() { _, _ = io.WriteString(pw, "early ") }()
				resp := w.open(t, c, "POST", ns+"/services/s/proxy/upload", r, nil)
				uploads = append(uploads, pw)
				all = append(all, open{w.String() + " upload", resp.Body})
				continue
			}
			for _, target := range upgrades {
				all = append(all, open{w.String() + " upgrade " + target, w.upgrade(t, target)})
			}
		}
	}
	ended := make(chan string, len(all))
	late := make(chan string, len(all))
	var reading sync.WaitGroup
	for _, o := range all {
		reading.Go(func() {
			text, err := io.ReadAll(o.r)
			if err != nil || string(text) != "late\n" {
				ended <- fmt.Sprintf("%s: %q, %v", o.name, text, err)
				return
			}
			late <- o.name
		})
	}
	time.Sleep(idle) // what is measured: nothing happens on any of them
	close(wake)
	for _, pw := range uploads {
		_, _ = io.WriteString(pw, "late")
		pw.Close()
	}
	within(t, 5*time.Second, "all end", reading.Wait)
	close(ended)
	for what := range ended {
		t.Error(what)
	}
	t.Logf("%d of %d requests lived idle for %v", len(late), len(all), idle)
}

// TestS08ShortRequests: CASES S-08. Everything else gets the configured limit, or the client's own when that is shorter.
func TestS08ShortRequests(t *testing.T) {
	t.Parallel()
	m := newMesh(t, setup{front: map[string]any{"requestTimeout": requestTimeout.String()}})
	var gone sync.Map
	m.servers["b"].on("s08", func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
		gone.Store(r.URL.Query().Get("key"), time.Now())
	})
	// What a node gives beyond the limit, so that the apiserver, which counts as well, is the one to say that it is over.
	const slack = time.Second
	var all sync.WaitGroup
	m.eachWay(t, func(t *testing.T, w way) {
		c := w.client(t)
		for i, tc := range []struct {
			method, query string
			limit         time.Duration
		}{
			{"GET", "", requestTimeout}, {"GET", "&timeout=1s", time.Second}, {"GET", "&timeout=1h", requestTimeout}, {"GET", "&timeout=soon", requestTimeout},
			{"POST", "", requestTimeout}, {"POST", "&timeout=500ms", time.Second / 2}, {"DELETE", "&timeout=1s", time.Second},
			{"GET", "&watch=false", requestTimeout}, {"GET", "&limit=1&timeoutSeconds=900", requestTimeout},
		} {
			key := fmt.Sprintf("%s-%d", w, i)
			req, err := http.NewRequestWithContext(context.Background(), tc.method, w.url("/api/v1/namespaces/s08/pods?key="+key+tc.query), strings.NewReader("{}"))
			if err != nil {
				t.Fatal(err)
			}
			if tc.method == "GET" {
				req.Body, req.ContentLength = nil, 0
			}
			all.Go(func() { // all wait at the same time
				start := time.Now()
				resp, err := c.Do(req)
				if err != nil {
					t.Errorf("%s %s: %v", key, tc.query, err)
					return
				}
				body, _ := io.ReadAll(resp.Body)
				resp.Body.Close()
				took := time.Since(start)
				if cause := ownStatus(t, answer{resp.StatusCode, resp.Header, body}); resp.StatusCode != 504 || cause != "OutcomeUnknown" {
					t.Errorf("%s %s %s: %d, cause %s", key, tc.method, tc.query, resp.StatusCode, cause)
				}
				if took < tc.limit || took > tc.limit+slack+time.Second {
					t.Errorf("%s %s %s: took %v, the limit is %v", key, tc.method, tc.query, took, tc.limit)
				}
				if err := poll(time.Second, func() error {
					if _, ok := gone.Load(key); !ok {
						return fmt.Errorf("%s still runs at the apiserver", key)
					}
					return nil
				}); err != nil {
					t.Error(err)
				}
			})
		}
		if w.h2 && w.path() == "forwarded" {
			all.Wait()
		}
	})
}

// TestS08RestOfTheTime: CASES S-08. The peer gets what is left of a request's time, not all of it anew; what is long-running has none.
func TestS08RestOfTheTime(t *testing.T) {
	t.Parallel()
	m := newMesh(t, setup{front: map[string]any{"requestTimeout": requestTimeout.String()}})
	p := newPeer(t, m)
	m.servers["b"].on("s08", func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if r.Header.Get("Upgrade") != "" {
			accept(t, w, r).Close()
		}
	})
	const slack = time.Second
	w := way{m, "a", false}
	c := w.client(t)
	m.eventually(5*time.Second, "the way through the peer", func() error {
		if a := w.send(t, c, "GET", "/api/v1/namespaces/s08/pods", nil, nil); a.code != 200 || p.lastDeadline() < 0 {
			return fmt.Errorf("%d %s", a.code, a.body)
		}
		return nil
	})
	for _, tc := range []struct {
		query string
		delay time.Duration // before the client's body is there, which is read before anything is forwarded
		want  time.Duration
	}{
		{"", 0, requestTimeout + slack}, {"?timeout=1s", 0, time.Second + slack}, {"", 2 * time.Second, requestTimeout + slack - 2*time.Second},
	} {
		r, pw := io.Pipe()
		go func() {
			time.Sleep(tc.delay) // a client that takes its time is what is tested
			_, _ = io.WriteString(pw, "{}")
			pw.Close()
		}()
		req := w.request(t, "POST", "/api/v1/namespaces/s08/pods"+tc.query, r, nil)
		req.ContentLength = 2
		resp, err := c.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if got := p.lastDeadline(); resp.StatusCode != 200 || got > tc.want || got < tc.want-500*time.Millisecond {
			t.Errorf("%q after %v: %s, the peer got %v, %v are left", tc.query, tc.delay, resp.Status, got, tc.want)
		}
	}
	w.send(t, c, "GET", "/api/v1/namespaces/s08/pods?watch=true&timeout=1s", nil, nil)
	if got := p.lastDeadline(); got != 0 {
		t.Errorf("a watch came to the peer with a deadline in %v", got)
	}
	w.upgrade(t, "/api/v1/namespaces/s08/pods/p/exec")
	if got := p.lastDeadline(); got != 0 {
		t.Errorf("an exec came to the peer with a deadline in %v", got)
	}
}
