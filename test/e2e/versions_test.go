//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/mvp-mesh/mvp-node/test/harness"
	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"
)

const csiNodes = "/apis/storage.k8s.io/v1/csinodes"

// TestBuiltinPeerProxy runs v1.36 and v1.37 with Kubernetes' own mixed version proxy switched on, a node before each: each
// node's catalog still equals its own server's local view (CASES D-04), what only v1.37 serves is reached, subresources
// included (CASES R-05), and a request is forwarded once in all (CASES R-07).
func TestBuiltinPeerProxy(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), longest)
	defer cancel()
	c := harness.New(t, harness.Options{
		Binaries: testBinaries(t),
		Hosts: []harness.HostOptions{
			{Name: "cp-a", Version: harness.V136, APIServerArgs: []string{"--audit-policy-file=" + auditPolicy(t), "--audit-log-path=-"}},
			{Name: "cp-b", Version: harness.V137, APIServerArgs: []string{"--audit-policy-file=" + auditPolicy(t), "--audit-log-path=-"}},
		},
		Nodes:            true,
		BuiltinPeerProxy: true,
	})
	a, b := c.Host("cp-a"), c.Host("cp-b")
	converged(t, ctx, c)
	root := admin(t, c)
	straightA, straightB := client(t, c, a.APIServer.URL(), root), client(t, c, b.APIServer.URL(), root)
	throughA := client(t, c, a.Node.URL(), root)

	// Without this the test would prove nothing: the apiserver at cp-a forwards by itself and shows its peer's resources.
	const migrations = "/apis/storagemigration.k8s.io/v1/storageversionmigrations"
	eventually(t, ctx, 2*time.Minute, "the built-in proxy forwards", wantCode(straightA, migrations, 200))
	eventually(t, ctx, 2*time.Minute, "the built-in proxy merges discovery", func(ctx context.Context) error {
		if got := discovered(t, ctx, straightA, ""); !slices.Contains(got, "storagemigration.k8s.io/v1/storageversionmigrations") {
			return fmt.Errorf("merged discovery of cp-a has %d resources and not the peer's", len(got))
		}
		return nil
	})

	t.Run("D-04 catalogs are local views", func(t *testing.T) {
		for _, h := range c.Hosts {
			own := client(t, c, h.APIServer.URL(), root)
			want := discovered(t, ctx, own, ";profile=nopeer")
			if slices.Contains(want, "storagemigration.k8s.io/v1/storageversionmigrations") != (h == b) {
				t.Fatalf("the nopeer view of %s is not local", h.Name)
			}
			for _, asked := range c.Hosts { // every node holds the same for it
				if d := cmp.Diff(want, heldCatalog(t, ctx, c, asked, h.Name)); d != "" {
					t.Errorf("catalog of %s as held by %s (-nopeer discovery +catalog):\n%s", h.Name, asked.Name, d)
				}
			}
		}
	})
	t.Run("R-05 subresource of the newer server", func(t *testing.T) {
		node := map[string]any{"apiVersion": "storage.k8s.io/v1", "kind": "CSINode", "metadata": map[string]any{"name": "n1"}, "spec": map[string]any{"drivers": []any{}}}
		if r := do(t, ctx, throughA, "POST", csiNodes, nil, node); r.Status != 201 {
			t.Fatalf("create: %d %s", r.Status, r.Body)
		}
		before := metric(t, ctx, a, "mvp_front_forwarded_total")
		if r := get(t, ctx, throughA, csiNodes+"/n1"); r.Status != 200 {
			t.Errorf("csinodes/n1: %d %s", r.Status, r.Body)
		}
		if after := metric(t, ctx, a, "mvp_front_forwarded_total"); after != before {
			t.Errorf("a resource that cp-a serves was forwarded")
		}
		merge := http.Header{"Content-Type": {"application/merge-patch+json"}}
		patch := map[string]any{"metadata": map[string]any{"labels": map[string]any{"by": "status"}}}
		direct := do(t, ctx, straightB, "PATCH", csiNodes+"/n1/status", merge, patch)
		r := do(t, ctx, throughA, "PATCH", csiNodes+"/n1/status", merge, patch)
		if direct.Status != 200 || r.Status != 200 {
			t.Errorf("patch of csinodes/n1/status: %d %s, straight to v1.37 %d", r.Status, r.Body, direct.Status)
		}
		if after := metric(t, ctx, a, "mvp_front_forwarded_total"); after != before+1 {
			t.Errorf("the subresource was forwarded %v times, want once", after-before)
		}
	})
	t.Run("forwarded once in all", func(t *testing.T) {
		before := metric(t, ctx, a, "mvp_front_forwarded_total")
		r := get(t, ctx, throughA, migrations)
		if r.Status != 200 {
			t.Fatalf("%d %s", r.Status, r.Body)
		}
		if after := metric(t, ctx, a, "mvp_front_forwarded_total"); after != before+1 {
			t.Errorf("forwards by the nodes: %v, want 1", after-before)
		}
		// The audit ID shows which apiservers saw the request: only the serving one, so the one behind the ingress node did
		// not forward it a second time.
		id := r.Header.Get("Audit-Id")
		eventually(t, ctx, settle, "audit event at cp-b", func(context.Context) error {
			if !strings.Contains(b.APIServer.Process.LogTail(1<<20), id) {
				return fmt.Errorf("audit ID %s is not in its log", id)
			}
			return nil
		})
		if strings.Contains(a.APIServer.Process.LogTail(1<<20), id) {
			t.Errorf("audit ID %s is in the log of cp-a too: the request took another hop", id)
		}
	})
	t.Run("no second hop by the built-in proxy", func(t *testing.T) {
		// cp-b's server does not serve it, cp-a's does not either any more: nothing may bounce. A request that a node hands
		// to its apiserver carries the marker, so an apiserver that could forward to its peer answers itself.
		const path = "/apis/storagemigration.k8s.io/v1/storageversionmigrations"
		if err := b.Node.Kill(); err != nil {
			t.Fatal(err)
		}
		// The node of cp-b is gone, its apiserver is not: the built-in proxy of cp-a could reach it, the node must not let it,
		// because then a client's answer would depend on a path that nothing here controls.
		r := get(t, ctx, throughA, path)
		if s := statusOf(t, r); r.Status != 503 || cause(s) == "" {
			t.Errorf("with cp-b's node gone: %d %s, want 503 of mvp-node", r.Status, r.Body)
		}
		if err := b.Node.Start(); err != nil {
			t.Fatal(err)
		}
		if err := b.Node.WaitReady(ctx); err != nil {
			t.Fatal(err)
		}
	})
}

