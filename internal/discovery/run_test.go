package discovery

import (
	"fmt"
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

// An apiserver replaced by one of another age is read in the form that the new one has.
func TestFormFollowsUpgrade(t *testing.T) {
	a := newAPIServer(t)
	a.set(func(a *apiserver) { a.knows, a.version = []form{formLegacy}, "v1.25.0" })
	w := newWatcher(t, a)
	start(t, w.Run)
	w.next(t)
	for _, f := range []form{formV2Beta1, formV2, formLegacy} {
		a.set(func(a *apiserver) { a.knows, a.version = []form{f}, "v1.30.0-"+string(f) })
		w.Refresh()
		c := w.until(t, "new version", func(c *catalog.Catalog) bool { return c.ServerVersion() == "v1.30.0-"+string(f) })
		if !c.Has(catalog.Key{Group: "apps", Version: "v1", Resource: "deployments"}) || w.Status().Form != string(f) {
			t.Errorf("%s: %v, %+v", f, keys(c), w.Status())
		}
		if got := testutil.ToFloat64(w.metrics.form.WithLabelValues(string(f))); got != 1 {
			t.Errorf("mvp_discovery_form of %s is %v", f, got)
		}
	}
}

// Whatever fails, the last good catalog stays, no smaller one is published, and OnRead is not called.
func TestOutage(t *testing.T) {
	status := func(path string, code int) func(*apiserver) { return func(a *apiserver) { a.fail[path] = code } }
	breaks := func(path string) func(*apiserver) { return func(a *apiserver) { a.broken[path] = true } }
	hangs := func(path string) func(*apiserver) {
		return func(a *apiserver) {
			stop := a.stop
			a.hook = func(p string) {
				if p == path {
					<-stop
				}
			}
		}
	}
	for name, test := range map[string]struct {
		legacy bool
		harm   func(*apiserver)
		result string
		want   string // in the error
	}{
		"/apis 500":              {harm: status("/apis", 500), want: "GET /apis: 500"},
		"/apis 302":              {harm: status("/apis", 302), want: "GET /apis: 302"},
		"/apis is a Status":      {harm: status("/apis", 200), want: "kind is"},
		"/apis breaks off":       {harm: breaks("/apis"), want: "EOF"},
		"/api breaks off":        {harm: breaks("/api"), want: "EOF"},
		"/apis hangs":            {harm: hangs("/apis"), want: "deadline"},
		"/readyz hangs":          {harm: hangs("/readyz"), want: "deadline"},
		"legacy, core not found": {legacy: true, harm: status("/api/v1", 404), want: errNoCore.Error()},
		"legacy, all fail": {
			legacy: true, harm: func(a *apiserver) { a.fail["/api/v1"], a.fail["/apis/apps/v1"] = 500, 500 }, want: "none of 1 group-versions",
		},
		"stops being ready while it is read": {
			harm: func(a *apiserver) {
				a.hook = func(path string) {
					if path == "/apis" {
						a.set(func(a *apiserver) { a.readyz = 500 })
					}
				}
			},
			result: resultNotReady, want: errNotReady.Error(),
		},
		"is another one at every look": {
			harm: func(a *apiserver) {
				a.hook = func(path string) {
					if path == "/version" {
						a.set(func(a *apiserver) { a.version += "x" })
					}
				}
			},
			want: errVersionChanged.Error(),
		},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAPIServer(t)
			if test.legacy {
				a.knows = []form{formLegacy}
			}
			w := newWatcher(t, a, func(o *Options) {
				if strings.Contains(name, "hangs") {
					o.Timeout = 500 * time.Millisecond
				}
			})
			start(t, w.Run)
			first, _ := w.next(t)
			result := test.result
			if result == "" {
				result = resultError
			}
			failures := func() float64 { return testutil.ToFloat64(w.metrics.refreshes.WithLabelValues(result)) }
			before := failures()

			var whole []apidiscoveryv2.APIGroupDiscovery
			a.set(func(a *apiserver) {
				whole = a.local
				a.local = a.local[:1] // what it would list were it believed
				test.harm(a)
			})
			broken := time.Now()
			w.Refresh()
			times := 2.0
			if strings.Contains(name, "hangs") {
				times = 1 // what takes long is repeated late
			}
			eventually(t, "failed", func() bool { return failures() >= before+times })
			if err := w.Status().LastError; err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error is %v, want %q", err, test.want)
			}
			c, generation := w.Catalog()
			if c != first || generation != 1 || len(w.published) != 0 {
				t.Errorf("generation %d, %d more catalogs, %v", generation, len(w.published), keys(c))
			}
			for len(w.readings) > 0 {
				if s := <-w.readings; s.After(broken) {
					t.Error("OnRead was called of a reading that failed")
				}
			}

			a.heal()
			a.set(func(a *apiserver) { a.local = append(slices.Clone(whole), group("batch", "v1", "jobs")) })
			w.Refresh()
			c, generation = w.next(t)
			if d := cmp.Diff(append(slices.Clone(localKeys), "batch/v1/jobs"), keys(c)); d != "" || generation != 2 {
				t.Error(generation, d)
			}
			if err := w.Status().LastError; err != nil {
				t.Errorf("the error stays: %v", err)
			}
			if warned, healed := w.log.count("reading discovery failed, "), w.log.count("discovery can be read again"); warned != 1 || healed != 1 {
				t.Errorf("%d warnings and %d all-clears for one outage", warned, healed)
			}
		})
	}
}

