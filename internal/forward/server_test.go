package forward_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/catalog"
	"github.com/mvp-mesh/mvp-node/internal/forward"
	"github.com/mvp-mesh/mvp-node/internal/route"
	mvpv1 "github.com/mvp-mesh/mvp-node/proto/mvp/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// goodHead is a head that a serving node accepts from node "a".
func goodHead() *mvpv1.RequestHead {
	return &mvpv1.RequestHead{
		ClusterId: cluster,
		Hop:       1,
		Identity:  &mvpv1.Identity{User: "jane"},
		Audit:     &mvpv1.AuditContext{AuditId: "id-1", SourceIps: []string{"192.0.2.1"}, IngressNode: "a"},
		Http:      &mvpv1.HttpRequest{Method: "GET", Target: getPath},
		Attributes: &mvpv1.RequestAttributes{
			Group: "example.com", Version: "v1", Resource: "widgets", Verb: "get", Namespace: "default", Name: "w1",
		},
		DeadlineClass: mvpv1.DeadlineClass_DEADLINE_CLASS_SHORT,
		End:           true,
	}
}

func head(h *mvpv1.RequestHead) *mvpv1.ForwardRequest {
	return &mvpv1.ForwardRequest{Part: &mvpv1.ForwardRequest_Head{Head: h}}
}

func chunk(data string, end bool) *mvpv1.ForwardRequest {
	return &mvpv1.ForwardRequest{Part: &mvpv1.ForwardRequest_Chunk{Chunk: &mvpv1.Chunk{Data: []byte(data), End: end}}}
}

