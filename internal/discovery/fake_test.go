package discovery

import (
	"encoding/json"
	"encoding/pem"
	"io"
	"log"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/mvp-mesh/mvp-node/internal/catalog"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const token = "the-node's-own-token"

// apiserver is a fake kube-apiserver as far as this package asks it, over real TLS. Its fields are changed under mu, by set.
type apiserver struct {
	*httptest.Server

	handlers map[string]http.Handler // answer instead, by path; not changed while serving

	mu      sync.Mutex
	version string
	readyz  int                                // status of /readyz
	body    string                             // of /readyz
	local   []apidiscoveryv2.APIGroupDiscovery // what it serves, the core group included
	peers   []apidiscoveryv2.APIGroupDiscovery // what v2 has besides unless profile=nopeer is asked for
	knows   []form                             // forms it has
	strict  bool                               // 406 to an Accept header with more than one type
	picky   bool                               // takes no type with a profile
	fail    map[string]int                     // status by path
	broken  map[string]bool                    // path whose answer breaks off
	hook    func(path string)                  // called before an answer, without mu
	stop    chan struct{}                      // closed by heal and at the end; what hangs waits for it
	seen    []string                           // "path accept-form status"
	objects map[string]map[string]any          // apiservices and customresourcedefinitions by resource and name
	watches map[string]map[chan event]struct{} // by resource
	rv      int
}

type event struct {
	Type   string `json:"type"`
	Object any    `json:"object"`
}

func newAPIServer(t testing.TB) *apiserver {
	t.Helper()
	a := &apiserver{
		version: "v1.36.3", readyz: http.StatusOK, body: "ok", knows: []form{formV2, formV2Beta1, formLegacy},
		local:    []apidiscoveryv2.APIGroupDiscovery{group("", "v1", "pods", "pods/status"), group("apps", "v1", "deployments", "deployments/scale")},
		handlers: make(map[string]http.Handler),
		fail:     make(map[string]int), broken: make(map[string]bool), stop: make(chan struct{}),
		objects: map[string]map[string]any{"apiservices": {}, "customresourcedefinitions": {}},
		watches: map[string]map[chan event]struct{}{"apiservices": {}, "customresourcedefinitions": {}},
	}
	a.Server = httptest.NewUnstartedServer(a)
	a.Config.ErrorLog = log.New(io.Discard, "", 0)
	a.StartTLS()
	t.Cleanup(func() { a.heal(); a.CloseClientConnections(); a.Close() })
	return a
}

// restart lets a closed apiserver come back on its old address.
func (a *apiserver) restart(t testing.TB) {
	t.Helper()
	l, err := net.Listen("tcp", a.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewUnstartedServer(a)
	_ = s.Listener.Close()
	s.Listener = l
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.StartTLS()
	t.Cleanup(func() { s.CloseClientConnections(); s.Close() })
}

// hang makes the paths wait until heal.
func (a *apiserver) hang(paths ...string) {
	a.set(func(a *apiserver) {
		stop := a.stop
		a.hook = func(path string) {
			if slices.Contains(paths, path) {
				<-stop
			}
		}
	})
}

// heal makes a good apiserver of it again; what it serves stays.
func (a *apiserver) heal() {
	a.mu.Lock()
	defer a.mu.Unlock()
	close(a.stop)
	a.stop, a.hook = make(chan struct{}), nil
	clear(a.fail)
	clear(a.broken)
	a.version, a.readyz, a.body = "v1.36.3", http.StatusOK, "ok"
}

// set changes the apiserver.
func (a *apiserver) set(f func(*apiserver)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f(a)
}

func (a *apiserver) config() *rest.Config {
	return &rest.Config{
		Host:        a.URL,
		BearerToken: token,
		TLSClientConfig: rest.TLSClientConfig{
			CAData: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.Certificate().Raw}),
		},
	}
}

func (a *apiserver) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	hook := a.hook
	a.mu.Unlock()
	if hook != nil {
		hook(r.URL.Path)
	}
	if r.Header.Get("Authorization") != "Bearer "+token {
		http.Error(w, "who are you", http.StatusUnauthorized)
		return
	}
	for _, resource := range []string{"apiservices", "customresourcedefinitions"} {
		if strings.HasSuffix(r.URL.Path, "/"+resource) {
			a.serveObjects(w, r, resource)
			return
		}
	}
	if h := a.handlers[r.URL.Path]; h != nil {
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, r)
		a.set(func(a *apiserver) { a.seen = append(a.seen, r.URL.Path+" "+strconv.Itoa(rec.Code)) })
		maps.Copy(w.Header(), rec.Header())
		w.WriteHeader(rec.Code)
		_, _ = w.Write(rec.Body.Bytes())
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	status, contentType, doc := a.answer(r)
	if status == http.StatusOK && doc != nil && !a.broken[r.URL.Path] && (r.URL.Path == "/api" || r.URL.Path == "/apis") && !strings.HasSuffix(contentType, "/json") {
		etag := strconv.Quote(strconv.Itoa(len(doc)) + "-" + strconv.FormatUint(uint64(sum(doc)), 16))
		w.Header().Set("ETag", etag)
		if r.Header.Get("If-None-Match") == etag {
			status, doc = http.StatusNotModified, nil
		}
	}
	a.seen = append(a.seen, r.URL.Path+" "+strconv.Itoa(status))
	if contentType != "" {
		w.Header().Set("Content-Type", contentType)
	}
	if a.broken[r.URL.Path] {
		w.Header().Set("Content-Length", strconv.Itoa(len(doc)))
		_, _ = w.Write(doc[:len(doc)/2])
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	}
	w.WriteHeader(status)
	_, _ = w.Write(doc)
}

