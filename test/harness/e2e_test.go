//go:build e2e && linux

package harness

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

const mutatingPolicies = "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicies"

// testBinaries builds what is missing, outside the time a test has for its own steps.
func testBinaries(t *testing.T) *Binaries {
	t.Helper()
	b, err := FindBinaries(logWriter{t})
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Ensure(t.Context(), V135, V136); err != nil {
		t.Fatal(err)
	}
	return b
}

// The harness gives what the tests of the mesh build on: two versions beside each other that really differ, an upgrade at
// the same address, identities, and nothing left behind.
func TestTwoVersionsAndAnUpgrade(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	c := New(t, Options{
		Binaries: testBinaries(t),
		Hosts:    []HostOptions{{Name: "cp-a", Version: V135}, {Name: "cp-b", Version: V136}},
	})
	older, newer := c.Host("cp-a").APIServer, c.Host("cp-b").APIServer

	t.Run("kubectl sees the difference", func(t *testing.T) {
		result := kubectl(t, ctx, c, older.URL(), "get", "--raw", mutatingPolicies)
		if result.ExitCode != 1 || !strings.Contains(result.Stderr, "NotFound") {
			t.Errorf("%s: got %+v, want NotFound", older.Version, result)
		}
		if result := kubectl(t, ctx, c, newer.URL(), "get", "--raw", mutatingPolicies); result.ExitCode != 0 {
			t.Errorf("%s: got %+v, want success", newer.Version, result)
		}
		want := "v1.35.4"
		if result := kubectl(t, ctx, c, older.URL(), "version"); !strings.Contains(result.Stdout, "Server Version: "+want) {
			t.Errorf("got version %+v, want %s", result, want)
		}
	})

	t.Run("statuses", func(t *testing.T) {
		for _, server := range []struct {
			*APIServer
			want int
		}{{older, http.StatusNotFound}, {newer, http.StatusOK}} {
			if got := status(t, ctx, c, server.APIServer, mutatingPolicies); got != server.want {
				t.Errorf("%s: got %d, want %d", server.Version, got, server.want)
			}
		}
	})

	t.Run("front proxy", func(t *testing.T) {
		proxy, err := c.PKI.FrontProxyCert()
		if err != nil {
			t.Fatal(err)
		}
		got := whoAmI(t, ctx, c, older, Credential{Cert: proxy}, http.Header{
			"X-Remote-User":         {"alice"},
			"X-Remote-Uid":          {"42"},
			"X-Remote-Group":        {"developers", "system:authenticated"},
			"X-Remote-Extra-Reason": {"test"},
		})
		want := userInfo{
			Username: "alice",
			UID:      "42",
			Groups:   []string{"developers", "system:authenticated"},
			Extra:    map[string][]string{"reason": {"test"}},
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("user (-want +got):\n%s", diff)
		}
	})

	t.Run("user certificate", func(t *testing.T) {
		cert, err := c.PKI.UserCert("bob", "operators")
		if err != nil {
			t.Fatal(err)
		}
		got := whoAmI(t, ctx, c, newer, Credential{Cert: cert}, nil)
		if got.Username != "bob" || !slices.Contains(got.Groups, "operators") {
			t.Errorf("got %+v", got)
		}
	})

	t.Run("service account token on both", func(t *testing.T) {
		token, err := c.ServiceAccountToken(ctx, "default", "robot")
		if err != nil {
			t.Fatal(err)
		}
		for _, server := range []*APIServer{older, newer} {
			if got := whoAmI(t, ctx, c, server, Credential{Token: token}, nil).Username; got != "system:serviceaccount:default:robot" {
				t.Errorf("%s: got %q", server.Version, got)
			}
		}
	})

	t.Run("upgrade at the same address", func(t *testing.T) {
		before := older.URL()
		if err := older.RestartWithVersion(ctx, V136); err != nil {
			t.Fatal(err)
		}
		if older.URL() != before {
			t.Errorf("address was %s, is %s", before, older.URL())
		}
		if got := status(t, ctx, c, older, mutatingPolicies); got != http.StatusOK {
			t.Errorf("got %d, want 200", got)
		}
	})

	t.Run("crash and restart", func(t *testing.T) {
		if err := newer.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := newer.Restart(ctx); err != nil {
			t.Fatal(err)
		}
	})

	t.Run("nothing is left", func(t *testing.T) {
		running := c.Processes()
		if len(running) != 3 {
			t.Errorf("%d processes run, want 3", len(running))
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		for _, p := range running {
			if !gone(p.PID()) {
				t.Errorf("%s (pid %d) is still there", p.Name(), p.PID())
			}
		}
		if _, err := os.Stat(c.Dir); !os.IsNotExist(err) {
			t.Errorf("%s is still there (%v)", c.Dir, err)
		}
	})
}

// The apiservers' own mixed version proxy, which the mesh is compared with, forwards between two servers of the harness.
func TestBuiltinPeerProxy(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	c := New(t, Options{
		Binaries: testBinaries(t),
		Hosts: []HostOptions{
			{Name: "cp-a", Version: V136, APIServerArgs: []string{"--runtime-config=batch/v1=false"}},
			{Name: "cp-b", Version: V136},
		},
		BuiltinPeerProxy: true,
	})
	const jobs = "/apis/batch/v1/namespaces/default/jobs"
	var leases struct {
		Items []struct {
			Metadata struct {
				Labels map[string]string `json:"labels"`
			} `json:"metadata"`
		} `json:"items"`
	}
	client, err := c.AdminClient(c.Host("cp-a"))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	response, err := client.Get(ctx, "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases")
	if err != nil {
		t.Fatal(err)
	}
	if err := response.Decode(&leases); err != nil {
		t.Fatal(err)
	}
	var hostnames []string
	for _, lease := range leases.Items {
		if name := lease.Metadata.Labels["kubernetes.io/hostname"]; name != "" {
			hostnames = append(hostnames, name)
		}
	}
	slices.Sort(hostnames)
	if diff := cmp.Diff([]string{"cp-a", "cp-b"}, hostnames); diff != "" {
		t.Errorf("hostnames of the identity leases (-want +got):\n%s", diff)
	}
	// It learns of its peers after it is ready.
	bounded, cancelBounded := context.WithTimeout(ctx, time.Minute)
	defer cancelBounded()
	if err := Eventually(bounded, func(ctx context.Context) error {
		response, err := client.Get(ctx, jobs)
		if err == nil && response.Status != http.StatusOK {
			err = fmt.Errorf("%d: %s", response.Status, response.Body)
		}
		return err
	}); err != nil {
		t.Errorf("jobs through cp-a, which does not serve them: %v", err)
	}
}

// The newest version starts beside the one before it, and hands over cleanly when it is asked to stop.
func TestNewestVersion(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	b := testBinaries(t)
	if err := b.Ensure(ctx, V137); err != nil {
		t.Fatal(err)
	}
	c := New(t, Options{
		Binaries: b,
		Hosts:    []HostOptions{{Name: "cp-a", Version: V136}, {Name: "cp-b", Version: V137}},
	})
	const trustBundles = "/apis/certificates.k8s.io/v1/clustertrustbundles"
	if got := status(t, ctx, c, c.Host("cp-a").APIServer, trustBundles); got != http.StatusNotFound {
		t.Errorf("%s: got %d, want 404", V136, got)
	}
	if got := status(t, ctx, c, c.Host("cp-b").APIServer, trustBundles); got != http.StatusOK {
		t.Errorf("%s: got %d, want 200", V137, got)
	}
	if err := c.Host("cp-b").APIServer.Stop(ctx); err != nil {
		t.Error(err)
	}
	if log := c.Host("cp-b").APIServer.Process.LogTail(1000); strings.Contains(log, "panic") {
		t.Errorf("panic in the log:\n%s", log)
	}
}

// A rolling upgrade stops apiservers that have watches open; that must neither take long nor end in a SIGKILL.
func TestStopWithAnOpenWatch(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	c := New(t, Options{Binaries: testBinaries(t), Hosts: []HostOptions{{Name: "cp-a", Version: V135}}})
	for _, version := range []string{V135, V136} {
		server := c.Host("cp-a").APIServer
		if err := server.RestartWithVersion(ctx, version); err != nil {
			t.Fatal(err)
		}
		client, err := c.AdminClient(c.Host("cp-a"))
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, client.URL+"/api/v1/namespaces?watch=true", nil)
		if err != nil {
			t.Fatal(err)
		}
		response, err := client.HTTP.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		start := time.Now()
		if err := server.Stop(ctx); err != nil {
			t.Errorf("%s: %v", version, err)
		}
		t.Logf("%s with an open watch stopped in %v", version, time.Since(start).Round(100*time.Millisecond))
	}
}

