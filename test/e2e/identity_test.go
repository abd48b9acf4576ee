//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mvp-mesh/mvp-node/test/harness"
)

type userInfo struct {
	Username string              `json:"username"`
	UID      string              `json:"uid"`
	Groups   []string            `json:"groups"`
	Extra    map[string][]string `json:"extra"`
}

const selfSubjectReviews = "/apis/authentication.k8s.io/v1/selfsubjectreviews"

// testIdentity: the user, UID, groups and extra that an apiserver sees are the same direct, through its node and through a
// forward, for a client certificate and a service account token; by SelfSubjectReview and by kubectl auth whoami. A
// SelfSubjectReview is served by every version, so the forward is made by taking the local apiserver away: then its node sends
// what it would serve to a peer (DESIGN.md "localOutage").
func testIdentity(t *testing.T, ctx context.Context, c *harness.Cluster) {
	a := c.Host("cp-a")
	cert, err := c.PKI.UserCert("jane", "dev", "ops,night", "audit")
	if err != nil {
		t.Fatal(err)
	}
	token, err := c.ServiceAccountToken(ctx, "default", "robot")
	if err != nil {
		t.Fatal(err)
	}
	credentials := map[string]harness.Credential{"client certificate": {Cert: cert}, "service account": {Token: token}}
	type seen struct{ review, whoami userInfo }
	ask := func(url string, credential harness.Credential) seen {
		t.Helper()
		return seen{review(t, ctx, client(t, c, url, credential), nil), whoami(t, ctx, c, url, credential)}
	}
	direct, local := map[string]seen{}, map[string]seen{}
	for name, credential := range credentials {
		direct[name] = ask(a.APIServer.URL(), credential)
		local[name] = ask(a.Node.URL(), credential)
		if d := cmp.Diff(direct[name], local[name], cmp.AllowUnexported(seen{})); d != "" {
			t.Errorf("%s, local path (-direct +local):\n%s", name, d)
		}
	}
	// CASES I-04: the groups that authentication implies are there, once.
	for name, want := range map[string][]string{
		"client certificate": {"dev", "audit", "ops,night", "system:authenticated"}, // a certificate keeps its organizations in DER order
		"service account":    {"system:serviceaccounts", "system:serviceaccounts:default", "system:authenticated"},
	} {
		if d := cmp.Diff(want, local[name].review.Groups); d != "" {
			t.Errorf("%s: groups (-want +got):\n%s", name, d)
		}
	}
	if !strings.HasPrefix(direct["service account"].review.Username, "system:serviceaccount:default:robot") || direct["service account"].review.UID == "" {
		t.Errorf("service account is seen as %+v", direct["service account"].review)
	}

	if err := a.APIServer.Kill(); err != nil {
		t.Fatal(err)
	}
	before := metric(t, ctx, a, "mvp_front_requests_total", `outcome="Forward"`, `reason="LocalOutage"`)
	for name, credential := range credentials {
		// The verdict on the token is remembered from the local path; until the outage is noticed the answer is 503.
		var got userInfo
		cl := client(t, c, a.Node.URL(), credential)
		eventually(t, ctx, settle, name+" through a forward", func(ctx context.Context) error {
			r, err := cl.Do(ctx, "POST", selfSubjectReviews, nil, map[string]any{"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"})
			if err != nil {
				return err
			}
			if r.Status != 201 {
				return fmt.Errorf("%d %s", r.Status, r.Body)
			}
			got = decodeReview(t, r)
			return nil
		})
		if d := cmp.Diff(direct[name].review, got); d != "" {
			t.Errorf("%s, forwarded (-direct +forwarded):\n%s", name, d)
		}
		if d := cmp.Diff(direct[name].whoami, whoami(t, ctx, c, a.Node.URL(), credential)); d != "" {
			t.Errorf("%s, kubectl auth whoami forwarded (-direct +forwarded):\n%s", name, d)
		}
	}
	if after := metric(t, ctx, a, "mvp_front_requests_total", `outcome="Forward"`, `reason="LocalOutage"`); after < before+4 {
		t.Errorf("forwards because of the outage went from %v to %v, want 4 more", before, after)
	}
	if err := a.APIServer.Start(ctx); err != nil {
		t.Fatal(err)
	}
	if err := a.APIServer.WaitReady(ctx); err != nil {
		t.Fatal(err)
	}
	converged(t, ctx, c)
}

func review(t *testing.T, ctx context.Context, cl *harness.Client, header http.Header) userInfo {
	t.Helper()
	r := do(t, ctx, cl, "POST", selfSubjectReviews, header, map[string]any{"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"})
	if r.Status != 201 {
		t.Fatalf("SelfSubjectReview: %d %s", r.Status, r.Body)
	}
	return decodeReview(t, r)
}

func decodeReview(t *testing.T, r *harness.Response) userInfo {
	t.Helper()
	var answer struct {
		Status struct {
			UserInfo userInfo `json:"userInfo"`
		} `json:"status"`
	}
	if err := r.Decode(&answer); err != nil {
		t.Fatal(err)
	}
	return answer.Status.UserInfo
}