func sum(b []byte) (h uint32) {
	for _, c := range b {
		h = h*31 + uint32(c)
	}
	return h
}

// answer needs mu.
func (a *apiserver) answer(r *http.Request) (status int, contentType string, doc []byte) {
	path := r.URL.Path
	if s := a.fail[path]; s != 0 {
		return s, "application/json", []byte(`{"kind":"Status"}`)
	}
	switch path {
	case "/version":
		return 200, "application/json", mustJSON(map[string]string{"gitVersion": a.version})
	case "/readyz":
		return a.readyz, "text/plain", []byte(a.body)
	case "/api", "/apis":
		return a.root(r)
	}
	for _, g := range a.local {
		for _, v := range g.Versions {
			gv := catalog.GV{Group: g.Name, Version: v.Version}
			if path == "/apis/"+gv.String() || g.Name == "" && path == "/api/v1" {
				list := metav1.APIResourceList{TypeMeta: metav1.TypeMeta{Kind: "APIResourceList"}}
				for _, r := range v.Resources {
					namespaced := r.Scope == apidiscoveryv2.ScopeNamespace
					list.APIResources = append(list.APIResources, metav1.APIResource{Name: r.Resource, Kind: r.ResponseKind.Kind, Namespaced: namespaced, Verbs: r.Verbs})
					for _, s := range r.Subresources {
						list.APIResources = append(list.APIResources, metav1.APIResource{Name: r.Resource + "/" + s.Subresource, Namespaced: namespaced, Verbs: s.Verbs})
					}
				}
				return 200, "application/json", mustJSON(list)
			}
		}
	}
	return 404, "application/json", []byte(`{"kind":"Status"}`)
}

// root answers /api and /apis as an apiserver of a.knows negotiates.
func (a *apiserver) root(r *http.Request) (int, string, []byte) {
	accepts := strings.Split(r.Header.Get("Accept"), ",")
	if a.strict && len(accepts) > 1 {
		return 406, "", nil
	}
	for _, accept := range accepts {
		f, err := formOf(accept)
		if err != nil || !slices.Contains(a.knows, f) || a.picky && strings.Contains(accept, "profile=") {
			continue
		}
		groups := slices.Clone(a.local)
		if f == formV2 && !strings.Contains(accept, "profile=nopeer") {
			groups = append(groups, a.peers...)
		}
		groups = slices.DeleteFunc(groups, func(g apidiscoveryv2.APIGroupDiscovery) bool { return (g.Name == "") != (r.URL.Path == "/api") })
		if f != formLegacy {
			list := apidiscoveryv2.APIGroupDiscoveryList{TypeMeta: metav1.TypeMeta{Kind: "APIGroupDiscoveryList"}, Items: groups}
			return 200, strings.TrimSuffix(accept, ";profile=nopeer"), mustJSON(list)
		}
		if r.URL.Path == "/api" {
			return 200, "application/json", mustJSON(metav1.APIVersions{TypeMeta: metav1.TypeMeta{Kind: "APIVersions"}, Versions: []string{"v1"}})
		}
		list := metav1.APIGroupList{TypeMeta: metav1.TypeMeta{Kind: "APIGroupList"}}
		// From the APIServices in etcd: what only a peer serves is listed too.
		for _, g := range append(groups, a.peers...) {
			mg := metav1.APIGroup{Name: g.Name}
			for _, v := range g.Versions {
				mg.Versions = append(mg.Versions, metav1.GroupVersionForDiscovery{Version: v.Version})
			}
			list.Groups = append(list.Groups, mg)
		}
		return 200, "application/json", mustJSON(list)
	}
	return 406, "", nil
}

