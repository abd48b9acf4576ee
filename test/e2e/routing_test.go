//go:build e2e

package e2e

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/mvp-mesh/mvp-node/test/harness"
)

// TestMixedVersions runs the main job: v1.35 at cp-a, v1.36 at cp-b and cp-c, a node before each.
func TestMixedVersions(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), longest)
	defer cancel()
	c := harness.New(t, harness.Options{
		Binaries: testBinaries(t),
		Hosts: []harness.HostOptions{
			{Name: "cp-a", Version: harness.V135}, {Name: "cp-b", Version: harness.V136}, {Name: "cp-c", Version: harness.V136},
		},
		Nodes: true,
	})
	a, b := c.Host("cp-a"), c.Host("cp-b")
	converged(t, ctx, c)
	root := admin(t, c)
	through := client(t, c, a.Node.URL(), root)
	straightOld := client(t, c, a.APIServer.URL(), root)
	straightNew := client(t, c, b.APIServer.URL(), root)

	t.Run("R-01 requests", func(t *testing.T) { testEveryVerb(t, ctx, c, through, straightOld, straightNew) })
	t.Run("R-03a true 404", func(t *testing.T) {
		direct, proxied := get(t, ctx, straightOld, unknown), get(t, ctx, through, unknown)
		if proxied.Status != 404 || !bytes.Equal(direct.Body, proxied.Body) || direct.Header.Get("Content-Type") != proxied.Header.Get("Content-Type") {
			t.Errorf("got %d %q, the apiserver's own is %d %q", proxied.Status, proxied.Body, direct.Status, direct.Body)
		}
		// An object that is not there, of a resource that a peer serves, is the peer's 404 and no reason for anything else.
		direct, proxied = get(t, ctx, straightNew, policies+"/none"), get(t, ctx, through, policies+"/none")
		if proxied.Status != 404 || !bytes.Equal(direct.Body, proxied.Body) {
			t.Errorf("got %d %q, the apiserver's own is %d %q", proxied.Status, proxied.Body, direct.Status, direct.Body)
		}
	})
	t.Run("R-01 random requests", func(t *testing.T) {
		clients := []*harness.Client{through, client(t, c, b.Node.URL(), root), client(t, c, c.Host("cp-c").Node.URL(), root)}
		paths := []string{policies, "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicybindings", configMaps, "/api/v1/nodes"}
		r := rand.New(rand.NewPCG(1, 2))
		for range manyRequests {
			i, p := r.IntN(len(clients)), paths[r.IntN(len(paths))]
			if resp := get(t, ctx, clients[i], p); resp.Status != 200 {
				t.Fatalf("GET %s through node %d: %d %.200s", p, i, resp.Status, resp.Body)
			}
		}
	})
	t.Run("R-07 marks of a client change nothing", func(t *testing.T) {
		marks := http.Header{
			"X-Kubernetes-Peer-Proxied": {"true"}, "X-Kubernetes-Apiserver-Rerouted": {"true"},
			"X-Mvp-Node-Hop": {"1"}, "x-kubernetes-peer-proxied": {"true"},
		}
		if r := do(t, ctx, through, "GET", policies, marks, nil); r.Status != 200 {
			t.Errorf("got %d %s", r.Status, r.Body)
		}
	})
	t.Run("S-01 S-02 watch", func(t *testing.T) { testWatches(t, ctx, c, through, straightNew) })
	t.Run("identity", func(t *testing.T) { testIdentity(t, ctx, c) })
	t.Run("I-02 forged identity", func(t *testing.T) { testForgedIdentity(t, ctx, c) })
	t.Run("looking in", func(t *testing.T) { testLookingIn(t, ctx, c) })
	t.Run("peers killed", func(t *testing.T) { testPeersKilled(t, ctx, c, through) })
}

