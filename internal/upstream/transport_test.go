package upstream

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/apiserver/pkg/authentication/request/headerrequest"
	"k8s.io/apiserver/pkg/authentication/user"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	"github.com/mvp-mesh/mvp-node/internal/route"
)

// Hostile and ordinary headers together: what the apiserver gets is exactly this list (CASES I-01, I-02, R-07, A-01, A-02).
func TestHeaders(t *testing.T) {
	in := http.Header{
		// passes
		"Accept":           {"application/json;as=Table;v=v1;g=meta.k8s.io", "application/json"},
		"Accept-Encoding":  {"gzip"},
		"User-Agent":       {"kubectl/v1.36.3"},
		"Content-Type":     {"application/vnd.kubernetes.protobuf"},
		"Impersonate-User": {"bob"},
		"If-None-Match":    {`"x"`},
		"Te":               {"trailers, deflate"},
		"X-Custom":         {"a", "b"},
		// hop by hop, among it an attempt to take away the identity
		"Connection":          {"foo, X-Remote-User, X-Remote-Group", "Impersonate-User, Authorization, Audit-ID, X-Kubernetes-Peer-Proxied"},
		"Foo":                 {"1"},
		"Keep-Alive":          {"timeout=5"},
		"Proxy-Authorization": {"Basic x"},
		"Upgrade":             {"h2c"},
		// identity, in every spelling that a server passes on
		"X-Remote-User":                   {"admin", "root"},
		"X-Remote-Group":                  {"system:masters"},
		"X-Remote-Uid":                    {"0"},
		"X-Remote-Extra-Scopes":           {"all"},
		"X_remote_user":                   {"admin"},
		"X-Remote_group":                  {"system:masters"},
		"X-Remote-Unknown":                {"x"},
		"x-remote-user":                   {"admin"},
		"X-Proxy-User":                    {"admin"},
		"X_proxy-User":                    {"admin"},
		"X-Proxy-Note-Scopes":             {"all"},
		"Authorization":                   {"Bearer secret"},
		"authorization":                   {"Bearer secret"},
		"Cookie":                          {"a=b"},
		"X-Forwarded-For":                 {"1.2.3.4"},
		"X-Real-Ip":                       {"5.6.7.8"},
		"Forwarded":                       {"for=9.9.9.9"},
		"X-Forwarded-Host":                {"evil"},
		"Audit-Id":                        {"00000000-0000-0000-0000-000000000000"},
		"Idempotency-Key":                 {"k"},
		"X-Idempotency-Key":               {"k"},
		"X-Kubernetes-Peer-Proxied":       {"false"},
		"X-Kubernetes-Apiserver-Rerouted": {"true"},
		"X-Mvp-Node-Hop":                  {"0"},
	}
	want := func() http.Header {
		return http.Header{
			"Accept":           in["Accept"],
			"Accept-Encoding":  in["Accept-Encoding"],
			"User-Agent":       in["User-Agent"],
			"Content-Type":     in["Content-Type"],
			"Impersonate-User": in["Impersonate-User"],
			"If-None-Match":    in["If-None-Match"],
			"Te":               {"trailers"},
			"X-Custom":         in["X-Custom"],

			"X-Proxy-User":              {"alice"},
			"X-Proxy-Uid":               {"42"},
			"X-Proxy-Group":             {"dev", "system:authenticated"},
			"Audit-Id":                  {"3e1b6b44-0000-4000-8000-000000000001"},
			"X-Forwarded-For":           {"10.0.0.7, 10.0.0.1"},
			"X-Kubernetes-Peer-Proxied": {"true"},
		}
	}
	custom := func(o *Options) {
		o.HeaderNames = authz.HeaderNames{
			User: []string{"x-proxy-user", "X-Old-User"}, UID: []string{"X-Proxy-Uid"}, Group: []string{"X-Proxy-Group"},
			ExtraPrefix: []string{"X-Proxy-Note-"},
		}
	}
	overBoth(t, func(t *testing.T, http2 bool) {
		a := newAPIServer(t, http2, nil)
		tr := a.transport(t, custom)
		for _, mode := range []route.Reason{0, route.ServedLocally, route.ModeDisabled} {
			t.Run(mode.String(), func(t *testing.T) {
				rc := alice()
				rc.ClientAddrs = append(rc.ClientAddrs, "10.0.0.1")
				rc.Decision.Reason = mode
				req := request(t, rc, "GET", "/api/v1/pods", nil)
				req.Header = in.Clone()
				req.Close = true
				send(t, tr, req)
				w := want()
				if mode == route.ModeDisabled {
					delete(w, "X-Kubernetes-Peer-Proxied")
				}
				got := a.one(t)
				if d := cmp.Diff(w, got.Header); d != "" {
					t.Errorf("headers at the apiserver (-want +got):\n%s", d)
				}
				if got.Host != "kubernetes.default.svc" {
					t.Errorf("Host is %q, want the client's", got.Host)
				}
				if d := cmp.Diff(in, req.Header); d != "" {
					t.Errorf("the caller's header was changed:\n%s", d)
				}
				if wantProto := map[bool]string{true: "HTTP/2.0", false: "HTTP/1.1"}[http2]; got.Proto != wantProto {
					t.Errorf("protocol is %s, want %s", got.Proto, wantProto)
				}
			})
		}
	})
}

