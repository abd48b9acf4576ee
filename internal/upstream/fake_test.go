package upstream

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	"github.com/mvp-mesh/mvp-node/internal/pki"
	"github.com/mvp-mesh/mvp-node/internal/reqctx"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// certs are the certificates of one apiserver: its serving certificate and the front proxy's, each of a CA of its own.
type certs struct {
	serving, front         tls.Certificate
	servingRoots, frontCAs *x509.CertPool
	frontCA                *pki.CA
}

func newCerts(t testing.TB) *certs {
	t.Helper()
	ca := func(name string) (*pki.CA, *x509.CertPool) {
		c, err := pki.NewCA(pki.CAOptions{CommonName: name, Now: time.Now(), Lifetime: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		pool := x509.NewCertPool()
		pool.AppendCertsFromPEM(c.CertPEM())
		return c, pool
	}
	servingCA, servingRoots := ca("serving")
	frontCA, frontCAs := ca("front-proxy")
	serving, err := servingCA.Issue(pki.LeafOptions{CommonName: "kube-apiserver", IPs: []net.IP{net.IPv4(127, 0, 0, 1)}, Server: true, Now: time.Now(), Lifetime: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	c := &certs{serving: keyPair(t, serving), servingRoots: servingRoots, frontCAs: frontCAs, frontCA: frontCA}
	c.front = c.issueFront(t)
	return c
}

func (c *certs) issueFront(t testing.TB) tls.Certificate {
	t.Helper()
	p, err := c.frontCA.Issue(pki.LeafOptions{CommonName: "front-proxy-client", Client: true, Now: time.Now(), Lifetime: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	return keyPair(t, p)
}

func keyPair(t testing.TB, p pki.Pair) tls.Certificate {
	t.Helper()
	k, err := tls.X509KeyPair(p.CertPEM, p.KeyPEM)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// serverTLS is how a kube-apiserver listens.
func (c *certs) serverTLS(protos ...string) *tls.Config {
	return &tls.Config{
		Certificates: []tls.Certificate{c.serving},
		ClientCAs:    c.frontCAs,
		ClientAuth:   tls.RequireAndVerifyClientCert,
		NextProtos:   protos,
	}
}

// seen is a request as the apiserver got it.
type seen struct {
	Method, Target, Host, Proto string
	Header                      http.Header
	Body                        string
	ContentLength               int64
	Cert                        string // serial number of the client certificate
	Conn                        string // client's address, which tells connections apart
}

// apiserver is a fake that records what it is asked, over real TLS.
type apiserver struct {
	*httptest.Server
	certs *certs
	// answer is called after recording; nil answers 200.
	answer http.HandlerFunc

	mu   sync.Mutex
	seen []seen
}

func newAPIServer(t testing.TB, http2 bool, answer http.HandlerFunc) *apiserver {
	t.Helper()
	return startAPIServer(t, nil, newCerts(t), http2, nil, answer)
}

// newAPIServerWith speaks HTTP/2 as configured.
func newAPIServerWith(t testing.TB, configure func(*http.Server), answer http.HandlerFunc) *apiserver {
	t.Helper()
	return startAPIServer(t, nil, newCerts(t), true, configure, answer)
}

// relisten is an apiserver that came back at the same address with the same certificates.
func relisten(t testing.TB, address string, c *certs, http2 bool) *apiserver {
	t.Helper()
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	return startAPIServer(t, l, c, http2, nil, nil)
}

func startAPIServer(t testing.TB, l net.Listener, c *certs, http2 bool, configure func(*http.Server), answer http.HandlerFunc) *apiserver {
	t.Helper()
	a := &apiserver{certs: c, answer: answer}
	a.Server = httptest.NewUnstartedServer(a)
	if l != nil {
		a.Listener.Close()
		a.Listener = l
	}
	a.Config.ErrorLog = log.New(io.Discard, "", 0)
	a.Config.DisableGeneralOptionsHandler = true
	a.EnableHTTP2 = http2
	if configure != nil {
		configure(a.Config)
	}
	a.TLS = a.certs.serverTLS()
	a.StartTLS()
	t.Cleanup(func() { a.CloseClientConnections(); a.Close() })
	return a
}

func (a *apiserver) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	a.mu.Lock()
	a.seen = append(a.seen, seen{
		Method: r.Method, Target: r.RequestURI, Host: r.Host, Proto: r.Proto, Header: r.Header.Clone(), Body: string(body),
		ContentLength: r.ContentLength, Cert: r.TLS.PeerCertificates[0].SerialNumber.String(), Conn: r.RemoteAddr,
	})
	a.mu.Unlock()
	if a.answer != nil {
		a.answer(w, r)
	}
}

// take returns what was recorded and forgets it.
func (a *apiserver) take() []seen {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := a.seen
	a.seen = nil
	return s
}

func (a *apiserver) one(t testing.TB) seen {
	t.Helper()
	s := a.take()
	if len(s) != 1 {
		t.Fatalf("apiserver saw %d requests, want 1: %+v", len(s), s)
	}
	return s[0]
}

func options(t testing.TB, address string, c *certs) Options {
	t.Helper()
	o := DefaultOptions()
	o.URL = &url.URL{Scheme: "https", Host: address}
	o.Certificate = func() *tls.Certificate { return &c.front }
	o.Roots = func() *x509.CertPool { return c.servingRoots }
	o.Logger = slog.New(slog.DiscardHandler)
	o.Registerer = prometheus.NewRegistry()
	return o
}

func newTransport(t testing.TB, o Options) *Transport {
	t.Helper()
	tr, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(tr.Close)
	return tr
}

func (a *apiserver) transport(t testing.TB, change ...func(*Options)) *Transport {
	t.Helper()
	o := options(t, a.Listener.Addr().String(), a.certs)
	for _, f := range change {
		f(&o)
	}
	return newTransport(t, o)
}

// alice is the user of most tests.
func alice() *reqctx.Request {
	return &reqctx.Request{
		User:        &authz.User{Name: "alice", UID: "42", Groups: []string{"dev", "system:authenticated"}},
		AuditID:     "3e1b6b44-0000-4000-8000-000000000001",
		ClientAddrs: []string{"10.0.0.7"},
	}
}

// request makes a request as an http.Server hands it to front.
func request(t testing.TB, rc *reqctx.Request, method, target string, body []byte) *http.Request {
	t.Helper()
	var r io.Reader
	if body != nil {
		r = bytes.NewReader(body)
	}
	req := httptest.NewRequestWithContext(reqctx.With(context.Background(), rc), method, target, r)
	req.Host = "kubernetes.default.svc"
	return req
}

// send fails the test on an error.
func send(t testing.TB, tr *Transport, req *http.Request) (*http.Response, string) {
	t.Helper()
	resp, err := tr.RoundTrip(req)
	if err != nil {
		t.Fatalf("RoundTrip: %v", err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("body: %v", err)
	}
	return resp, string(b)
}

// eventually waits for a condition that another goroutine brings about.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("still not so: %s", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// overBoth runs a test with an apiserver that speaks HTTP/1.1 and with one that speaks HTTP/2.
func overBoth(t *testing.T, f func(t *testing.T, http2 bool)) {
	t.Run("http1", func(t *testing.T) { f(t, false) })
	t.Run("http2", func(t *testing.T) { f(t, true) })
}