// testEveryVerb does with X through the v1.35 node all that a client can do, and compares with the v1.36 apiserver.
func testEveryVerb(t *testing.T, ctx context.Context, c *harness.Cluster, through, straightOld, straightNew *harness.Client) {
	if r := get(t, ctx, straightOld, policies); r.Status != 404 {
		t.Fatalf("straight to v1.35: %d %s, want the 404 that this is about", r.Status, r.Body)
	}
	if r := do(t, ctx, through, "POST", policies, nil, harness.MutatingAdmissionPolicy("one")); r.Status != 201 {
		t.Fatalf("create: %d %s", r.Status, r.Body)
	}
	if r := do(t, ctx, straightNew, "POST", policies, nil, harness.MutatingAdmissionPolicy("two")); r.Status != 201 {
		t.Fatalf("create straight: %d %s", r.Status, r.Body)
	}
	sameAnswer(t, ctx, through, straightNew, policies, nil)
	sameAnswer(t, ctx, through, straightNew, policies+"/one", nil)
	sameAnswer(t, ctx, through, straightNew, policies+"?limit=1", nil)
	sameAnswer(t, ctx, through, straightNew, policies+"?limit=1", http.Header{"Accept": {"application/vnd.kubernetes.protobuf"}})
	sameAnswer(t, ctx, through, straightNew, policies, http.Header{"Accept": {"application/json;as=Table;v=v1;g=meta.k8s.io"}})
	sameAnswer(t, ctx, through, straightNew, policies, http.Header{"Accept": {"application/cbor"}})

	r := get(t, ctx, through, policies+"/one")
	var object map[string]any
	if err := json.Unmarshal(r.Body, &object); err != nil {
		t.Fatal(err)
	}
	object["metadata"].(map[string]any)["labels"] = map[string]any{"step": "put"}
	if r := do(t, ctx, through, "PUT", policies+"/one", nil, object); r.Status != 200 || !strings.Contains(string(r.Body), `"step":"put"`) {
		t.Errorf("update: %d %s", r.Status, r.Body)
	}
	if r := do(t, ctx, through, "PUT", policies+"/one", nil, object); r.Status != 409 {
		t.Errorf("update of an old version: %d %s, want the apiserver's conflict", r.Status, r.Body)
	}
	merge := http.Header{"Content-Type": {"application/merge-patch+json"}}
	if r := do(t, ctx, through, "PATCH", policies+"/one", merge, map[string]any{"metadata": map[string]any{"labels": map[string]any{"step": "patch"}}}); r.Status != 200 || !strings.Contains(string(r.Body), `"step":"patch"`) {
		t.Errorf("patch: %d %s", r.Status, r.Body)
	}
	apply := http.Header{"Content-Type": {"application/apply-patch+yaml"}}
	if r := do(t, ctx, through, "PATCH", policies+"/three?fieldManager=e2e", apply, harness.MutatingAdmissionPolicy("three")); r.Status != 201 {
		t.Errorf("server-side apply: %d %s", r.Status, r.Body)
	}
	if r := do(t, ctx, through, "DELETE", policies+"/two", nil, nil); r.Status != 200 {
		t.Errorf("delete: %d %s", r.Status, r.Body)
	}
	if r := do(t, ctx, through, "DELETE", policies+"?labelSelector=step%3Dpatch", nil, nil); r.Status != 200 {
		t.Errorf("delete collection: %d %s", r.Status, r.Body)
	}
	var left struct {
		Items []struct{ Metadata struct{ Name string } }
	}
	if err := json.Unmarshal(get(t, ctx, straightNew, policies).Body, &left); err != nil {
		t.Fatal(err)
	}
	if len(left.Items) != 1 || left.Items[0].Metadata.Name != "three" {
		t.Errorf("left at the end: %+v, want only three", left.Items)
	}
	if n := metric(t, ctx, c.Host("cp-a"), "mvp_front_forwarded_total"); n < 10 {
		t.Errorf("mvp_front_forwarded_total at cp-a is %v", n)
	}
}

