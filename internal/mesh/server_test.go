package mesh

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/mvp-mesh/mvp-node/internal/authz"
	"github.com/mvp-mesh/mvp-node/internal/catalog"
	"github.com/mvp-mesh/mvp-node/internal/route"
	mvpv1 "github.com/mvp-mesh/mvp-node/proto/mvp/v1"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"
)

// Every method has a line in the table of access, and every line a method.
func TestAccessIsComplete(t *testing.T) {
	w := newWorld(t)
	s, err := NewServer(w.options("b"))
	if err != nil {
		t.Fatal(err)
	}
	registered := make(map[string]bool)
	for _, m := range methodsOf(s.grpc.GetServiceInfo()) {
		registered[m] = true
		if len(access[m]) == 0 {
			t.Errorf("method %s: nobody may call it", m)
		}
	}
	for m := range access {
		if !registered[m] {
			t.Errorf("line %s: no such method", m)
		}
	}
	s.grpc.Stop()
}

// A service that the table does not know keeps the server from starting.
func TestUnknownServiceIsRefused(t *testing.T) {
	w := newWorld(t)
	o := w.options("b")
	o.Register = append(o.Register, func(r grpc.ServiceRegistrar) {
		r.RegisterService(&grpc.ServiceDesc{
			ServiceName: "mvp.v1.Secret", HandlerType: (*any)(nil), Methods: []grpc.MethodDesc{{MethodName: "Open"}},
		}, nil)
	})
	if _, err := NewServer(o); err == nil || !strings.Contains(err.Error(), "/mvp.v1.Secret/Open") {
		t.Errorf("error %v", err)
	}
}

// Each method by each role, called for real.
func TestAccess(t *testing.T) {
	w := newWorld(t)
	b := w.start("b")
	pools := map[authz.Role]*Pool{authz.RoleNode: w.pool("a"), authz.RoleOperator: w.pool("operator-jane")}
	for _, method := range methodsOf(b.grpc.GetServiceInfo()) {
		for role, pool := range pools {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			// Opened as a stream whatever it is: only the verdict counts, and it comes before any message is read.
			st, err := connTo(t, pool, b.member, false).NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, method)
			if err != nil {
				t.Fatal(err)
			}
			_ = st.SendMsg(&mvpv1.GetViewRequest{})
			if method == mvpv1.ForwardService_Forward_FullMethodName && role == authz.RoleNode {
				err = st.RecvMsg(&mvpv1.ForwardResponse{})
			} else {
				_ = st.CloseSend()
				err = st.RecvMsg(&mvpv1.GetViewResponse{})
			}
			want := true
			if role == authz.RoleOperator && method == mvpv1.ForwardService_Forward_FullMethodName {
				want = false
			}
			if got := status.Code(err) != codes.PermissionDenied; got != want {
				t.Errorf("%s by %v: %v", method, role, err)
			}
			cancel()
		}
	}
}

// Who is taken off the allow list cannot go on with the connection it has.
func TestAllowListIsReadForEachCall(t *testing.T) {
	w := newWorld(t)
	allowed := []string{"a"} // changed in place, as a reload of the configuration would
	b := w.start("b", func(o *Options) { o.TLS.Rules.AllowedNames = allowed })
	// One connection that is up before the list changes: a pool would open another meanwhile, whose handshake reads the list.
	conn, err := grpc.NewClient(b.member.Address, grpc.WithTransportCredentials(credentials.NewTLS(w.tls("a").Client("h2", "b"))))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	client := mvpv1.NewMeshServiceClient(conn)
	if _, err := client.GetView(t.Context(), &mvpv1.GetViewRequest{}); err != nil {
		t.Fatal(err)
	}
	allowed[0] = "somebody else"
	if _, err := client.GetView(t.Context(), &mvpv1.GetViewRequest{}); status.Code(err) != codes.Unauthenticated {
		t.Errorf("after: %v", err)
	}
}

