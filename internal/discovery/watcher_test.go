package discovery

import (
	"context"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"

	"github.com/mvp-mesh/mvp-node/internal/catalog"
)

// localKeys is what the fake apiserver serves itself.
var localKeys = []string{"v1/pods", "v1/pods/status", "apps/v1/deployments", "apps/v1/deployments/scale"}

// The catalog holds what the local apiserver serves and nothing of its peers, in whatever form it says so (CASES D-04).
func TestForms(t *testing.T) {
	tests := map[string]struct {
		change func(*apiserver)
		want   form
	}{
		"merging, knows nopeer":  {func(a *apiserver) {}, formV2},
		"one type per request":   {func(a *apiserver) { a.strict = true }, formV2},
		"refuses the parameter":  {func(a *apiserver) { a.picky = true }, formV2Beta1},
		"refuses it, strict":     {func(a *apiserver) { a.picky, a.strict = true, true }, formV2Beta1},
		"v2beta1":                {func(a *apiserver) { a.knows = []form{formV2Beta1, formLegacy} }, formV2Beta1},
		"v2beta1, strict":        {func(a *apiserver) { a.knows, a.strict = []form{formV2Beta1}, true }, formV2Beta1},
		"legacy":                 {func(a *apiserver) { a.knows = []form{formLegacy} }, formLegacy},
		"legacy, strict":         {func(a *apiserver) { a.knows, a.strict = []form{formLegacy}, true }, formLegacy},
		"does not merge, old v2": {func(a *apiserver) { a.peers = nil }, formV2},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			a := newAPIServer(t)
			a.peers = append(a.peers, group("batch", "v1", "jobs", "jobs/status"), group("apps", "v2", "deployments"))
			test.change(a)
			w := newWatcher(t, a)
			if err := w.refresh(t.Context()); err != nil {
				t.Fatal(err)
			}
			c, generation := w.Catalog()
			if d := cmp.Diff(localKeys, keys(c)); d != "" {
				t.Error(d)
			}
			if got := w.Status().Form; got != string(test.want) || generation != 1 || c.ServerVersion() != "v1.36.3" {
				t.Errorf("form %s, generation %d, version %s; want form %s", got, generation, c.ServerVersion(), test.want)
			}
		})
	}
}

// What the two forms say of the same apiserver is the same catalog, so that a change of form is no change.
func TestFormsAgree(t *testing.T) {
	var digests []catalog.Digest
	for _, f := range []form{formV2, formV2Beta1} {
		a := newAPIServer(t)
		a.knows = []form{f}
		w := newWatcher(t, a)
		if err := w.refresh(t.Context()); err != nil {
			t.Fatal(err)
		}
		c, _ := w.Catalog()
		digests = append(digests, c.Digest())
	}
	if digests[0] != digests[1] {
		t.Error("v2 and v2beta1 give different catalogs")
	}
}

