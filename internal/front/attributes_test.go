package front

import (
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mvp-mesh/mvp-node/internal/catalog"
	"github.com/mvp-mesh/mvp-node/internal/route"
)

func TestResolve(t *testing.T) {
	resource := func(verb catalog.Verb, group, version, name, sub string) route.Attributes {
		return route.Attributes{Resource: true, Verb: verb, Key: catalog.Key{Group: group, Version: version, Resource: name, Subresource: sub}}
	}
	for _, tc := range []struct {
		method, target string
		want           Resolved
	}{
		{"GET", "/api/v1/pods", Resolved{Verb: "list", Attributes: resource(catalog.VerbList, "", "v1", "pods", "")}},
		{"GET", "/api/v1/pods/", Resolved{Verb: "list", Attributes: resource(catalog.VerbList, "", "v1", "pods", "")}},
		{"HEAD", "/api/v1/namespaces/n/pods/p", Resolved{Verb: "get", Namespace: "n", Name: "p", Attributes: resource(catalog.VerbGet, "", "v1", "pods", "")}},
		{"GET", "/api/v1/pods?watch=true", Resolved{Verb: "watch", LongRunning: true, Attributes: resource(catalog.VerbWatch, "", "v1", "pods", "")}},
		{"GET", "/api/v1/watch/pods", Resolved{Verb: "watch", LongRunning: true, Attributes: resource(catalog.VerbWatch, "", "v1", "pods", "")}},
		{"DELETE", "/apis/apps/v1/namespaces/n/deployments", Resolved{Verb: "deletecollection", Namespace: "n", Attributes: resource(catalog.VerbDeleteCollection, "apps", "v1", "deployments", "")}},
		{"PATCH", "/apis/storage.k8s.io/v1/csinodes/n1/status", Resolved{Verb: "patch", Name: "n1", Attributes: resource(catalog.VerbPatch, "storage.k8s.io", "v1", "csinodes", "status")}},
		{"POST", "/api/v1/namespaces/n/pods/p/exec?command=id", Resolved{Verb: "create", Namespace: "n", Name: "p", LongRunning: true, Attributes: resource(catalog.VerbCreate, "", "v1", "pods", "exec")}},
		{"GET", "/api/v1/namespaces/n/pods/p/log?follow=true", Resolved{Verb: "get", Namespace: "n", Name: "p", LongRunning: true, Attributes: resource(catalog.VerbGet, "", "v1", "pods", "log")}},
		{"PUT", "/api/v1/namespaces/n/finalize", Resolved{Verb: "update", Namespace: "n", Name: "n", Attributes: resource(catalog.VerbUpdate, "", "v1", "namespaces", "finalize")}},
		{"OPTIONS", "/api/v1/pods", Resolved{Attributes: resource(0, "", "v1", "pods", "")}},
		{"FOO", "/api/v1/pods", Resolved{Attributes: resource(0, "", "v1", "pods", "")}},
		{"GET", "/version", Resolved{Verb: "get", Attributes: route.Attributes{Document: true}}},
		{"GET", "/apis", Resolved{Verb: "get", Attributes: route.Attributes{Document: true}}},
		{"GET", "/apis/apps/v1", Resolved{Verb: "get", Attributes: route.Attributes{Document: true}}},
		{"HEAD", "/openapi/v3/apis/apps/v1", Resolved{Verb: "head", Attributes: route.Attributes{Document: true}}},
		{"POST", "/version", Resolved{Verb: "post"}},
		{"GET", "/readyz", Resolved{Verb: "get"}},
		{"GET", "/apix", Resolved{Verb: "get"}},
		{"GET", "/debug/pprof/profile", Resolved{Verb: "get", LongRunning: true}},
		// CASES R-06: RequestInfo would trim or read through these; the apiserver's routes do not.
		{"GET", "//api/v1/pods", Resolved{Verb: "list"}},
		{"GET", "/api/v1//pods", Resolved{Verb: "get"}},
		{"GET", "/apis/../api/v1/secrets", Resolved{Verb: "get"}},
		{"GET", "/api/v1/namespaces/n/pods/..", Resolved{Verb: "get"}},
		{"GET", "/api/v1/namespaces/n/pods/a%2Fb", Resolved{Verb: "get"}},
		{"GET", "/api/v1/namespaces/n/pods/%2e%2e/x", Resolved{Verb: "get"}},
		// What follows proxy is the backend's.
		{"GET", "/api/v1/namespaces/n/pods/p/proxy//a/../b%2Fc/", Resolved{Verb: "get", Namespace: "n", Name: "p", LongRunning: true, Attributes: resource(catalog.VerbGet, "", "v1", "pods", "proxy")}},
		{"GET", "/api/v1/namespaces//pods/p/proxy", Resolved{Verb: "get"}},
	} {
		t.Run(tc.method+" "+tc.target, func(t *testing.T) {
			got, err := NewResolver().Resolve(tc.method, tc.target)
			if err != nil {
				t.Fatal(err)
			}
			if !got.Attributes.Resource {
				got.LongRunning = got.LongRunning && tc.want.LongRunning // an ambiguous path may look long-running; it is local either way
			}
			if d := cmp.Diff(tc.want, got); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
		})
	}
	for _, target := range []string{"", "api/v1/pods", "/a\x00b", "/%zz"} {
		if _, err := NewResolver().Resolve("GET", target); err == nil {
			t.Errorf("target %q: no error", target)
		}
	}
}