// call sends messages as they are and returns the status that ends the stream, with its detail.
func call(t testing.TB, c *client, m *route.Member, long bool, msgs ...*mvpv1.ForwardRequest) (*status.Status, *mvpv1.ForwardError) {
	t.Helper()
	conn, err := c.pool.Conn(m, long)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	st, err := mvpv1.NewForwardServiceClient(conn).Forward(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range msgs {
		if err := st.Send(m); err != nil {
			break // over already: Recv knows
		}
	}
	_ = st.CloseSend()
	for {
		if _, err = st.Recv(); err != nil {
			break
		}
	}
	if err == io.EOF {
		err = nil
	}
	s := status.Convert(err)
	for _, d := range s.Details() {
		if fe, ok := d.(*mvpv1.ForwardError); ok {
			return s, fe
		}
	}
	return s, nil
}

// Every reason for which a serving node refuses a head, in the order of its questions. The apiserver sees none of them.
func TestServerRefuses(t *testing.T) {
	w := newWorld(t)
	never := &apiserver{answer: answers}
	b := w.serve("b", never, func(o *forward.ServerOptions) { o.Policy.DeniedGroups = []string{"system:masters"} })
	c := w.client("a")
	with := func(f func(*mvpv1.RequestHead)) []*mvpv1.ForwardRequest {
		h := goodHead()
		f(h)
		return []*mvpv1.ForwardRequest{head(h)}
	}
	for _, tc := range []struct {
		name  string
		msgs  []*mvpv1.ForwardRequest
		code  codes.Code
		cause route.Cause
	}{
		{"nothing", nil, codes.InvalidArgument, route.PeerRefused},
		{"a chunk first", []*mvpv1.ForwardRequest{chunk("x", true)}, codes.InvalidArgument, route.PeerRefused},
		{"an empty message", []*mvpv1.ForwardRequest{{}}, codes.InvalidArgument, route.PeerRefused},
		{"an empty head", with(func(h *mvpv1.RequestHead) {
			*h = mvpv1.RequestHead{DeadlineClass: mvpv1.DeadlineClass_DEADLINE_CLASS_SHORT}
		}), codes.InvalidArgument, route.PeerRefused},
		{"no deadline class", with(func(h *mvpv1.RequestHead) { h.DeadlineClass = 0 }), codes.InvalidArgument, route.PeerRefused},
		{"an upgrade to nothing", with(func(h *mvpv1.RequestHead) {
			h.DeadlineClass = mvpv1.DeadlineClass_DEADLINE_CLASS_UPGRADE
		}), codes.InvalidArgument, route.PeerRefused},
		{"an upgrade with a deadline", with(func(h *mvpv1.RequestHead) { h.Http.Upgrade = "websocket" }), codes.InvalidArgument, route.PeerRefused},
		{"an upgrade to h2c", with(func(h *mvpv1.RequestHead) {
			h.DeadlineClass, h.Http.Upgrade = mvpv1.DeadlineClass_DEADLINE_CLASS_UPGRADE, "h2c"
		}), codes.InvalidArgument, route.PeerRefused},
		{"an upgrade with a body", with(func(h *mvpv1.RequestHead) {
			h.DeadlineClass, h.Http.Upgrade = mvpv1.DeadlineClass_DEADLINE_CLASS_UPGRADE, "websocket"
			h.End, h.Http.ContentLength = false, -1
		}), codes.InvalidArgument, route.PeerRefused},
		{"a class of the future", with(func(h *mvpv1.RequestHead) { h.DeadlineClass = 77 }), codes.Unimplemented, route.PeerRefused},
		{"a method that is none", with(func(h *mvpv1.RequestHead) { h.Http.Method = "GET /" }), codes.InvalidArgument, route.PeerRefused},
		{"an absolute target", with(func(h *mvpv1.RequestHead) { h.Http.Target = "http://x/y" }), codes.InvalidArgument, route.PeerRefused},
		{"a bad target", with(func(h *mvpv1.RequestHead) { h.Http.Target = "/%zz" }), codes.InvalidArgument, route.PeerRefused},
		{"a header with a line break", with(func(h *mvpv1.RequestHead) {
			h.Http.Headers = []*mvpv1.Header{{Name: "X-A", Values: []string{"a\r\nX-Remote-User: admin"}}}
		}), codes.InvalidArgument, route.PeerRefused},
		{"a header name with a space", with(func(h *mvpv1.RequestHead) {
			h.Http.Headers = []*mvpv1.Header{{Name: "X-Remote-User ", Values: []string{"admin"}}}
		}), codes.InvalidArgument, route.PeerRefused},
		{"an address that is none", with(func(h *mvpv1.RequestHead) {
			h.Audit.SourceIps = []string{"evil, 127.0.0.1"}
		}), codes.InvalidArgument, route.PeerRefused},
		{"no audit ID", with(func(h *mvpv1.RequestHead) { h.Audit.AuditId = "" }), codes.InvalidArgument, route.PeerRefused},
		{"less body than announced", with(func(h *mvpv1.RequestHead) {
			h.Http.ContentLength, h.Body = 5, []byte("abc")
		}), codes.InvalidArgument, route.PeerRefused},
		{"another cluster", with(func(h *mvpv1.RequestHead) { h.ClusterId = "other" }), codes.PermissionDenied, route.PeerRefused},
		{"no hop", with(func(h *mvpv1.RequestHead) { h.Hop = 0 }), codes.FailedPrecondition, route.LoopDetected},
		{"two hops", with(func(h *mvpv1.RequestHead) { h.Hop = 2 }), codes.FailedPrecondition, route.LoopDetected},
		{"another ingress node", with(func(h *mvpv1.RequestHead) { h.Audit.IngressNode = "c" }), codes.PermissionDenied, route.PeerRefused},
		{"no user", with(func(h *mvpv1.RequestHead) { h.Identity = nil }), codes.PermissionDenied, route.AssertionDenied},
		{"a user that is denied", with(func(h *mvpv1.RequestHead) {
			h.Identity.Groups = []string{"system:masters"}
		}), codes.PermissionDenied, route.AssertionDenied},
		{"another group", with(func(h *mvpv1.RequestHead) { h.Attributes.Group = "apps" }), codes.InvalidArgument, route.PeerRefused},
		{"another version", with(func(h *mvpv1.RequestHead) { h.Attributes.Version = "v2" }), codes.InvalidArgument, route.PeerRefused},
		{"another resource", with(func(h *mvpv1.RequestHead) { h.Attributes.Resource = "pods" }), codes.InvalidArgument, route.PeerRefused},
		{"another subresource", with(func(h *mvpv1.RequestHead) { h.Attributes.Subresource = "status" }), codes.InvalidArgument, route.PeerRefused},
		{"another verb", with(func(h *mvpv1.RequestHead) { h.Attributes.Verb = "list" }), codes.InvalidArgument, route.PeerRefused},
		{"another namespace", with(func(h *mvpv1.RequestHead) { h.Attributes.Namespace = "kube-system" }), codes.InvalidArgument, route.PeerRefused},
		{"another name", with(func(h *mvpv1.RequestHead) { h.Attributes.Name = "w2" }), codes.InvalidArgument, route.PeerRefused},
		{"no attributes", with(func(h *mvpv1.RequestHead) { h.Attributes = nil }), codes.InvalidArgument, route.PeerRefused},
		{"a get that claims to be long-running", with(func(h *mvpv1.RequestHead) {
			h.DeadlineClass = mvpv1.DeadlineClass_DEADLINE_CLASS_LONG_RUNNING
		}), codes.InvalidArgument, route.PeerRefused},
		{"what is not served", with(func(h *mvpv1.RequestHead) {
			h.Http.Target, h.Attributes.Resource = strings.Replace(getPath, "widgets", "gadgets", 1), "gadgets"
		}), codes.FailedPrecondition, route.NotServed},
	} {
		t.Run(tc.name, func(t *testing.T) {
			st, detail := call(t, c, b.member, false, tc.msgs...)
			if st.Code() != tc.code || detail.GetCause() != tc.cause.String() || detail.GetDispatched() {
				t.Errorf("status %v, detail %v, want %v %v, not dispatched", st, detail, tc.code, tc.cause)
			}
			if want := uint64(7); tc.cause == route.NotServed && detail.GetCatalogGeneration() != want {
				t.Errorf("generation %d, want %d", detail.GetCatalogGeneration(), want)
			}
		})
	}
	if n := never.calls.Load(); n != 0 {
		t.Errorf("the apiserver was asked %d times", n)
	}
	// CASES R-07: two wrong hop counts and one resource that is not served.
	if n := value(b.registry, "mvp_forward_loop_guard_total"); n != 3 {
		t.Errorf("loop guard counted %v", n)
	}
	if st, _ := call(t, c, b.member, false, head(goodHead())); st.Code() != codes.OK || never.calls.Load() != 1 {
		t.Errorf("a good head: %v", st)
	}
}

// A short request on a connection for long ones, whose calls get no deadline from the pool.
func TestShortWithoutDeadlineIsRefused(t *testing.T) {
	w := newWorld(t)
	b := w.serve("b", &apiserver{answer: answers})
	st, detail := call(t, w.client("a"), b.member, true, head(goodHead()))
	if st.Code() != codes.InvalidArgument || detail.GetCause() != route.PeerRefused.String() || detail.GetDispatched() {
		t.Errorf("status %v, detail %v", st, detail)
	}
}

func TestOperatorMayNotForward(t *testing.T) {
	w := newWorld(t)
	never := &apiserver{answer: answers}
	b := w.serve("b", never)
	c := w.client("operator-jane")
	h := goodHead()
	h.Audit.IngressNode = "operator-jane"
	if st, _ := call(t, c, b.member, false, head(h)); st.Code() != codes.PermissionDenied {
		t.Errorf("status %v", st)
	}
	_, _, err := c.RoundTrip(newRequest(t, "POST", listPath, nil), []*route.Member{b.member})
	wantError(t, err, route.PeerRefused, false)
	if never.calls.Load() != 0 {
		t.Error("the apiserver was asked")
	}
}

// The order of the parts after the head, and lengths that are not kept. The apiserver may have seen the beginning, never a whole body.
func TestServerRefusesBodies(t *testing.T) {
	w := newWorld(t)
	whole := 0
	b := w.serve("b", roundTripper(func(r *http.Request) (*http.Response, error) {
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			return nil, err
		}
		whole++
		return answer(r, 200, "ok"), nil
	}))
	c := w.client("a")
	post := func(length int64) *mvpv1.ForwardRequest {
		h := goodHead()
		h.Http.Method, h.Http.Target, h.Http.ContentLength = "POST", listPath, length
		h.Attributes.Verb, h.Attributes.Name, h.End = "create", "", false
		return head(h)
	}
	for _, tc := range []struct {
		name string
		msgs []*mvpv1.ForwardRequest
	}{
		{"a second head", []*mvpv1.ForwardRequest{post(-1), head(goodHead())}},
		{"an empty part", []*mvpv1.ForwardRequest{post(-1), {}}},
		{"no end", []*mvpv1.ForwardRequest{post(-1), chunk("abc", false)}},
		{"too little", []*mvpv1.ForwardRequest{post(5), chunk("abc", true)}},
		{"too much", []*mvpv1.ForwardRequest{post(5), chunk("abcdef", true)}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			st, detail := call(t, c, b.member, false, tc.msgs...)
			if st.Code() != codes.InvalidArgument || detail.GetCause() != route.PeerRefused.String() || !detail.GetDispatched() {
				t.Errorf("status %v, detail %v", st, detail)
			}
		})
	}
	if whole != 0 {
		t.Errorf("the apiserver took %d bodies for complete", whole)
	}
	if st, _ := call(t, c, b.member, false, post(6), chunk("abc", false), chunk("def", true)); st.Code() != codes.OK || whole != 1 {
		t.Errorf("a good body: %v", st)
	}
}

