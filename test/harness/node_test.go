//go:build linux

package harness

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/config"
)

// helperNode stands in for mvp-node: it reads its configuration and has an admin port whose first answer is "not ready".
func helperNode() {
	if len(os.Args) < 4 || os.Args[1] != "serve" || os.Args[2] != "--config" {
		fmt.Println("usage:", os.Args)
		os.Exit(2)
	}
	c, err := config.Load(os.Args[3])
	if err != nil {
		fmt.Println(err)
		os.Exit(2)
	}
	if c.Mode.String() == "Disabled" {
		fmt.Println("this mode is not for me")
		os.Exit(1)
	}
	asked := false
	fmt.Println(http.ListenAndServe(c.Admin.Address, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if !asked {
			asked = true
			w.WriteHeader(http.StatusServiceUnavailable)
			fmt.Fprint(w, "[+]ping ok\n[-]catalog failed: reason withheld\n")
		}
	})))
}

// helperCluster is a cluster that has only a node, which is this test binary.
func helperCluster(t *testing.T) *Cluster {
	t.Helper()
	b := readyMade(t)
	if err := place(os.Args[0], filepath.Join(b.ReadyDir, "mvp-node")); err != nil {
		t.Fatal(err)
	}
	c, err := NewCluster(t.Context(), Options{Binaries: b, Nodes: true, Hosts: []HostOptions{{Name: "cp-a", Version: V136}}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	c.Hosts[0].Node.Env = []string{helperVariable + "=node"}
	return c
}

func TestNodeLifecycle(t *testing.T) {
	c := helperCluster(t)
	node := c.Host("cp-a").Node
	ctx := bounded(t)
	if err := node.WaitReady(ctx); err == nil || !strings.Contains(err.Error(), "was not started") {
		t.Errorf("ready before the start: %v", err)
	}
	if err := node.Start(); err != nil {
		t.Fatal(err)
	}
	if err := node.Start(); err == nil || !strings.Contains(err.Error(), "running already") {
		t.Errorf("second start: %v", err)
	}
	if err := node.WaitReady(ctx); err != nil {
		t.Fatal(err)
	}
	first := node.Process
	if err := node.Restart(ctx); err != nil {
		t.Fatal(err)
	}
	if !gone(first.PID()) || node.Process == first {
		t.Error("the first run was not replaced")
	}
	if err := node.Kill(); err != nil {
		t.Fatal(err)
	}
	if node.Running() {
		t.Error("running after Kill")
	}
	if err := node.Restart(ctx); err != nil {
		t.Fatal(err)
	}
	if got := len(c.Processes()); got != 1 {
		t.Errorf("%d processes run, want 1", got)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if !gone(node.Process.PID()) {
		t.Error("running after Close")
	}
	if _, err := os.Stat(c.Dir); !os.IsNotExist(err) {
		t.Errorf("%s is still there (%v)", c.Dir, err)
	}
}

func TestNodeThatIsNotReady(t *testing.T) {
	node := helperCluster(t).Host("cp-a").Node
	if err := node.Start(); err != nil {
		t.Fatal(err)
	}
	// The one and only "not ready" is fetched directly; what follows is a node that hangs.
	client := &Client{URL: node.AdminURL(), HTTP: &http.Client{Transport: &http.Transport{}}}
	defer client.Close()
	var reason error
	if err := Eventually(bounded(t), func(ctx context.Context) error {
		reason = client.checkReady(ctx)
		if !strings.HasPrefix(fmt.Sprint(reason), "/readyz: ") {
			return fmt.Errorf("no answer yet: %w", reason)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if want := "/readyz: 503: [-]catalog failed: reason withheld"; reason.Error() != want {
		t.Errorf("got %q, want %q", reason, want)
	}
	if err := node.Pause(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if err := node.WaitReady(ctx); err == nil || !strings.Contains(err.Error(), "still running") {
		t.Errorf("hanging node: %v", err)
	}
}

// A node that gives up is reported at once, with what it said.
func TestNodeThatEnds(t *testing.T) {
	node := helperCluster(t).Host("cp-a").Node
	node.Overlay = map[string]any{"mode": "Disabled"}
	err := node.Start()
	if err == nil {
		err = node.WaitReady(bounded(t))
	}
	if err == nil || !strings.Contains(err.Error(), "exit status 1") || !strings.Contains(err.Error(), "this mode is not for me") {
		t.Errorf("got %v, want the exit code and the end of the log", err)
	}
}