var sink uint64 // keeps the compiler from leaving the call out

func TestAffinityTellsApartWhatItMust(t *testing.T) {
	k := catalog.Key{Group: "g", Version: "v1", Resource: "r"}
	seen := map[uint64]string{}
	for name, h := range map[string]uint64{
		"base": Affinity("u", k), "user": Affinity("v", k), "group": Affinity("u", catalog.Key{Group: "h", Resource: "r"}),
		"resource": Affinity("u", catalog.Key{Group: "g", Resource: "s"}), "shifted": Affinity("ug", catalog.Key{Resource: "r"}),
	} {
		if other, twice := seen[h]; twice {
			t.Errorf("%s and %s are the same", name, other)
		}
		seen[h] = name
	}
	if Affinity("u", k) != Affinity("u", catalog.Key{Group: "g", Version: "v2", Resource: "r"}) {
		t.Error("another version goes elsewhere")
	}
	if n := testing.AllocsPerRun(100, func() { sink = Affinity("system:serviceaccount:kube-system:x", k) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// FuzzResolve: reading a target never panics; what names a resource has no path that could mean something else to the apiserver;
// both ways in, from a request and from a string, agree, as ingress and serving node must.
func FuzzResolve(f *testing.F) {
	for _, s := range []string{
		"/api/v1/pods", "//api/v1/pods", "/api/v1/namespaces/n/pods/p/proxy//a/", "/apis/../api/v1/secrets", "/api/v1/watch/pods?watch=1",
		"/apis/a/v1/x/%2e%2e/y", "/api/v1/pods?fieldSelector=metadata.name%3Dx&labelSelector=a", "/api", "/apis/a", "/%2f", "*",
	} {
		f.Add("GET", s)
	}
	r := NewResolver()
	f.Fuzz(func(t *testing.T, method, target string) {
		got, err := r.Resolve(method, target)
		if err != nil {
			return
		}
		u, err := url.ParseRequestURI(target)
		if err != nil {
			t.Fatalf("%q: resolved, but is no request-target: %v", target, err)
		}
		if d := cmp.Diff(got, r.resolve(&http.Request{Method: method, URL: u})); d != "" {
			t.Fatalf("%q: two readings:\n%s", target, d)
		}
		a := got.Attributes
		if !a.Resource {
			if a.Key != (catalog.Key{}) || a.Verb != 0 {
				t.Fatalf("%q: no resource, but %+v", target, a)
			}
			return
		}
		path := u.EscapedPath()
		if a.Key.Subresource == "proxy" {
			path, _, _ = strings.Cut(path, "/proxy")
		}
		lower := strings.ToLower(path)
		for _, bad := range []string{"//", "/./", "/../", "%2f", "%2e"} {
			if strings.Contains(lower, bad) {
				t.Fatalf("%q: names resource %s in spite of %q", target, a.Key, bad)
			}
		}
		if a.Key.Resource == "" || a.Key.Version == "" {
			t.Fatalf("%q: resource request for %+v", target, a.Key)
		}
	})
}
