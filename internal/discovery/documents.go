package discovery

import (
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"strings"

	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/mvp-mesh/mvp-node/internal/catalog"
)

// form is a form of discovery document, in order of preference. The strings are metric labels.
type form string

const (
	formV2      form = "v2"
	formV2Beta1 form = "v2beta1"
	formLegacy  form = "legacy"
)

// Accept headers, one per form. v2 without profile=nopeer is not among them and must never be: it is the only form that an
// apiserver merges with its peers' (k8s.io/apiserver pkg/endpoints/discovery/aggregated/wrapper.go). Servers from before the
// profile do not merge and ignore the parameter.
var accepts = map[form]string{
	formV2:      "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList;profile=nopeer",
	formV2Beta1: "application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList",
	formLegacy:  "application/json",
}

// forms is every form, best first.
var forms = []form{formV2, formV2Beta1, formLegacy}

// formOf tells the form of a document by its Content-Type, which repeats what was negotiated.
func formOf(contentType string) (form, error) {
	mediaType, params, err := mime.ParseMediaType(contentType)
	if err != nil || mediaType != "application/json" {
		return "", fmt.Errorf("content type %q is not JSON", contentType)
	}
	as := params["as"]
	switch {
	case as == "":
		return formLegacy, nil
	case as == "APIGroupDiscoveryList" && params["g"] == "apidiscovery.k8s.io" && params["v"] == "v2":
		return formV2, nil
	case as == "APIGroupDiscoveryList" && params["g"] == "apidiscovery.k8s.io" && params["v"] == "v2beta1":
		return formV2Beta1, nil
	}
	return "", fmt.Errorf("content type %q is no discovery document", contentType)
}

// parseAggregated reads a v2 or v2beta1 document, whose JSON is the same. The group-versions have no source yet.
func parseAggregated(doc []byte) ([]catalog.GroupVersion, error) {
	var list apidiscoveryv2.APIGroupDiscoveryList
	if err := json.Unmarshal(doc, &list); err != nil {
		return nil, fmt.Errorf("aggregated discovery: %w", err)
	}
	if list.Kind != "APIGroupDiscoveryList" {
		return nil, fmt.Errorf("aggregated discovery: kind is %.40q", list.Kind)
	}
	var out []catalog.GroupVersion
	for _, g := range list.Items {
		for _, v := range g.Versions {
			gv := catalog.GroupVersion{
				GV:    catalog.GV{Group: g.Name, Version: v.Version},
				Stale: v.Freshness == apidiscoveryv2.DiscoveryFreshnessStale,
			}
			for _, r := range v.Resources {
				namespaced := r.Scope == apidiscoveryv2.ScopeNamespace
				// A parent without verbs is there for the sake of its subresources only; legacy documents leave it out.
				if len(r.Verbs) > 0 {
					gv.Resources = append(gv.Resources, catalog.Resource{
						Name: r.Resource, Kind: kind(r.ResponseKind), Namespaced: namespaced, Verbs: catalog.ParseVerbs(r.Verbs),
					})
				}
				for _, s := range r.Subresources {
					if s.Subresource == "" {
						continue // would look like the resource itself
					}
					gv.Resources = append(gv.Resources, catalog.Resource{
						Name: r.Resource, Subresource: s.Subresource, Kind: kind(s.ResponseKind), Namespaced: namespaced,
						Verbs: catalog.ParseVerbs(s.Verbs),
					})
				}
			}
			out = append(out, gv)
		}
	}
	return out, nil
}

func kind(k *metav1.GroupVersionKind) string {
	if k == nil {
		return ""
	}
	return k.Kind
}

// parseVersions reads the legacy answer of /api.
func parseVersions(doc []byte) ([]catalog.GV, error) {
	var list metav1.APIVersions
	if err := json.Unmarshal(doc, &list); err != nil {
		return nil, fmt.Errorf("legacy discovery of /api: %w", err)
	}
	if list.Kind != "APIVersions" {
		return nil, fmt.Errorf("legacy discovery of /api: kind is %.40q", list.Kind)
	}
	var out []catalog.GV
	for _, v := range list.Versions {
		out = append(out, catalog.GV{Version: v})
	}
	return out, nil
}