func TestHealth(t *testing.T) {
	w := newWorld(t)
	b := w.start("b")
	health := healthv1.NewHealthClient(connTo(t, w.pool("operator-jane"), b.member, false))
	check := func(service string, want healthv1.HealthCheckResponse_ServingStatus) {
		t.Helper()
		resp, err := health.Check(t.Context(), &healthv1.HealthCheckRequest{Service: service})
		if err != nil || resp.GetStatus() != want {
			t.Errorf("%q: %v %v, want %v", service, resp.GetStatus(), err, want)
		}
	}
	services := []string{"", "mvp.v1.MeshService", "mvp.v1.ForwardService"}
	for _, s := range services {
		check(s, healthv1.HealthCheckResponse_NOT_SERVING)
	}
	b.SetServing(true)
	for _, s := range services {
		check(s, healthv1.HealthCheckResponse_SERVING)
	}
	b.SetServing(false)
	check("", healthv1.HealthCheckResponse_NOT_SERVING)
}

func TestReflection(t *testing.T) {
	w := newWorld(t)
	b := w.start("b")
	st, err := reflectionv1.NewServerReflectionClient(connTo(t, w.pool("operator-jane"), b.member, false)).ServerReflectionInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := st.Send(&reflectionv1.ServerReflectionRequest{
		MessageRequest: &reflectionv1.ServerReflectionRequest_FileContainingSymbol{FileContainingSymbol: "mvp.v1.ForwardService"},
	}); err != nil {
		t.Fatal(err)
	}
	resp, err := st.Recv()
	if err != nil || len(resp.GetFileDescriptorResponse().GetFileDescriptorProto()) == 0 {
		t.Errorf("answer %v, %v", resp, err)
	}
	_ = st.CloseSend()
	if _, err := st.Recv(); err != io.EOF {
		t.Errorf("end: %v", err)
	}
}

