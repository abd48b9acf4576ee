package discovery

import (
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apiserver/pkg/endpoints/discovery/aggregated"
	"k8s.io/apiserver/pkg/features"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
)

// The same against Kubernetes' own handlers, which negotiate, merge and make ETags as a real apiserver of the version in go.mod
// does (CASES D-04). The end-to-end tests ask whole apiservers.
func TestKubernetesNegotiation(t *testing.T) {
	if !utilfeature.DefaultFeatureGate.Enabled(features.UnknownVersionInteroperabilityProxy) {
		t.Fatal("Kubernetes' own peer proxy is off by default again: this test would show nothing")
	}
	a := newAPIServer(t)
	managers := make(map[string]aggregated.ResourceManager)
	for _, path := range []string{"/api", "/apis"} {
		local, merged := aggregated.NewResourceManager(path), aggregated.NewResourceManager(path)
		for _, g := range a.local {
			if (g.Name == "") == (path == "/api") {
				local.AddGroupVersion(g.Name, g.Versions[0])
				merged.AddGroupVersion(g.Name, g.Versions[0])
			}
		}
		if path == "/apis" {
			merged.AddGroupVersion("batch", group("batch", "v1", "jobs").Versions[0])
		}
		managers[path] = local
		a.handlers[path] = aggregated.WrapAggregatedDiscoveryToHandler(http.NotFoundHandler(), local, merged)
	}
	if got, err := newWatcher(t, a).client.get(t.Context(), "/apis", strings.TrimSuffix(accepts[formV2], ";profile=nopeer"), "", maxDocument); err != nil || !strings.Contains(string(got.body), "batch") {
		t.Fatalf("without nopeer the answer is not merged, so this test shows nothing: %v, %s", err, got.body)
	}

	w := newWatcher(t, a)
	for range 2 {
		if err := w.refresh(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	c, generation := w.Catalog()
	if d := cmp.Diff(localKeys, keys(c)); d != "" || generation != 1 || w.Status().Form != string(formV2) {
		t.Errorf("form %s, generation %d: %s", w.Status().Form, generation, d)
	}
	notModified := 0
	for _, s := range a.take() {
		if strings.HasPrefix(s, "/api") && strings.HasSuffix(s, " 304") {
			notModified++
		}
	}
	if notModified != 2 {
		t.Errorf("the second reading met %d answers 304, want 2", notModified)
	}
	managers["/apis"].AddGroupVersion("new", group("new", "v1", "things").Versions[0])
	if err := w.refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	if c, _ := w.Catalog(); !slices.Contains(keys(c), "new/v1/things") {
		t.Errorf("catalog is %v", keys(c))
	}
}
