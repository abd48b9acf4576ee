package front

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/mvp-mesh/mvp-node/internal/authz"
	"github.com/mvp-mesh/mvp-node/internal/catalog"
	"github.com/mvp-mesh/mvp-node/internal/reqctx"
	"github.com/mvp-mesh/mvp-node/internal/route"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/goleak"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	podsPath    = "/api/v1/namespaces/n/pods"
	widgetsPath = "/apis/widgets.example.com/v1/widgets"
	gadgetsPath = "/apis/gadgets.example.com/v1/gadgets"
)

// world is a front with recording fakes on both sides: a serves pods, b serves widgets.
type world struct {
	t       testing.TB
	mu      sync.Mutex
	got     []*http.Request // as Local or Forwarder received them
	ctx     []reqctx.Request
	options Options
	reg     *prometheus.Registry

	local   func(*http.Request) (*http.Response, error)
	forward func(*http.Request) (*http.Response, Served, error)
	authn   func(*http.Request) (*authenticator.Response, bool, error)
	allow   func(authorizer.Attributes) (authorizer.Decision, string, error)
	ready   error
	view    *route.View
	mode    route.Mode
	strict  bool // policy without localOutage
	prefer  route.Preference
	server  *httptest.Server
	client  *http.Client
}

type views struct{ w *world }

func (v views) View() *route.View { return v.w.view }

type roundTripper struct{ w *world }

func (rt roundTripper) RoundTrip(r *http.Request) (*http.Response, error) {
	rt.w.record(r)
	return rt.w.local(r)
}

type forwarder struct{ w *world }

func (f forwarder) Forward(r *http.Request, candidates []*route.Member) (*http.Response, Served, error) {
	f.w.record(r)
	return f.w.forward(r)
}

func (w *world) record(r *http.Request) {
	w.mu.Lock()
	defer w.mu.Unlock()
	rc, _ := reqctx.From(r.Context())
	w.got, w.ctx = append(w.got, r.Clone(context.Background())), append(w.ctx, *rc)
}

func (w *world) last() (*http.Request, reqctx.Request) {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.got) == 0 {
		w.t.Fatal("no request arrived")
	}
	return w.got[len(w.got)-1], w.ctx[len(w.ctx)-1]
}

func (w *world) count() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.got)
}

func answered(code int, body string) *http.Response {
	return &http.Response{
		StatusCode: code, ContentLength: int64(len(body)), Body: io.NopCloser(strings.NewReader(body)),
		Header: http.Header{"Content-Type": {"application/json"}},
	}
}