// parseGroups reads the legacy answer of /apis.
func parseGroups(doc []byte) ([]catalog.GV, error) {
	var list metav1.APIGroupList
	if err := json.Unmarshal(doc, &list); err != nil {
		return nil, fmt.Errorf("legacy discovery of /apis: %w", err)
	}
	if list.Kind != "APIGroupList" {
		return nil, fmt.Errorf("legacy discovery of /apis: kind is %.40q", list.Kind)
	}
	var out []catalog.GV
	for _, g := range list.Groups {
		for _, v := range g.Versions {
			out = append(out, catalog.GV{Group: g.Name, Version: v.Version})
		}
	}
	return out, nil
}

// parseResources reads the legacy document of one group-version.
func parseResources(doc []byte) ([]catalog.Resource, error) {
	var list metav1.APIResourceList
	if err := json.Unmarshal(doc, &list); err != nil {
		return nil, fmt.Errorf("legacy discovery: %w", err)
	}
	if list.Kind != "APIResourceList" {
		return nil, fmt.Errorf("legacy discovery: kind is %.40q", list.Kind)
	}
	var out []catalog.Resource
	for _, r := range list.APIResources {
		name, sub, _ := strings.Cut(r.Name, "/")
		if sub == "" && len(r.Verbs) == 0 {
			continue
		}
		out = append(out, catalog.Resource{
			Name: name, Subresource: sub, Kind: r.Kind, Namespaced: r.Namespaced, Verbs: catalog.ParseVerbs(r.Verbs),
		})
	}
	return out, nil
}

// errNoCore reports documents without the core group's resources. Every kube-apiserver has them, so it is not its whole truth:
// with such a catalog a node would look for pods everywhere but at its own apiserver.
var errNoCore = errors.New("discovery lists no resources of core v1, which every kube-apiserver serves")

// maxName is the longest name that a DNS subdomain, and so a catalog, can have.
const maxName = 253

// assemble makes the catalog of one reading: group-versions as documents give them, the sources that facts tell, and for stale
// group-versions without resources those that last had. It returns how many entries it left out because no catalog can hold
// them: an aggregated API may answer anything, and must not cost the node its catalog.
func assemble(serverVersion string, gvs []catalog.GroupVersion, facts facts, last *catalog.Catalog) (c *catalog.Catalog, dropped int, err error) {
	byGV := make(map[catalog.GV]int, len(gvs))
	clean := make([]catalog.GroupVersion, 0, len(gvs))
	for _, gv := range gvs {
		if gv.Version == "" || len(gv.Version) > maxName || len(gv.Group) > maxName {
			dropped++
			continue
		}
		if gv.Stale && len(gv.Resources) == 0 && last != nil {
			if old, ok := last.Lookup(gv.GV); ok {
				gv.Resources = old.Resources
			}
		}
		if at, twice := byGV[gv.GV]; twice {
			// Both lists are served, whoever wrote them.
			clean[at].Resources = append(clean[at].Resources[:len(clean[at].Resources):len(clean[at].Resources)], gv.Resources...)
			clean[at].Stale = clean[at].Stale || gv.Stale
			dropped++
			continue
		}
		gv.Source = facts.source(gv.GV)
		byGV[gv.GV] = len(clean)
		clean = append(clean, gv)
	}
	for i := range clean {
		var n int
		clean[i].Resources, n = tidy(clean[i].Resources)
		dropped += n
	}
	if at, ok := byGV[catalog.GV{Version: "v1"}]; !ok || len(clean[at].Resources) == 0 {
		return nil, dropped, errNoCore
	}
	c, err = catalog.New(serverVersion, clean)
	return c, dropped, err
}

// tidy leaves out what cannot be named in a request and joins the verbs of entries that occur twice.
func tidy(in []catalog.Resource) (out []catalog.Resource, dropped int) {
	type name struct{ resource, subresource string }
	at := make(map[name]int, len(in))
	out = make([]catalog.Resource, 0, len(in))
	for _, r := range in {
		if r.Name == "" || len(r.Name) > maxName || len(r.Subresource) > maxName || len(r.Kind) > maxName {
			dropped++
			continue
		}
		n := name{r.Name, r.Subresource}
		if i, twice := at[n]; twice {
			out[i].Verbs |= r.Verbs
			dropped++
			continue
		}
		at[n] = len(out)
		out = append(out, r)
	}
	return out, dropped
}
