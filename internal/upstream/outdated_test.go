package upstream

import (
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/mvp-mesh/mvp-node/internal/catalog"
	"github.com/mvp-mesh/mvp-node/internal/reqctx"
	"github.com/mvp-mesh/mvp-node/internal/route"
)

// The 404s of a kube-apiserver, as v1.35.4 and v1.36.3 were seen to write them.
const (
	noRoute      = `{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"the server could not find the requested resource","reason":"NotFound","details":{},"code":404}`
	noObject     = `{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"pods \"p\" not found","reason":"NotFound","details":{"name":"p","kind":"pods"},"code":404}`
	notFoundPage = "404 page not found\n"
)

func protobufStatus(t *testing.T, s *metav1.Status) string {
	t.Helper()
	raw, err := s.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	u := runtime.Unknown{TypeMeta: runtime.TypeMeta{APIVersion: "v1", Kind: "Status"}, Raw: raw}
	data, err := u.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	return "k8s\x00" + string(data)
}

// A 404 misleads if the catalog says that the resource is served and the process that answers is newer than the catalog.
func TestOutdatedCatalog(t *testing.T) {
	const jsonType, protobuf = "application/json", "application/vnd.kubernetes.protobuf"
	local := reqctx.Request{Decision: route.Decision{Outcome: route.Local, Reason: route.ServedLocally}}
	pods := route.Attributes{Resource: true, Verb: catalog.VerbGet, Key: catalog.Key{Version: "v1", Resource: "pods"}}
	for _, tc := range []struct {
		name              string
		rc                reqctx.Request
		code              int
		contentType, body string
		readBefore        bool // the catalog was read before the connection was opened
		resource          bool
		refused           bool
	}{
		{"no route, JSON", local, 404, jsonType, noRoute, true, true, true},
		{"no route, text", local, 404, "text/plain; charset=utf-8", notFoundPage, true, true, true},
		{"no route, protobuf", local, 404, protobuf, protobufStatus(t, &metav1.Status{Reason: metav1.StatusReasonNotFound, Code: 404}), true, true, true},
		{"forwarded", reqctx.Request{Hop: 1}, 404, jsonType, noRoute, true, true, true},
		{"the catalog is of this process", local, 404, jsonType, noRoute, false, true, false},
		{"no object", local, 404, jsonType, noObject, true, true, false},
		{"no object, protobuf", local, 404, protobuf, protobufStatus(t, &metav1.Status{Reason: metav1.StatusReasonNotFound, Details: &metav1.StatusDetails{Kind: "pods", Name: "p"}}), true, true, false},
		{"the truth", reqctx.Request{Decision: route.Decision{Outcome: route.Local, Reason: route.NotServedAnywhere}}, 404, jsonType, noRoute, true, true, false},
		{"disabled", reqctx.Request{Decision: route.Decision{Outcome: route.Local, Reason: route.ModeDisabled}}, 404, jsonType, noRoute, true, true, false},
		{"no resource", local, 404, "text/plain", notFoundPage, true, false, false},
		{"not a 404", local, 410, jsonType, noRoute, true, true, false},
		{"not a Status", local, 404, jsonType, `{"kind":"Other"}`, true, true, false},
		{"not JSON", local, 404, jsonType, `<html>`, true, true, false},
		{"not protobuf", local, 404, protobuf, "k8s\x00\xff\xff", true, true, false},
		{"another page", local, 404, "text/plain", "404 of a backend\n", true, true, false},
		{"no type", local, 404, "", notFoundPage, true, true, false},
		{"long", local, 404, "text/plain", notFoundPage + strings.Repeat("x", maxStatus), true, true, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			overBoth(t, func(t *testing.T, http2 bool) {
				a := newAPIServer(t, http2, func(w http.ResponseWriter, _ *http.Request) {
					w.Header()["Content-Type"] = []string{tc.contentType}
					w.WriteHeader(tc.code)
					_, _ = w.Write([]byte(tc.body))
				})
				told := 0
				tr := a.transport(t, func(o *Options) {
					o.OnOutdated = func() { told++ }
				})
				rc := tc.rc
				rc.CatalogRead = time.Now().Add(time.Hour)
				if tc.readBefore {
					rc.CatalogRead = time.Now().Add(-time.Hour)
				}
				rc.User, rc.Attributes, rc.Attributes.Resource = alice().User, pods, tc.resource
				req := request(t, &rc, "POST", "/api/v1/namespaces/n/pods/p", []byte("{}"))
				if !tc.refused {
					resp, body := send(t, tr, req)
					if resp.StatusCode != tc.code || body != tc.body || told != 0 {
						t.Errorf("got %d %q, told %d times; want the apiserver's own answer %d %q", resp.StatusCode, body, told, tc.code, tc.body)
					}
					return
				}
				_, err := tr.RoundTrip(req)
				wantNotSent(t, err)
				if e, ok := errors.AsType[*Error](err); !ok || !e.NotServed() || !errors.Is(err, ErrNotServed) || told != 1 {
					t.Errorf("got %v, told %d times; want ErrNotServed, told once", err, told)
				}
			})
		})
	}
}
