package forward_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/forward"
	"github.com/mvp-mesh/mvp-node/internal/reqctx"
	"github.com/mvp-mesh/mvp-node/internal/route"
	mvpv1 "github.com/mvp-mesh/mvp-node/proto/mvp/v1"
)

func TestClientLeaves(t *testing.T) {
	for _, stage := range []string{"before the head", "during the body"} {
		t.Run(stage, func(t *testing.T) {
			w := newWorld(t)
			arrived, ended := make(chan struct{}), make(chan struct{})
			b := w.serve("b", upstreamTo(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
				if stage == "during the body" {
					_ = http.NewResponseController(rw).Flush()
				}
				close(arrived)
				<-r.Context().Done()
				close(ended)
			})))
			c := w.client("a")
			r := newRequest(t, "GET", watchPath, nil)
			ctx, cancel := context.WithCancel(r.Context())
			go func() {
				<-arrived
				if stage == "before the head" {
					cancel()
				}
			}()
			resp, _, err := c.RoundTrip(r.WithContext(ctx), []*route.Member{b.member, deadMember(t, "c")})
			if stage == "before the head" {
				if !errors.Is(err, context.Canceled) {
					t.Errorf("error %v", err)
				}
				if _, ok := errors.AsType[*forward.Error](err); ok {
					t.Errorf("error %v is a peer's failure", err)
				}
			} else {
				if err != nil {
					t.Fatal(err)
				}
				time.AfterFunc(10*time.Millisecond, cancel)
				if _, err := resp.Body.Read(make([]byte, 1)); !errors.Is(err, context.Canceled) {
					t.Errorf("read: %v", err)
				}
				resp.Body.Close()
			}
			within(t, time.Second, "the end of the apiserver's request", func() { <-ended })
		})
	}
}

func TestCloseEndsUpstream(t *testing.T) {
	w := newWorld(t)
	ended := make(chan struct{})
	b := w.serve("b", upstreamTo(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(rw).Flush()
		<-r.Context().Done()
		close(ended)
	})))
	resp, _, err := w.client("a").RoundTrip(newRequest(t, "GET", watchPath, nil), []*route.Member{b.member})
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	within(t, time.Second, "the end of the apiserver's request", func() { <-ended })
}

func TestBrokenUpload(t *testing.T) {
	broken := errors.New("client went away")
	for _, tc := range []struct {
		name string
		size int64
		sent int
	}{{"small", 100, 50}, {"large", 1 << 20, 200 << 10}, {"unknown length", -1, 200 << 10}} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			var whole atomic.Bool
			b := w.serve("b", upstreamTo(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
				if _, err := io.Copy(io.Discard, r.Body); err == nil {
					whole.Store(true)
				}
			})))
			body := io.MultiReader(strings.NewReader(strings.Repeat("x", tc.sent)), &brokenReader{err: broken})
			r := newRequest(t, "POST", listPath, body)
			r.ContentLength = tc.size
			var err error
			within(t, 2*time.Second, "the end", func() { _, _, err = w.client("a").RoundTrip(r, []*route.Member{b.member}) })
			if _, ok := errors.AsType[*forward.RequestBodyError](err); !ok || !errors.Is(err, broken) {
				t.Errorf("error %v (%T)", err, err)
			}
			if whole.Load() {
				t.Error("the apiserver took the body for complete")
			}
		})
	}
}

func TestLimits(t *testing.T) {
	w := newWorld(t)
	release := make(chan struct{})
	b := w.serve("b", roundTripper(func(r *http.Request) (*http.Response, error) {
		<-release
		return answer(r, 200, "ok"), nil
	}))
	other := w.serve("c", &apiserver{answer: answers})
	c := w.client("a", func(o *forward.ClientOptions) {
		o.Limits = forward.Limits{Short: 1, Long: 1, Wait: 20 * time.Millisecond}
	})
	send := func(target string, ms ...*route.Member) (string, error) {
		resp, served, err := c.RoundTrip(newRequest(t, "GET", target, nil), ms)
		if err != nil {
			return "", err
		}
		readAll(t, resp)
		return served.Node, nil
	}
	first := make(chan error, 1)
	go func() { _, err := send(getPath, b.member); first <- err }()
	waitFor(t, func() bool { return value(c.registry, "mvp_forward_inflight", "short") == 1 })

	_, err := send(getPath, b.member)
	wantError(t, err, route.PeerBusy, false)
	if node, err := send(getPath, b.member, other.member); node != "c" || err != nil {
		t.Errorf("served by %q, %v", node, err)
	}
	watch := make(chan error, 1)
	go func() { _, err := send(watchPath, b.member); watch <- err }() // a place of its own
	waitFor(t, func() bool { return value(c.registry, "mvp_forward_inflight", "long") == 1 })
	close(release)
	if err := errors.Join(<-first, <-watch); err != nil {
		t.Error(err)
	}
	if node, err := send(getPath, b.member); node != "b" || err != nil {
		t.Errorf("the place was not given back: %q, %v", node, err)
	}
	if n := value(c.registry, "mvp_forward_inflight", "short"); n != 0 {
		t.Errorf("%v in flight at the end", n)
	}
}

