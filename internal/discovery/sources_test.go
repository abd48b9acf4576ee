package discovery

import (
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/mvp-mesh/mvp-node/internal/catalog"
)

// widgets makes an apiserver that serves a CRD, an aggregated API and what is built in.
func widgets(t testing.TB) *apiserver {
	a := newAPIServer(t)
	a.set(func(a *apiserver) {
		a.local = append(a.local, group("metrics.k8s.io", "v1beta1", "nodes"), group("widgets.example.com", "v1", "widgets"))
		for _, gv := range []string{"v1.", "v1.apps"} {
			a.put("apiservices", gv, map[string]string{managedLabel: managedBuiltin}, nil, false)
		}
		a.put("apiservices", "v1.widgets.example.com", map[string]string{managedLabel: managedCRD}, nil, false)
		a.put("apiservices", "v1beta1.metrics.k8s.io", nil, map[string]any{"service": map[string]any{"name": "metrics-server"}}, false)
		a.put("customresourcedefinitions", "widgets.widgets.example.com", nil, nil, false)
	})
	return a
}

// watching waits until both watches are open.
func (a *apiserver) watching(t testing.TB) {
	t.Helper()
	eventually(t, "watching", func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		return len(a.watches["apiservices"]) == 1 && len(a.watches["customresourcedefinitions"]) == 1
	})
}

func (w *watcher) sourceErrors(source string) float64 {
	return testutil.ToFloat64(w.metrics.sourceErrors.WithLabelValues(source))
}

// A new CRD is in the catalog within two seconds, though the apiserver's discovery follows it by a moment.
func TestNewCRDInTime(t *testing.T) {
	for _, behind := range []int32{0, 1, 2} {
		a := widgets(t)
		w := newWatcher(t, a, func(o *Options) { o.Interval = time.Hour })
		stop := start(t, w.Run)
		w.next(t)
		a.watching(t)
		var readings atomic.Int32
		begin := time.Now()
		a.set(func(a *apiserver) {
			// Discovery has the CRD in the reading after so many that do not.
			a.hook = func(path string) {
				if path == "/apis" && readings.Add(1) == behind+1 {
					a.set(func(a *apiserver) { a.local = append(a.local, group("gears.example.com", "v1", "gears")) })
				}
			}
			a.put("customresourcedefinitions", "gears.gears.example.com", nil, nil, false)
		})
		w.until(t, "the CRD is known as one", func(c *catalog.Catalog) bool { return slices.Contains(keys(c), "gears.example.com/v1/gears CRD") })
		if d := time.Since(begin); d > 2*time.Second {
			t.Errorf("discovery behind by %d readings: the catalog had the CRD after %s", behind, d)
		}
		stop()
	}
}

// What only one of the two lists knows is still known.
func TestOneListForbidden(t *testing.T) {
	for forbidden, want := range map[string][]string{
		"apiservices":               {"metrics.k8s.io/v1beta1/nodes", "widgets.example.com/v1/widgets CRD"},
		"customresourcedefinitions": {"metrics.k8s.io/v1beta1/nodes Aggregated", "widgets.example.com/v1/widgets CRD"},
	} {
		t.Run(forbidden, func(t *testing.T) {
			a := widgets(t)
			a.set(func(a *apiserver) { a.fail[forbidden] = 403 })
			w := newWatcher(t, a, func(o *Options) { o.SourcesWait = 500 * time.Millisecond })
			stop := start(t, w.Run)
			want := append(slices.Clone(localKeys), want...)
			w.until(t, "it has the other list's sources", func(c *catalog.Catalog) bool { return cmp.Equal(want, keys(c)) })
			// The warning is for the first failure of a row.
			eventually(t, "refused three times", func() bool { return w.sourceErrors(forbidden) >= 3 })
			stop()
			if w.Status().SourcesKnown || w.sourceErrors(sourceUnsynced) == 0 {
				t.Errorf("sources known: %v, catalogs counted as made without: %v", w.Status().SourcesKnown, w.sourceErrors(sourceUnsynced))
			}
			if n := w.log.count("cannot read what tells the source"); n != 1 {
				t.Errorf("%d warnings", n)
			}
		})
	}
}

// The right to list without the right to watch is told about once, not at every attempt: nothing is well again between two.
func TestWatchForbidden(t *testing.T) {
	a := widgets(t)
	a.set(func(a *apiserver) { a.fail["watch apiservices"] = 403 })
	w := newWatcher(t, a)
	stop := start(t, w.Run)
	c, _ := w.next(t)
	if !slices.Contains(keys(c), "metrics.k8s.io/v1beta1/nodes Aggregated") {
		t.Errorf("what was listed is not used: %v", keys(c))
	}
	eventually(t, "refused five times", func() bool { return w.sourceErrors(sourceAPIServices) >= 5 })
	a.heal()
	eventually(t, "well again", func() bool { return w.log.count("source of group-versions can be read again") > 0 })
	stop()
	if n := w.log.count("cannot read what tells the source"); n != 1 {
		t.Errorf("%d warnings", n)
	}
}