// An error, whichever and wherever, keeps the last good catalog (never a smaller one) and is reported.
func TestErrorsKeepTheCatalog(t *testing.T) {
	tests := map[string]struct {
		change func(*apiserver)
		want   error
	}{
		"apis 500":           {func(a *apiserver) { a.fail["/apis"] = 500 }, nil},
		"apis 503":           {func(a *apiserver) { a.fail["/apis"] = 503 }, nil},
		"apis 404":           {func(a *apiserver) { a.fail["/apis"] = 404 }, nil},
		"api 404":            {func(a *apiserver) { a.fail["/api"] = 404 }, nil},
		"api 403":            {func(a *apiserver) { a.fail["/api"] = 403 }, nil},
		"apis breaks off":    {func(a *apiserver) { a.broken["/apis"] = true; a.local = append(a.local, group("x", "v1", "y")) }, io.ErrUnexpectedEOF},
		"no core":            {func(a *apiserver) { a.local = a.local[1:] }, errNoCore},
		"empty":              {func(a *apiserver) { a.local = nil }, errNoCore},
		"nothing acceptable": {func(a *apiserver) { a.knows = nil }, nil},
		"version 500":        {func(a *apiserver) { a.fail["/version"] = 500 }, nil},
		"version empty":      {func(a *apiserver) { a.version = "" }, nil},
		"not ready":          {func(a *apiserver) { a.readyz = 500; a.local = a.local[:1] }, errNotReady},
		"legacy, nothing but": {func(a *apiserver) {
			a.knows = []form{formLegacy}
			a.fail["/apis/apps/v1"] = 500
			a.fail["/api/v1"] = 500
		}, nil},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			a := newAPIServer(t)
			w := newWatcher(t, a)
			if err := w.refresh(t.Context()); err != nil {
				t.Fatal(err)
			}
			before, _ := w.Catalog()
			a.set(test.change)
			err := w.refresh(t.Context())
			if err == nil || test.want != nil && !errors.Is(err, test.want) {
				t.Errorf("error is %v, want %v", err, test.want)
			}
			after, generation := w.Catalog()
			if after != before || generation != 1 {
				t.Errorf("catalog changed to %v, generation %d", keys(after), generation)
			}
			if s := w.Status(); s.LastError == nil || s.LastSuccess.IsZero() {
				t.Errorf("status says %+v", s)
			}
			result := resultError
			if test.want == errNotReady {
				result = resultNotReady
			}
			if n := testutil.ToFloat64(w.metrics.refreshes.WithLabelValues(result)); n != 1 {
				t.Errorf("%v refreshes count as %s, want 1", n, result)
			}
		})
	}
}

// The apiserver becomes unready, or another, between the first and the last question of one reading.
func TestReadingIsOfOneServer(t *testing.T) {
	t.Run("not ready after", func(t *testing.T) {
		a := newAPIServer(t)
		a.hook = func(path string) {
			if path == "/apis" {
				a.set(func(a *apiserver) { a.readyz = 500 })
			}
		}
		w := newWatcher(t, a)
		if err := w.refresh(t.Context()); !errors.Is(err, errNotReady) {
			t.Errorf("error is %v, want errNotReady", err)
		}
		if c, g := w.Catalog(); c != nil || g != 0 {
			t.Error("half a reading was believed")
		}
	})
	t.Run("upgraded between", func(t *testing.T) {
		a := newAPIServer(t)
		once := sync.OnceFunc(func() {
			a.set(func(a *apiserver) { a.version = "v1.37.2"; a.local = append(a.local, group("new", "v1", "things")) })
		})
		a.hook = func(path string) {
			if path == "/apis" {
				// The answer to this question is the new server's, the version was the old one's.
				once()
			}
		}
		w := newWatcher(t, a)
		if err := w.refresh(t.Context()); err != nil {
			t.Fatal(err)
		}
		c, g := w.Catalog()
		if c.ServerVersion() != "v1.37.2" || g != 1 || !slices.Contains(keys(c), "new/v1/things") {
			t.Errorf("version %s, generation %d, keys %v", c.ServerVersion(), g, keys(c))
		}
	})
	t.Run("never the same", func(t *testing.T) {
		a := newAPIServer(t)
		a.hook = func(path string) {
			if path == "/apis" {
				a.set(func(a *apiserver) { a.version += "x" })
			}
		}
		w := newWatcher(t, a)
		if err := w.refresh(t.Context()); !errors.Is(err, errVersionChanged) {
			t.Errorf("error is %v, want errVersionChanged", err)
		}
	})
}

