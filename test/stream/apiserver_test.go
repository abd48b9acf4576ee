package stream_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// apiserver is a fake kube-apiserver. What the node asks for itself (discovery, readiness, reviews) it answers; what comes by the
// front proxy is for the handlers that tests register, and is noted as it arrived.
type apiserver struct {
	name   string
	serves map[string][]string // group/version -> resources or resource/subresource
	server *httptest.Server
	hold   chan struct{} // closed at the end
	conns  atomic.Int64

	mu       sync.Mutex
	handlers []route
	arrivals []*arrival
	reviews  []map[string]any
	keep     bool // note arrivals
}

type route struct {
	key    string // a part of the request-target
	handle http.HandlerFunc
}

// arrival is one request that came by the front proxy.
type arrival struct {
	method, target, alpn string
	conn                 int64 // number of the connection
	header               http.Header
	at                   time.Time
}

type connKey struct{}

func newAPIServer(t *testing.T, name string, cert tls.Certificate, clientCAs *x509.CertPool, serves map[string][]string) *apiserver {
	t.Helper()
	a := &apiserver{name: name, serves: serves, hold: make(chan struct{}), keep: true}
	a.server = httptest.NewUnstartedServer(a)
	a.server.EnableHTTP2 = true
	a.server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	a.server.Config.ConnContext = func(ctx context.Context, _ net.Conn) context.Context {
		return context.WithValue(ctx, connKey{}, a.conns.Add(1))
	}
	a.server.TLS = &tls.Config{
		Certificates: []tls.Certificate{cert}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: clientCAs, MinVersion: tls.VersionTLS12,
		NextProtos: []string{"h2", "http/1.1"},
	}
	a.server.StartTLS()
	t.Cleanup(func() {
		close(a.hold)
		a.server.CloseClientConnections()
		a.server.Close()
	})
	return a
}

func (a *apiserver) address() string { return a.server.Listener.Addr().String() }

// on has requests answered whose target contains key. The latest registration counts.
func (a *apiserver) on(key string, handle http.HandlerFunc) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.handlers = append(a.handlers, route{key, handle})
}

// seen are the arrivals whose target contains key.
func (a *apiserver) seen(key string) []*arrival {
	a.mu.Lock()
	defer a.mu.Unlock()
	var out []*arrival
	for _, r := range a.arrivals {
		if strings.Contains(r.target, key) {
			out = append(out, r)
		}
	}
	return out
}

// forget drops what was noted, so that a test that counts memory counts none of it.
func (a *apiserver) forget(keep bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.arrivals, a.keep = nil, keep
}

// ServeHTTP implements http.Handler.
func (a *apiserver) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.TLS.PeerCertificates[0].Subject.CommonName == "front-proxy-client" {
		a.proxied(w, r)
		return
	}
	switch path := r.URL.Path; {
	case path == "/readyz" || path == "/livez":
		fmt.Fprint(w, "ok")
	case path == "/version":
		reply(w, 200, map[string]string{"gitVersion": "v1.36.0"})
	case path == "/api" || path == "/apis":
		a.discovery(w, r)
	case strings.HasSuffix(path, "/subjectaccessreviews"):
		a.review(w, r)
	default:
		a.watched(w, r)
	}
}

func (a *apiserver) proxied(w http.ResponseWriter, r *http.Request) {
	conn, _ := r.Context().Value(connKey{}).(int64)
	got := &arrival{
		method: r.Method, target: r.RequestURI, alpn: r.TLS.NegotiatedProtocol, conn: conn, header: r.Header.Clone(), at: time.Now(),
	}
	a.mu.Lock()
	if a.keep {
		a.arrivals = append(a.arrivals, got)
	}
	var handle http.HandlerFunc
	for _, h := range slices.Backward(a.handlers) {
		if strings.Contains(r.RequestURI, h.key) {
			handle = h.handle
			break
		}
	}
	a.mu.Unlock()
	if handle == nil {
		// As a kube-apiserver answers a path that it has no route for.
		w.Header().Set("X-Content-Type-Options", "nosniff")
		http.Error(w, "404 page not found", http.StatusNotFound)
		return
	}
	handle(w, r)
}

