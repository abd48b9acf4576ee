package upstream

import (
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"testing"

	"github.com/mvp-mesh/mvp-node/internal/reqctx"
)

// targets are request-targets that must arrive byte for byte (CASES R-06).
var targets = []string{
	"/", "/version", "//version", "//api/v1/pods", "///", "/api/v1//pods", "/api/v1/pods/", "/api/v1/pods//",
	"/api/v1/namespaces/n/services/s/proxy", "/api/v1/namespaces/n/services/s/proxy/", "/api/v1/namespaces/n/pods/p/proxy//a/",
	"/apis/../api/v1/secrets", "/./x", "/a/%2e%2e/b", "/a%2Fb", "/a%2fb", "//a%2Fb", "/a%20b", "/a+b", "/a;b=c", "/a:b", "/a@b", "/%E4%BD%A0", "/%41",
	"/?", "/a?", "/a??", "/a?b", "/a?b=", "/a?b=c&b=d", "/a?b=%2F+%20&c", "/a?b=c?d=e", "/a?fieldSelector=metadata.name%3Dx&watch=true", "/a?q=a;b",
	"/a|b", `/a"b`, "/a^b`c", "/a{b}[c]", "/a%7Cb|c", "/a?q=|\"<>", "/a#b", "/a?q#f", "/näh", "*",
}

func TestTarget(t *testing.T) {
	overBoth(t, func(t *testing.T, http2 bool) {
		a := newAPIServer(t, http2, nil)
		tr := a.transport(t)
		for _, target := range targets {
			req := request(t, alice(), map[bool]string{true: "OPTIONS", false: "GET"}[target == "*"], "/", nil)
			u, err := url.ParseRequestURI(target) // as http.Server does
			if err != nil {
				t.Fatalf("%q: %v", target, err)
			}
			req.URL, req.RequestURI = u, target
			before := *u
			send(t, tr, req)
			if got := a.one(t).Target; got != target {
				t.Errorf("target %q arrived as %q", target, got)
			}
			if *u != before {
				t.Errorf("target %q: the caller's URL was changed", target)
			}
		}
	})
}

// What http.Server reads from a socket is what arrives, not only what a test parses.
func TestTargetFromSocket(t *testing.T) {
	a := newAPIServer(t, true, nil)
	tr := a.transport(t)
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		resp, err := tr.RoundTrip(r.WithContext(reqctx.With(r.Context(), alice())))
		if err != nil {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		resp.Body.Close()
	}))
	defer front.Close()
	for _, target := range targets {
		if target == "*" {
			continue // http.Server answers OPTIONS * itself
		}
		c, err := net.Dial("tcp", front.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(c, "GET "+target+" HTTP/1.1\r\nHost: kubernetes\r\nConnection: close\r\n\r\n")
		if _, err := io.ReadAll(c); err != nil {
			t.Fatal(err)
		}
		c.Close()
		if got := a.one(t).Target; got != target {
			t.Errorf("target %q arrived as %q", target, got)
		}
	}
}

func TestTargetAbsoluteForm(t *testing.T) {
	a := newAPIServer(t, true, nil)
	tr := a.transport(t)
	for target, want := range map[string]string{
		"http://kubernetes/api/v1/pods?x=y": "/api/v1/pods?x=y",
		"https://kubernetes:6443//version":  "//version",
		"http://kubernetes":                 "",
		"http://kubernetes?x":               "",
	} {
		req := request(t, alice(), "GET", "/", nil)
		u, err := url.ParseRequestURI(target)
		if err != nil {
			t.Fatal(err)
		}
		req.URL, req.RequestURI = u, target
		resp, err := tr.RoundTrip(req)
		if want == "" {
			wantNotSent(t, err)
			continue
		}
		if err != nil {
			t.Errorf("%q: %v", target, err)
			continue
		}
		resp.Body.Close()
		if got := a.one(t).Target; got != want {
			t.Errorf("target %q arrived as %q, want %q", target, got, want)
		}
	}
}

func TestTargetRefused(t *testing.T) {
	a := newAPIServer(t, true, nil)
	tr := a.transport(t)
	for _, target := range []string{"//a|b", `//a"b?q`} {
		req := request(t, alice(), "GET", "/", nil)
		u, err := url.ParseRequestURI(target)
		if err != nil {
			t.Fatal(err)
		}
		req.URL, req.RequestURI = u, target
		_, err = tr.RoundTrip(req)
		wantNotSent(t, err)
		var e *Error
		if !errors.Is(err, ErrTarget) || !errors.As(err, &e) || !e.BadRequest() {
			t.Errorf("%q: error is %v, want ErrTarget", target, err)
		}
	}
	req := request(t, alice(), "CONNECT", "/", nil)
	req.RequestURI = "example.com:443"
	if _, err := tr.RoundTrip(req); !errors.Is(err, ErrTarget) {
		t.Errorf("CONNECT: error is %v, want ErrTarget", err)
	}
}