func TestNotModified(t *testing.T) {
	a := newAPIServer(t)
	w := newWatcher(t, a)
	refresh := func(want ...string) {
		t.Helper()
		if err := w.refresh(t.Context()); err != nil {
			t.Fatal(err)
		}
		got := slices.DeleteFunc(a.take(), func(s string) bool { return !strings.HasPrefix(s, "/api") })
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("asked for (-want +got):\n%s", d)
		}
	}
	refresh("/api 200", "/apis 200")
	refresh("/api 304", "/apis 304")
	if _, g := w.Catalog(); g != 1 {
		t.Errorf("generation is %d without a change", g)
	}
	a.set(func(a *apiserver) { a.local = append(a.local, group("new", "v1", "things")) })
	refresh("/api 304", "/apis 200")
	a.set(func(a *apiserver) { a.version = "v1.37.2" }) // the same lists of another version are another catalog
	refresh("/api 304", "/apis 304")
	a.set(func(a *apiserver) { a.local = a.local[:2] })
	refresh("/api 304", "/apis 200")
	c, g := w.Catalog()
	if d := cmp.Diff(localKeys, keys(c)); d != "" || g != 4 {
		t.Errorf("generation %d, want 4; %s", g, d)
	}
	// A server that was replaced by an older one without aggregated discovery does not get its old answers confirmed.
	a.set(func(a *apiserver) { a.knows = []form{formLegacy}; a.version = "v1.25.0" })
	if err := w.refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	if c, _ := w.Catalog(); c.ServerVersion() != "v1.25.0" || w.Status().Form != string(formLegacy) {
		t.Errorf("version %s, form %s", c.ServerVersion(), w.Status().Form)
	}
}

// A 304 that nobody asked for is an error, not an empty list.
func TestNotModifiedUnasked(t *testing.T) {
	a := newAPIServer(t)
	a.fail["/apis"] = http.StatusNotModified
	w := newWatcher(t, a)
	var se *statusError
	if err := w.refresh(t.Context()); !errors.As(err, &se) || se.status != http.StatusNotModified {
		t.Errorf("error is %v", err)
	}
	if c, _ := w.Catalog(); c != nil {
		t.Errorf("catalog is %v", keys(c))
	}
}

// An aggregated API that is away is listed as stale and keeps the resources that it had.
func TestStale(t *testing.T) {
	for _, f := range []form{formV2, formLegacy} {
		t.Run(string(f), func(t *testing.T) {
			a := newAPIServer(t)
			a.knows = []form{f}
			a.local = append(a.local, group("metrics.k8s.io", "v1beta1", "nodes"))
			w := newWatcher(t, a)
			steps := []struct {
				change func(*apiserver)
				want   []string
			}{
				{func(a *apiserver) {}, []string{"metrics.k8s.io/v1beta1/nodes"}},
				{func(a *apiserver) {
					a.local[2].Versions = []apidiscoveryv2.APIVersionDiscovery{{Version: "v1beta1", Freshness: apidiscoveryv2.DiscoveryFreshnessStale}}
					a.fail["/apis/metrics.k8s.io/v1beta1"] = 503
				}, []string{"metrics.k8s.io/v1beta1/nodes stale"}},
				{func(a *apiserver) {
					a.local[2] = group("metrics.k8s.io", "v1beta1", "nodes", "pods")
					delete(a.fail, "/apis/metrics.k8s.io/v1beta1")
				}, []string{"metrics.k8s.io/v1beta1/nodes", "metrics.k8s.io/v1beta1/pods"}},
				{func(a *apiserver) { a.local = a.local[:2] }, nil},
			}
			for i, step := range steps {
				a.set(step.change)
				if err := w.refresh(t.Context()); err != nil {
					t.Fatal(err)
				}
				c, _ := w.Catalog()
				got := slices.DeleteFunc(keys(c), func(s string) bool { return !strings.HasPrefix(s, "metrics") })
				if d := cmp.Diff(step.want, got, cmp.Transformer("nil", func(s []string) string { return strings.Join(s, ",") })); d != "" {
					t.Errorf("step %d: %s", i, d)
				}
				if n, want := testutil.ToFloat64(w.metrics.stale), map[bool]float64{true: 1}[i == 1]; n != want {
					t.Errorf("step %d: %v stale group-versions in the metric, want %v", i, n, want)
				}
			}
		})
	}
}

