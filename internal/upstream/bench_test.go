package upstream

import (
	"context"
	"crypto/tls"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"testing"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	"github.com/mvp-mesh/mvp-node/internal/catalog"
	"github.com/mvp-mesh/mvp-node/internal/loopguard"
	"github.com/mvp-mesh/mvp-node/internal/reqctx"
	"github.com/mvp-mesh/mvp-node/internal/route"
)

// sink is a ResponseWriter that costs nothing.
type sink struct{ h http.Header }

func (s sink) Header() http.Header         { return s.h }
func (s sink) Write(p []byte) (int, error) { return len(p), nil }
func (s sink) WriteHeader(int)             {}

// kubectlGet is a small GET as kubectl sends it.
func kubectlGet(rc *reqctx.Request) *http.Request {
	req := httptest.NewRequestWithContext(reqctx.With(context.Background(), rc), "GET", "/api/v1/namespaces/default/configmaps/a?timeout=10s", nil)
	req.Host = "10.0.0.1:6443"
	req.Header = http.Header{
		"Accept": {"application/json"}, "Accept-Encoding": {"gzip"}, "User-Agent": {"kubectl/v1.36.3 (linux/amd64) kubernetes/abcdef0"},
		"Authorization": {"Bearer abc"}, "Kubectl-Command": {"kubectl get"}, "Kubectl-Session": {"3e1b6b44-0000-4000-8000-000000000001"},
	}
	return req
}

var smallBody = make([]byte, 600)

// BenchmarkGet compares a small GET through a Transport with the same through httputil.ReverseProxy, both with a fake apiserver
// in the same process, whose cost is in the numbers of both.
func BenchmarkGet(b *testing.B) {
	answer := func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.Write(smallBody)
	}
	for _, proto := range []string{"h2", "h1", "default"} {
		a := newAPIServer(b, proto != "h1", answer)
		a.Config.Handler = http.HandlerFunc(answer) // without recording
		tr := a.transport(b, func(o *Options) {
			if proto == "h2" {
				o.ReadConnections = 0
			}
		})
		buf := make([]byte, 32<<10)
		mine := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			resp, err := tr.RoundTrip(r)
			if err != nil {
				b.Error(err)
				return
			}
			authz.StripHopByHop(resp.Header)
			h := w.Header()
			for k, v := range resp.Header {
				h[k] = v
			}
			w.WriteHeader(resp.StatusCode)
			io.CopyBuffer(struct{ io.Writer }{w}, resp.Body, buf)
			resp.Body.Close()
		})
		stock := &http.Transport{
			TLSClientConfig:    &tls.Config{RootCAs: a.certs.servingRoots, Certificates: []tls.Certificate{a.certs.front}},
			ForceAttemptHTTP2:  proto != "h1",
			DisableCompression: true, MaxIdleConnsPerHost: 100,
		}
		b.Cleanup(stock.CloseIdleConnections)
		target := &url.URL{Scheme: "https", Host: a.Listener.Addr().String()}
		names := authz.DefaultHeaderNames()
		proxy := &httputil.ReverseProxy{Transport: stock, BufferPool: pool1{buf}, Rewrite: func(p *httputil.ProxyRequest) {
			p.SetURL(target)
			p.Out.Host = p.In.Host
			rc, _ := reqctx.From(p.In.Context())
			names.Strip(p.Out.Header)
			authz.StripCredentials(p.Out.Header)
			_ = names.Set(p.Out.Header, rc.User)
			p.Out.Header.Set("Audit-Id", rc.AuditID)
			p.Out.Header.Set("X-Forwarded-For", rc.ClientAddrs[0])
			loopguard.Mark(p.Out.Header)
		}}
		for name, h := range map[string]http.Handler{"upstream": mine, "reverseproxy": proxy} {
			b.Run(proto+"/"+name, func(b *testing.B) {
				b.ReportAllocs()
				rc := alice()
				rc.Attributes = route.Attributes{Resource: true, Verb: catalog.VerbGet}
				req := kubectlGet(rc)
				for b.Loop() {
					h.ServeHTTP(sink{http.Header{}}, req)
				}
			})
		}
	}
}

type pool1 struct{ b []byte }

func (p pool1) Get() []byte { return p.b }
func (p pool1) Put([]byte)  {}

// BenchmarkOutgoing is the share of the rewriting alone.
func BenchmarkOutgoing(b *testing.B) {
	a := newAPIServer(b, true, nil)
	tr := a.transport(b)
	rc := alice()
	req := kubectlGet(rc)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := tr.outgoing(req, rc); err != nil {
			b.Fatal(err)
		}
	}
}