// TestUpgrade upgrades the first host under a running watch, with real kubectl, then the second by one more minor.
func TestUpgrade(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), longest)
	defer cancel()
	c := harness.New(t, harness.Options{
		Binaries: testBinaries(t),
		Hosts:    []harness.HostOptions{{Name: "cp-a", Version: harness.V135}, {Name: "cp-b", Version: harness.V136}},
		Nodes:    true,
	})
	a, b := c.Host("cp-a"), c.Host("cp-b")
	converged(t, ctx, c)
	root := admin(t, c)
	through := client(t, c, a.Node.URL(), root)

	load := startLoad(t, ctx, c, root)

	// A watch on X that runs through the upgrade of cp-a: it is forwarded, and the route flips to local while it runs.
	wctx, stop := context.WithCancel(ctx)
	defer stop()
	req, err := http.NewRequestWithContext(wctx, "GET", a.Node.URL()+policies+"?watch=true", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := through.HTTP.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	events := json.NewDecoder(resp.Body)

	if err := a.APIServer.RestartWithVersion(ctx, harness.V136); err != nil {
		t.Fatal(err)
	}
	eventually(t, ctx, settle, "X is served by the upgraded server", func(ctx context.Context) error {
		r := cli(t, ctx, c, a, "explain", "GET", policies)
		if !strings.Contains(r.Stdout, "ServedLocally") {
			return fmt.Errorf("%s", r.Stdout)
		}
		return nil
	})
	if r := do(t, ctx, through, "POST", policies, nil, harness.MutatingAdmissionPolicy("after")); r.Status != 201 {
		t.Fatalf("create after the upgrade: %d %s", r.Status, r.Body)
	}
	var event struct {
		Type   string
		Object struct{ Metadata struct{ Name string } }
	}
	if err := events.Decode(&event); err != nil || event.Type != "ADDED" || event.Object.Metadata.Name != "after" {
		t.Errorf("event on the watch from before the upgrade: %+v, %v", event, err)
	}
	stop()

	if err := b.APIServer.RestartWithVersion(ctx, harness.V137); err != nil {
		t.Fatal(err)
	}
	converged(t, ctx, c)
	for _, path := range []string{"/apis/storagemigration.k8s.io/v1/storageversionmigrations", "/apis/certificates.k8s.io/v1/clustertrustbundles"} {
		if r := get(t, ctx, through, path); r.Status != 200 {
			t.Errorf("GET %s through the v1.36 node: %d %s", path, r.Status, r.Body)
		}
	}
	// CASES R-01: all the time somebody served X, so nobody was told that it does not exist.
	load.stop(t)

	// And back: what nobody serves any more is the true 404 again, within seconds.
	if err := b.APIServer.RestartWithVersion(ctx, harness.V136); err != nil {
		t.Fatal(err)
	}
	eventually(t, ctx, settle, "404 after the rollback", wantCode(through, "/apis/storagemigration.k8s.io/v1/storageversionmigrations", 404))
}