// Shutdown says so first, waits for short calls, and cuts long ones when its time is over.
func TestShutdown(t *testing.T) {
	w := newWorld(t)
	b := w.start("b")
	pool := w.pool("a")
	watch, err := mvpv1.NewForwardServiceClient(connTo(t, pool, b.member, true)).Forward(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := watch.Recv(); err != nil {
		t.Fatal(err)
	}
	b.SetServing(true)
	health, err := healthv1.NewHealthClient(connTo(t, pool, b.member, true)).Watch(t.Context(), &healthv1.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if resp, err := health.Recv(); err != nil || resp.GetStatus() != healthv1.HealthCheckResponse_SERVING {
		t.Fatalf("%v %v", resp, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- b.Shutdown(ctx) }()
	if resp, err := health.Recv(); err != nil || resp.GetStatus() != healthv1.HealthCheckResponse_NOT_SERVING {
		t.Errorf("health during shutdown: %v %v", resp, err)
	}
	if err := <-done; !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("shutdown with a watch: %v", err)
	}
	if _, err := watch.Recv(); err == nil || err == io.EOF {
		t.Errorf("watch after shutdown: %v", err)
	}

	// Nothing under way: at once, and without an error.
	c := w.start("c")
	if _, err := mvpv1.NewMeshServiceClient(connTo(t, pool, c.member, false)).GetView(t.Context(), &mvpv1.GetViewRequest{}); err != nil {
		t.Fatal(err)
	}
	if err := c.Shutdown(t.Context()); err != nil {
		t.Errorf("idle shutdown: %v", err)
	}
}

// A bug in a handler ends one call, tells nothing, is logged with its stack and counted.
func TestPanic(t *testing.T) {
	w := newWorld(t)
	var log bytes.Buffer
	b := w.start("b", func(o *Options) {
		o.Logger = slog.New(slog.NewTextHandler(&log, nil))
		o.Explain = func(string, string, string) (Explanation, error) { panic("secret-canary") }
	})
	client := mvpv1.NewMeshServiceClient(connTo(t, w.pool("operator-jane"), b.member, false))
	_, err := client.Explain(t.Context(), &mvpv1.ExplainRequest{})
	if status.Code(err) != codes.Internal || strings.Contains(err.Error(), "canary") || strings.Contains(err.Error(), ".go") {
		t.Errorf("error %v", err)
	}
	if _, err := client.GetView(t.Context(), &mvpv1.GetViewRequest{}); err != nil {
		t.Errorf("afterwards: %v", err)
	}
	b.stop()
	if s := log.String(); !strings.Contains(s, "secret-canary") || !strings.Contains(s, "server_test.go") || !strings.Contains(s, "/Explain") {
		t.Errorf("log %s", s)
	}
	const want = `
# HELP mvp_mesh_panics_total Panics while serving a call on the mesh port. Any is a bug.
# TYPE mvp_mesh_panics_total counter
mvp_mesh_panics_total 1
`
	if err := testutil.GatherAndCompare(b.registry, strings.NewReader(want), "mvp_mesh_panics_total"); err != nil {
		t.Error(err)
	}
	if n := testutil.ToFloat64(b.metrics.calls.WithLabelValues(mvpv1.MeshService_Explain_FullMethodName, "Internal")); n != 1 {
		t.Errorf("%v calls counted as Internal", n)
	}
	if n := testutil.ToFloat64(b.metrics.of(mvpv1.MeshService_Explain_FullMethodName).inflight); n != 0 {
		t.Errorf("%v calls in flight", n)
	}
}

// A unary call never lasts for ever, though its caller gave it no deadline.
func TestUnaryDeadline(t *testing.T) {
	s := &Server{}
	_, _ = s.boundUnary(context.Background(), nil, nil, func(ctx context.Context, _ any) (any, error) {
		if d, ok := ctx.Deadline(); !ok || time.Until(d) > unaryTimeout {
			t.Errorf("deadline %v %v", d, ok)
		}
		return nil, nil
	})
}

// What operators see of the mesh.
func TestViewAndDump(t *testing.T) {
	w := newWorld(t)
	own, other := testCatalog(t, "v1.36.0"), testCatalog(t, "v1.35.2")
	v, err := route.NewView("b", []route.Member{
		{Name: "b", Address: "10.0.0.2:1", State: route.Ready, Mode: route.Enabled, ServerVersion: "v1.36.0", Digest: own.Digest(), Generation: 3, Catalog: own},
		{Name: "c", State: route.Missing, Mode: route.ObserveOnly, HoldsUp: true},
		{Name: "d", Address: "10.0.0.4:1", State: route.Stale, Mode: route.Enabled, Digest: own.Digest(), Generation: 9, Catalog: other},
	})
	if err != nil {
		t.Fatal(err)
	}
	b := w.start("b", func(o *Options) {
		o.Gossip = &fakeGossip{
			view: v,
			details: map[string]Detail{
				"b": {ViewHash: v.Hash().String(), NodeVersion: "v0.1.0"},
				"d": {CatalogAge: time.Minute, LastError: "refused"},
			},
			dump: Dump{
				Members:     []GossipMember{{Name: "d", Address: "10.0.0.4:2", Status: "dead", Boot: 0xabc, MetaFormat: 1, FetchFailures: 2, Vanished: time.Second}},
				HealthScore: 1, PendingPackets: 2, Seeds: []Seed{{Seed: "seed:1", Addresses: []string{"10.0.0.9:1"}, LastError: "refused"}},
			},
		}
	})
	got, err := mvpv1.NewMeshServiceClient(connTo(t, w.pool("operator-jane"), b.member, false)).
		DumpGossip(t.Context(), &mvpv1.DumpGossipRequest{Catalogs: true})
	if err != nil {
		t.Fatal(err)
	}
	want := &mvpv1.DumpGossipResponse{
		View: &mvpv1.GetViewResponse{
			Self: "b", ClusterId: cluster, ViewHash: v.Hash().String(), Converged: true,
			Members: []*mvpv1.Member{
				{
					Name: "b", Address: "10.0.0.2:1", State: "Ready", Mode: "Enabled", ServerVersion: "v1.36.0", CatalogDigest: own.Digest().String(),
					CatalogGeneration: 3, HeldDigest: own.Digest().String(), Resources: 2, CatalogAge: durationpb.New(0),
					ViewHash: v.Hash().String(), NodeVersion: "v0.1.0",
				},
				{Name: "c", State: "Missing", Mode: "ObserveOnly", HoldsUp: true},
				{
					Name: "d", Address: "10.0.0.4:1", State: "Stale", Mode: "Enabled", CatalogDigest: own.Digest().String(), CatalogGeneration: 9,
					HeldDigest: other.Digest().String(), Resources: 2, CatalogAge: durationpb.New(time.Minute), LastError: "refused",
				},
			},
		},
		GossipMembers: []*mvpv1.GossipMember{{Name: "d", Address: "10.0.0.4:2", Status: "dead", Boot: "abc", MetaFormat: 1, FetchFailures: 2, Vanished: durationpb.New(time.Second)}},
		HealthScore:   1, PendingPackets: 2, Seeds: []*mvpv1.Seed{{Seed: "seed:1", Addresses: []string{"10.0.0.9:1"}, LastError: "refused"}},
		Catalogs: []*mvpv1.MemberCatalog{
			{Name: "b", Digest: own.Digest().String(), Catalog: EncodeCatalog(own)},
			{Name: "d", Digest: other.Digest().String(), Catalog: EncodeCatalog(other)},
		},
	}
	if d := cmp.Diff(want, got, protocmp.Transform()); d != "" {
		t.Errorf("dump (-want +got):\n%s", d)
	}
}

func TestExplain(t *testing.T) {
	w := newWorld(t)
	b, c := &route.Member{Name: "b", State: route.Ready}, &route.Member{Name: "c", State: route.Ready, ServerVersion: "v1.36.0"}
	srv := w.start("b", func(o *Options) {
		o.Explain = func(method, target, user string) (Explanation, error) {
			if method != "GET" || target != "/x" || user != "jane" {
				return Explanation{}, errors.New("cannot be read")
			}
			return Explanation{
				Attributes: route.Attributes{Resource: true, Key: catalog.Key{Group: "g", Version: "v1", Resource: "r", Subresource: "s"}},
				Verb:       "get", Namespace: "ns", Name: "n", Mode: route.ObserveOnly, ViewComplete: true,
				Decision: route.Decision{
					Outcome: route.Local, Reason: route.ServedByPeer,
					Observed: &route.Decision{Outcome: route.Forward, Candidates: []*route.Member{c}},
				},
				ServedBy: []ServedBy{{b, "No"}, {c, "Yes"}},
			}, nil
		}
	})
	client := mvpv1.NewMeshServiceClient(connTo(t, w.pool("operator-jane"), srv.member, false))
	got, err := client.Explain(t.Context(), &mvpv1.ExplainRequest{Method: "GET", Target: "/x", User: "jane"})
	if err != nil {
		t.Fatal(err)
	}
	want := &mvpv1.ExplainResponse{
		Node: "b", Group: "g", Version: "v1", Resource: "r", Subresource: "s", Verb: "get", Namespace: "ns", Name: "n", ResourceRequest: true,
		Outcome: "Local", Reason: "ServedByPeer", ObservedOutcome: "Forward", Candidates: []string{"c"}, Mode: "ObserveOnly", ViewComplete: true,
		ServedBy: []*mvpv1.ServedBy{{Name: "b", State: "Ready", Serves: "No"}, {Name: "c", State: "Ready", ServerVersion: "v1.36.0", Serves: "Yes"}},
	}
	if d := cmp.Diff(want, got, protocmp.Transform()); d != "" {
		t.Errorf("explanation (-want +got):\n%s", d)
	}
	if _, err := client.Explain(t.Context(), &mvpv1.ExplainRequest{Method: "?"}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("error %v", err)
	}
}

// What is missing is named, all of it.
func TestOptions(t *testing.T) {
	_, err := NewServer(Options{})
	for _, name := range []string{"Name", "ClusterID", "TLS", "Catalog", "Gossip", "Explain", "Logger", "Registerer"} {
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s is not named in %v", name, err)
		}
	}
	if _, err := NewPool(PoolOptions{Registerer: prometheus.NewRegistry()}); err == nil {
		t.Error("a pool without TLS")
	}
}
