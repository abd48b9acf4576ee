//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/mvp-mesh/mvp-node/test/harness"
)

// The two hosts. They are one minor version apart, as the version skew policy wants it.
const (
	older = "cp-a"
	newer = "cp-b"
)

// withoutGroups takes from the older apiserver every group-version that it gets ready without, so that requests for them can be
// answered in one way only. What it cannot be without (core, rbac, storage, networking, ...) is forwarded by preference.
const withoutGroups = "--runtime-config=batch/v1=false,apps/v1=false,autoscaling/v2=false,policy/v1=false," +
	"certificates.k8s.io/v1=false,events.k8s.io/v1=false,coordination.k8s.io/v1=false"

// convergeTimeout bounds how long the nodes may take to know of each other; it is a second or two.
const convergeTimeout = time.Minute

// way is one of the ways by which the tests reach the cluster.
type way struct {
	Name  string
	Host  string // where requests enter
	Node  bool   // through the node of that host rather than to its apiserver
	About string
}

// ways in the order in which they are run and shown. The first is what the others are compared with.
var ways = []way{
	{"direct", newer, false, "straight to the newer apiserver"},
	{"local", newer, true, "through the node before the newer apiserver"},
	{"forwarded", older, true, "through the node before the older apiserver, which prefers the newest"},
}

// url is where clients go.
func (w way) url(c *harness.Cluster) string {
	if h := c.Host(w.Host); w.Node {
		return h.Node.URL()
	}
	return c.Host(w.Host).APIServer.URL()
}

// startCluster starts what all ways are run on, each on a cluster of its own: what one run leaves behind is not there for the next.
// The caller closes the cluster, also when there is an error, unless it is nil.
func startCluster(ctx context.Context, dir string, progress io.Writer) (*harness.Cluster, error) {
	c, err := harness.NewCluster(ctx, harness.Options{
		Hosts: []harness.HostOptions{
			{
				Name: older, Version: harness.V135, APIServerArgs: []string{withoutGroups},
				NodeOverlay: map[string]any{"routing": map[string]any{"prefer": "newest"}},
			},
			{Name: newer, Version: harness.V136},
		},
		Nodes: true, Dir: dir, Progress: progress,
	})
	if err != nil {
		return nil, err
	}
	if err := c.Start(ctx); err != nil {
		return c, err
	}
	if _, err := c.StartControllerManager(ctx, c.Host(newer)); err != nil {
		return c, err
	}
	if err := createNode(ctx, c); err != nil {
		return c, fmt.Errorf("object of a node: %w", err)
	}
	return c, converged(ctx, c)
}

// createNode creates a Node that looks ready, with nothing behind it. The tests do not begin without one; no pod ever gets there.
func createNode(ctx context.Context, c *harness.Cluster) error {
	const nodes, name = "/api/v1/nodes", "no-machine"
	client, err := c.AdminClient(c.Host(newer))
	if err != nil {
		return err
	}
	defer client.Close()
	now := time.Now().UTC().Format(time.RFC3339)
	room := map[string]string{"cpu": "8", "memory": "32Gi", "ephemeral-storage": "100Gi", "pods": "110"}
	if err := client.Create(ctx, nodes, map[string]any{
		"apiVersion": "v1", "kind": "Node",
		"metadata": map[string]any{"name": name, "labels": map[string]string{
			"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64",
		}},
		"status": map[string]any{
			"capacity": room, "allocatable": room,
			"conditions": []any{map[string]any{
				"type": "Ready", "status": "True", "reason": "KubeletReady",
				"lastHeartbeatTime": now, "lastTransitionTime": now,
			}},
			"addresses": []any{map[string]any{"type": "InternalIP", "address": "192.0.2.1"}}, // a documentation address: nobody is there
			"nodeInfo": map[string]any{
				"kubeletVersion": harness.V136, "operatingSystem": "linux", "architecture": "amd64", "osImage": "none",
				"kernelVersion": "none", "containerRuntimeVersion": "none://0", "machineID": "none", "systemUUID": "none", "bootID": "none",
				"kubeProxyVersion": "",
			},
		},
	}); err != nil {
		return err
	}
	// Admission gives a new Node the taint that it is not ready, which a kubelet's first word would take away.
	answer, err := client.Do(ctx, http.MethodPatch, nodes+"/"+name, http.Header{"Content-Type": {"application/merge-patch+json"}},
		map[string]any{"spec": map[string]any{"taints": nil}})
	if err == nil && answer.Status != http.StatusOK {
		err = fmt.Errorf("PATCH: %d: %.300s", answer.Status, answer.Body)
	}
	return err
}

// converged waits until every node says that it sees the whole mesh.
func converged(ctx context.Context, c *harness.Cluster) error {
	ctx, cancel := context.WithTimeout(ctx, convergeTimeout)
	defer cancel()
	for _, h := range c.Hosts {
		if err := harness.Eventually(ctx, func(ctx context.Context) error {
			m, err := scrape(ctx, h.Node)
			if err == nil && m.sum("mvp_gossip_converged") != 1 {
				err = errors.New("the view is not converged")
			}
			return err
		}); err != nil {
			return fmt.Errorf("mvp-node of %s: %w", h.Name, err)
		}
	}
	return nil
}