// serveObjects lists and watches.
func (a *apiserver) serveObjects(w http.ResponseWriter, r *http.Request, resource string) {
	kind := "List"
	if strings.Contains(r.Header.Get("Accept"), "PartialObjectMetadata") {
		kind = "PartialObjectMetadataList"
	}
	w.Header().Set("Content-Type", "application/json")
	a.mu.Lock()
	s := a.fail[resource]
	if s == 0 && r.URL.Query().Get("watch") != "" {
		s = a.fail["watch "+resource]
	}
	if s != 0 {
		a.mu.Unlock()
		w.WriteHeader(s)
		_ = json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: "Failure", Code: int32(s), Reason: metav1.StatusReasonForbidden})
		return
	}
	if r.URL.Query().Get("watch") == "" {
		items := make([]any, 0)
		for _, o := range a.objects[resource] {
			items = append(items, o)
		}
		list := map[string]any{"kind": kind, "apiVersion": "meta.k8s.io/v1", "metadata": map[string]any{"resourceVersion": strconv.Itoa(a.rv)}, "items": items}
		a.mu.Unlock()
		_ = json.NewEncoder(w).Encode(list)
		return
	}
	if r.URL.Query().Get("sendInitialEvents") != "" {
		a.mu.Unlock()
		w.WriteHeader(http.StatusUnprocessableEntity) // as apiservers without streaming lists do
		_ = json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: "Failure", Code: 422, Reason: metav1.StatusReasonInvalid})
		return
	}
	ch := make(chan event, 100)
	a.watches[resource][ch] = struct{}{}
	a.mu.Unlock()
	defer a.set(func(a *apiserver) { delete(a.watches[resource], ch) })
	w.(http.Flusher).Flush()
	for {
		select {
		case e := <-ch:
			if err := json.NewEncoder(w).Encode(e); err != nil {
				return
			}
			w.(http.Flusher).Flush()
		case <-r.Context().Done():
			return
		}
	}
}

// put adds or deletes an object and tells the watches. It needs mu.
func (a *apiserver) put(resource, name string, labels map[string]string, spec map[string]any, deleted bool) {
	a.rv++
	o := map[string]any{
		"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata",
		"metadata": map[string]any{"name": name, "labels": labels, "resourceVersion": strconv.Itoa(a.rv), "managedFields": []any{map[string]any{"manager": "x"}}},
		"spec":     spec,
	}
	if resource == "apiservices" {
		o["apiVersion"], o["kind"] = "apiregistration.k8s.io/v1", "APIService"
	}
	typ := "ADDED"
	if _, ok := a.objects[resource][name]; ok {
		typ = "MODIFIED"
	}
	a.objects[resource][name] = o
	if deleted {
		typ = "DELETED"
		delete(a.objects[resource], name)
	}
	for ch := range a.watches[resource] {
		ch <- event{typ, o}
	}
}

// take returns what was asked and forgets it.
func (a *apiserver) take() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := a.seen
	a.seen = nil
	return s
}

// watcher is a Watcher under test with what it published.
type watcher struct {
	*Watcher
	reg       *prometheus.Registry
	log       *logs
	published chan published
	readings  chan time.Time // their starts
}

type published struct {
	c          *catalog.Catalog
	generation uint64
}

func newWatcher(t testing.TB, a *apiserver, change ...func(*Options)) *watcher {
	t.Helper()
	w := &watcher{reg: prometheus.NewPedanticRegistry(), log: &logs{}, published: make(chan published, 1000), readings: make(chan time.Time, 1000)}
	o := DefaultOptions()
	o.Config = a.config()
	o.OnCatalog = func(c *catalog.Catalog, g uint64) { w.published <- published{c, g} }
	o.OnRead = func(start time.Time) { w.readings <- start }
	o.Logger = slog.New(slog.NewTextHandler(w.log, nil))
	o.Registerer = w.reg
	for _, f := range change {
		f(&o)
	}
	var err error
	if w.Watcher, err = New(o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.client.closeIdle)
	return w
}

// next waits for the next catalog.
func (w *watcher) next(t testing.TB) (*catalog.Catalog, uint64) {
	t.Helper()
	select {
	case p := <-w.published:
		return p.c, p.generation
	case <-time.After(20 * time.Second):
		t.Fatalf("no catalog; status is %+v", w.Status())
		return nil, 0
	}
}

// reread asks for a reading and waits for one that began afterwards.
func (w *watcher) reread(t testing.TB) {
	t.Helper()
	asked := time.Now()
	w.Refresh()
	deadline := time.After(20 * time.Second)
	for {
		select {
		case start := <-w.readings:
			if start.After(asked) {
				return
			}
		case <-deadline:
			t.Fatalf("no reading; status is %+v", w.Status())
		}
	}
}

// until waits for a catalog that fits.
func (w *watcher) until(t testing.TB, what string, ok func(*catalog.Catalog) bool) *catalog.Catalog {
	t.Helper()
	deadline := time.After(20 * time.Second)
	for {
		select {
		case p := <-w.published:
			if ok(p.c) {
				return p.c
			}
		case <-deadline:
			t.Fatalf("no catalog such that %s; status is %+v", what, w.Status())
		}
	}
}

// keys lists what a catalog serves, with the sources of group-versions that are not built in and a mark on stale ones.
func keys(c *catalog.Catalog) []string {
	var out []string
	for _, gv := range c.GroupVersions() {
		note := ""
		if gv.Source != catalog.SourceBuiltin {
			note += " " + gv.Source.String()
		}
		if gv.Stale {
			note += " stale"
		}
		if len(gv.Resources) == 0 {
			out = append(out, gv.String()+note)
		}
		for _, r := range gv.Resources {
			out = append(out, catalog.Key{Group: gv.Group, Version: gv.Version, Resource: r.Name, Subresource: r.Subresource}.String()+note)
		}
	}
	return out
}

// eventually waits for a condition that another goroutine brings about.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("still not so: %s", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}
