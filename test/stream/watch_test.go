package stream_test

import (
	"bufio"
	"compress/gzip"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"
)

// flushing writes pieces of an answer that arrive one by one.
type flushing struct {
	w  io.Writer
	rc *http.ResponseController
}

// Write implements io.Writer.
func (f flushing) Write(p []byte) (int, error) {
	n, err := f.w.Write(p)
	if err == nil {
		err = f.rc.Flush()
	}
	return n, err
}

// event is a line of 200 bytes.
func event(i int) string {
	s := fmt.Sprintf(`{"type":"MODIFIED","object":{"n":%d,"pad":"`, i)
	return s + strings.Repeat("x", 200-len(s)-len("\"}}\n")) + "\"}}\n"
}

// TestS01SmallEvents: CASES S-01. An event of 200 bytes is with the client at most 100 ms after the apiserver wrote it.
func TestS01SmallEvents(t *testing.T) {
	const events, limit = 20, 100 * time.Millisecond
	m := newMesh(t, setup{})
	written := make(chan time.Time, 1)
	next := make(chan int)
	m.servers["b"].on("s01", func(w http.ResponseWriter, r *http.Request) {
		var out io.Writer = flushing{w, http.NewResponseController(w)}
		w.Header().Set("Content-Type", "application/json")
		flush := func() error { return nil }
		if r.Header.Get("Accept-Encoding") == "gzip" {
			w.Header().Set("Content-Encoding", "gzip")
			z := gzip.NewWriter(out)
			out, flush = z, z.Flush
		}
		w.WriteHeader(200)
		_ = http.NewResponseController(w).Flush()
		for i := range next {
			written <- time.Now()
			_, err := io.WriteString(out, event(i))
			if err != nil || flush() != nil {
				return
			}
			if i == events-1 {
				return
			}
		}
	})
	m.eachWay(t, func(t *testing.T, w way) {
		c := w.client(t)
		for _, tc := range []struct{ name, target, encoding string }{
			{"watch", "/api/v1/namespaces/s01/pods?watch=true", ""},
			{"watch of all", "/api/v1/pods?watch=1&labelSelector=s01", ""},
			{"old watch path", "/api/v1/watch/namespaces/s01/pods", ""},
			{"watch with gzip", "/api/v1/namespaces/s01/pods?watch=true", "gzip"},
			{"log", "/api/v1/namespaces/s01/pods/p/log?follow=true", ""},
			{"proxy", "/api/v1/namespaces/s01/services/s/proxy/events", ""},
		} {
			h := http.Header{}
			if tc.encoding != "" {
				h.Set("Accept-Encoding", tc.encoding)
			}
			resp := w.open(t, c, "GET", tc.target, nil, h)
			if got := resp.Header.Get("Content-Encoding"); got != tc.encoding {
				t.Fatalf("%s: Content-Encoding %q", tc.name, got)
			}
			var lines *bufio.Reader
			var took []time.Duration
			for i := range events {
				next <- i
				start := <-written
				if lines == nil {
					body := io.Reader(resp.Body)
					if tc.encoding != "" {
						z, err := gzip.NewReader(resp.Body) // its header comes with the first event
						if err != nil {
							t.Fatal(err)
						}
						body = z
					}
					lines = bufio.NewReader(body)
				}
				line, err := lines.ReadString('\n')
				took = append(took, time.Since(start))
				if err != nil || line != event(i) || len(line) != 200 {
					t.Fatalf("%s: event %d is %q, %v", tc.name, i, line, err)
				}
				if tc.encoding == "" {
					time.Sleep(time.Duration(rand.Int64N(int64(10 * time.Millisecond)))) // events come when they come
				}
			}
			resp.Body.Close()
			slices.Sort(took)
			t.Logf("%-16s median %v, worst %v", tc.name, took[events/2].Round(time.Microsecond), took[events-1].Round(time.Microsecond))
			if took[events-1] > limit {
				t.Errorf("%s: an event took %v", tc.name, took[events-1])
			}
		}
	})
}

// TestS02HeadOfAQuietWatch: CASES S-02. The head of an answer reaches the client within a second of the server sending it, with no
// byte of a body.
func TestS02HeadOfAQuietWatch(t *testing.T) {
	m := newMesh(t, setup{})
	sent := make(chan time.Time, 1)
	m.servers["b"].on("s02", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json;stream=watch")
		w.Header().Set("X-Quiet", "yes")
		w.WriteHeader(200)
		sent <- time.Now()
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	})
	m.eachWay(t, func(t *testing.T, w way) {
		c := w.client(t)
		for _, target := range []string{
			"/api/v1/namespaces/s02/pods?watch=true&resourceVersion=5", "/api/v1/watch/namespaces/s02/pods", "/api/v1/namespaces/s02/pods/p/log?follow=true",
			"/api/v1/namespaces/s02/services/s/proxy/", "/api/v1/namespaces/s02/pods", // a list that is slow to be written is no other case
		} {
			resp := w.open(t, c, "GET", target, nil, nil)
			took := time.Since(<-sent)
			if resp.StatusCode != 200 || resp.Header.Get("X-Quiet") != "yes" || resp.Header.Get("Content-Type") != "application/json;stream=watch" {
				t.Errorf("%s: %s %v", target, resp.Status, resp.Header)
			}
			t.Logf("%-60s %v", target, took.Round(time.Microsecond))
			if took > time.Second {
				t.Errorf("%s: the head took %v", target, took)
			}
			resp.Body.Close()
		}
	})
}