func testCatalog(t testing.TB, gv catalog.GV, resource string, verbs ...string) *catalog.Catalog {
	t.Helper()
	c, err := catalog.New("v1.36.3", []catalog.GroupVersion{{GV: gv, Source: catalog.SourceBuiltin, Resources: []catalog.Resource{
		{Name: resource, Verbs: catalog.ParseVerbs(verbs)},
	}}})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

var allVerbs = []string{"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"}

func newWorld(t testing.TB, http2 bool) *world {
	t.Helper()
	w := &world{t: t, mode: route.Enabled, reg: prometheus.NewRegistry()}
	w.local = func(*http.Request) (*http.Response, error) { return answered(200, `{"from":"local"}`), nil }
	w.forward = func(*http.Request) (*http.Response, Served, error) {
		return answered(200, `{"from":"b"}`), Served{Node: "b", Attempts: 1}, nil
	}
	w.authn = func(*http.Request) (*authenticator.Response, bool, error) {
		return &authenticator.Response{User: &user.DefaultInfo{Name: "jane", UID: "u1", Groups: []string{"dev", "system:authenticated"}}}, true, nil
	}
	w.allow = func(authorizer.Attributes) (authorizer.Decision, string, error) {
		return authorizer.DecisionAllow, "", nil
	}
	w.setView(
		route.Member{Name: "a", State: route.Ready, Mode: route.Enabled, Catalog: testCatalog(t, catalog.GV{Version: "v1"}, "pods", allVerbs...)},
		route.Member{Name: "b", State: route.Ready, Mode: route.Enabled, Address: "b:1", Catalog: testCatalog(t, catalog.GV{Group: "widgets.example.com", Version: "v1"}, "widgets", allVerbs...)},
	)
	w.options = Options{
		NodeName: "a", Views: views{w}, Resolver: NewResolver(), Local: roundTripper{w}, Forwarder: forwarder{w},
		Policy:        func() route.Policy { return route.Policy{Mode: w.mode, LocalOutage: !w.strict, Prefer: w.prefer} },
		Authenticator: authenticator.RequestFunc(func(r *http.Request) (*authenticator.Response, bool, error) { return w.authn(r) }),
		Authorizer: authorizerFunc(func(a authorizer.Attributes) (authorizer.Decision, string, error) {
			return w.allow(a)
		}),
		HeaderNames: authz.DefaultHeaderNames(), Ready: func() error { return w.ready }, RequestTimeout: time.Minute, StallTimeout: time.Minute,
		Logger: slog.New(slog.DiscardHandler), Registerer: w.reg,
	}
	h, err := New(w.options)
	if err != nil {
		t.Fatal(err)
	}
	w.server = httptest.NewUnstartedServer(h)
	w.server.EnableHTTP2 = http2
	w.server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	w.server.StartTLS()
	w.client = w.server.Client()
	t.Cleanup(func() {
		w.client.CloseIdleConnections()
		w.server.Close()
	})
	return w
}

func (w *world) setView(ms ...route.Member) {
	w.t.Helper()
	v, err := route.NewView("a", ms)
	if err != nil {
		w.t.Fatal(err)
	}
	w.view = v
}

type authorizerFunc func(authorizer.Attributes) (authorizer.Decision, string, error)

func (f authorizerFunc) Authorize(_ context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	return f(a)
}

func (w *world) do(method, path string, header http.Header) (*http.Response, string) {
	w.t.Helper()
	req, err := http.NewRequest(method, w.server.URL+path, nil)
	if err != nil {
		w.t.Fatal(err)
	}
	for k, v := range header {
		req.Header[k] = v
	}
	resp, err := w.client.Do(req)
	if err != nil {
		w.t.Fatalf("%s %s: %v", method, path, err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		w.t.Fatalf("%s %s: read body: %v", method, path, err)
	}
	return resp, string(body)
}

func (w *world) status(method, path string, header http.Header) (*http.Response, metav1.Status) {
	w.t.Helper()
	resp, body := w.do(method, path, header)
	var s metav1.Status
	if err := json.Unmarshal([]byte(body), &s); err != nil || s.Kind != "Status" {
		w.t.Fatalf("%s %s: body is no Status (%v): %s", method, path, err, body)
	}
	return resp, s
}

func bothProtocols(t *testing.T, f func(t *testing.T, w *world)) {
	for name, http2 := range map[string]bool{"HTTP/1.1": false, "HTTP/2": true} {
		t.Run(name, func(t *testing.T) { f(t, newWorld(t, http2)) })
	}
}

func TestEachOutcomeGoesItsWay(t *testing.T) {
	bothProtocols(t, func(t *testing.T, w *world) {
		for _, tc := range []struct{ path, want string }{
			{podsPath, "local"}, {"/version", "local"}, {"/apis", "local"}, {widgetsPath, "b"}, {gadgetsPath, "local"},
		} {
			if resp, body := w.do("GET", tc.path, nil); resp.StatusCode != 200 || !strings.Contains(body, tc.want) {
				t.Errorf("GET %s: %d %s, want an answer from %s", tc.path, resp.StatusCode, body, tc.want)
			}
		}
		// Incomplete: what nobody is known to serve is 503 with a cause, what is known goes its way.
		w.setView(w.view.Members()[0].Copy(), w.view.Members()[1].Copy(), route.Member{Name: "c", State: route.Starting, HoldsUp: true})
		resp, s := w.status("GET", gadgetsPath, nil)
		if resp.StatusCode != 503 || s.Details.Causes[0].Type != "ViewIncomplete" || resp.Header.Get("Retry-After") == "" {
			t.Errorf("unknown resource in an incomplete view: %d %+v, want 503 ViewIncomplete with Retry-After", resp.StatusCode, s)
		}
		if _, body := w.do("GET", podsPath, nil); !strings.Contains(body, "local") {
			t.Errorf("pods in an incomplete view: %s", body)
		}
	})
}

func TestDisabledAndObserveOnlyServeLocally(t *testing.T) {
	w := newWorld(t, true)
	for _, m := range []route.Mode{route.Disabled, route.ObserveOnly} {
		w.mode = m
		if _, body := w.do("GET", widgetsPath, nil); !strings.Contains(body, "local") {
			t.Errorf("mode %s: %s, want the local answer", m, body)
		}
		if _, rc := w.last(); (rc.Decision.Observed != nil) != (m == route.ObserveOnly) {
			t.Errorf("mode %s: observed decision %v", m, rc.Decision.Observed)
		}
	}
}

// CASES I-02, R-07: whatever a client claims, in whatever spelling, does not arrive, on the local and on the forwarded path.
func TestForgedHeadersDoNotArrive(t *testing.T) {
	bothProtocols(t, func(t *testing.T, w *world) {
		forged := http.Header{
			"X-Remote-User": {"admin", "root"}, "X-Remote-Group": {"system:masters"}, "X-Remote-Uid": {"0"},
			"X-Remote-Extra-Scopes": {"all"}, "X_remote_user": {"admin"}, "x-remote-GROUP": {"system:masters"},
			"X-Kubernetes-Peer-Proxied": {"true"}, "X-Kubernetes-Apiserver-Rerouted": {"true"}, "X-Mvp-Node-Hop": {"1"},
			"Authorization": {"Bearer secret"}, "Cookie": {"a=b"}, "X-Forwarded-For": {"1.2.3.4"}, "X-Real-Ip": {"1.2.3.4"},
			"Idempotency-Key": {"k"}, "X-Idempotency-Key": {"k"}, "Audit-Id": {"chosen"},
			"X-Custom": {"kept"}, "User-Agent": {"agent/1"}, "Impersonate-User": {"joe"}, "Accept-Encoding": {"gzip"},
		}
		for _, path := range []string{podsPath, widgetsPath, "/version"} {
			w.do("GET", path, forged)
			got, rc := w.last()
			want := http.Header{"X-Custom": {"kept"}, "User-Agent": {"agent/1"}, "Impersonate-User": {"joe"}, "Accept-Encoding": {"gzip"}, "Audit-Id": {"chosen"}}
			if d := cmp.Diff(want, got.Header); d != "" {
				t.Errorf("GET %s: headers that arrived (-want +got):\n%s", path, d)
			}
			if rc.User.Name != "jane" || rc.AuditID == "chosen" || rc.AuditID == "" || rc.Hop != 0 || rc.ClientAddrs[0] != "127.0.0.1" {
				t.Errorf("GET %s: request context %+v", path, rc)
			}
		}
	})
}

// CASES I-01 at the entrance: what Connection names is gone before an identity is set further down.
func TestConnectionNamedHeadersAreDropped(t *testing.T) {
	w := newWorld(t, false)
	w.do("GET", podsPath, http.Header{"Connection": {"foo, X-Remote-User, Impersonate-User"}, "Foo": {"1"}, "Impersonate-User": {"joe"}})
	if got, _ := w.last(); got.Header.Get("Foo") != "" || got.Header.Get("Connection") != "" {
		t.Errorf("hop-by-hop headers arrived: %v", got.Header)
	}
}

func TestEveryCauseIsAStatus(t *testing.T) {
	w := newWorld(t, true)
	for _, cause := range route.Causes() {
		t.Run(cause.String(), func(t *testing.T) {
			want, ok := answers[cause]
			if !ok {
				t.Fatal("cause has no row in the table")
			}
			w.forward = func(*http.Request) (*http.Response, Served, error) {
				return nil, Served{}, &Failure{Cause: cause, Err: errors.New("dial 10.1.2.3: secret detail")}
			}
			before := testutil.ToFloat64(w.server.Config.Handler.(*Handler).metrics.errors.WithLabelValues(cause.String()))
			resp, s := w.status("POST", widgetsPath, nil)
			after := testutil.ToFloat64(w.server.Config.Handler.(*Handler).metrics.errors.WithLabelValues(cause.String()))
			if int32(resp.StatusCode) != want.code || s.Code != want.code || s.Reason != want.reason || s.Details.Causes[0].Type != metav1.CauseType(cause.String()) {
				t.Errorf("got %d %+v, want %+v", resp.StatusCode, s, want)
			}
			retry := resp.Header.Get("Retry-After")
			if (retry != "") != want.retry || want.retry && retry != fmt.Sprint(s.Details.RetryAfterSeconds) {
				t.Errorf("Retry-After %q, retryAfterSeconds %d, want retry %v", retry, s.Details.RetryAfterSeconds, want.retry)
			}
			if strings.Contains(s.Message, "secret") || !strings.Contains(s.Message, "mvp-node a") {
				t.Errorf("message %q must name the node and no inner detail", s.Message)
			}
			if after != before+1 {
				t.Errorf("mvp_front_errors_total went from %v to %v", before, after)
			}
		})
	}
	if len(answers) != len(route.Causes()) {
		t.Errorf("%d rows for %d causes", len(answers), len(route.Causes()))
	}
}

// CASES F-02: a Status in what the client accepts, JSON if it accepts nothing that we have.
func TestStatusIsNegotiated(t *testing.T) {
	w := newWorld(t, true)
	w.forward = func(*http.Request) (*http.Response, Served, error) {
		return nil, Served{}, &Failure{Cause: route.NoPeerAvailable}
	}
	for accept, want := range map[string]string{
		"application/vnd.kubernetes.protobuf": "application/vnd.kubernetes.protobuf",
		"application/json":                    "application/json",
		"application/vnd.kubernetes.protobuf;q=0.9, application/json;q=0.1": "application/vnd.kubernetes.protobuf",
		"application/json;as=Table;v=v1;g=meta.k8s.io,application/json":     "application/json",
		"application/json;as=Table;v=v1;g=meta.k8s.io":                      "application/json",
		"text/html": "application/json",
		"":          "application/json",
	} {
		resp, body := w.do("GET", widgetsPath, http.Header{"Accept": {accept}})
		if resp.StatusCode != 503 || resp.Header.Get("Content-Type") != want || resp.Header.Get("Retry-After") == "" {
			t.Errorf("Accept %q: %d %v %q", accept, resp.StatusCode, resp.Header, body)
		}
		if strings.Contains(want, "protobuf") != strings.HasPrefix(body, "k8s\x00") {
			t.Errorf("Accept %q: body %.20q does not fit %s", accept, body, want)
		}
	}
}

func TestLocalFailures(t *testing.T) {
	w := newWorld(t, true)
	for _, tc := range []struct {
		name, method, path string
		err                error
		code               int
		cause              route.Cause
	}{
		{"dial refused", "POST", podsPath, notSent{errors.New("refused")}, 503, route.LocalUnavailable},
		{"write cut off", "POST", podsPath, errors.New("EOF"), 504, route.OutcomeUnknown},
		{"delete cut off", "DELETE", podsPath + "/p", errors.New("EOF"), 504, route.OutcomeUnknown},
		{"exec is no read though a GET", "GET", podsPath + "/p/exec", errors.New("EOF"), 504, route.OutcomeUnknown},
		{"read cut off", "GET", podsPath, errors.New("EOF"), 503, route.LocalUnavailable},
		{"time over before sending", "POST", podsPath, notSent{context.DeadlineExceeded}, 504, route.DeadlineBeforeDispatch},
		{"time over after sending a write", "POST", podsPath, context.DeadlineExceeded, 504, route.OutcomeUnknown},
		{"time over after sending a read", "GET", podsPath, context.DeadlineExceeded, 504, route.OutcomeUnknown},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w.setView(route.Member{Name: "a", State: route.Ready, Mode: route.Enabled, Catalog: mustPods(t)})
			w.local = func(*http.Request) (*http.Response, error) { return nil, tc.err }
			resp, s := w.status(tc.method, tc.path, nil)
			if resp.StatusCode != tc.code || s.Details.Causes[0].Type != metav1.CauseType(tc.cause.String()) {
				t.Errorf("got %d %+v, want %d %s", resp.StatusCode, s.Details, tc.code, tc.cause)
			}
		})
	}
	t.Run("bad request", func(t *testing.T) {
		// No apiserver can be sent it, so a client must not be told to try again.
		w.local = func(*http.Request) (*http.Response, error) { return nil, badRequest{notSent{errors.New("target")}} }
		if resp, s := w.status("GET", "/x", nil); resp.StatusCode != 400 || s.Reason != metav1.StatusReasonBadRequest || resp.Header.Get("Retry-After") != "" {
			t.Errorf("got %d %+v", resp.StatusCode, s)
		}
	})
	t.Run("no identity", func(t *testing.T) {
		w.local = func(*http.Request) (*http.Response, error) { return nil, fmt.Errorf("upstream: %w", authz.ErrNoUser) }
		if resp, s := w.status("GET", podsPath, nil); resp.StatusCode != 500 || resp.Header.Get("Retry-After") != "" {
			t.Errorf("got %d %+v", resp.StatusCode, s)
		}
	})
}