// sameAnswer compares a GET through a node with one straight to the serving apiserver: status, body and end-to-end headers.
func sameAnswer(t *testing.T, ctx context.Context, through, straight *harness.Client, path string, header http.Header) {
	t.Helper()
	want, got := do(t, ctx, straight, "GET", path, header, nil), do(t, ctx, through, "GET", path, header, nil)
	if want.Status != got.Status || !bytes.Equal(want.Body, got.Body) {
		t.Errorf("GET %s %v: %d %.300q, straight %d %.300q", path, header, got.Status, got.Body, want.Status, want.Body)
	}
	for _, r := range []*harness.Response{want, got} {
		if len(r.Header["Audit-Id"]) != 1 {
			t.Errorf("GET %s: Audit-Id %q, want one", path, r.Header["Audit-Id"])
		}
		for _, name := range []string{"Audit-Id", "Date", "X-Kubernetes-Pf-Flowschema-Uid", "X-Kubernetes-Pf-Prioritylevel-Uid"} {
			r.Header.Del(name)
		}
	}
	// Content-Length is framing: net/http adds it to an answer that its handler ended within one buffer, which is 4 KiB with
	// HTTP/2 and 2 KiB with HTTP/1.1, and the node may speak another of the two to the apiserver than the client does. What it
	// says must be true, which the client has checked while reading the body.
	want.Header.Del("Content-Length")
	got.Header.Del("Content-Length")
	if d := cmp.Diff(want.Header, got.Header); d != "" {
		t.Errorf("GET %s %v: headers (-straight +through):\n%s", path, header, d)
	}
}

