package front

import (
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"github.com/mvp-mesh/mvp-node/internal/catalog"
	"github.com/mvp-mesh/mvp-node/internal/route"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/server/filters"
)

// Resolved is what a request means, by Kubernetes' own reading of it.
type Resolved struct {
	Attributes  route.Attributes
	Namespace   string
	Name        string
	LongRunning bool
	// Verb is the verb as RequestInfo spells it, also where discovery has no such verb ("proxy", "").
	Verb string
	// FieldSelector and LabelSelector are as the client wrote them; only list, watch and deletecollection have them.
	FieldSelector, LabelSelector string
}

// Resolver reads requests as a kube-apiserver does. Its zero value is not usable; make it with NewResolver. Safe for concurrent
// use. The serving node and `explain` use the same one, so that a path means the same everywhere.
type Resolver struct {
	info        request.RequestInfoFactory
	longRunning request.LongRunningRequestCheck
}

// NewResolver returns a Resolver with the prefixes, verbs and subresources that kube-apiserver itself configures
// (k8s.io/kubernetes pkg/controlplane/apiserver/config.go: BuildGenericConfig).
func NewResolver() *Resolver {
	return &Resolver{
		info: request.RequestInfoFactory{
			APIPrefixes:          sets.NewString("api", "apis"),
			GrouplessAPIPrefixes: sets.NewString("api"),
		},
		longRunning: filters.BasicLongRunningRequestCheck(
			sets.NewString("watch", "proxy"),
			sets.NewString("attach", "exec", "proxy", "log", "portforward"),
		),
	}
}

// Resolve reads a method and a request-target without a request at hand.
func (r *Resolver) Resolve(method, target string) (Resolved, error) {
	u, err := url.ParseRequestURI(target)
	if err != nil {
		return Resolved{}, fmt.Errorf("request-target %q: %w", target, err)
	}
	return r.resolve(&http.Request{Method: method, URL: u}), nil
}

// resolve never fails: what RequestInfo cannot read names no resource, and the local apiserver is the one to say so.
func (r *Resolver) resolve(req *http.Request) Resolved {
	info, err := r.info.NewRequestInfo(req)
	if err != nil {
		return Resolved{}
	}
	out := Resolved{Verb: info.Verb, LongRunning: r.longRunning(req, info)}
	if ambiguous(req.URL, info.Subresource) {
		return out
	}
	if !info.IsResourceRequest {
		out.Attributes.Document = (req.Method == http.MethodGet || req.Method == http.MethodHead) && isDocument(req.URL.Path)
		return out
	}
	out.Namespace, out.Name = info.Namespace, info.Name
	out.FieldSelector, out.LabelSelector = info.FieldSelector, info.LabelSelector
	out.Attributes = route.Attributes{
		Resource: true,
		Key: catalog.Key{
			Group:       info.APIGroup,
			Version:     info.APIVersion,
			Resource:    info.Resource,
			Subresource: info.Subresource,
		},
		Verb: catalog.ParseVerb(info.Verb),
	}
	return out
}

// isDocument reports whether a path that names no resource is one of those by which a server describes itself: discovery, OpenAPI,
// version.
func isDocument(path string) bool {
	first, _, _ := strings.Cut(strings.TrimPrefix(path, "/"), "/")
	switch first {
	case "api", "apis", "openapi", "version":
		return true
	}
	return false
}

// ambiguous reports whether a path could mean one thing to RequestInfo, which trims slashes, and another to the apiserver's
// routes: empty and dot segments and encoded slashes. Such a path names no resource here; the local apiserver gets it as it is
// (CASES R-06). What follows a proxy subresource belongs to the backend behind it and may hold anything.
func ambiguous(u *url.URL, subresource string) bool {
	path := u.EscapedPath()
	if subresource == "proxy" {
		if i := strings.Index(path, "/proxy"); i >= 0 {
			path = path[:i]
		}
	}
	if strings.Contains(path, "//") || strings.Contains(path, "/./") || strings.Contains(path, "/../") ||
		strings.HasSuffix(path, "/.") || strings.HasSuffix(path, "/..") {
		return true
	}
	for i := strings.IndexByte(path, '%'); i >= 0 && i+2 < len(path); {
		if path[i+1] == '2' && (path[i+2] == 'f' || path[i+2] == 'F' || path[i+2] == 'e' || path[i+2] == 'E') {
			return true
		}
		next := strings.IndexByte(path[i+1:], '%')
		if next < 0 {
			break
		}
		i += 1 + next
	}
	return false
}

// Affinity hashes who asks for which resource (FNV-1a, without allocating), so that a LIST and its WATCH choose the same peer.
// The version is left out: a client that changes it should still meet the same watch cache.
func Affinity(user string, k catalog.Key) uint64 {
	const offset, prime = 14695981039346656037, 1099511628211
	h := uint64(offset)
	for _, s := range [...]string{user, k.Group, k.Resource} {
		for i := 0; i < len(s); i++ {
			h = (h ^ uint64(s[i])) * prime
		}
		h = (h ^ 0xff) * prime // 0xff never occurs in UTF-8: keeps the fields apart
	}
	return h
}