// The apiserver's port is closed, before the node starts and after.
func TestApiserverAway(t *testing.T) {
	a := newAPIServer(t)
	a.Close()
	w := newWatcher(t, a, func(o *Options) { o.SourcesWait = time.Millisecond })
	if c, g := w.Catalog(); c != nil || g != 0 || w.Status().LastError != nil {
		t.Error("something is known before anybody was asked")
	}
	start(t, w.Run)
	eventually(t, "failed", func() bool { return w.Status().LastError != nil })
	if c, g := w.Catalog(); c != nil || g != 0 || len(w.readings) != 0 {
		t.Error("something is known of an apiserver that is away")
	}
	a.restart(t)
	c, g := w.next(t)
	if d := cmp.Diff(localKeys, keys(c)); d != "" || g != 1 {
		t.Error(g, d)
	}
}

// OnRead comes after every complete reading, behind OnCatalog, and says a time before anything was asked.
func TestOnRead(t *testing.T) {
	a := newAPIServer(t)
	var mu sync.Mutex
	var events []string
	var asked, started time.Time // of the first question of the reading under way; what OnRead said
	note := func(s string) {
		mu.Lock()
		defer mu.Unlock()
		events = append(events, s)
	}
	a.set(func(a *apiserver) {
		a.hook = func(path string) {
			mu.Lock()
			defer mu.Unlock()
			if path == "/readyz" && asked.IsZero() {
				asked = time.Now()
			}
		}
	})
	var w *watcher
	w = newWatcher(t, a, func(o *Options) {
		publish, read := o.OnCatalog, o.OnRead
		o.OnCatalog = func(c *catalog.Catalog, g uint64) {
			if now, n := w.Catalog(); now != c || n != g {
				t.Errorf("OnCatalog of generation %d while Catalog has %d", g, n)
			}
			note(fmt.Sprintf("catalog %d", g))
			publish(c, g)
		}
		o.OnRead = func(s time.Time) {
			note("read")
			mu.Lock()
			if asked.IsZero() || s.After(asked) || !s.After(started) {
				t.Errorf("OnRead of %s, the first question came at %s, the reading before began at %s", s, asked, started)
			}
			asked, started = time.Time{}, s
			mu.Unlock()
			read(s)
		}
	})
	stop := start(t, w.Run)
	w.next(t)
	w.reread(t)
	w.reread(t)
	a.set(func(a *apiserver) { a.local = append(a.local, group("batch", "v1", "jobs")) })
	w.reread(t)
	stop()
	// Echoes make more readings than were asked for.
	got := slices.Compact(events)
	if d := cmp.Diff([]string{"catalog 1", "read", "catalog 2", "read"}, got); d != "" {
		t.Error(d)
	}
	if len(events) < 6 {
		t.Errorf("unchanged readings are not told: %v", events)
	}
}