func whoami(t *testing.T, ctx context.Context, c *harness.Cluster, url string, credential harness.Credential) userInfo {
	t.Helper()
	config, err := c.Kubeconfig(url, credential)
	if err != nil {
		t.Fatal(err)
	}
	r, err := c.Kubectl(ctx, config, "auth", "whoami", "-o", "json")
	if err != nil || r.ExitCode != 0 {
		t.Fatalf("kubectl auth whoami: %v, exit code %d\n%s", err, r.ExitCode, r.Stderr)
	}
	var answer struct {
		Status struct {
			UserInfo userInfo `json:"userInfo"`
		} `json:"status"`
	}
	if err := json.Unmarshal([]byte(r.Stdout), &answer); err != nil {
		t.Fatalf("%v: %s", err, r.Stdout)
	}
	return answer.Status.UserInfo
}

// testForgedIdentity: CASES I-01 and I-02 on real servers. What a client writes into identity headers has no effect, with or
// without credentials, in any spelling, also when Connection names the header that the node will set.
func testForgedIdentity(t *testing.T, ctx context.Context, c *harness.Cluster) {
	a := c.Host("cp-a")
	cert, err := c.PKI.UserCert("jane", "dev")
	if err != nil {
		t.Fatal(err)
	}
	forged := http.Header{
		"X-Remote-User": {"root", "e2e-admin"}, "x-remote-group": {"system:masters"}, "X-Remote-Group": {"system:masters"},
		"X_Remote_Group": {"system:masters"}, "X-Remote-Uid": {"0"}, "X-Remote-Extra-Scopes": {"all"},
	}
	jane := client(t, c, a.Node.URL(), harness.Credential{Cert: cert})
	want := review(t, ctx, client(t, c, a.APIServer.URL(), harness.Credential{Cert: cert}), nil)
	if d := cmp.Diff(want, review(t, ctx, jane, forged)); d != "" {
		t.Errorf("identity with forged headers (-direct +got):\n%s", d)
	}
	// HTTP/2 forbids Connection; over HTTP/1.1 it must not take away what the node sets.
	http1 := client(t, c, a.Node.URL(), harness.Credential{Cert: cert})
	http1.HTTP.Transport.(*http.Transport).ForceAttemptHTTP2 = false
	http1.HTTP.Transport.(*http.Transport).TLSClientConfig.NextProtos = []string{"http/1.1"}
	connection := forged.Clone()
	connection["Connection"] = []string{"foo, X-Remote-User, X-Remote-Group, X-Remote-Uid, Authorization"}
	if d := cmp.Diff(want, review(t, ctx, http1, connection)); d != "" {
		t.Errorf("identity with Connection naming the identity headers (-direct +got):\n%s", d)
	}
	// The forwarded path, where jane may not list: still forbidden, by name, with forged headers as without.
	for _, h := range []http.Header{nil, forged} {
		if r := do(t, ctx, jane, "GET", policies, h, nil); r.Status != 403 || !strings.Contains(string(r.Body), `User \"jane\" cannot list`) {
			t.Errorf("forged headers %v on the forwarded path: %d %s", h != nil, r.Status, r.Body)
		}
	}
	nobody := client(t, c, a.Node.URL(), harness.Credential{})
	for _, path := range []string{"/version", "/readyz"} {
		if r := do(t, ctx, nobody, "GET", path, forged, nil); r.Status != 200 {
			t.Errorf("anonymous GET %s: %d %s", path, r.Status, r.Body)
		}
	}
	for _, path := range []string{configMaps, policies} {
		if r := do(t, ctx, nobody, "GET", path, forged, nil); r.Status != 403 || !strings.Contains(string(r.Body), "system:anonymous") {
			t.Errorf("anonymous GET %s: %d %s", path, r.Status, r.Body)
		}
	}
	// A bad token is 401, as at the apiserver, with the same body.
	bad := harness.Credential{Token: "not-a-token"}
	direct, through := get(t, ctx, client(t, c, a.APIServer.URL(), bad), configMaps), get(t, ctx, client(t, c, a.Node.URL(), bad), configMaps)
	if through.Status != 401 || string(through.Body) != string(direct.Body) || !slices.Equal(direct.Header["Www-Authenticate"], through.Header["Www-Authenticate"]) {
		t.Errorf("bad token: %d %s %v, at the apiserver %d %s %v", through.Status, through.Body, through.Header, direct.Status, direct.Body, direct.Header)
	}
	// The node's own front-proxy certificate is nobody to the front.
	proxy, err := c.PKI.FrontProxyCert()
	if err != nil {
		t.Fatal(err)
	}
	if r := do(t, ctx, client(t, c, a.Node.URL(), harness.Credential{Cert: proxy}), "GET", configMaps, forged, nil); r.Status == 200 {
		t.Errorf("the front-proxy certificate with forged headers reads configmaps: %s", r.Body)
	}
}
