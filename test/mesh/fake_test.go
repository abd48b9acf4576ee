// Package mesh_test runs three whole nodes in one process, over real sockets, before fake kube-apiservers that serve different
// things. The fakes record each request byte for byte, which real apiservers cannot; what needs a real one is in test/e2e.
package mesh_test

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// apiserver is a fake kube-apiserver: discovery, readiness, reviews, and a list for each resource it serves.
type apiserver struct {
	name   string
	server *httptest.Server

	mu      sync.Mutex
	version string
	serves  map[string][]string // group/version -> resources or resource/subresource
	ready   bool
	got     []*http.Request // requests that came by the front proxy
	hold    chan struct{}   // closed to end open watches
}

// newAPIServer starts a fake that trusts clientCAs, the request-header CA among them, for client certificates.
func newAPIServer(t *testing.T, name, version string, cert tls.Certificate, clientCAs *x509.CertPool, serves map[string][]string) *apiserver {
	t.Helper()
	a := &apiserver{name: name, version: version, serves: serves, ready: true, hold: make(chan struct{})}
	a.server = httptest.NewUnstartedServer(a)
	a.server.EnableHTTP2 = true
	a.server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	a.server.TLS = &tls.Config{Certificates: []tls.Certificate{cert}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: clientCAs}
	a.server.StartTLS()
	t.Cleanup(func() {
		close(a.hold)
		a.server.CloseClientConnections()
		a.server.Close()
	})
	return a
}

func (a *apiserver) set(version string, serves map[string][]string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.version, a.serves = version, serves
}

func (a *apiserver) setReady(ready bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ready = ready
}

// last returns the newest recorded request for a path.
func (a *apiserver) last(t *testing.T, path string) *http.Request {
	t.Helper()
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, r := range slices.Backward(a.got) {
		if r.URL.Path == path {
			return r
		}
	}
	t.Fatalf("%s: no request for %s arrived", a.name, path)
	return nil
}

// count is how many recorded requests had a path.
func (a *apiserver) count(path string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := 0
	for _, r := range a.got {
		if r.URL.Path == path {
			n++
		}
	}
	return n
}

// ServeHTTP implements http.Handler.
func (a *apiserver) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	version, ready := a.version, a.ready
	if r.TLS.PeerCertificates[0].Subject.CommonName == "front-proxy-client" {
		clone := r.Clone(r.Context())
		a.got = append(a.got, clone)
	}
	a.mu.Unlock()
	switch {
	case r.URL.Path == "/readyz" || r.URL.Path == "/livez":
		if !ready {
			http.Error(w, "[-]shutdown failed", http.StatusInternalServerError)
			return
		}
		fmt.Fprint(w, "ok")
	case r.URL.Path == "/version":
		reply(w, 200, map[string]string{"gitVersion": version})
	case r.URL.Path == "/api" || r.URL.Path == "/apis":
		a.discovery(w, r)
	case strings.HasSuffix(r.URL.Path, "/subjectaccessreviews"):
		a.review(w, r)
	case strings.HasSuffix(r.URL.Path, "/apiservices"), strings.HasSuffix(r.URL.Path, "/customresourcedefinitions"):
		a.watched(w, r)
	default:
		a.resource(w, r)
	}
}

func reply(w http.ResponseWriter, code int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(v)
}

// discovery answers the aggregated form; CASES D-04: with more than the truth to a client that does not ask for the local view.
func (a *apiserver) discovery(w http.ResponseWriter, r *http.Request) {
	accept := r.Header.Get("Accept")
	if !strings.Contains(accept, "APIGroupDiscoveryList") || !strings.Contains(accept, "v=v2") {
		reply(w, http.StatusNotAcceptable, metav1.Status{})
		return
	}
	a.mu.Lock()
	serves := make(map[string][]string, len(a.serves)+1)
	for gv, resources := range a.serves {
		serves[gv] = resources
	}
	a.mu.Unlock()
	if !strings.Contains(accept, "profile=nopeer") {
		serves["merged.example.com/v1"] = []string{"peerthings"}
	}
	list := apidiscoveryv2.APIGroupDiscoveryList{TypeMeta: metav1.TypeMeta{APIVersion: "apidiscovery.k8s.io/v2", Kind: "APIGroupDiscoveryList"}}
	for gv, resources := range serves {
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
				v.Resources = append(v.Resources, apidiscoveryv2.APIResourceDiscovery{Resource: name, Scope: apidiscoveryv2.ScopeCluster, ResponseKind: &metav1.GroupVersionKind{Group: group, Version: version, Kind: name}})
				i = len(v.Resources) - 1
			}
			if isSub {
				v.Resources[i].Subresources = append(v.Resources[i].Subresources, apidiscoveryv2.APISubresourceDiscovery{Subresource: sub, Verbs: []string{"get", "patch", "update"}})
			} else {
				v.Resources[i].Verbs = []string{"create", "delete", "get", "list", "patch", "update", "watch"}
			}
		}
		list.Items = append(list.Items, apidiscoveryv2.APIGroupDiscovery{ObjectMeta: metav1.ObjectMeta{Name: group}, Versions: []apidiscoveryv2.APIVersionDiscovery{v}})
	}
	w.Header().Set("Content-Type", "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList")
	_ = json.NewEncoder(w).Encode(list)
}

// review allows everybody but the user "denied".
func (a *apiserver) review(w http.ResponseWriter, r *http.Request) {
	var review map[string]any
	if err := json.NewDecoder(r.Body).Decode(&review); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	user, _ := review["spec"].(map[string]any)["user"].(string)
	review["status"] = map[string]any{"allowed": user != "denied", "reason": "test"}
	reply(w, http.StatusCreated, review)
}

// watched gives the informers of discovery an empty list that never changes.
func (a *apiserver) watched(w http.ResponseWriter, r *http.Request) {
	switch q := r.URL.Query(); {
	case q.Has("sendInitialEvents"):
		reply(w, http.StatusUnprocessableEntity, metav1.Status{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: "Failure", Reason: metav1.StatusReasonInvalid, Code: 422})
	case q.Get("watch") != "":
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(200)
		_ = http.NewResponseController(w).Flush()
		select {
		case <-r.Context().Done():
		case <-a.hold:
		}
	default:
		reply(w, 200, map[string]any{"apiVersion": "v1", "kind": "List", "metadata": map[string]any{"resourceVersion": "1"}, "items": []any{}})
	}
}

// resource answers what is served with a list, the rest as a kube-apiserver does that has no such route.
func (a *apiserver) resource(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	served := false
	for gv, resources := range a.serves {
		prefix := "/apis/" + gv + "/"
		if !strings.Contains(gv, "/") {
			prefix = "/api/" + gv + "/"
		}
		for _, name := range resources {
			served = served || r.URL.Path == prefix+name || strings.HasPrefix(r.URL.Path, prefix+name+"/")
		}
	}
	a.mu.Unlock()
	if !served {
		w.Header().Set("X-Content-Type-Options", "nosniff")
		http.Error(w, "404 page not found", http.StatusNotFound)
		return
	}
	body, _ := io.ReadAll(r.Body)
	w.Header().Set("Audit-Id", r.Header.Get("Audit-Id"))
	reply(w, 200, map[string]string{"from": a.name, "body": string(body)})
}