// An aggregated API that hangs does not take the others with it: legacy discovery asks for each group-version alone.
func TestLegacyHang(t *testing.T) {
	a := newAPIServer(t)
	a.knows = []form{formLegacy}
	a.local = append(a.local, group("metrics.k8s.io", "v1beta1", "nodes"))
	release := make(chan struct{})
	defer close(release)
	a.hook = func(path string) {
		if path == "/apis/metrics.k8s.io/v1beta1" {
			<-release
		}
	}
	w := newWatcher(t, a)
	w.fetcher.gvTimeout = 50 * time.Millisecond
	if err := w.refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	c, _ := w.Catalog()
	if d := cmp.Diff(append(slices.Clone(localKeys), "metrics.k8s.io/v1beta1 stale"), keys(c)); d != "" {
		t.Error(d)
	}
}

// runWatcher starts Run and stops it with the test.
func runWatcher(t *testing.T, w *watcher) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run returned %v", err)
		}
	})
	t.Cleanup(stop)
	return stop
}

func TestSourcesAreFollowed(t *testing.T) {
	a := newAPIServer(t)
	a.local = append(a.local, group("widgets.example.com", "v1", "widgets"), group("metrics.k8s.io", "v1beta1", "nodes"))
	a.put("apiservices", "v1.", map[string]string{managedLabel: managedBuiltin}, nil, false)
	a.put("apiservices", "v1.apps", map[string]string{managedLabel: managedBuiltin}, nil, false)
	a.put("apiservices", "v1.widgets.example.com", map[string]string{managedLabel: managedCRD}, nil, false)
	a.put("apiservices", "v1beta1.metrics.k8s.io", nil, map[string]any{"service": map[string]any{"name": "metrics-server"}}, false)
	a.put("customresourcedefinitions", "widgets.widgets.example.com", nil, nil, false)
	w := newWatcher(t, a)
	stop := runWatcher(t, w)
	c, generation := w.next(t)
	want := append(slices.Clone(localKeys), "metrics.k8s.io/v1beta1/nodes Aggregated", "widgets.example.com/v1/widgets CRD")
	if d := cmp.Diff(want, keys(c)); d != "" || generation != 1 {
		t.Errorf("the first catalog has generation %d and differs:\n%s", generation, d)
	}
	if !w.Status().SourcesKnown {
		t.Error("status says that the sources are not known")
	}

	// A new CRD: its APIService and the document come a moment after it.
	start := time.Now()
	a.set(func(a *apiserver) { a.put("customresourcedefinitions", "gears.gears.example.com", nil, nil, false) })
	eventually(t, "discovery was read because of the CRD", func() bool {
		return slices.ContainsFunc(a.take(), func(s string) bool { return strings.HasPrefix(s, "/apis ") })
	})
	a.set(func(a *apiserver) { a.local = append(a.local, group("gears.example.com", "v1", "gears")) })
	w.until(t, "the new CRD is known as one", func(c *catalog.Catalog) bool { return slices.Contains(keys(c), "gears.example.com/v1/gears CRD") })
	if d := time.Since(start); d > 4*time.Second {
		t.Errorf("the new CRD was known after %s", d)
	}

	// An APIService becomes an aggregated one; a CRD goes.
	a.set(func(a *apiserver) {
		a.put("apiservices", "v1.apps", nil, map[string]any{"service": map[string]any{"name": "x"}}, false)
	})
	w.until(t, "apps is aggregated", func(c *catalog.Catalog) bool { return slices.Contains(keys(c), "apps/v1/deployments Aggregated") })
	a.set(func(a *apiserver) {
		a.put("customresourcedefinitions", "gears.gears.example.com", nil, nil, true)
		a.local = slices.DeleteFunc(a.local, func(g apidiscoveryv2.APIGroupDiscovery) bool { return g.Name == "gears.example.com" })
	})
	w.until(t, "the CRD is gone", func(c *catalog.Catalog) bool {
		return !slices.ContainsFunc(keys(c), func(s string) bool { return strings.HasPrefix(s, "gears") })
	})

	stop()
	if err := testutil.GatherAndCompare(w.reg, strings.NewReader(`
# HELP mvp_discovery_group_versions Group-versions in the local catalog, by source.
# TYPE mvp_discovery_group_versions gauge
mvp_discovery_group_versions{source="Aggregated"} 2
mvp_discovery_group_versions{source="Builtin"} 1
mvp_discovery_group_versions{source="CRD"} 1
# HELP mvp_discovery_form 1 for the form of discovery document that the local apiserver gave last.
# TYPE mvp_discovery_form gauge
mvp_discovery_form{form="legacy"} 0
mvp_discovery_form{form="v2"} 1
mvp_discovery_form{form="v2beta1"} 0
`), "mvp_discovery_group_versions", "mvp_discovery_form"); err != nil {
		t.Error(err)
	}
}