// An aggregated API that is away keeps the resources it had, in every form and for as long as it takes.
func TestStaleForLong(t *testing.T) {
	metrics := group("metrics.k8s.io", "v1beta1", "pods", "nodes")
	for _, f := range forms {
		t.Run(string(f), func(t *testing.T) {
			a := newAPIServer(t)
			a.set(func(a *apiserver) { a.knows, a.local = []form{f}, append(a.local, metrics) })
			w := newWatcher(t, a)
			start(t, w.Run)
			w.next(t)
			a.set(func(a *apiserver) {
				gone := group("metrics.k8s.io", "v1beta1")
				gone.Versions[0].Freshness = apidiscoveryv2.DiscoveryFreshnessStale
				a.local[2] = gone
				a.fail["/apis/metrics.k8s.io/v1beta1"] = 503
			})
			w.Refresh()
			c, _ := w.next(t)
			want := append(slices.Clone(localKeys), "metrics.k8s.io/v1beta1/nodes stale", "metrics.k8s.io/v1beta1/pods stale")
			if d := cmp.Diff(want, keys(c)); d != "" {
				t.Error(d)
			}
			if got := testutil.ToFloat64(w.metrics.stale); got != 1 {
				t.Errorf("mvp_discovery_stale_group_versions is %v", got)
			}
			// Still away, while something else changes.
			a.set(func(a *apiserver) { a.local = append(a.local, group("batch", "v1", "jobs")) })
			w.Refresh()
			c, _ = w.next(t)
			want = slices.Insert(want, 4, "batch/v1/jobs")
			if d := cmp.Diff(want, keys(c)); d != "" {
				t.Error(d)
			}
			a.set(func(a *apiserver) { a.local[2] = group("metrics.k8s.io", "v1beta1", "pods"); clear(a.fail) })
			w.Refresh()
			c, _ = w.next(t)
			if d := cmp.Diff(append(slices.Clone(want[:5]), "metrics.k8s.io/v1beta1/pods"), keys(c)); d != "" {
				t.Error(d)
			}
		})
	}
}

// The first catalog needs the core resources: a list without them would send requests for pods to peers.
func TestCoreIsNeverUnknown(t *testing.T) {
	for _, f := range forms {
		t.Run(string(f), func(t *testing.T) {
			a := newAPIServer(t)
			stale := group("", "v1")
			stale.Versions[0].Freshness = apidiscoveryv2.DiscoveryFreshnessStale
			a.set(func(a *apiserver) { a.knows, a.local[0], a.fail["/api/v1"] = []form{f}, stale, 500 })
			// What is not read at all fails the document by itself; here it is read besides others.
			w := newWatcher(t, a)
			start(t, w.Run)
			eventually(t, "failed", func() bool { return w.Status().LastError != nil })
			if c, _ := w.Catalog(); c != nil {
				t.Errorf("published %v", keys(c))
			}
			a.set(func(a *apiserver) { a.local[0] = group("", "v1", "pods", "pods/status"); clear(a.fail) })
			w.Refresh()
			c, _ := w.next(t)
			if d := cmp.Diff(localKeys, keys(c)); d != "" {
				t.Error(d)
			}
		})
	}
}

