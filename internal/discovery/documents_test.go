package discovery

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/mvp-mesh/mvp-node/internal/catalog"
)

func verbs(names ...string) catalog.Verbs { return catalog.ParseVerbs(names) }

func TestFormOf(t *testing.T) {
	for contentType, want := range map[string]form{
		"application/json": formLegacy,
		"application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList":                formV2,
		"application/json; as=APIGroupDiscoveryList; v=v2; g=apidiscovery.k8s.io; profile=no": formV2,
		"application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList":           formV2Beta1,
		"application/json;g=apidiscovery.k8s.io;v=v3;as=APIGroupDiscoveryList":                "",
		"application/json;as=Table": "",
		"application/vnd.kubernetes.protobuf;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList": "",
		"text/html": "",
		"":          "",
	} {
		got, err := formOf(contentType)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%q is %q, %v; want %q", contentType, got, err, want)
		}
	}
}

const aggregatedDoc = `{"kind":"APIGroupDiscoveryList","apiVersion":"apidiscovery.k8s.io/v2","metadata":{},"items":[
 {"metadata":{"name":"apps"},"versions":[{"version":"v1","freshness":"Current","resources":[
   {"resource":"deployments","responseKind":{"group":"","version":"","kind":"Deployment"},"scope":"Namespaced","singularResource":"deployment",
    "verbs":["create","delete","deletecollection","get","list","patch","update","watch"],"shortNames":["deploy"],
    "subresources":[{"subresource":"scale","responseKind":{"group":"autoscaling","version":"v1","kind":"Scale"},"verbs":["get","patch","update"]},
                    {"subresource":"status","responseKind":{"kind":"Deployment"},"verbs":["get","patch","update","proxy"]}]}]}]},
 {"metadata":{"name":"sub.example.com"},"versions":[{"version":"v1","resources":[
   {"resource":"parents","responseKind":{},"scope":"Cluster","singularResource":"","verbs":[],"subresources":[
     {"subresource":"only","verbs":["create"]},{"subresource":"","verbs":["get"]}]}]}]},
 {"metadata":{"name":"metrics.k8s.io"},"versions":[{"version":"v1beta1","freshness":"Stale"}]}]}`

var aggregatedGVs = []catalog.GroupVersion{
	{GV: catalog.GV{Group: "apps", Version: "v1"}, Resources: []catalog.Resource{
		{Name: "deployments", Kind: "Deployment", Namespaced: true, Verbs: verbs("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")},
		{Name: "deployments", Subresource: "scale", Kind: "Scale", Namespaced: true, Verbs: verbs("get", "patch", "update")},
		{Name: "deployments", Subresource: "status", Kind: "Deployment", Namespaced: true, Verbs: verbs("get", "patch", "update")},
	}},
	{GV: catalog.GV{Group: "sub.example.com", Version: "v1"}, Resources: []catalog.Resource{
		{Name: "parents", Subresource: "only", Verbs: verbs("create")},
	}},
	{GV: catalog.GV{Group: "metrics.k8s.io", Version: "v1beta1"}, Stale: true},
}