// load is clients that ask every node for X, and for what both versions serve, until they are stopped.
type load struct {
	cancel context.CancelFunc
	done   sync.WaitGroup
	mu     sync.Mutex
	codes  map[string]int
	bad    []string
}

func startLoad(t *testing.T, ctx context.Context, c *harness.Cluster, credential harness.Credential) *load {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	l := &load{cancel: cancel, codes: map[string]int{}}
	t.Cleanup(cancel)
	paths := []string{policies, policies + "?limit=1", "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicybindings", configMaps}
	for i, h := range c.Hosts {
		cl := client(t, c, h.Node.URL(), credential)
		r := rand.New(rand.NewPCG(uint64(i), 7))
		l.done.Go(func() {
			tick := time.NewTicker(10 * time.Millisecond)
			defer tick.Stop()
			for {
				select {
				case <-ctx.Done():
					return
				case <-tick.C:
				}
				path := paths[r.IntN(len(paths))]
				resp, err := cl.Get(ctx, path)
				if ctx.Err() != nil {
					return
				}
				l.note(h.Name, path, resp, err)
			}
		})
	}
	return l
}

// note counts an answer. 200 and 503 with Retry-After are what a client may see while servers are replaced.
func (l *load) note(host, path string, resp *harness.Response, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil {
		l.codes["error"]++
		l.bad = append(l.bad, fmt.Sprintf("GET %s through %s: %v", path, host, err))
		return
	}
	l.codes[fmt.Sprint(resp.Status)]++
	if resp.Status != http.StatusOK && (resp.Status != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "") {
		l.bad = append(l.bad, fmt.Sprintf("GET %s through %s: %d %.200s", path, host, resp.Status, resp.Body))
	}
}

func (l *load) stop(t *testing.T) {
	t.Helper()
	l.cancel()
	l.done.Wait()
	total := 0
	for _, n := range l.codes {
		total += n
	}
	t.Logf("%d requests during the upgrades: %v", total, l.codes)
	if total < 1000 {
		t.Errorf("only %d requests during the upgrades, want 1000 or the test proves little", total)
	}
	for i, b := range l.bad {
		if i == 10 {
			t.Errorf("and %d more", len(l.bad)-i)
			break
		}
		t.Error(b)
	}
}

func auditPolicy(t *testing.T) string {
	t.Helper()
	return writeFile(t, "audit.yaml", "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules:\n- level: Metadata\n")
}

// discovered lists group/version/resource[/subresource] of an apiserver's aggregated discovery, sorted. profile is added to the
// media type.
func discovered(t *testing.T, ctx context.Context, cl *harness.Client, profile string) []string {
	t.Helper()
	var out []string
	for _, path := range []string{"/api", "/apis"} {
		r := do(t, ctx, cl, "GET", path, http.Header{"Accept": {"application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList" + profile}}, nil)
		var list apidiscoveryv2.APIGroupDiscoveryList
		if err := json.Unmarshal(r.Body, &list); err != nil || r.Status != 200 {
			t.Fatalf("GET %s: %d %v %.300s", path, r.Status, err, r.Body)
		}
		for _, g := range list.Items {
			for _, v := range g.Versions {
				gv := strings.TrimPrefix(g.Name+"/"+v.Version, "/")
				for _, res := range v.Resources {
					// Resources without verbs of their own are parents of subresources only ("serviceaccounts/token" has one).
					if len(res.Verbs) > 0 {
						out = append(out, gv+"/"+res.Resource)
					}
					for _, sub := range res.Subresources {
						out = append(out, gv+"/"+res.Resource+"/"+sub.Subresource)
					}
				}
			}
		}
	}
	slices.Sort(out)
	return out
}

// heldCatalog lists the catalog of one member as a node holds it, in the form of discovered.
func heldCatalog(t *testing.T, ctx context.Context, c *harness.Cluster, asked *harness.Host, name string) []string {
	t.Helper()
	r := cli(t, ctx, c, asked, "gossip", "dump", "--catalogs", "-o", "json")
	var dump struct {
		Catalogs []struct {
			Name    string
			Catalog struct {
				GroupVersions []struct {
					Group, Version string
					Resources      []struct {
						Name, Subresource string
						Verbs             []string
					}
				}
			}
		}
	}
	if err := json.Unmarshal([]byte(r.Stdout), &dump); err != nil {
		t.Fatalf("gossip dump: %v\n%s%s", err, r.Stdout, r.Stderr)
	}
	var out []string
	for _, m := range dump.Catalogs {
		if m.Name != name {
			continue
		}
		for _, gv := range m.Catalog.GroupVersions {
			for _, res := range gv.Resources {
				s := strings.TrimPrefix(gv.Group+"/"+gv.Version, "/") + "/" + res.Name
				if res.Subresource != "" {
					s += "/" + res.Subresource
				}
				out = append(out, s)
			}
		}
	}
	slices.Sort(out)
	return out
}
