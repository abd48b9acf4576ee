//go:build e2e

// Package e2e holds the product to its promises on real kube-apiservers of several versions, real etcd, real kubectl and real
// mvp-node processes. Each test names the case or rule that it proves.
package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/mvp-mesh/mvp-node/test/harness"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Paths that the tests use: X is served by v1.36 and later only.
const (
	policies     = "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicies"
	configMaps   = "/api/v1/namespaces/default/configmaps"
	unknown      = "/apis/nobody.example.com/v1/things"
	longest      = 10 * time.Minute // bound of a whole test
	settle       = 30 * time.Second // bound of what should take seconds
	manyRequests = 200
)

func testBinaries(t *testing.T) *harness.Binaries {
	t.Helper()
	b, err := harness.FindBinaries(os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// client returns a client that is closed with the test.
func client(t *testing.T, c *harness.Cluster, url string, credential harness.Credential) *harness.Client {
	t.Helper()
	cl, err := c.Client(url, credential)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cl.Close)
	return cl
}

// admin is the certificate of a member of system:masters.
func admin(t *testing.T, c *harness.Cluster) harness.Credential {
	t.Helper()
	files, err := c.PKI.UserCert("e2e-admin", "system:masters")
	if err != nil {
		t.Fatal(err)
	}
	return harness.Credential{Cert: files}
}

func get(t *testing.T, ctx context.Context, cl *harness.Client, path string) *harness.Response {
	t.Helper()
	return do(t, ctx, cl, http.MethodGet, path, nil, nil)
}

func do(t *testing.T, ctx context.Context, cl *harness.Client, method, path string, header http.Header, body any) *harness.Response {
	t.Helper()
	r, err := cl.Do(ctx, method, path, header, body)
	if err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	return r
}

// statusOf reads a Status that mvp-node made.
func statusOf(t *testing.T, r *harness.Response) metav1.Status {
	t.Helper()
	var s metav1.Status
	if err := json.Unmarshal(r.Body, &s); err != nil || s.Kind != "Status" {
		t.Fatalf("body is no Status: %d %.300s", r.Status, r.Body)
	}
	return s
}

// cause is the cause in a Status of mvp-node, "" in one of an apiserver.
func cause(s metav1.Status) string {
	if s.Details == nil || len(s.Details.Causes) == 0 || s.Details.Causes[0].Message != "mvp-node" {
		return ""
	}
	return string(s.Details.Causes[0].Type)
}

// eventually waits until check returns nil, and fails the test with its last error.
func eventually(t *testing.T, ctx context.Context, within time.Duration, what string, check func(ctx context.Context) error) time.Duration {
	t.Helper()
	start := time.Now()
	bounded, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	if err := harness.Eventually(bounded, check); err != nil {
		t.Fatalf("%s: not within %v: %v", what, within, err)
	}
	return time.Since(start)
}

// wantCode is a check for eventually.
func wantCode(cl *harness.Client, path string, code int) func(context.Context) error {
	return func(ctx context.Context) error {
		r, err := cl.Get(ctx, path)
		if err != nil {
			return err
		}
		if r.Status != code {
			return fmt.Errorf("GET %s: %d %.200s, want %d", path, r.Status, r.Body, code)
		}
		return nil
	}
}

// view is what `mvp-node members -o json` prints.
type view struct {
	Self      string   `json:"self"`
	ViewHash  string   `json:"viewHash"`
	Complete  bool     `json:"complete"`
	Converged bool     `json:"converged"`
	Members   []member `json:"members"`
}

type member struct {
	Name          string `json:"name"`
	State         string `json:"state"`
	ServerVersion string `json:"serverVersion"`
	CatalogDigest string `json:"catalogDigest"`
	HeldDigest    string `json:"heldDigest"`
	Resources     int    `json:"resources"`
}

// cli runs a mvp-node command against the node of a host, by the host's own configuration file.
func cli(t *testing.T, ctx context.Context, c *harness.Cluster, h *harness.Host, args ...string) harness.Result {
	t.Helper()
	r, err := harness.Run(ctx, harness.ProcessSpec{Name: "mvp-node", Path: h.Node.Program(), Args: append(args, "--config", h.Node.ConfigFile())}, nil)
	if err != nil {
		t.Fatalf("mvp-node %s: %v", strings.Join(args, " "), err)
	}
	return r
}

func viewOf(t *testing.T, ctx context.Context, c *harness.Cluster, h *harness.Host) view {
	t.Helper()
	r := cli(t, ctx, c, h, "members", "-o", "json")
	var v view
	if err := json.Unmarshal([]byte(r.Stdout), &v); err != nil || r.ExitCode != 0 {
		t.Fatalf("members of %s: exit code %d, %v\n%s%s", h.Name, r.ExitCode, err, r.Stdout, r.Stderr)
	}
	return v
}

// converged waits until every node says that all hold the same view.
func converged(t *testing.T, ctx context.Context, c *harness.Cluster) {
	t.Helper()
	for _, h := range c.Hosts {
		eventually(t, ctx, settle, "converged view at "+h.Name, func(ctx context.Context) error {
			if v := viewOf(t, ctx, c, h); !v.Converged {
				return fmt.Errorf("view of %s: %+v", h.Name, v)
			}
			return nil
		})
	}
}

// metric returns the sum of a metric's series whose labels contain all of the given pieces, from a node's admin port.
func metric(t *testing.T, ctx context.Context, h *harness.Host, name string, labels ...string) float64 {
	t.Helper()
	cl := &harness.Client{URL: h.Node.AdminURL(), HTTP: &http.Client{Transport: &http.Transport{}}}
	defer cl.Close()
	r, err := cl.Get(ctx, "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	var sum float64
	for line := range strings.Lines(string(r.Body)) {
		rest, ok := strings.CutPrefix(line, name)
		if !ok || rest == "" || rest[0] != '{' && rest[0] != ' ' {
			continue
		}
		matches := true
		for _, l := range labels {
			matches = matches && strings.Contains(rest, l)
		}
		if !matches {
			continue
		}
		var v float64
		fields := strings.Fields(rest)
		if _, err := fmt.Sscan(fields[len(fields)-1], &v); err != nil {
			t.Fatalf("metric line %q: %v", line, err)
		}
		sum += v
	}
	return sum
}