// The whole thing: nodes before apiservers of two versions, reached by everything a test may use.
func TestNodes(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	c := New(t, Options{
		Binaries: testBinaries(t),
		Nodes:    true,
		Hosts:    []HostOptions{{Name: "cp-a", Version: V135}, {Name: "cp-b", Version: V136}},
	})
	node := c.Host("cp-a").Node
	reads := func(t *testing.T) {
		t.Helper()
		// A node is ready before it has heard of all others; until then it says 503 and not 404.
		bounded, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		if err := Eventually(bounded, func(ctx context.Context) error {
			config, err := c.AdminKubeconfig(node.URL())
			if err != nil {
				return err
			}
			result, err := c.Kubectl(ctx, config, "get", "--raw", mutatingPolicies)
			if err == nil && result.ExitCode != 0 {
				err = errors.New(result.Stderr)
			}
			return err
		}); err != nil {
			t.Errorf("through the node of the older apiserver: %v", err)
		}
	}
	reads(t)
	if err := node.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := node.Restart(ctx); err != nil {
		t.Fatal(err)
	}
	reads(t)
	for _, host := range c.Hosts {
		if err := host.Node.Stop(ctx); err != nil {
			t.Errorf("%s: %v", host.Name, err)
		}
	}
}

// What is not ready is named.
func TestWaitReadySaysWhat(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	c := New(t, Options{Binaries: testBinaries(t), Hosts: []HostOptions{{Name: "cp-a", Version: V136}}})
	if err := c.Etcd.Pause(); err != nil {
		t.Fatal(err)
	}
	// The apiserver asks etcd now and then and answers from memory, so it is ready for a little longer. A try is long
	// enough for the two checks of etcd to time out, which they do one after the other.
	if err := Eventually(ctx, func(ctx context.Context) error {
		once, cancel := context.WithTimeout(ctx, 15*time.Second)
		defer cancel()
		err := c.Host("cp-a").APIServer.WaitReady(once)
		if err == nil {
			return errors.New("still ready")
		}
		if !strings.Contains(err.Error(), "[-]etcd failed") {
			t.Errorf("got %v, want an error that names etcd", err)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
	if err := c.Etcd.Continue(); err != nil {
		t.Fatal(err)
	}
	if err := c.Host("cp-a").APIServer.WaitReady(ctx); err != nil {
		t.Error(err)
	}
}

func kubectl(t *testing.T, ctx context.Context, c *Cluster, url string, args ...string) Result {
	t.Helper()
	config, err := c.AdminKubeconfig(url)
	if err != nil {
		t.Fatal(err)
	}
	result, err := c.Kubectl(ctx, config, args...)
	if err != nil {
		t.Fatal(err)
	}
	return result
}

func status(t *testing.T, ctx context.Context, c *Cluster, a *APIServer, path string) int {
	t.Helper()
	client, err := c.Client(a.URL(), Credential{Cert: c.admin})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	response, err := client.Get(ctx, path)
	if err != nil {
		t.Fatal(err)
	}
	return response.Status
}

type userInfo struct {
	Username string              `json:"username"`
	UID      string              `json:"uid"`
	Groups   []string            `json:"groups"`
	Extra    map[string][]string `json:"extra"`
}

// whoAmI asks an apiserver by a SelfSubjectReview whom it takes the client for.
func whoAmI(t *testing.T, ctx context.Context, c *Cluster, a *APIServer, credential Credential, header http.Header) userInfo {
	t.Helper()
	client, err := c.Client(a.URL(), credential)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	response, err := client.Do(ctx, http.MethodPost, "/apis/authentication.k8s.io/v1/selfsubjectreviews", header, object{
		"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview",
	})
	if err != nil {
		t.Fatal(err)
	}
	var review struct {
		Status struct {
			UserInfo userInfo `json:"userInfo"`
		} `json:"status"`
	}
	if err := response.Decode(&review); err != nil {
		t.Fatal(err)
	}
	if response.Status != http.StatusCreated {
		t.Fatal(fmt.Errorf("SelfSubjectReview: %d: %s", response.Status, response.Body))
	}
	return review.Status.UserInfo
}