// A panic ends one call with a status that tells nothing of the inside, is counted, and leaves the server running.
func TestPanicTellsNothing(t *testing.T) {
	w := newWorld(t)
	b := w.serve("b", roundTripper(func(*http.Request) (*http.Response, error) { panic("secret-canary") }))
	c := w.client("a")
	st, _ := call(t, c, b.member, false, head(goodHead()))
	if st.Code() != codes.Internal || strings.Contains(st.String(), "canary") || strings.Contains(st.String(), ".go") {
		t.Errorf("status %v", st)
	}
	if n := value(b.registry, "mvp_mesh_panics_total"); n != 1 {
		t.Errorf("%v panics counted", n)
	}
	if n := value(b.registry, "mvp_mesh_inflight_calls", "/mvp.v1.ForwardService/Forward"); n != 0 {
		t.Errorf("%v calls in flight", n)
	}
	if st, _ := call(t, c, b.member, false, head(goodHead())); st.Code() != codes.Internal {
		t.Errorf("second call: %v", st)
	}
}

// A catalog that is not known, or a node that is not ready, is no proof of anything.
func TestNotReady(t *testing.T) {
	w := newWorld(t)
	for name, change := range map[string]func(*forward.ServerOptions){
		"draining":   func(o *forward.ServerOptions) { o.Ready = func() error { return errors.New("draining") } },
		"no catalog": func(o *forward.ServerOptions) { o.Catalog = func() (*catalog.Catalog, uint64) { return nil, 0 } },
	} {
		b := w.serve("b", &apiserver{answer: answers}, change)
		st, detail := call(t, w.client("a"), b.member, false, head(goodHead()))
		if st.Code() != codes.Unavailable || detail.GetCause() != route.LocalUnavailable.String() || detail.GetDispatched() {
			t.Errorf("%s: status %v, detail %v", name, st, detail)
		}
	}
}