func mustPods(t testing.TB) *catalog.Catalog {
	t.Helper()
	c, err := catalog.New("v1.36.3", []catalog.GroupVersion{{GV: catalog.GV{Version: "v1"}, Source: catalog.SourceBuiltin, Resources: []catalog.Resource{
		{Name: "pods", Verbs: catalog.ParseVerbs(allVerbs)}, {Name: "pods", Subresource: "exec", Verbs: catalog.ParseVerbs([]string{"get", "create"})},
	}}})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

type notSent struct{ error }

func (notSent) NotSent() bool   { return true }
func (e notSent) Unwrap() error { return e.error }

type badRequest struct{ notSent }

func (badRequest) BadRequest() bool { return true }

func TestAuthentication(t *testing.T) {
	bothProtocols(t, func(t *testing.T, w *world) {
		for _, tc := range []struct {
			name string
			ok   bool
			err  error
			code int
		}{
			{"no credentials", false, nil, 401},
			{"bad token", false, errors.New("invalid bearer token"), 401},
			{"review not answered", false, apierrors.NewServiceUnavailable("no"), 503},
			{"review unreachable", false, &net.OpError{Op: "dial", Err: errors.New("refused")}, 503},
			{"review timed out", false, context.DeadlineExceeded, 503},
		} {
			w.authn = func(*http.Request) (*authenticator.Response, bool, error) { return nil, tc.ok, tc.err }
			before := w.count()
			resp, s := w.status("GET", podsPath, nil)
			if resp.StatusCode != tc.code || w.count() != before {
				t.Errorf("%s: %d %+v, %d requests went on", tc.name, resp.StatusCode, s, w.count()-before)
			}
			if tc.code == 503 && s.Details.Causes[0].Type != "AuthnUnavailable" {
				t.Errorf("%s: cause %+v", tc.name, s.Details)
			}
		}
	})
}

func TestAccessIsReviewedBeforeAForward(t *testing.T) {
	w := newWorld(t, true)
	var asked authorizer.Attributes
	w.allow = func(a authorizer.Attributes) (authorizer.Decision, string, error) {
		asked = a
		return authorizer.DecisionNoOpinion, "no binding", nil
	}
	resp, s := w.status("DELETE", widgetsPath+"/x", nil)
	if resp.StatusCode != 403 || s.Reason != metav1.StatusReasonForbidden || w.count() != 0 {
		t.Errorf("denied: %d %+v, %d requests left the node", resp.StatusCode, s, w.count())
	}
	if asked.GetUser().GetName() != "jane" || asked.GetVerb() != "delete" || asked.GetResource() != "widgets" || asked.GetName() != "x" || asked.GetAPIGroup() != "widgets.example.com" {
		t.Errorf("asked about %+v", asked)
	}
	if want := `widgets.widgets.example.com "x" is forbidden: User "jane" cannot delete resource "widgets" in API group "widgets.example.com" at the cluster scope: no binding`; s.Message != want {
		t.Errorf("message %q\nwant    %q", s.Message, want)
	}
	w.allow = func(authorizer.Attributes) (authorizer.Decision, string, error) {
		return authorizer.DecisionNoOpinion, "", errors.New("refused")
	}
	w.strict = true
	if resp, s := w.status("GET", widgetsPath, nil); resp.StatusCode != 503 || s.Details.Causes[0].Type != "LocalUnavailable" || w.count() != 0 {
		t.Errorf("review not possible: %d %+v", resp.StatusCode, s)
	}
	w.strict = false // the upgrade of this apiserver must not take away what only its peers serve
	if resp, body := w.do("GET", widgetsPath, nil); resp.StatusCode != 200 || !strings.Contains(body, `"b"`) {
		t.Errorf("review not possible, with localOutage: %d %s", resp.StatusCode, body)
	}
	// Impersonation: the boundary is the impersonated user's; the serving apiserver judges the right to impersonate.
	w.allow = func(a authorizer.Attributes) (authorizer.Decision, string, error) {
		asked = a
		return authorizer.DecisionAllow, "", nil
	}
	w.do("GET", widgetsPath, http.Header{"Impersonate-User": {"joe"}, "Impersonate-Group": {"ops"}})
	if d := cmp.Diff([]string{"ops", "system:authenticated"}, asked.GetUser().GetGroups()); asked.GetUser().GetName() != "joe" || d != "" {
		t.Errorf("impersonated review of %+v", asked.GetUser())
	}
	// Groups that the apiserver adds to an impersonated user, or does not: a review without them would deny what is allowed.
	for _, tc := range []struct {
		user         string
		groups, want []string
	}{
		{"joe", nil, []string{"system:authenticated"}},
		{"joe", []string{"system:authenticated"}, []string{"system:authenticated"}},
		{"joe", []string{"system:unauthenticated"}, []string{"system:unauthenticated"}},
		{"system:anonymous", nil, []string{"system:unauthenticated"}},
		{"system:anonymous", []string{"ops"}, []string{"ops", "system:unauthenticated"}},
		{"system:serviceaccount:n:bot", nil, []string{"system:serviceaccounts", "system:serviceaccounts:n", "system:authenticated"}},
		{"system:serviceaccount:n:bot", []string{"ops"}, []string{"ops", "system:authenticated"}},
	} {
		header := http.Header{"Impersonate-User": {tc.user}, "Impersonate-Extra-Example.com%2fteam": {"red", "blue"}, "Impersonate-Uid": {"u7"}}
		if tc.groups != nil {
			header["Impersonate-Group"] = tc.groups
		}
		w.do("GET", widgetsPath, header)
		want := &user.DefaultInfo{Name: tc.user, UID: "u7", Groups: tc.want, Extra: map[string][]string{"example.com/team": {"red", "blue"}}}
		if d := cmp.Diff(user.Info(want), asked.GetUser()); d != "" {
			t.Errorf("review of %s in %v (-want +got):\n%s", tc.user, tc.groups, d)
		}
	}
	// Selectors are part of the question: a kubelet may list only what is on its node.
	w.do("GET", widgetsPath+"?fieldSelector=spec.nodeName%3Dn1&labelSelector=a%3Db", nil)
	fields, ferr := asked.GetFieldSelector()
	labels, lerr := asked.GetLabelSelector()
	if ferr != nil || lerr != nil || len(fields) != 1 || fields[0].Field != "spec.nodeName" || fields[0].Value != "n1" || len(labels) != 1 || labels[0].String() != "a=b" {
		t.Errorf("selectors asked about: %v %v, %v %v", fields, ferr, labels, lerr)
	}
	// A local request asks nothing: the apiserver does its own authorization.
	asked = nil
	w.do("GET", podsPath, nil)
	if asked != nil {
		t.Errorf("a local request was reviewed: %+v", asked)
	}
}

func TestOutageNeedsNoReview(t *testing.T) {
	w := newWorld(t, true)
	w.setView(
		route.Member{Name: "a", State: route.LocalDown, Mode: route.Enabled, Catalog: mustPods(t)},
		route.Member{Name: "b", State: route.Ready, Mode: route.Enabled, Address: "b:1", Catalog: mustPods(t)},
	)
	w.allow = func(authorizer.Attributes) (authorizer.Decision, string, error) {
		return authorizer.DecisionNoOpinion, "", errors.New("refused")
	}
	if resp, body := w.do("GET", podsPath, nil); resp.StatusCode != 200 || !strings.Contains(body, `"b"`) {
		t.Errorf("pods while the local apiserver is down: %d %s", resp.StatusCode, body)
	}
	// What only the peer serves needs none either, and none is tried: the answer does not wait for a time-out.
	w.setView(
		route.Member{Name: "a", State: route.LocalDown, Mode: route.Enabled, Catalog: mustPods(t)},
		route.Member{Name: "b", State: route.Ready, Mode: route.Enabled, Address: "b:1", Catalog: testCatalog(t, catalog.GV{Group: "widgets.example.com", Version: "v1"}, "widgets", allVerbs...)},
	)
	w.allow = func(authorizer.Attributes) (authorizer.Decision, string, error) {
		t.Error("a review was tried")
		return authorizer.DecisionNoOpinion, "", errors.New("refused")
	}
	if resp, body := w.do("GET", widgetsPath, nil); resp.StatusCode != 200 || !strings.Contains(body, `"b"`) {
		t.Errorf("widgets while the local apiserver is down: %d %s", resp.StatusCode, body)
	}
}

func TestReadyz(t *testing.T) {
	w := newWorld(t, false)
	w.authn = func(*http.Request) (*authenticator.Response, bool, error) {
		return &authenticator.Response{User: &user.DefaultInfo{Name: user.Anonymous, Groups: []string{user.AllUnauthenticated}}}, true, nil
	}
	w.local = func(*http.Request) (*http.Response, error) { return answered(200, "ok"), nil }
	if resp, body := w.do("GET", "/readyz", nil); resp.StatusCode != 200 || body != "ok" {
		t.Errorf("ready: %d %q", resp.StatusCode, body)
	}
	w.ready = errors.New("the local catalog is not known")
	if resp, body := w.do("GET", "/readyz", nil); resp.StatusCode != 503 || strings.Contains(body, "catalog") {
		t.Errorf("not ready: %d %q", resp.StatusCode, body)
	}
	if resp, body := w.do("GET", "/livez", nil); resp.StatusCode != 200 || body != "ok" {
		t.Errorf("livez must stay the apiserver's: %d %q", resp.StatusCode, body)
	}
}

func TestPanicIsAStatus(t *testing.T) {
	w := newWorld(t, true)
	w.local = func(*http.Request) (*http.Response, error) { panic("bug with a secret") }
	resp, s := w.status("GET", podsPath, nil)
	if resp.StatusCode != 500 || strings.Contains(s.Message, "secret") {
		t.Errorf("got %d %+v", resp.StatusCode, s)
	}
}

func TestRequestTimeout(t *testing.T) {
	for query, want := range map[string]time.Duration{
		"": time.Minute, "timeout=3s": 3 * time.Second, "timeout=90s": time.Minute, "timeout=x": time.Minute, "timeout=-1s": time.Minute,
		"timeoutSeconds=5": time.Minute, "a=b&timeout=500ms": 500 * time.Millisecond,
	} {
		r := httptest.NewRequest("GET", "/api/v1/pods?"+query, nil)
		if got := requestTimeout(r, time.Minute); got != want {
			t.Errorf("?%s: %v, want %v", query, got, want)
		}
	}
}

// CASES A-03: what strangers type adds no series.
func TestMetricsDoNotGrow(t *testing.T) {
	w := newWorld(t, true)
	w.do("GET", podsPath, nil)
	before, err := testutil.GatherAndCount(w.reg)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 200 {
		w.do([]string{"GET", "POST", "FOO", "PUT"}[i%4], fmt.Sprintf("/apis/g%d.example/v%d/r%d", i, i, i), nil)
	}
	after, err := testutil.GatherAndCount(w.reg)
	if err != nil {
		t.Fatal(err)
	}
	if after-before > 20 {
		t.Errorf("series grew from %d to %d", before, after)
	}
}

func TestNewNamesWhatIsMissing(t *testing.T) {
	if _, err := New(Options{}); err == nil || !strings.Contains(err.Error(), "is required") {
		t.Errorf("got %v", err)
	}
}