func TestRefusedBeforeLeaving(t *testing.T) {
	w := newWorld(t)
	b := w.serve("b", &apiserver{answer: answers})
	c := w.client("a")
	r := newRequest(t, "GET", getPath, nil, func(rc *reqctx.Request) { rc.User = nil })
	if _, _, err := c.RoundTrip(r, []*route.Member{b.member}); err == nil {
		t.Error("a request without a user left the node")
	}
	r = newRequest(t, "GET", getPath, nil, func(rc *reqctx.Request) { rc.Hop = 1 })
	_, _, err := c.RoundTrip(r, []*route.Member{b.member})
	wantError(t, err, route.LoopDetected, false)
	if len(c.wire.sent) != 0 {
		t.Errorf("sent %v", c.wire.sent)
	}
}

func TestCredentialsStayHere(t *testing.T) {
	w := newWorld(t)
	var seen http.Header
	b := w.serve("b", roundTripper(func(r *http.Request) (*http.Response, error) {
		seen = r.Header
		return answer(r, 200, "ok"), nil
	}))
	c := w.client("a")
	const canary = "s3cret-canary"
	headers := []string{
		"Authorization", "Cookie", "Proxy-Authorization", "X-Remote-User", "X-Remote-Group", "X-Remote-Extra-Scopes", "X-Remote-Uid",
		"X_Remote_User", "X-Kubernetes-Peer-Proxied", "X-Kubernetes-Apiserver-Rerouted", "X-Mvp-Node-Hop", "X-Forwarded-For",
		"Forwarded", "Idempotency-Key", "X-Idempotency-Key", "Upgrade", "Te", "X-Named", "Transfer-Encoding", "Content-Length",
	}
	fill := func(h http.Header) {
		for _, name := range headers {
			h[name] = []string{canary}
		}
		h["Connection"] = []string{"Upgrade, X-Named"}
		h["Sec-Websocket-Protocol"] = []string{"v5.channel.k8s.io, base64url.bearer.authorization.k8s.io." + canary}
		h["Accept"] = []string{"*/*"}
	}
	check := func() {
		t.Helper()
		for _, m := range c.wire.sent {
			if strings.Contains(m.String(), canary) {
				t.Errorf("on the wire: %v", m)
			}
		}
		if strings.Contains(fmt.Sprint(seen), canary) || seen.Get("Accept") != "*/*" || seen.Get("Sec-Websocket-Protocol") != "v5.channel.k8s.io" {
			t.Errorf("at the apiserver: %v", seen)
		}
	}
	r := newRequest(t, "GET", getPath, nil)
	fill(r.Header)
	resp, _, err := c.RoundTrip(r, []*route.Member{b.member})
	if err != nil {
		t.Fatal(err)
	}
	readAll(t, resp)
	check()
	if r.Header.Get("Authorization") != canary {
		t.Error("the caller's headers were changed")
	}

	// Without those whose values say what else must go, headers take a shorter way.
	delete(r.Header, "Connection")
	delete(r.Header, "X-Named")
	delete(r.Header, "Sec-Websocket-Protocol")
	c.wire.sent = nil
	if resp, _, err = c.RoundTrip(r, []*route.Member{b.member}); err != nil {
		t.Fatal(err)
	}
	readAll(t, resp)
	for _, m := range c.wire.sent {
		if strings.Contains(m.String(), canary) {
			t.Errorf("on the wire: %v", m)
		}
	}

	// A faulty ingress node that sends them: the serving node strips again.
	c.wire.change = func(m *mvpv1.ForwardRequest) {
		h := http.Header{}
		fill(h)
		for name, values := range h {
			m.GetHead().Http.Headers = append(m.GetHead().Http.Headers, &mvpv1.Header{Name: strings.ToLower(name), Values: values})
		}
	}
	resp, _, err = c.RoundTrip(newRequest(t, "GET", getPath, nil), []*route.Member{b.member})
	if err != nil {
		t.Fatal(err)
	}
	readAll(t, resp)
	c.wire.sent = nil
	check()
}
