package upstream

import (
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	"github.com/mvp-mesh/mvp-node/internal/loopguard"
)

// plain is header written as a list of steps; it is what header's single pass must equal.
func plain(n authz.HeaderNames, in http.Header) http.Header {
	h := make(http.Header)
	for name, values := range in {
		for _, v := range values {
			h.Add(name, v)
		}
	}
	te := false
	for _, v := range in["Te"] {
		te = te || strings.Contains(v, "trailers")
	}
	authz.StripHopByHop(h)
	authz.StripCredentials(h)
	authz.StripForwarding(h)
	authz.StripReplayKeys(h)
	n.Strip(h)
	loopguard.Strip(h)
	h.Del("Audit-ID")
	if te {
		h.Set("Te", "trailers")
	}
	if _, ok := h["User-Agent"]; !ok {
		h["User-Agent"] = nil
	}
	rc := alice()
	h.Set("Audit-ID", rc.AuditID)
	h.Set("X-Forwarded-For", strings.Join(rc.ClientAddrs, ", "))
	loopguard.Mark(h)
	_ = n.Set(h, rc.User)
	return h
}

func FuzzHeader(f *testing.F) {
	f.Add("Accept: a\nConnection: foo, X-Remote-User\nFoo: 1\nX_Remote_User: x")
	f.Add("connection: close\nTE: trailers\nX-Forwarded-For: 1.2.3.4\nAudit-ID: x\nIdempotency-Key: y")
	f.Add("Connection: Impersonate-User, User-Agent\nImpersonate-User: bob\nUser-Agent: a\nX-MVP-Node-Hop: 1\nx-kubernetes-peer-proxied: false")
	t := &Transport{names: authz.DefaultHeaderNames(), userKey: "X-Remote-User"}
	f.Fuzz(func(tt *testing.T, s string) {
		in := make(http.Header)
		for line := range strings.SplitSeq(s, "\n") {
			name, value, ok := strings.Cut(line, ":")
			if ok && name != "" {
				in.Add(name, strings.TrimSpace(value))
			}
		}
		before := in.Clone()
		got, err := t.header(in, alice())
		if err != nil {
			tt.Fatal(err)
		}
		if d := cmp.Diff(plain(t.names, in), got); d != "" {
			tt.Errorf("header differs from its steps (-steps +header):\n%s", d)
		}
		if d := cmp.Diff(before, in); d != "" {
			tt.Errorf("the incoming header was changed:\n%s", d)
		}
		if !t.identified(&http.Request{Header: got}, alice()) {
			tt.Errorf("identity is not on %v", got)
		}
	})
}

// Whatever target is accepted is written as it was read.
func FuzzTarget(f *testing.F) {
	for _, s := range targets {
		f.Add(s)
	}
	base := &url.URL{Scheme: "https", Host: "127.0.0.1:6443"}
	t := &Transport{url: base}
	f.Fuzz(func(tt *testing.T, target string) {
		u, err := url.ParseRequestURI(target)
		if err != nil || !strings.HasPrefix(target, "/") {
			return
		}
		out, err := t.target(&http.Request{Method: "GET", URL: u, RequestURI: target})
		if err != nil {
			return
		}
		if got := out.RequestURI(); got != target {
			tt.Errorf("target %q would be written as %q", target, got)
		}
		if out.Host != base.Host || out.Scheme != "https" {
			tt.Errorf("target %q leads to %s://%s", target, out.Scheme, out.Host)
		}
	})
}
