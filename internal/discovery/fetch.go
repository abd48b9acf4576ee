package discovery

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/mvp-mesh/mvp-node/internal/catalog"
)

// fetcher reads the discovery documents and remembers them, so that an unchanged one costs a 304. Used by one goroutine.
type fetcher struct {
	client *client
	// gvTimeout bounds one legacy document of a group-version: an aggregated API that hangs makes that one stale.
	gvTimeout time.Duration
	last      map[string]document // by path
	version   string              // of the apiserver that last is from
}

type document struct {
	etag string
	form form
	gvs  []catalog.GroupVersion // v2 and v2beta1
}

// reading is what the documents say at one time.
type reading struct {
	form form
	gvs  []catalog.GroupVersion // without sources
}

func newFetcher(c *client) *fetcher {
	return &fetcher{client: c, gvTimeout: 5 * time.Second, last: make(map[string]document)}
}

// of is told the version of the apiserver that is read next. One that knows a better form confirms what was read in a worse one,
// because ETags are of the content; so what is remembered of another version is only kept in the best form.
func (f *fetcher) of(version string) {
	if version == f.version {
		return
	}
	f.version = version
	maps.DeleteFunc(f.last, func(_ string, d document) bool { return d.form != forms[0] })
}

// fetch reads /api and /apis. Any error is an error of the whole: half a reading is none.
func (f *fetcher) fetch(ctx context.Context) (reading, error) {
	api, err := f.root(ctx, "/api")
	if err != nil {
		return reading{}, err
	}
	apis, err := f.root(ctx, "/apis")
	if err != nil {
		return reading{}, err
	}
	r := reading{form: apis.form, gvs: slices.Concat(api.gvs, apis.gvs)}
	if slices.Index(forms, api.form) > slices.Index(forms, r.form) {
		r.form = api.form // the worse of the two is reported
	}
	return r, nil
}

// root reads /api or /apis in the best form that the apiserver has.
func (f *fetcher) root(ctx context.Context, path string) (document, error) {
	all := make([]string, 0, len(forms))
	for _, fm := range forms {
		all = append(all, accepts[fm])
	}
	// One request offers all forms. A server that cannot choose among them is offered one after the other.
	for _, accept := range append([]string{strings.Join(all, ",")}, all...) {
		last := f.last[path]
		a, err := f.client.get(ctx, path, accept, last.etag, maxDocument)
		switch {
		case err != nil:
			return document{}, err
		case a.status == http.StatusNotModified && last.etag != "":
			return last, nil
		case a.status == http.StatusNotAcceptable:
			continue
		case a.status != http.StatusOK:
			return document{}, &statusError{path, a.status}
		}
		d, err := f.read(ctx, path, a)
		if err != nil {
			return document{}, fmt.Errorf("GET %s: %w", path, err)
		}
		f.last[path] = d
		return d, nil
	}
	return document{}, &statusError{path, http.StatusNotAcceptable}
}

func (f *fetcher) read(ctx context.Context, path string, a answer) (document, error) {
	fm, err := formOf(a.contentType)
	if err != nil {
		return document{}, err
	}
	d := document{form: fm, etag: a.etag}
	if fm != formLegacy {
		d.gvs, err = parseAggregated(a.body)
		return d, err
	}
	// The list of groups says nothing about the documents below it.
	d.etag = ""
	parse := parseGroups
	if path == "/api" {
		parse = parseVersions
	}
	gvs, err := parse(a.body)
	if err != nil {
		return document{}, err
	}
	if len(gvs) > catalog.MaxGroupVersions {
		return document{}, fmt.Errorf("%d group-versions, at most %d allowed", len(gvs), catalog.MaxGroupVersions)
	}
	d.gvs, err = f.legacy(ctx, gvs)
	return d, err
}

// legacyParallel is how many documents are asked for at a time.
const legacyParallel = 8

// legacy reads the documents of all group-versions. One that is not found is not served here: the legacy list is made from
// APIServices, which all apiservers of a cluster share, so an older one lists what only a newer one serves. One that cannot be
// read for another reason is stale.
func (f *fetcher) legacy(ctx context.Context, gvs []catalog.GV) ([]catalog.GroupVersion, error) {
	out := make([]catalog.GroupVersion, len(gvs))
	errs := make([]error, len(gvs))
	var g errgroup.Group
	g.SetLimit(legacyParallel)
	for i, gv := range gvs {
		g.Go(func() error {
			out[i].GV = gv
			out[i].Resources, errs[i] = f.legacyOne(ctx, gv)
			return nil
		})
	}
	_ = g.Wait() // the functions return nil
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	kept, failed := out[:0], 0
	var firstErr error
	for i, gv := range out {
		if se, ok := errs[i].(*statusError); ok && se.status == http.StatusNotFound {
			continue
		}
		if errs[i] != nil {
			gv.Stale, gv.Resources = true, nil
			failed++
			if firstErr == nil {
				firstErr = errs[i]
			}
		}
		kept = append(kept, gv)
	}
	if failed > 0 && failed == len(kept) {
		return nil, fmt.Errorf("none of %d group-versions could be read: %w", failed, firstErr)
	}
	return kept, nil
}

func (f *fetcher) legacyOne(ctx context.Context, gv catalog.GV) ([]catalog.Resource, error) {
	ctx, cancel := context.WithTimeout(ctx, f.gvTimeout)
	defer cancel()
	path := "/apis/" + gv.String()
	if gv.Group == "" {
		path = "/api/" + gv.Version
	}
	a, err := f.client.get(ctx, path, accepts[formLegacy], "", maxDocument)
	if err != nil {
		return nil, err
	}
	if a.status != http.StatusOK {
		return nil, &statusError{path, a.status}
	}
	return parseResources(a.body)
}
