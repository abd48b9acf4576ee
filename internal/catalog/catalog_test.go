package catalog

import (
	"fmt"
	"math/rand"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// sample is a catalog with every kind of thing in it.
func sample() []GroupVersion {
	return []GroupVersion{
		{GV: GV{"", "v1"}, Source: SourceBuiltin, Resources: []Resource{
			{Name: "pods", Kind: "Pod", Namespaced: true, Verbs: ParseVerbs([]string{"get", "list", "watch", "create", "delete"})},
			{Name: "pods", Subresource: "exec", Kind: "PodExecOptions", Namespaced: true, Verbs: ParseVerbs([]string{"get", "create"})},
			{Name: "nodes", Kind: "Node", Verbs: ParseVerbs([]string{"get", "list"})},
		}},
		{GV: GV{"apps", "v1"}, Source: SourceBuiltin, Resources: []Resource{
			{Name: "deployments", Kind: "Deployment", Namespaced: true, Verbs: ParseVerbs([]string{"get"})},
			{Name: "deployments", Subresource: "scale", Kind: "Scale", Namespaced: true, Verbs: ParseVerbs([]string{"get", "patch"})},
		}},
		{GV: GV{"example.com", "v1"}, Source: SourceCRD, Resources: []Resource{{Name: "widgets", Kind: "Widget"}}},
		{GV: GV{"metrics.k8s.io", "v1beta1"}, Source: SourceAggregated, Stale: true},
	}
}

func mustNew(t testing.TB, version string, gvs []GroupVersion) *Catalog {
	t.Helper()
	c, err := New(version, gvs)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// The digest says what is served, not in which order a document listed it; the same for what the catalog gives back.
func TestDigestIsCanonical(t *testing.T) {
	want := mustNew(t, "v1.36.3", sample())
	r := rand.New(rand.NewSource(1))
	for range 200 {
		gvs := sample()
		r.Shuffle(len(gvs), func(i, j int) { gvs[i], gvs[j] = gvs[j], gvs[i] })
		for _, gv := range gvs {
			rs := gv.Resources
			r.Shuffle(len(rs), func(i, j int) { rs[i], rs[j] = rs[j], rs[i] })
		}
		got := mustNew(t, "v1.36.3", gvs)
		if got.Digest() != want.Digest() {
			t.Fatalf("another digest for %v", gvs)
		}
		if diff := cmp.Diff(want.GroupVersions(), got.GroupVersions()); diff != "" {
			t.Fatal(diff)
		}
	}
}

// Every fact is in the digest, and bytes do not move from one fact to its neighbour unseen.
func TestDigestSeesEveryField(t *testing.T) {
	seen := map[Digest]string{}
	for _, tc := range []struct {
		name    string
		version string
		change  func(gvs []GroupVersion) []GroupVersion
	}{
		{name: "nothing"},
		{name: "server version", version: "v1.36.4"},
		{name: "group", change: func(g []GroupVersion) []GroupVersion { g[1].Group = "app"; return g }},
		{name: "version", change: func(g []GroupVersion) []GroupVersion { g[1].Version = "v2"; return g }},
		{name: "group to version", change: func(g []GroupVersion) []GroupVersion { g[1].GV = GV{"app", "sv1"}; return g }},
		{name: "source", change: func(g []GroupVersion) []GroupVersion { g[1].Source = SourceCRD; return g }},
		{name: "another source", change: func(g []GroupVersion) []GroupVersion { g[1].Source = SourceAggregated; return g }},
		{name: "stale", change: func(g []GroupVersion) []GroupVersion { g[1].Stale = true; return g }},
		{name: "resource", change: func(g []GroupVersion) []GroupVersion { g[1].Resources[0].Name = "deployment"; return g }},
		{name: "subresource", change: func(g []GroupVersion) []GroupVersion { g[1].Resources[1].Subresource = "scales"; return g }},
		{name: "name to subresource", change: func(g []GroupVersion) []GroupVersion {
			g[1].Resources[1].Name, g[1].Resources[1].Subresource = "deployment", "sscale"
			return g
		}},
		{name: "kind", change: func(g []GroupVersion) []GroupVersion { g[1].Resources[0].Kind = "Deploymen"; return g }},
		{name: "namespaced", change: func(g []GroupVersion) []GroupVersion { g[1].Resources[0].Namespaced = false; return g }},
		{name: "verbs", change: func(g []GroupVersion) []GroupVersion { g[1].Resources[0].Verbs |= Verbs(VerbList); return g }},
		{name: "no verbs", change: func(g []GroupVersion) []GroupVersion { g[1].Resources[0].Verbs = 0; return g }},
		{name: "less resources", change: func(g []GroupVersion) []GroupVersion { g[1].Resources = g[1].Resources[:1]; return g }},
		{name: "less group-versions", change: func(g []GroupVersion) []GroupVersion { return g[:3] }},
		{name: "an empty group-version", change: func(g []GroupVersion) []GroupVersion {
			return append(g, GroupVersion{GV: GV{"z", "v1"}, Source: SourceBuiltin})
		}},
	} {
		gvs, version := sample(), "v1.36.3"
		if tc.change != nil {
			gvs = tc.change(gvs)
		}
		if tc.version != "" {
			version = tc.version
		}
		d := mustNew(t, version, gvs).Digest()
		if other, dup := seen[d]; dup {
			t.Errorf("changing %s and changing %s give the same digest", tc.name, other)
		}
		seen[d] = tc.name
	}
}

// The digest travels between nodes of different releases: its value is part of the wire format.
func TestDigestIsStable(t *testing.T) {
	const want = "c263138267a2a5dbf8ed9fbbd1c8dbb81e9abb2146dcc874f71989095f9c3577"
	d := mustNew(t, "v1.36.3", sample()).Digest()
	if d.String() != want || d.Short() != want[:12] || d.IsZero() || !(Digest{}).IsZero() {
		t.Errorf("digest = %s, want %s; if the form of the digest changes on purpose, change its name in sum too", d, want)
	}
}

func TestServes(t *testing.T) {
	c := mustNew(t, "v1.36.3", sample())
	for _, tc := range []struct {
		key  Key
		verb Verb
		want bool
	}{
		{Key{"", "v1", "pods", ""}, VerbGet, true},
		{Key{"", "v1", "pods", ""}, VerbPatch, false},
		{Key{"", "v1", "pods", "exec"}, VerbCreate, true},
		{Key{"", "v1", "pods", "exec"}, VerbDelete, false},
		{Key{"", "v1", "pods", "attach"}, VerbCreate, false},
		{Key{"apps", "v1", "deployments", "scale"}, VerbPatch, true},
		{Key{"apps", "v2", "deployments", ""}, VerbGet, false},
		{Key{"example.com", "v1", "widgets", ""}, VerbGet, false},
		// A method that discovery has no verb for is served where the resource is.
		{Key{"", "v1", "pods", ""}, 0, true},
		{Key{"example.com", "v1", "widgets", ""}, 0, true},
		{Key{"", "v1", "pods", "attach"}, 0, false},
	} {
		if got := c.Serves(tc.key, tc.verb); got != tc.want {
			t.Errorf("Serves(%s, %s) = %v", tc.key, tc.verb, got)
		}
	}
	if !c.Has(Key{"example.com", "v1", "widgets", ""}) || c.Has(Key{"example.com", "v1", "gadgets", ""}) {
		t.Error("Has is wrong about example.com/v1")
	}
	if c.ServerVersion() != "v1.36.3" || c.Len() != 6 {
		t.Errorf("ServerVersion, Len = %s, %d", c.ServerVersion(), c.Len())
	}
	if gv, ok := c.Lookup(GV{"metrics.k8s.io", "v1beta1"}); !ok || gv.Source != SourceAggregated || !gv.Stale {
		t.Errorf("Lookup of metrics.k8s.io/v1beta1 = %v, %v", gv, ok)
	}
	if _, ok := c.Lookup(GV{"metrics.k8s.io", "v1"}); ok {
		t.Error("Lookup found a group-version that is not there")
	}
}

// A catalog keeps no hold of what it was made from: the caller may go on using its slices.
func TestNewCopies(t *testing.T) {
	gvs := sample()
	c := mustNew(t, "v1.36.3", gvs)
	gvs[1].Group = "changed"
	gvs[1].Resources[0] = Resource{Name: "changed"}
	if diff := cmp.Diff(mustNew(t, "v1.36.3", sample()).GroupVersions(), c.GroupVersions()); diff != "" {
		t.Error(diff)
	}
}

// What a peer sends passes through New: nothing malformed or oversized may become a Catalog.
func TestNewRefuses(t *testing.T) {
	long := strings.Repeat("x", maxName+1)
	builtin := func(gv GV, rs ...Resource) []GroupVersion {
		return []GroupVersion{{GV: gv, Source: SourceBuiltin, Resources: rs}}
	}
	apps := GV{"apps", "v1"}
	for _, tc := range []struct {
		name    string
		version string // "v1" if empty
		gvs     []GroupVersion
		want    string
	}{
		{"long server version", long, nil, `catalog: server version "xxxxxxxxxxxxxxxxxxxx" is empty or longer than 253 bytes`},
		{"no version", "", builtin(GV{"apps", ""}), `catalog: group-version "apps/": empty version or a name longer than 253 bytes`},
		{"long group", "", builtin(GV{long, "v1"}), `catalog: group-version "` + long[:60] + `": empty version or a name longer than 253 bytes`},
		{"long version", "", builtin(GV{"", long}), `catalog: group-version "` + long[:60] + `": empty version or a name longer than 253 bytes`},
		{"no source", "", []GroupVersion{{GV: apps}}, `catalog: group-version apps/v1: unknown source 0`},
		{"unknown source", "", []GroupVersion{{GV: apps, Source: 4}}, `catalog: group-version apps/v1: unknown source 4`},
		{"group-version twice", "", append(builtin(apps), builtin(apps)...), `catalog: group-version apps/v1: listed twice`},
		{"no resource name", "", builtin(apps, Resource{}), `catalog: resource "apps/v1/": empty name or a name longer than 253 bytes`},
		{"long resource", "", builtin(apps, Resource{Name: long}), `catalog: resource "apps/v1/` + long[:52] + `": empty name or a name longer than 253 bytes`},
		{"long subresource", "", builtin(apps, Resource{Name: "a", Subresource: long}), `catalog: resource "apps/v1/a/` + long[:50] + `": empty name or a name longer than 253 bytes`},
		{"long kind", "", builtin(apps, Resource{Name: "a", Kind: long}), `catalog: resource "apps/v1/a": empty name or a name longer than 253 bytes`},
		{"resource twice", "", builtin(apps, Resource{Name: "a"}, Resource{Name: "b"}, Resource{Name: "a"}), `catalog: resource apps/v1/a: listed twice`},
		{"subresource twice", "", builtin(apps, Resource{Name: "a", Subresource: "s"}, Resource{Name: "a", Subresource: "s"}), `catalog: resource apps/v1/a/s: listed twice`},
		{"too many group-versions", "", make([]GroupVersion, MaxGroupVersions+1), `catalog: 20001 group-versions, at most 20000 allowed`},
		{"too many resources", "", builtin(apps, make([]Resource, MaxResources+1)...), `catalog: 100001 resources, at most 100000 allowed`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			version := tc.version
			if version == "" {
				version = "v1"
			}
			if _, err := New(version, tc.gvs); err == nil || err.Error() != tc.want {
				t.Errorf("err = %v, want %s", err, tc.want)
			}
		})
	}
	if _, err := New("", nil); err == nil {
		t.Error("an empty server version was accepted")
	}
}

// The limits themselves are allowed.
func TestNewAtTheLimits(t *testing.T) {
	rs := make([]Resource, MaxResources)
	for i := range rs {
		rs[i] = Resource{Name: fmt.Sprint("r", i), Verbs: Verbs(VerbGet)}
	}
	rs[0].Subresource, rs[0].Kind = strings.Repeat("s", maxName), strings.Repeat("k", maxName)
	gvs := make([]GroupVersion, MaxGroupVersions)
	for i := range gvs {
		gvs[i] = GroupVersion{GV: GV{strings.Repeat("g", maxName), fmt.Sprint("v", i)}, Source: SourceCRD}
	}
	gvs[0].Resources = rs
	c := mustNew(t, strings.Repeat("v", maxName), gvs)
	if c.Len() != MaxResources || len(c.GroupVersions()) != MaxGroupVersions {
		t.Errorf("%d resources in %d group-versions", c.Len(), len(c.GroupVersions()))
	}
}

func TestNames(t *testing.T) {
	for _, tc := range []struct{ got, want string }{
		{GV{"", "v1"}.String(), "v1"},
		{GV{"apps", "v1"}.String(), "apps/v1"},
		{Key{"", "v1", "pods", ""}.String(), "v1/pods"},
		{Key{"apps", "v1", "deployments", "scale"}.String(), "apps/v1/deployments/scale"},
		{SourceBuiltin.String(), "Builtin"},
		{SourceCRD.String(), "CRD"},
		{SourceAggregated.String(), "Aggregated"},
		{Source(0).String(), "Unknown"},
	} {
		if tc.got != tc.want {
			t.Errorf("got %q, want %q", tc.got, tc.want)
		}
	}
	if SourceBuiltin.Shared() || !SourceCRD.Shared() || !SourceAggregated.Shared() || Source(0).Shared() {
		t.Error("wrong sources are shared through etcd")
	}
}