// In mode ObserveOnly a request that would have been forwarded is left to the apiserver as if nobody stood before it.
func TestObservedIsNotMarked(t *testing.T) {
	overBoth(t, func(t *testing.T, http2 bool) {
		a := newAPIServer(t, http2, nil)
		rc := alice()
		rc.Decision = route.Decision{Outcome: route.Local, Reason: route.ServedByPeer, Observed: &route.Decision{Outcome: route.Forward}}
		send(t, a.transport(t), request(t, rc, "GET", "/version", nil))
		if got := a.one(t).Header["X-Kubernetes-Peer-Proxied"]; got != nil {
			t.Errorf("marked %q", got)
		}
	})
}

func TestNothingIsAdded(t *testing.T) {
	overBoth(t, func(t *testing.T, http2 bool) {
		a := newAPIServer(t, http2, nil)
		rc := alice()
		rc.ClientAddrs, rc.User.UID = nil, ""
		send(t, a.transport(t), request(t, rc, "GET", "/version", nil))
		want := http.Header{
			"X-Remote-User": {"alice"}, "X-Remote-Group": {"dev", "system:authenticated"},
			"Audit-Id": {rc.AuditID}, "X-Kubernetes-Peer-Proxied": {"true"},
		}
		if d := cmp.Diff(want, a.one(t).Header); d != "" {
			t.Errorf("headers at the apiserver (-want +got):\n%s", d)
		}
	})
}

// What the apiserver's own authenticator reads is what the ingress authenticated (CASES I-03, I-04).
func TestIdentityRoundTrip(t *testing.T) {
	tests := map[string]authz.User{
		"several groups": {Name: "alice", UID: "u-1", Groups: []string{"c", "a", "b"}},
		"comma":          {Name: "a,b", Groups: []string{"x, y", "z"}},
		"no groups":      {Name: "nobody"},
		"extra": {Name: "system:serviceaccount:ns:sa", Groups: []string{"system:serviceaccounts", "system:serviceaccounts:ns"}, Extra: map[string][]string{
			"authentication.kubernetes.io/credential-id": {"JTI=1", "JTI=2"},
			"scopes.example/a b":                         {"z", "y", "x"},
			"50%":                                        {"half"},
			"ünïcode/ключ":                               {"значение"},
			"under_score":                                {"1"},
			"%2f":                                        {"percent"},
			"empty-value":                                {"", "a"},
		}},
		"unicode name": {Name: "Ägidius 李", Groups: []string{"gruppe-ß"}},
	}
	for _, u := range tests {
		for k := range u.Extra {
			if k != strings.ToLower(k) {
				t.Fatalf("test key %q: the apiserver knows lower case only", k)
			}
		}
	}
	auth, err := headerrequest.New([]string{"X-Remote-User"}, []string{"X-Remote-Uid"}, []string{"X-Remote-Group"}, []string{"X-Remote-Extra-"})
	if err != nil {
		t.Fatal(err)
	}
	overBoth(t, func(t *testing.T, http2 bool) {
		got := make(chan user.Info, 1)
		a := newAPIServer(t, http2, func(_ http.ResponseWriter, r *http.Request) {
			resp, ok, err := auth.AuthenticateRequest(r)
			if !ok || err != nil {
				t.Errorf("not authenticated: %v %v", ok, err)
				got <- &user.DefaultInfo{}
				return
			}
			got <- resp.User
		})
		tr := a.transport(t)
		for name, u := range tests {
			t.Run(name, func(t *testing.T) {
				rc := alice()
				rc.User = &u
				send(t, tr, request(t, rc, "GET", "/", nil))
				i := <-got
				back := authz.User{Name: i.GetName(), UID: i.GetUID(), Groups: i.GetGroups(), Extra: i.GetExtra()}
				if len(back.Groups) == 0 {
					back.Groups = nil
				}
				if len(back.Extra) == 0 {
					back.Extra = nil
				}
				if d := cmp.Diff(u, back); d != "" {
					t.Errorf("identity changed on the way (-sent +read):\n%s", d)
				}
			})
		}
	})
}