// Without the right to read CRDs and APIServices the catalog comes, after a bounded wait, with all built in, and that is counted.
func TestSourcesForbidden(t *testing.T) {
	a := newAPIServer(t)
	a.local = append(a.local, group("widgets.example.com", "v1", "widgets"))
	a.fail["apiservices"], a.fail["customresourcedefinitions"] = 403, 403
	w := newWatcher(t, a, func(o *Options) { o.SourcesWait = 50 * time.Millisecond })
	stop := runWatcher(t, w)
	c, _ := w.next(t)
	if !slices.Contains(keys(c), "widgets.example.com/v1/widgets") {
		t.Errorf("catalog is %v", keys(c))
	}
	if w.Status().SourcesKnown {
		t.Error("status says that the sources are known")
	}
	for _, s := range []string{sourceAPIServices, sourceCRDs, sourceUnsynced} {
		eventually(t, "an error is counted for "+s, func() bool { return testutil.ToFloat64(w.metrics.sourceErrors.WithLabelValues(s)) > 0 })
	}
	// The right is given later.
	a.set(func(a *apiserver) {
		clear(a.fail)
		a.put("customresourcedefinitions", "widgets.widgets.example.com", nil, nil, false)
	})
	w.until(t, "the CRD is known as one", func(c *catalog.Catalog) bool { return slices.Contains(keys(c), "widgets.example.com/v1/widgets CRD") })
	stop()
}

// The node starts before its apiserver, sees it come, go and come back as another version.
func TestRestartOfTheServer(t *testing.T) {
	a := newAPIServer(t)
	a.readyz = 500
	w := newWatcher(t, a, func(o *Options) { o.SourcesWait = 10 * time.Millisecond })
	runWatcher(t, w)
	eventually(t, "the starting apiserver was asked more than once", func() bool {
		return testutil.ToFloat64(w.metrics.refreshes.WithLabelValues(resultNotReady)) > 1
	})
	if c, g := w.Catalog(); c != nil || g != 0 {
		t.Fatal("a starting apiserver was believed")
	}
	a.set(func(a *apiserver) { a.readyz = 200 })
	if c, g := w.next(t); g != 1 || c.ServerVersion() != "v1.36.3" {
		t.Errorf("generation %d of %s", g, c.ServerVersion())
	}
	a.set(func(a *apiserver) { a.readyz = 500; a.local = a.local[:1] })
	w.Refresh()
	eventually(t, "the stopping apiserver was asked", func() bool { return w.Status().LastError != nil })
	a.set(func(a *apiserver) {
		a.readyz, a.version = 200, "v1.37.2"
		a.local = append(a.local, group("apps", "v1", "deployments"), group("new", "v1", "things"))
	})
	w.Refresh()
	c, g := w.next(t)
	if g != 2 || c.ServerVersion() != "v1.37.2" || !slices.Contains(keys(c), "new/v1/things") {
		t.Errorf("generation %d of %s: %v", g, c.ServerVersion(), keys(c))
	}
	if s := w.Status(); s.LastError != nil {
		t.Errorf("status says %+v", s)
	}
}

func TestValidate(t *testing.T) {
	err := Options{}.Validate()
	for _, want := range []string{"Config", "OnCatalog", "Interval", "Logger"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Validate does not name %s: %v", want, err)
		}
	}
	err = ProbeOptions{}.Validate()
	for _, want := range []string{"Config", "Interval", "Logger"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Validate of the probe does not name %s: %v", want, err)
		}
	}
}
