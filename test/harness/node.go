//go:build linux

package harness

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"sigs.k8s.io/yaml"
)

// nodeReadyTimeout bounds how long a node may take to be ready once its apiserver is.
const nodeReadyTimeout = 90 * time.Second

// nodeUser is the Kubernetes user that nodes make their own calls as.
const nodeUser = "mvp-node"

// Node is a mvp-node beside an apiserver, as the separate process it is in real life. It can be stopped, killed and
// started again, at the same addresses. Start and stop it from one goroutine at a time.
type Node struct {
	// Overlay is laid over the configuration the harness writes, at the next start: maps are merged, anything else
	// replaces what was there, and a nil value removes the key.
	Overlay map[string]any
	// ExtraArgs follow "serve --config FILE" at the next start.
	ExtraArgs []string
	// Env is added to the environment at the next start.
	Env []string

	daemon

	name    string
	ip      string
	dir     string
	program string
	base    map[string]any
	ports   nodePorts
}

type nodePorts struct{ front, mesh, gossip, admin int }

// Name is the node's name in the mesh.
func (n *Node) Name() string { return n.name }

// URL is the front, where clients go.
func (n *Node) URL() string { return "https://" + hostPort(n.ip, n.ports.front) }

// MeshAddress is the gRPC listener, host:port.
func (n *Node) MeshAddress() string { return hostPort(n.ip, n.ports.mesh) }

// GossipAddress is the gossip listener, host:port.
func (n *Node) GossipAddress() string { return hostPort(n.ip, n.ports.gossip) }

// AdminURL is the plain HTTP admin listener.
func (n *Node) AdminURL() string { return "http://" + hostPort(n.ip, n.ports.admin) }

// ConfigFile is where the configuration is written at every start.
func (n *Node) ConfigFile() string { return filepath.Join(n.dir, "mvp-node.yaml") }

// LogFile is where the output of all runs goes.
func (n *Node) LogFile() string { return filepath.Join(n.dir, "mvp-node.log") }

// Start writes the configuration, starts the node and returns without waiting for it to be ready.
func (n *Node) Start() error {
	if err := n.writeConfig(); err != nil {
		return fmt.Errorf("configuration of %s: %w", n.name, err)
	}
	return n.start(ProcessSpec{
		Name:    "mvp-node " + n.name,
		Path:    n.program,
		Args:    append([]string{"serve", "--config", n.ConfigFile()}, n.ExtraArgs...),
		Env:     n.Env,
		LogFile: n.LogFile(),
	})
}

func (n *Node) writeConfig() error {
	config, err := overlay(n.base, n.Overlay)
	if err != nil {
		return err
	}
	data, err := yaml.Marshal(config)
	if err != nil {
		return err
	}
	return os.WriteFile(n.ConfigFile(), data, 0o644)
}

// WaitReady waits until the admin /readyz says ok. The error says what is not ready, and has the end of the log.
func (n *Node) WaitReady(ctx context.Context) error {
	if n.Process == nil {
		return fmt.Errorf("mvp-node %s was not started", n.name)
	}
	client := &Client{URL: n.AdminURL(), HTTP: &http.Client{Transport: &http.Transport{}}}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, nodeReadyTimeout)
	defer cancel()
	return eventuallyRunning(ctx, n.Process, client.checkReady)
}

// Restart stops the node, starts it again as Overlay and ExtraArgs now say, and waits until it is ready.
func (n *Node) Restart(ctx context.Context) error {
	if err := errors.Join(n.Stop(ctx), n.Start()); err != nil {
		return err
	}
	return n.WaitReady(ctx)
}

// nodeConfig is the configuration of the node of host h. seeds and members are those of the whole cluster.
func (c *Cluster) nodeConfig(h *Host, ports nodePorts, seeds, members []string) (map[string]any, error) {
	serving, servingErr := c.PKI.ServingCert("front-"+h.Name, h.IP, h.Name)
	mesh, meshErr := c.PKI.MeshCert(h.Name, h.IP)
	proxy, proxyErr := c.PKI.FrontProxyCert()
	user, userErr := c.PKI.UserCert(nodeUser)
	if err := errors.Join(servingErr, meshErr, proxyErr, userErr); err != nil {
		return nil, fmt.Errorf("certificates of %s: %w", h.Name, err)
	}
	own, err := c.Kubeconfig(h.APIServer.URL(), Credential{Cert: user})
	if err != nil {
		return nil, err
	}
	pair := func(files CertFiles) map[string]any {
		return map[string]any{"certFile": files.Cert, "keyFile": files.Key}
	}
	with := func(m map[string]any, key string, value any) map[string]any {
		m[key] = value
		return m
	}
	return map[string]any{
		"apiVersion": "config.mvp-node.io/v1alpha1",
		"kind":       "NodeConfiguration",
		"clusterID":  c.ID,
		"name":       h.Name,
		"mode":       "Enabled",
		"front": map[string]any{
			"address": hostPort(h.IP, ports.front),
			"tls":     pair(serving),
			"authentication": map[string]any{
				"clientCAFile": c.PKI.ClientCAFile,
				"anonymous":    true,
			},
		},
		"apiserver": map[string]any{
			"url":        h.APIServer.URL(),
			"caFile":     c.PKI.ServingCAFile,
			"kubeconfig": own,
			"frontProxy": with(pair(proxy), "caFile", c.PKI.FrontProxyCAFile),
		},
		"mesh": map[string]any{
			"address": hostPort(h.IP, ports.mesh),
			"tls":     with(pair(mesh), "caFile", c.PKI.MeshCAFile),
		},
		"gossip": map[string]any{
			"address": hostPort(h.IP, ports.gossip),
			"seeds":   seeds,
		},
		"expectedMembers": members,
		"view":            map[string]any{"staleGrace": "5m", "unknownCatalogHold": "1m"},
		"admin":           map[string]any{"address": hostPort(h.IP, ports.admin)},
		// No load balancer has to notice that a node goes; tests of that set their own delay.
		"shutdown": map[string]any{"delay": "0s", "drainTimeout": "10s"},
	}, nil
}

// overlay returns base with over laid over it. Neither is changed.
func overlay(base, over map[string]any) (map[string]any, error) {
	// Through JSON, so that both sides have the same plain types, whatever structs the caller used.
	var merged, top map[string]any
	for _, step := range []struct {
		from map[string]any
		to   *map[string]any
	}{{base, &merged}, {over, &top}} {
		data, err := json.Marshal(step.from)
		if err != nil {
			return nil, err
		}
		if err := json.Unmarshal(data, step.to); err != nil {
			return nil, err
		}
	}
	merge(merged, top)
	return merged, nil
}

func merge(into, over map[string]any) {
	for key, value := range over {
		below, isMap := into[key].(map[string]any)
		above, overMap := value.(map[string]any)
		switch {
		case value == nil:
			delete(into, key)
		case isMap && overMap:
			merge(below, above)
		default:
			into[key] = value
		}
	}
}

// Program is the mvp-node binary that this node runs, for calling its other commands.
func (n *Node) Program() string { return n.program }