// testWatches: the head comes without any event, and each event within 100 ms of the write that caused it (which includes the
// write's own way through etcd, so the bound is generous to nobody but the machine).
func testWatches(t *testing.T, ctx context.Context, c *harness.Cluster, through, straightNew *harness.Client) {
	root := admin(t, c)
	for _, path := range []struct {
		name, list string
		create     func(name string) (string, any)
	}{
		{"forwarded", policies, func(name string) (string, any) { return policies, harness.MutatingAdmissionPolicy(name) }},
		{"local", configMaps, func(name string) (string, any) {
			return configMaps, map[string]any{"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]any{"name": name}}
		}},
	} {
		for _, protocol := range []string{"HTTP/1.1", "HTTP/2.0"} {
			for _, encoding := range []string{"identity", "gzip"} {
				name := strings.ToLower(strings.NewReplacer("/", "", ".", "").Replace(path.name + protocol + encoding))
				t.Run(name, func(t *testing.T) {
					cl := client(t, c, through.URL, root)
					tr := cl.HTTP.Transport.(*http.Transport)
					tr.DisableCompression = true
					if protocol == "HTTP/1.1" {
						tr.ForceAttemptHTTP2 = false
						tr.TLSClientConfig.NextProtos = []string{"http/1.1"}
					}
					ctx, cancel := context.WithTimeout(ctx, time.Minute)
					defer cancel()
					rv := resourceVersion(t, ctx, straightNew, path.list)
					req, err := http.NewRequestWithContext(ctx, "GET", cl.URL+path.list+"?watch=true&resourceVersion="+rv+"&fieldSelector=metadata.name%3D"+name, nil)
					if err != nil {
						t.Fatal(err)
					}
					req.Header.Set("Accept-Encoding", encoding)
					start := time.Now()
					resp, err := cl.HTTP.Do(req)
					if err != nil {
						t.Fatal(err)
					}
					defer resp.Body.Close()
					if took := time.Since(start); resp.StatusCode != 200 || resp.Proto != protocol || took > time.Second {
						t.Fatalf("head of a quiet watch: %d %s after %v", resp.StatusCode, resp.Proto, took)
					}
					var body io.Reader = resp.Body
					if resp.Header.Get("Content-Encoding") == "gzip" {
						if body, err = gzip.NewReader(resp.Body); err != nil {
							t.Fatal(err)
						}
					}
					events := make(chan time.Time, 1)
					go func() {
						if _, err := bufio.NewReader(body).ReadBytes('\n'); err == nil {
							events <- time.Now()
						}
					}()
					list, object := path.create(name)
					if r := do(t, ctx, straightNew, "POST", list, nil, object); r.Status != 201 {
						t.Fatalf("create: %d %s", r.Status, r.Body)
					}
					written := time.Now()
					select {
					case got := <-events:
						if late := got.Sub(written); late > 100*time.Millisecond {
							t.Errorf("event came %v after the write was answered", late)
						}
					case <-ctx.Done():
						t.Fatal("no event")
					}
					if r := do(t, ctx, straightNew, "DELETE", list+"/"+name, nil, nil); r.Status != 200 {
						t.Errorf("delete: %d", r.Status)
					}
				})
			}
		}
	}
}

func resourceVersion(t *testing.T, ctx context.Context, cl *harness.Client, path string) string {
	t.Helper()
	var list struct {
		Metadata struct {
			ResourceVersion string `json:"resourceVersion"`
		} `json:"metadata"`
	}
	if err := get(t, ctx, cl, path+"?limit=1").Decode(&list); err != nil {
		t.Fatal(err)
	}
	return list.Metadata.ResourceVersion
}

// testLookingIn: the commands and grpcurl show the same mesh.
func testLookingIn(t *testing.T, ctx context.Context, c *harness.Cluster) {
	a := c.Host("cp-a")
	v := viewOf(t, ctx, c, a)
	versions := map[string]string{}
	for _, m := range v.Members {
		versions[m.Name] = m.ServerVersion + " " + m.State
		if m.CatalogDigest != m.HeldDigest || m.Resources < 100 {
			t.Errorf("member %+v: want the advertised catalog held, with over 100 resources", m)
		}
	}
	if d := cmp.Diff(map[string]string{"cp-a": harness.V135 + " Ready", "cp-b": harness.V136 + " Ready", "cp-c": harness.V136 + " Ready"}, versions); d != "" {
		t.Errorf("members (-want +got):\n%s", d)
	}
	for _, h := range c.Hosts {
		if other := viewOf(t, ctx, c, h); other.ViewHash != v.ViewHash || !other.Complete {
			t.Errorf("view of %s is %s (complete %t), of cp-a %s", h.Name, other.ViewHash, other.Complete, v.ViewHash)
		}
	}
	for _, tc := range []struct {
		args []string
		want []string
	}{
		{[]string{"members"}, []string{"NAME", "cp-a", "cp-b", harness.V135}},
		{[]string{"gossip", "dump"}, []string{"converged: true", "cp-c", "alive", "health score 0"}},
		{[]string{"gossip", "dump", "--catalogs"}, []string{"mutatingadmissionpolicies", "Builtin"}},
		{[]string{"explain", "GET", policies}, []string{"Forward", "ServedByPeer", "cp-b"}},
		{[]string{"explain", "get", "/api/v1/namespaces/x/pods/p/exec"}, []string{"Local", "ServedLocally", "exec"}},
		{[]string{"explain", "GET", unknown}, []string{"Local", "NotServedAnywhere"}},
		{[]string{"explain", "GET", "/version"}, []string{"Local", "NonResource"}},
	} {
		r := cli(t, ctx, c, a, tc.args...)
		for _, w := range tc.want {
			if r.ExitCode != 0 || !strings.Contains(r.Stdout, w) {
				t.Errorf("mvp-node %s: exit code %d, %q missing in\n%s%s", strings.Join(tc.args, " "), r.ExitCode, w, r.Stdout, r.Stderr)
			}
		}
	}
	// Two JSON dumps of the same state differ in ages only; members come sorted.
	if names := []string{v.Members[0].Name, v.Members[1].Name, v.Members[2].Name}; !slices.IsSorted(names) {
		t.Errorf("members are not sorted: %q", names)
	}

	grpcurl, err := c.Tool(ctx, "grpcurl")
	if err != nil {
		t.Fatal(err)
	}
	operator, err := c.PKI.OperatorCert("alice")
	if err != nil {
		t.Fatal(err)
	}
	call := func(files harness.CertFiles, args ...string) harness.Result {
		t.Helper()
		base := []string{"-cacert", c.PKI.MeshCAFile, "-cert", files.Cert, "-key", files.Key, "-servername", "cp-a"}
		r, err := harness.Run(ctx, harness.ProcessSpec{Name: "grpcurl", Path: grpcurl, Args: append(base, args...)}, nil)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	if r := call(operator, a.Node.MeshAddress(), "list"); !strings.Contains(r.Stdout, "mvp.v1.MeshService") || !strings.Contains(r.Stdout, "grpc.health.v1.Health") {
		t.Errorf("grpcurl list: %d %s%s", r.ExitCode, r.Stdout, r.Stderr)
	}
	if r := call(operator, a.Node.MeshAddress(), "mvp.v1.MeshService/GetView"); !strings.Contains(r.Stdout, v.ViewHash) {
		t.Errorf("grpcurl GetView: %d %s%s", r.ExitCode, r.Stdout, r.Stderr)
	}
	if r := call(operator, a.Node.MeshAddress(), "grpc.health.v1.Health/Check"); !strings.Contains(r.Stdout, "SERVING") {
		t.Errorf("grpcurl health: %d %s%s", r.ExitCode, r.Stdout, r.Stderr)
	}
	if r := call(operator, "-d", `{"head":{"hop":1}}`, a.Node.MeshAddress(), "mvp.v1.ForwardService/Forward"); r.ExitCode == 0 || !strings.Contains(r.Stderr, "PermissionDenied") {
		t.Errorf("an operator may forward: %d %s%s", r.ExitCode, r.Stdout, r.Stderr)
	}
	// a node's certificate opens the door, but a second hop is refused.
	node, err := c.PKI.MeshCert("cp-b", c.Host("cp-b").IP)
	if err != nil {
		t.Fatal(err)
	}
	head := fmt.Sprintf(`{"head":{"clusterId":%q,"hop":2,"deadlineClass":"DEADLINE_CLASS_SHORT","end":true,"identity":{"user":"x"},"audit":{"auditId":"a","ingressNode":"cp-b","sourceIps":["127.0.0.1"]},`+
		`"http":{"method":"GET","target":"/api/v1/pods"},"attributes":{"version":"v1","resource":"pods","verb":"list"}}}`, c.ID)
	if r := call(node, "-max-time", "5", "-d", head, a.Node.MeshAddress(), "mvp.v1.ForwardService/Forward"); r.ExitCode == 0 || !strings.Contains(r.Stderr, "LoopDetected") {
		t.Errorf("second hop: %d %s%s", r.ExitCode, r.Stdout, r.Stderr)
	}
}

// testPeersKilled: with every server of X gone without notice, X is 503 with a cause, never 404; it is back within 5 s of the
// readiness of one.
func testPeersKilled(t *testing.T, ctx context.Context, c *harness.Cluster, through *harness.Client) {
	b := c.Host("cp-b")
	if err := b.Node.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := c.Host("cp-c").Node.Kill(); err != nil {
		t.Fatal(err)
	}
	for start := time.Now(); time.Since(start) < 12*time.Second; {
		r := get(t, ctx, through, policies)
		s := statusOf(t, r)
		if r.Status != 503 || s.Reason != "ServiceUnavailable" || cause(s) == "" || r.Header.Get("Retry-After") == "" {
			t.Fatalf("%v after the kill: %d %s, headers %v", time.Since(start), r.Status, r.Body, r.Header)
		}
	}
	// Known resources of its own, and what nobody ever served, are not held up... the latter only once the view says so.
	if r := get(t, ctx, through, configMaps); r.Status != 200 {
		t.Errorf("configmaps: %d %s", r.Status, r.Body)
	}
	// After the failure detector's verdict the state is known: the cause says that no peer can be asked.
	eventually(t, ctx, settle, "cause NoPeerAvailable", func(ctx context.Context) error {
		r, err := through.Get(ctx, policies)
		if err != nil {
			return err
		}
		if s := statusOf(t, r); cause(s) != "NoPeerAvailable" {
			return fmt.Errorf("cause %q: %s", cause(s), r.Body)
		}
		return nil
	})
	if err := b.Node.Start(); err != nil {
		t.Fatal(err)
	}
	if err := b.Node.WaitReady(ctx); err != nil {
		t.Fatal(err)
	}
	took := eventually(t, ctx, 5*time.Second, "X after one server came back", wantCode(through, policies, 200))
	t.Logf("X answered %v after the node of cp-b was ready", took)
	if err := c.Host("cp-c").Node.Start(); err != nil {
		t.Fatal(err)
	}
	if err := c.Host("cp-c").Node.WaitReady(ctx); err != nil {
		t.Fatal(err)
	}
	converged(t, ctx, c)
}