// The generation rises with every other content and with nothing else.
func TestGeneration(t *testing.T) {
	a := newAPIServer(t)
	w := newWatcher(t, a)
	start(t, w.Run)
	first, _ := w.next(t)
	for range 3 {
		w.reread(t)
	}
	a.set(func(a *apiserver) { slices.Reverse(a.local) }) // the order means nothing
	w.reread(t)
	if c, g := w.Catalog(); c != first || g != 1 || len(w.published) != 0 {
		t.Errorf("generation %d without a change", g)
	}
	changes := []func(*apiserver){
		func(a *apiserver) { a.version = "v1.36.4" },
		func(a *apiserver) { a.local = append(a.local, group("batch", "v1", "jobs")) },
		func(a *apiserver) { a.local[2].Versions[0].Resources[0].Verbs = []string{"get"} },
		func(a *apiserver) { a.local = a.local[:2] },
		func(a *apiserver) { a.version = "v1.36.3" },
	}
	for i, change := range changes {
		a.set(change)
		w.Refresh()
		c, g := w.next(t)
		if want := uint64(i + 2); g != want || testutil.ToFloat64(w.metrics.generation) != float64(want) {
			t.Errorf("generation %d, want %d", g, want)
		}
		if i == len(changes)-1 && c.Digest() != first.Digest() {
			t.Error("the same content has another digest")
		}
	}
}

// However many ask for a reading while one is under way, one follows.
func TestRefreshCoalesces(t *testing.T) {
	defer func(e []time.Duration) { echoes = e }(echoes)
	echoes = nil
	a := newAPIServer(t)
	w := newWatcher(t, a)
	start(t, w.Run)
	eventually(t, "watching", func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		return len(a.watches["apiservices"]) == 1 && len(a.watches["customresourcedefinitions"]) == 1
	})
	w.next(t)
	readings := func() float64 { return testutil.ToFloat64(w.metrics.refreshes.WithLabelValues(resultUnchanged)) }
	inside := make(chan struct{})
	release := make(chan struct{})
	var once sync.Once
	a.set(func(a *apiserver) {
		a.hook = func(path string) {
			if path == "/apis" {
				once.Do(func() { close(inside); <-release })
			}
		}
	})
	w.Refresh()
	<-inside
	before := readings()
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			for range 100 {
				w.Refresh()
			}
		})
	}
	wg.Wait()
	asked := time.Now()
	close(release)
	for s := range w.readings {
		if s.After(asked) {
			break
		}
	}
	if got := readings() - before; got != 2 {
		t.Errorf("%v readings, want the one under way and one more", got)
	}
	w.reread(t) // had more been waiting, this would not be the next
	if got := readings() - before; got != 3 {
		t.Errorf("%v readings after another Refresh, want 3", got)
	}
}

// The interval alone finds what changes without a sign.
func TestInterval(t *testing.T) {
	a := newAPIServer(t)
	w := newWatcher(t, a, func(o *Options) { o.Interval = 300 * time.Millisecond })
	start(t, w.Run)
	w.next(t)
	a.set(func(a *apiserver) { a.local = append(a.local, group("batch", "v1", "jobs")) })
	w.until(t, "it has jobs", func(c *catalog.Catalog) bool {
		return c.Has(catalog.Key{Group: "batch", Version: "v1", Resource: "jobs"})
	})
}

// Run ends at once, whatever it waits for.
func TestRunEnds(t *testing.T) {
	for name, paths := range map[string][]string{
		"in /readyz":  {"/readyz"},
		"in /apis":    {"/apis"},
		"in a legacy": {"/apis/apps/v1"},
		"in the lists": {
			"/apis/apiregistration.k8s.io/v1/apiservices", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
		},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAPIServer(t)
			a.set(func(a *apiserver) { a.knows = []form{formLegacy} })
			a.hang(paths...)
			inside := make(chan struct{}, 100)
			a.set(func(a *apiserver) {
				hang := a.hook
				a.hook = func(path string) {
					if slices.Contains(paths, path) {
						inside <- struct{}{}
					}
					hang(path)
				}
			})
			w := newWatcher(t, a)
			stop := start(t, w.Run)
			<-inside
			begin := time.Now()
			stop()
			if d := time.Since(begin); d > 3*time.Second {
				t.Errorf("took %s", d)
			}
			if len(w.published) != 0 || len(w.readings) != 0 || w.Status().LastError != nil {
				t.Errorf("the end looks like something else: %+v", w.Status())
			}
		})
	}
}