// An identity that cannot arrive as it is does not leave.
func TestIdentityRefused(t *testing.T) {
	a := newAPIServer(t, true, nil)
	tr := a.transport(t)
	tests := map[string]struct {
		user *authz.User
		want error
	}{
		"none":          {nil, authz.ErrNoUser},
		"no name":       {&authz.User{Groups: []string{"g"}}, authz.ErrNoUser},
		"name padded":   {&authz.User{Name: " admin"}, ErrIdentity},
		"uid padded":    {&authz.User{Name: "a", UID: "1\t"}, ErrIdentity},
		"group padded":  {&authz.User{Name: "a", Groups: []string{"system:masters "}}, ErrIdentity},
		"extra padded":  {&authz.User{Name: "a", Extra: map[string][]string{"k": {" v"}}}, ErrIdentity},
		"line feed":     {&authz.User{Name: "a\nX-Remote-Group: system:masters"}, ErrIdentity},
		"group with CR": {&authz.User{Name: "a", Groups: []string{"x\ry"}}, ErrIdentity},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			rc := alice()
			rc.User = test.user
			_, err := tr.RoundTrip(request(t, rc, "POST", "/api/v1/pods", []byte("{}")))
			wantNotSent(t, err)
			if !errors.Is(err, test.want) {
				t.Errorf("error is %v, want %v", err, test.want)
			}
		})
	}
	t.Run("no context", func(t *testing.T) {
		_, err := tr.RoundTrip(httptest.NewRequest("GET", "/", nil))
		wantNotSent(t, err)
		if !errors.Is(err, authz.ErrNoUser) {
			t.Errorf("error is %v, want %v", err, authz.ErrNoUser)
		}
	})
	if got := a.take(); len(got) != 0 {
		t.Errorf("apiserver saw %+v", got)
	}
}

func wantNotSent(t testing.TB, err error) {
	t.Helper()
	var e *Error
	if !errors.As(err, &e) {
		t.Fatalf("error is %T %v, want *Error", err, err)
	}
	if !e.NotSent() {
		t.Errorf("error says the request may have been sent: %v", err)
	}
}

func wantSent(t testing.TB, err error) {
	t.Helper()
	var e *Error
	if !errors.As(err, &e) {
		t.Fatalf("error is %T %v, want *Error", err, err)
	}
	if e.NotSent() {
		t.Errorf("error says the request was certainly not sent: %v", err)
	}
}

func TestBodies(t *testing.T) {
	big := strings.Repeat("0123456789abcdef", 40<<10)
	overBoth(t, func(t *testing.T, http2 bool) {
		a := newAPIServer(t, http2, func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "ok") })
		tr := a.transport(t)
		for name, body := range map[string]string{"small": `{"a":1}`, "big": big} {
			for _, known := range []bool{true, false} {
				closed := &closing{Reader: strings.NewReader(body)}
				req := request(t, alice(), "POST", "/api/v1/pods", nil)
				req.Body, req.ContentLength = closed, int64(len(body))
				if !known {
					req.ContentLength = -1
				}
				req.GetBody = func() (io.ReadCloser, error) { t.Error("GetBody was called"); return nil, io.EOF }
				if _, got := send(t, tr, req); got != "ok" {
					t.Errorf("answer is %q", got)
				}
				s := a.one(t)
				if s.Body != body || s.ContentLength != req.ContentLength {
					t.Errorf("%s: %d bytes arrived with length %d, want %d with %d", name, len(s.Body), s.ContentLength, len(body), req.ContentLength)
				}
				eventually(t, "the body is closed", closed.isClosed)
			}
		}
		// No body, and the apiserver can tell.
		send(t, tr, request(t, alice(), "DELETE", "/api/v1/pods/p", nil))
		if s := a.one(t); s.ContentLength != 0 {
			t.Errorf("DELETE without body arrived with length %d", s.ContentLength)
		}
	})
}