func reply(w http.ResponseWriter, code int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(v)
}

// discovery answers the aggregated form. Every resource has every verb: what a request may do is not what these tests ask.
func (a *apiserver) discovery(w http.ResponseWriter, r *http.Request) {
	if accept := r.Header.Get("Accept"); !strings.Contains(accept, "APIGroupDiscoveryList") || !strings.Contains(accept, "v=v2") {
		reply(w, http.StatusNotAcceptable, metav1.Status{})
		return
	}
	verbs := []string{"create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"}
	list := apidiscoveryv2.APIGroupDiscoveryList{TypeMeta: metav1.TypeMeta{APIVersion: "apidiscovery.k8s.io/v2", Kind: "APIGroupDiscoveryList"}}
	for gv, resources := range a.serves {
		group, version, found := strings.Cut(gv, "/")
		if !found {
			group, version = "", gv
		}
		if (group == "") != (r.URL.Path == "/api") {
			continue
		}
		v := apidiscoveryv2.APIVersionDiscovery{Version: version, Freshness: apidiscoveryv2.DiscoveryFreshnessCurrent}
		for _, name := range resources {
			name, sub, isSub := strings.Cut(name, "/")
			i := slices.IndexFunc(v.Resources, func(r apidiscoveryv2.APIResourceDiscovery) bool { return r.Resource == name })
			if i < 0 {
				v.Resources = append(v.Resources, apidiscoveryv2.APIResourceDiscovery{
					Resource: name, Scope: apidiscoveryv2.ScopeNamespace, Verbs: verbs,
					ResponseKind: &metav1.GroupVersionKind{Group: group, Version: version, Kind: name},
				})
				i = len(v.Resources) - 1
			}
			if isSub {
				v.Resources[i].Subresources = append(v.Resources[i].Subresources, apidiscoveryv2.APISubresourceDiscovery{Subresource: sub, Verbs: verbs})
			}
		}
		list.Items = append(list.Items, apidiscoveryv2.APIGroupDiscovery{ObjectMeta: metav1.ObjectMeta{Name: group}, Versions: []apidiscoveryv2.APIVersionDiscovery{v}})
	}
	w.Header().Set("Content-Type", "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList")
	_ = json.NewEncoder(w).Encode(list)
}

// review allows everybody everything, and remembers the question.
func (a *apiserver) review(w http.ResponseWriter, r *http.Request) {
	var review map[string]any
	if err := json.NewDecoder(r.Body).Decode(&review); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	a.mu.Lock()
	if a.keep {
		spec, _ := review["spec"].(map[string]any)
		a.reviews = append(a.reviews, spec)
	}
	a.mu.Unlock()
	review["status"] = map[string]any{"allowed": true, "reason": "test"}
	reply(w, http.StatusCreated, review)
}

// watched gives the informers of discovery an empty list that never changes.
func (a *apiserver) watched(w http.ResponseWriter, r *http.Request) {
	switch q := r.URL.Query(); {
	case q.Has("sendInitialEvents"):
		reply(w, http.StatusUnprocessableEntity, metav1.Status{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: "Failure", Reason: metav1.StatusReasonInvalid, Code: 422,
		})
	case q.Get("watch") != "":
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(200)
		_ = http.NewResponseController(w).Flush()
		a.linger(r)
	default:
		reply(w, 200, map[string]any{"apiVersion": "v1", "kind": "List", "metadata": map[string]any{"resourceVersion": "1"}, "items": []any{}})
	}
}

// linger keeps a request open until its client goes or the test ends.
func (a *apiserver) linger(r *http.Request) {
	select {
	case <-r.Context().Done():
	case <-a.hold:
	}
}

// hijack takes the connection of a request over, as a handler of an upgrade does. Whatever comes on it from then on is in the
// reader, nothing was lost.
func hijack(t testing.TB, w http.ResponseWriter) *pipe {
	conn, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		t.Errorf("the apiserver was asked to upgrade what it cannot: %v", err)
		panic(http.ErrAbortHandler)
	}
	return &pipe{Conn: conn.(*tls.Conn), r: buffered.Reader}
}
