package front

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
)

// CASES F-01: a body that breaks off never ends cleanly, whether its length was known or not.
func TestAbortIsAnAbort(t *testing.T) {
	bothProtocols(t, func(t *testing.T, w *world) {
		for _, length := range []int64{-1, 100} {
			w.forward = func(*http.Request) (*http.Response, Served, error) {
				return &http.Response{StatusCode: 200, ContentLength: length, Header: http.Header{},
					Body: io.NopCloser(io.MultiReader(strings.NewReader("half"), errReader{}))}, Served{Node: "b"}, nil
			}
			resp, err := w.client.Get(w.server.URL + widgetsPath)
			if err != nil {
				continue // the connection broke before the head came out of the buffer: not a complete answer either
			}
			body, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			if err == nil {
				t.Errorf("length %d: a cut-off body reads as complete: %q", length, body)
			}
			if !strings.HasPrefix("half", string(body)) {
				t.Errorf("length %d: bytes beyond the server's: %q", length, body)
			}
		}
		if n := testutil.ToFloat64(w.server.Config.Handler.(*Handler).metrics.aborted); n != 2 {
			t.Errorf("mvp_front_aborted_total is %v, want 2", n)
		}
	})
}

type errReader struct{}

func (errReader) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

// CASES S-01, S-02: head without an event, then each event as it comes.
func TestWatchIsLive(t *testing.T) {
	bothProtocols(t, func(t *testing.T, w *world) {
		pr, pw := io.Pipe()
		w.forward = func(*http.Request) (*http.Response, Served, error) {
			return &http.Response{StatusCode: 200, ContentLength: -1, Header: http.Header{"Content-Type": {"application/json"}}, Body: pr}, Served{Node: "b"}, nil
		}
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		req, _ := http.NewRequestWithContext(ctx, "GET", w.server.URL+widgetsPath+"?watch=true", nil)
		start := time.Now()
		resp, err := w.client.Do(req) // returns with the head; no event was written yet
		if err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took > time.Second {
			t.Errorf("head took %v", took)
		}
		lines := bufio.NewReader(resp.Body)
		for i := range 3 {
			event := fmt.Sprintf(`{"n":%d}`, i) + "\n"
			start := time.Now()
			if _, err := io.WriteString(pw, event); err != nil {
				t.Fatal(err)
			}
			got, err := lines.ReadString('\n')
			if err != nil || got != event || time.Since(start) > 100*time.Millisecond {
				t.Errorf("event %d: %q, %v after %v", i, got, err, time.Since(start))
			}
		}
		pw.Close()
		if _, err := lines.ReadByte(); err != io.EOF {
			t.Errorf("end of the watch: %v, want a clean end", err)
		}
		resp.Body.Close()
	})
}

// A body that does not come holds nothing beyond the request's time: not the handler that reads it, and not net/http, which reads
// what is left of it before it answers. Reading cannot be interrupted by a context.
func TestStalledBody(t *testing.T) {
	t.Parallel()
	bothProtocols(t, func(t *testing.T, w *world) {
		t.Parallel() // seconds of waiting
		w.options.RequestTimeout, w.options.Registerer = 100*time.Millisecond, prometheus.NewRegistry()
		h, err := New(w.options)
		if err != nil {
			t.Fatal(err)
		}
		w.server.Config.Handler = h
		w.local = func(r *http.Request) (*http.Response, error) {
			if _, err := io.ReadAll(r.Body); err == nil {
				t.Error("the body was read to its end")
			}
			<-r.Context().Done()
			return nil, r.Context().Err()
		}
		for _, tc := range []struct {
			name string
			ok   bool
			code int
		}{{"read", true, 504}, {"unread", false, 401}} {
			t.Run(tc.name, func(t *testing.T) {
				w.authn = func(*http.Request) (*authenticator.Response, bool, error) {
					return &authenticator.Response{User: &user.DefaultInfo{Name: "jane"}}, tc.ok, nil
				}
				body, more := io.Pipe() // of which nothing comes
				defer more.Close()
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				defer cancel()
				req, err := http.NewRequestWithContext(ctx, "POST", w.server.URL+podsPath, body)
				if err != nil {
					t.Fatal(err)
				}
				req.ContentLength = 10
				resp, err := w.client.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				defer resp.Body.Close()
				if resp.StatusCode != tc.code {
					t.Errorf("got %d, want %d", resp.StatusCode, tc.code)
				}
			})
		}
	})
}

// What is long-running may take its time with its body as well (an upload through a pod's proxy).
func TestLongRunningBodyIsNotBounded(t *testing.T) {
	t.Parallel()
	bothProtocols(t, func(t *testing.T, w *world) {
		t.Parallel() // seconds of waiting
		w.options.RequestTimeout, w.options.Registerer = 10*time.Millisecond, prometheus.NewRegistry()
		h, err := New(w.options)
		if err != nil {
			t.Fatal(err)
		}
		w.server.Config.Handler = h
		w.local = func(r *http.Request) (*http.Response, error) {
			b, err := io.ReadAll(r.Body)
			if err != nil || string(b) != "late" {
				t.Errorf("body %q, %v", b, err)
			}
			return answered(200, ""), nil
		}
		body, more := io.Pipe()
		time.AfterFunc(2*deadlineSlack+deadlineSlack/2, func() {
			_, _ = more.Write([]byte("late"))
			more.Close()
		})
		resp, err := w.client.Post(w.server.URL+podsPath+"/p/proxy/x", "text/plain", body)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != 200 {
			t.Errorf("got %d", resp.StatusCode)
		}
	})
}

func TestServerSpeaksBothProtocolsAndStops(t *testing.T) {
	w := newWorld(t, true)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := NewServer(l, w.server.Config.Handler, ServerOptions{
		TLS: &tls.Config{Certificates: w.server.TLS.Certificates}, MaxHeaderBytes: 64 << 10, MaxConcurrentStreams: 100, Logger: slog.New(slog.DiscardHandler),
	})
	done := make(chan error, 1)
	go func() { done <- s.Serve() }()
	for _, http2 := range []bool{false, true} {
		tr := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, ForceAttemptHTTP2: http2}
		if !http2 {
			tr.TLSClientConfig.NextProtos = []string{"http/1.1"}
		}
		resp, err := (&http.Client{Transport: tr}).Get("https://" + s.Addr().String() + podsPath)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if (resp.ProtoMajor == 2) != http2 || resp.StatusCode != 200 {
			t.Errorf("http2=%v: %s %d", http2, resp.Proto, resp.StatusCode)
		}
		tr.CloseIdleConnections()
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if err := s.Shutdown(ctx); err != nil {
		t.Error(err)
	}
	if err := <-done; err != nil {
		t.Errorf("Serve returned %v", err)
	}
}

func TestDeadlineReachesTheLocalRequest(t *testing.T) {
	w := newWorld(t, true)
	var left time.Duration
	var has bool
	w.local = func(r *http.Request) (*http.Response, error) {
		var end time.Time
		end, has = r.Context().Deadline()
		left = time.Until(end)
		return answered(200, ""), nil
	}
	w.do("GET", podsPath+"?timeout=5s", nil)
	if !has || left > 5*time.Second+deadlineSlack || left < 4*time.Second {
		t.Errorf("deadline %v in %v, want about 6s", has, left)
	}
	if w.do("GET", podsPath+"?watch=1", nil); has {
		t.Errorf("a watch has a deadline in %v", left)
	}
}