func TestResponseUntouched(t *testing.T) {
	overBoth(t, func(t *testing.T, http2 bool) {
		a := newAPIServer(t, http2, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			w.Header().Set("Location", "https://attacker.example/")
			w.WriteHeader(http.StatusTemporaryRedirect)
			io.WriteString(w, "not really gzip")
		})
		resp, body := send(t, a.transport(t), request(t, alice(), "GET", "/", nil))
		if resp.StatusCode != http.StatusTemporaryRedirect || resp.Header.Get("Location") != "https://attacker.example/" {
			t.Errorf("redirect came as %d %v", resp.StatusCode, resp.Header)
		}
		if body != "not really gzip" || resp.Uncompressed {
			t.Errorf("body came as %q, uncompressed %v", body, resp.Uncompressed)
		}
		if n := len(a.take()); n != 1 {
			t.Errorf("apiserver saw %d requests", n)
		}
	})
}

// Head first, events as they come (CASES S-01, S-02): nothing here holds either back.
func TestStreaming(t *testing.T) {
	overBoth(t, func(t *testing.T, http2 bool) {
		next := make(chan string)
		a := newAPIServer(t, http2, func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(http.StatusOK)
			w.(http.Flusher).Flush()
			for s := range next {
				io.WriteString(w, s)
				w.(http.Flusher).Flush()
			}
		})
		resp, err := a.transport(t).RoundTrip(request(t, alice(), "GET", "/api/v1/pods?watch=true", nil))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		buf := make([]byte, 16)
		for _, s := range []string{"one", "two"} {
			next <- s
			n, err := resp.Body.Read(buf)
			if err != nil || string(buf[:n]) != s {
				t.Fatalf("read %q, %v; want %q", buf[:n], err, s)
			}
		}
		close(next)
	})
}

// A client that leaves ends the apiserver's request.
func TestCancel(t *testing.T) {
	overBoth(t, func(t *testing.T, http2 bool) {
		started, ended := make(chan struct{}), make(chan struct{})
		a := newAPIServer(t, http2, func(w http.ResponseWriter, r *http.Request) {
			close(started)
			<-r.Context().Done()
			close(ended)
			// An answer now could still be read: closing a TLS connection tells the other side before it stops listening.
			panic(http.ErrAbortHandler)
		})
		tr := a.transport(t)
		req := request(t, alice(), "POST", "/api/v1/pods", []byte("{}"))
		ctx, cancel := context.WithCancel(req.Context())
		go func() { <-started; cancel() }()
		_, err := tr.RoundTrip(req.WithContext(ctx))
		if !errors.Is(err, context.Canceled) {
			t.Errorf("error is %v, want canceled", err)
		}
		wantSent(t, err)
		<-ended
	})
}

// An apiserver that does not answer a dial in time is not there. That is no end of the request's own time, which callers recognise
// by context.DeadlineExceeded and do not try elsewhere.
func TestDialTimeoutIsNoDeadline(t *testing.T) {
	c := newCerts(t)
	l, err := net.Listen("tcp", "127.0.0.1:0") // accepts, by the kernel, and never speaks TLS
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for name, change := range map[string]func(*Options){
		"TCP": func(o *Options) { o.DialTimeout = time.Nanosecond },
		"TLS": func(o *Options) { o.TLSTimeout = 20 * time.Millisecond },
	} {
		t.Run(name, func(t *testing.T) {
			o := options(t, l.Addr().String(), c)
			change(&o)
			tr := newTransport(t, o)
			req := request(t, alice(), "POST", "/api/v1/pods", []byte("{}"))
			ctx, cancel := context.WithTimeout(req.Context(), time.Minute)
			defer cancel()
			_, err := tr.RoundTrip(req.WithContext(ctx))
			wantNotSent(t, err)
			if errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%v reads as the end of the request's time", err)
			}
		})
	}
}