// CASES S-09: a client that stops reading a busy watch stops nobody else, and little piles up for it.
func TestStalledStream(t *testing.T) {
	w := newWorld(t)
	b := w.serve("b", upstreamTo(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("watch") == "" {
			_, _ = io.WriteString(rw, "ok")
			return
		}
		event := make([]byte, 8<<10)
		for r.Context().Err() == nil {
			if _, err := rw.Write(event); err != nil {
				return
			}
		}
	})))
	c := w.client("a")
	c.wire.off = true
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	const stalled = 20
	for range stalled {
		resp, _, err := c.RoundTrip(newRequest(t, "GET", watchPath, nil), []*route.Member{b.member})
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
	}
	live, _, err := c.RoundTrip(newRequest(t, "GET", watchPath, nil), []*route.Member{b.member})
	if err != nil {
		t.Fatal(err)
	}
	defer live.Body.Close()
	// Much more than the connection's window passes on a watch that is read, beside those that are not, and short requests do not
	// wait.
	if _, err := io.CopyN(io.Discard, live.Body, 32<<20); err != nil {
		t.Fatal(err)
	}
	var worst time.Duration
	for range 200 {
		start := time.Now()
		resp, _, err := c.RoundTrip(newRequest(t, "GET", getPath, nil), []*route.Member{b.member})
		if err != nil {
			t.Fatal(err)
		}
		readAll(t, resp)
		worst = max(worst, time.Since(start))
	}
	if worst > time.Second {
		t.Errorf("a short request took %v", worst)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	// Both ends and the apiserver are in this process.
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > stalled<<20 {
		t.Errorf("heap grew by %d KiB for %d stalled streams", grown>>10, stalled)
	} else {
		t.Logf("heap grew by %d KiB for %d stalled streams; worst short request %v", grown>>10, stalled, worst)
	}
}