func TestParseAggregated(t *testing.T) {
	got, err := parseAggregated([]byte(aggregatedDoc))
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(aggregatedGVs, got); d != "" {
		t.Error(d)
	}
	for _, bad := range []string{"", "null", "[]", `{"kind":"Status"}`, `{"kind":"APIGroupList"}`, `{"kind":"APIGroupDiscoveryList","items":[{"versions":"x"}]}`} {
		if _, err := parseAggregated([]byte(bad)); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
}

// The legacy documents say the same as the aggregated one.
func TestParseLegacy(t *testing.T) {
	versions, err := parseVersions([]byte(`{"kind":"APIVersions","versions":["v1"]}`))
	if d := cmp.Diff([]catalog.GV{{Version: "v1"}}, versions); d != "" || err != nil {
		t.Error(d, err)
	}
	groups, err := parseGroups([]byte(`{"kind":"APIGroupList","apiVersion":"v1","groups":[
		{"name":"apps","versions":[{"groupVersion":"apps/v1","version":"v1"}]},
		{"name":"sub.example.com","versions":[{"groupVersion":"sub.example.com/v1","version":"v1"},{"groupVersion":"sub.example.com/v2","version":"v2"}]}]}`))
	if d := cmp.Diff([]catalog.GV{{Group: "apps", Version: "v1"}, {Group: "sub.example.com", Version: "v1"}, {Group: "sub.example.com", Version: "v2"}}, groups); d != "" || err != nil {
		t.Error(d, err)
	}
	got, err := parseResources([]byte(`{"kind":"APIResourceList","apiVersion":"v1","groupVersion":"apps/v1","resources":[
		{"name":"deployments","singularName":"deployment","namespaced":true,"kind":"Deployment","verbs":["create","delete","deletecollection","get","list","patch","update","watch"]},
		{"name":"deployments/scale","namespaced":true,"group":"autoscaling","version":"v1","kind":"Scale","verbs":["get","patch","update"]},
		{"name":"deployments/status","namespaced":true,"kind":"Deployment","verbs":["get","patch","update"]}]}`))
	if d := cmp.Diff(aggregatedGVs[0].Resources, got); d != "" || err != nil {
		t.Error(d, err)
	}
	for _, bad := range []string{"", "null", `{"kind":"Status","status":"Failure"}`, `{"kind":"APIGroupDiscoveryList"}`} {
		if _, err := parseVersions([]byte(bad)); err == nil {
			t.Errorf("versions: %q was taken", bad)
		}
		if _, err := parseGroups([]byte(bad)); err == nil {
			t.Errorf("groups: %q was taken", bad)
		}
		if _, err := parseResources([]byte(bad)); err == nil {
			t.Errorf("resources: %q was taken", bad)
		}
	}
}

// core is the group without which nothing is believed.
var core = catalog.GroupVersion{GV: catalog.GV{Version: "v1"}, Resources: []catalog.Resource{{Name: "pods", Kind: "Pod", Namespaced: true, Verbs: verbs("get", "list")}}}

func TestAssemble(t *testing.T) {
	long := strings.Repeat("x", maxName+1)
	pods := core.Resources
	gv := func(group string, stale bool, rs ...catalog.Resource) catalog.GroupVersion {
		return catalog.GroupVersion{GV: catalog.GV{Group: group, Version: "v1"}, Stale: stale, Resources: rs}
	}
	old, _, err := assemble("v1.36.3", []catalog.GroupVersion{core, gv("a", false, pods...), gv("gone", false, pods...)}, facts{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	sourced := func(g catalog.GroupVersion, s catalog.Source) catalog.GroupVersion { g.Source = s; return g }
	tests := map[string]struct {
		gvs     []catalog.GroupVersion
		facts   facts
		last    *catalog.Catalog
		want    []catalog.GroupVersion
		dropped int
		err     error
	}{
		"plain": {
			gvs:  []catalog.GroupVersion{core},
			want: []catalog.GroupVersion{sourced(core, catalog.SourceBuiltin)},
		},
		"no core": {gvs: []catalog.GroupVersion{gv("a", false, pods...)}, err: errNoCore},
		"nothing": {err: errNoCore},
		"stale without resources keeps the last known": {
			gvs: []catalog.GroupVersion{core, gv("a", true)}, last: old,
			want: []catalog.GroupVersion{sourced(core, catalog.SourceBuiltin), sourced(gv("a", true, pods...), catalog.SourceBuiltin)},
		},
		"stale with resources has its own": {
			gvs: []catalog.GroupVersion{core, gv("a", true, catalog.Resource{Name: "new"})}, last: old,
			want: []catalog.GroupVersion{sourced(core, catalog.SourceBuiltin), sourced(gv("a", true, catalog.Resource{Name: "new"}), catalog.SourceBuiltin)},
		},
		"stale and never seen": {
			gvs: []catalog.GroupVersion{core, gv("b", true)}, last: old,
			want: []catalog.GroupVersion{sourced(core, catalog.SourceBuiltin), sourced(gv("b", true), catalog.SourceBuiltin)},
		},
		"empty and not stale is empty": {
			gvs: []catalog.GroupVersion{core, gv("a", false)}, last: old,
			want: []catalog.GroupVersion{sourced(core, catalog.SourceBuiltin), sourced(gv("a", false), catalog.SourceBuiltin)},
		},
		"an aggregated API that answers nonsense": {
			gvs: []catalog.GroupVersion{
				core,
				gv("a", false, catalog.Resource{Name: "x", Verbs: verbs("get")}, catalog.Resource{Name: ""}, catalog.Resource{Name: long},
					catalog.Resource{Name: "x", Subresource: long}, catalog.Resource{Name: "x", Verbs: verbs("list")}),
				gv("a", true, catalog.Resource{Name: "y"}),
				{GV: catalog.GV{Group: long, Version: "v1"}}, {GV: catalog.GV{Group: "b", Version: ""}},
			},
			facts: facts{apiServices: map[catalog.GV]apiService{{Group: "a", Version: "v1"}: {service: true}}},
			want: []catalog.GroupVersion{
				sourced(core, catalog.SourceBuiltin),
				sourced(gv("a", true, catalog.Resource{Name: "x", Verbs: verbs("get", "list")}, catalog.Resource{Name: "y"}), catalog.SourceAggregated),
			},
			dropped: 7,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			c, dropped, err := assemble("v1.36.3", test.gvs, test.facts, test.last)
			if !errors.Is(err, test.err) {
				t.Fatalf("error is %v, want %v", err, test.err)
			}
			if err != nil {
				return
			}
			if dropped != test.dropped {
				t.Errorf("%d entries were dropped, want %d", dropped, test.dropped)
			}
			want, err := catalog.New("v1.36.3", test.want)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(want.GroupVersions(), c.GroupVersions(), cmpopts.EquateEmpty()); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestSource(t *testing.T) {
	gv := func(s string) catalog.GV {
		group, version, _ := strings.Cut(s, "/")
		return catalog.GV{Group: group, Version: version}
	}
	f := facts{
		apiServices: map[catalog.GV]apiService{
			gv("apps/v1"):                      {managed: managedBuiltin},
			gv("metrics.k8s.io/v1beta1"):       {service: true},
			gv("taken.k8s.io/v1"):              {service: true, managed: managedBuiltin},
			gv("widgets.example.com/v1"):       {managed: managedCRD},
			gv("storagemigration.k8s.io/v1"):   {managed: managedBuiltin},
			gv("storagemigration.k8s.io/v1a1"): {managed: managedCRD},
			gv("byhand.example.com/v1"):        {},
			gv("byhand.apps/v1"):               {},
		},
		crdGroups: map[string]int{"widgets.example.com": 2, "storagemigration.k8s.io": 1, "byhand.example.com": 1, "early.example.com": 1},
	}
	for name, want := range map[string]catalog.Source{
		"apps/v1":                       catalog.SourceBuiltin,
		"metrics.k8s.io/v1beta1":        catalog.SourceAggregated,
		"taken.k8s.io/v1":               catalog.SourceAggregated,
		"widgets.example.com/v1":        catalog.SourceCRD,
		"widgets.example.com/v2":        catalog.SourceCRD, // its APIService follows
		"early.example.com/v1":          catalog.SourceCRD,
		"storagemigration.k8s.io/v1":    catalog.SourceBuiltin,
		"storagemigration.k8s.io/v1a1":  catalog.SourceCRD,
		"byhand.example.com/v1":         catalog.SourceCRD,
		"byhand.apps/v1":                catalog.SourceBuiltin,
		"apiregistration.k8s.io/v1":     catalog.SourceBuiltin, // has no APIService
		"nobody.knows.example.com/v1":   catalog.SourceBuiltin,
		"widgets.example.com.other/v1a": catalog.SourceBuiltin,
	} {
		if got := f.source(gv(name)); got != want {
			t.Errorf("%s comes from %s, want %s", name, got, want)
		}
	}
	if got := (facts{}).source(gv("widgets.example.com/v1")); got != catalog.SourceBuiltin {
		t.Errorf("with nothing known a CRD counts as %s; the safe side is Builtin", got)
	}
}

// FuzzDocuments holds that no document makes the parsers or assemble panic, and that what they accept is a valid catalog.
func FuzzDocuments(f *testing.F) {
	f.Add([]byte(aggregatedDoc))
	f.Add([]byte(`{"kind":"APIGroupDiscoveryList","items":[{"metadata":{"name":""},"versions":[{"version":"v1","resources":[{"resource":"pods","verbs":["get"]}]}]}]}`))
	f.Add([]byte(`{"kind":"APIResourceList","resources":[{"name":"pods/status","verbs":["get"]},{"name":"/","verbs":null}]}`))
	f.Add([]byte(`{"kind":"APIGroupList","groups":[{"name":"a","versions":[{"version":"v1"}]}]}`))
	f.Add([]byte(`{"kind":"APIVersions","versions":["v1",""]}`))
	f.Fuzz(func(t *testing.T, doc []byte) {
		_, _ = parseVersions(doc)
		_, _ = parseGroups(doc)
		gvs, err := parseAggregated(doc)
		if err != nil {
			gvs = nil
		}
		if rs, err := parseResources(doc); err == nil {
			gvs = append(gvs, catalog.GroupVersion{GV: catalog.GV{Group: "legacy", Version: "v1"}, Resources: rs})
		}
		c, _, err := assemble("v1.36.3", append(gvs, core), facts{}, nil)
		if err != nil {
			t.Fatalf("no catalog: %v", err)
		}
		if !c.Has(catalog.Key{Version: "v1", Resource: "pods"}) {
			t.Fatal("core was lost")
		}
	})
}

// group makes one group of an aggregated document.
func group(name, version string, resources ...string) apidiscoveryv2.APIGroupDiscovery {
	v := apidiscoveryv2.APIVersionDiscovery{Version: version, Freshness: apidiscoveryv2.DiscoveryFreshnessCurrent}
	for _, r := range resources {
		r, sub, _ := strings.Cut(r, "/")
		if sub != "" {
			last := &v.Resources[len(v.Resources)-1]
			last.Subresources = append(last.Subresources, apidiscoveryv2.APISubresourceDiscovery{Subresource: sub, Verbs: []string{"get", "patch", "update"}})
			continue
		}
		v.Resources = append(v.Resources, apidiscoveryv2.APIResourceDiscovery{
			Resource: r, ResponseKind: &metav1.GroupVersionKind{Kind: "K" + r}, Scope: apidiscoveryv2.ScopeNamespace, SingularResource: r,
			Verbs: []string{"get", "list", "create", "delete"},
		})
	}
	return apidiscoveryv2.APIGroupDiscovery{ObjectMeta: metav1.ObjectMeta{Name: name}, Versions: []apidiscoveryv2.APIVersionDiscovery{v}}
}

func mustJSON(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return b
}