// Before a connection is there, the end of the request's time means that nothing was sent.
func TestDeadlineBeforeConnect(t *testing.T) {
	c := newCerts(t)
	l, err := net.Listen("tcp", "127.0.0.1:0") // accepts, by the kernel, and never speaks TLS
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	tr := newTransport(t, options(t, l.Addr().String(), c))
	req := request(t, alice(), "POST", "/api/v1/pods", []byte("{}"))
	ctx, cancel := context.WithTimeout(req.Context(), 50*time.Millisecond)
	defer cancel()
	_, err = tr.RoundTrip(req.WithContext(ctx))
	wantNotSent(t, err)
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error is %v, want deadline exceeded", err)
	}
}

func TestConnectErrors(t *testing.T) {
	a := newAPIServer(t, true, nil)
	refused, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	refused.Close()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	stranger := newCerts(t)
	tests := map[string]func(*Options){
		"refused":     func(o *Options) { o.URL.Host = refused.Addr().String() },
		"silent":      func(o *Options) { o.URL.Host = silent.Addr().String(); o.TLSTimeout = 50 * time.Millisecond },
		"unknown CA":  func(o *Options) { o.Roots = func() *x509.CertPool { return stranger.servingRoots } },
		"other name":  func(o *Options) { o.ServerName = "example.com" },
		"no pair":     func(o *Options) { o.Certificate = func() *tls.Certificate { return nil } },
		"no roots":    func(o *Options) { o.Roots = func() *x509.CertPool { return nil } },
		"refused, h1": func(o *Options) { o.URL.Host = refused.Addr().String(); o.HTTP1 = true },
	}
	for name, change := range tests {
		t.Run(name, func(t *testing.T) {
			reg := prometheus.NewPedanticRegistry()
			tr := a.transport(t, change, func(o *Options) { o.Registerer = reg })
			closed := &closing{Reader: strings.NewReader("{}")}
			req := request(t, alice(), "POST", "/api/v1/pods", nil)
			req.Body, req.ContentLength = closed, 2
			_, err := tr.RoundTrip(req)
			wantNotSent(t, err)
			if e := new(Error); !errors.As(err, &e) || e.Op != OpConnect {
				t.Errorf("error is %v, want one of op connect", err)
			}
			if !closed.isClosed() {
				t.Error("body was not closed")
			}
			if err := testutil.GatherAndCompare(reg, strings.NewReader(`
# HELP mvp_upstream_errors_total Requests that got no response from the local apiserver, by step and by whether it may have seen them.
# TYPE mvp_upstream_errors_total counter
mvp_upstream_errors_total{op="body",sent="false"} 0
mvp_upstream_errors_total{op="connect",sent="false"} 1
mvp_upstream_errors_total{op="identity",sent="false"} 0
mvp_upstream_errors_total{op="outdated",sent="false"} 0
mvp_upstream_errors_total{op="send",sent="false"} 0
mvp_upstream_errors_total{op="send",sent="true"} 0
mvp_upstream_errors_total{op="target",sent="false"} 0
mvp_upstream_errors_total{op="upgrade",sent="true"} 0
# HELP mvp_upstream_moved_total Requests moved to another connection because the first certainly had not delivered them.
# TYPE mvp_upstream_moved_total counter
mvp_upstream_moved_total 0
`), "mvp_upstream_errors_total", "mvp_upstream_moved_total"); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestClosed(t *testing.T) {
	a := newAPIServer(t, true, nil)
	tr := a.transport(t)
	send(t, tr, request(t, alice(), "GET", "/", nil))
	tr.Close()
	_, err := tr.RoundTrip(request(t, alice(), "GET", "/", nil))
	wantNotSent(t, err)
	if !errors.Is(err, ErrClosed) {
		t.Errorf("error is %v, want ErrClosed", err)
	}
}

func TestValidate(t *testing.T) {
	o := Options{URL: &url.URL{Scheme: "http", Host: "x"}}
	err := o.Validate()
	for _, want := range []string{"URL", "Certificate", "Roots", "HeaderNames", "Connections", "DialTimeout", "PingAfter", "Logger"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Validate does not name %s: %v", want, err)
		}
	}
}