// An apiserver without streamed lists answers 422 to the first question of client-go, which then lists: that is no failure.
func TestNoStreamedLists(t *testing.T) {
	a := widgets(t)
	w := newWatcher(t, a)
	stop := start(t, w.Run)
	w.next(t)
	a.watching(t)
	stop()
	for _, s := range []string{sourceAPIServices, sourceCRDs, sourceUnsynced} {
		if n := w.sourceErrors(s); n != 0 {
			t.Errorf("%v failures are counted for %s", n, s)
		}
	}
	if n := w.log.count("level=WARN"); n != 0 {
		t.Errorf("%d warnings at a start without a fault", n)
	}
}

// What changes while no watch is open is found when it is open again.
func TestChangeWhileAway(t *testing.T) {
	a := widgets(t)
	w := newWatcher(t, a)
	start(t, w.Run)
	w.next(t)
	a.watching(t)
	a.CloseClientConnections()
	a.Close()
	a.set(func(a *apiserver) {
		a.put("customresourcedefinitions", "gears.gears.example.com", nil, nil, false)
		a.put("apiservices", "v1beta1.metrics.k8s.io", nil, nil, true)
		a.local = append(a.local, group("gears.example.com", "v1", "gears"))
		a.local = slices.DeleteFunc(a.local, func(g apidiscoveryv2.APIGroupDiscovery) bool { return g.Name == "metrics.k8s.io" })
	})
	a.restart(t)
	want := append(slices.Clone(localKeys), "gears.example.com/v1/gears CRD", "widgets.example.com/v1/widgets CRD")
	w.until(t, "the change is known", func(c *catalog.Catalog) bool { return cmp.Equal(want, keys(c)) })
}

// The last CRD of a group that is built in as well takes nothing with it.
func TestCRDDeleted(t *testing.T) {
	a := widgets(t)
	a.set(func(a *apiserver) { a.put("customresourcedefinitions", "extras.apps", nil, nil, false) })
	w := newWatcher(t, a)
	start(t, w.Run)
	c, _ := w.next(t)
	if !slices.Contains(keys(c), "apps/v1/deployments") {
		t.Errorf("a CRD in the group apps makes all of it CRDs: %v", keys(c))
	}
	a.watching(t)
	a.set(func(a *apiserver) {
		a.put("customresourcedefinitions", "extras.apps", nil, nil, true)
		a.put("customresourcedefinitions", "widgets.widgets.example.com", nil, nil, true)
		a.put("apiservices", "v1.widgets.example.com", nil, nil, true)
		a.local = a.local[:3]
	})
	want := append(slices.Clone(localKeys), "metrics.k8s.io/v1beta1/nodes Aggregated")
	w.until(t, "the CRD is gone", func(c *catalog.Catalog) bool { return cmp.Equal(want, keys(c)) })
}

// Of objects only what is needed is kept, and what is of another kind is no object.
func TestDigestOfObjects(t *testing.T) {
	service := func(spec map[string]any, labels map[string]any) *unstructured.Unstructured {
		return &unstructured.Unstructured{Object: map[string]any{
			"metadata": map[string]any{"name": "v1.a", "labels": labels, "managedFields": []any{}, "annotations": map[string]any{"a": "b"}},
			"spec":     spec, "status": map[string]any{},
		}}
	}
	for name, test := range map[string]struct {
		obj  any
		want apiService
		ok   bool
	}{
		"local":           {service(map[string]any{"group": "a"}, map[string]any{managedLabel: managedCRD}), apiService{managed: managedCRD}, true},
		"aggregated":      {service(map[string]any{"service": map[string]any{"name": "x"}}, nil), apiService{service: true}, true},
		"null":            {service(map[string]any{"service": nil}, nil), apiService{}, true},
		"not a map":       {service(map[string]any{"service": "x"}, nil), apiService{}, true},
		"nothing":         {service(nil, nil), apiService{}, true},
		"metadata":        {&metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: "v1.a"}}, apiService{}, true},
		"something else":  {&metav1.Status{}, apiService{}, false},
		"nothing at all ": {nil, apiService{}, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore("test", nil, nil, func() {})
			obj, err := s.Transformer()(test.obj)
			if err != nil {
				t.Fatal(err)
			}
			got, v, ok := digest(obj)
			if ok != test.ok || v != test.want || ok && got != "v1.a" {
				t.Errorf("%q, %+v, %v; want %+v, %v", got, v, ok, test.want, test.ok)
			}
			if u, is := obj.(*unstructured.Unstructured); is && (len(u.GetAnnotations()) > 0 || u.Object["status"] != nil || strings.Contains(string(mustJSON(u.Object)), "managedFields")) {
				t.Errorf("kept %v", u.Object)
			}
		})
	}
}
