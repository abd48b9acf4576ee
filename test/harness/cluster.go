//go:build linux

package harness

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"
)

// Options say what cluster is wanted.
type Options struct {
	// Hosts are the control-plane hosts, at least one.
	Hosts []HostOptions
	// Nodes puts a mvp-node before every apiserver.
	Nodes bool
	// Binaries are where programs come from. Nil: [FindBinaries].
	Binaries *Binaries
	// ID is the cluster ID. Empty: "demo".
	ID string
	// Dir is where all files go. Empty: a new temporary folder, which Close removes.
	Dir string
	// Subnet is the first three bytes of the loopback addresses to use, such as "127.0.0". Empty: a piece of loopback that
	// no other cluster on this machine has.
	Subnet string
	// BuiltinPeerProxy sets up the apiservers' own mixed version proxy, as something to compare with. Needs root.
	BuiltinPeerProxy bool
	// Progress gets a line for every step that takes a while. Nil: none.
	Progress io.Writer
}

// HostOptions describe one control-plane host.
type HostOptions struct {
	Name          string         // such as cp-a; also the name of its node in the mesh
	Version       string         // of its kube-apiserver: [V135], [V136] or [V137]
	APIServerArgs []string       // extra flags of its kube-apiserver
	Hostname      string         // hostname its kube-apiserver sees; needs root; empty: the machine's
	NodeOverlay   map[string]any // laid over its node's configuration, see [Node]
}

// Host is a control-plane host: a loopback address with an apiserver and, if the cluster has nodes, a node before it.
type Host struct {
	Name      string
	IP        string
	APIServer *APIServer
	Node      *Node // nil without nodes
}

// Cluster is a Kubernetes control plane on this machine.
type Cluster struct {
	ID    string
	Dir   string
	PKI   *PKI
	Etcd  *Etcd
	Hosts []*Host

	binaries    *Binaries
	progress    io.Writer
	admin       CertFiles
	controllers *ControllerManager // nil until it is started
	kubelets    []*Kubelet
	subnet      *subnet
	teardown    []func() error // run last in, first out
	close       sync.Once
}

// NewCluster prepares a cluster: programs, addresses, certificates, configuration. Nothing runs until Start. The caller
// must Close it.
func NewCluster(ctx context.Context, o Options) (*Cluster, error) {
	c := &Cluster{ID: o.ID, binaries: o.Binaries, progress: o.Progress}
	if err := c.prepare(ctx, o); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

func (c *Cluster) prepare(ctx context.Context, o Options) error {
	if len(o.Hosts) == 0 {
		return errors.New("cluster: no hosts")
	}
	if c.ID == "" {
		c.ID = "demo"
	}
	if c.binaries == nil {
		found, err := FindBinaries(o.Progress)
		if err != nil {
			return err
		}
		c.binaries = found
	}
	var versions []string
	for _, host := range o.Hosts {
		versions = append(versions, host.Version)
	}
	if err := c.binaries.Ensure(ctx, versions...); err != nil {
		return err
	}
	if err := c.makeDir(o.Dir); err != nil {
		return err
	}
	network, err := c.network(o.Subnet)
	if err != nil {
		return err
	}
	c.subnet = network
	if c.PKI, err = NewPKI(filepath.Join(c.Dir, "pki"), c.ID); err != nil {
		return err
	}
	if c.admin, err = c.PKI.AdminCert(); err != nil {
		return err
	}
	if c.Etcd, err = newEtcd(filepath.Join(c.Dir, "etcd"), network.ip(1)); err != nil {
		return err
	}
	if c.Etcd.program, err = c.binaries.Etcd(ctx); err != nil {
		return err
	}
	for i, host := range o.Hosts {
		if err := c.addHost(host, network.ip(firstHost+i), o.BuiltinPeerProxy); err != nil {
			return err
		}
	}
	if o.Nodes {
		return c.addNodes(ctx, o.Hosts)
	}
	return nil
}

// makeDir makes the cluster's folder and everything in it that has to exist beforehand.
func (c *Cluster) makeDir(dir string) error {
	c.Dir = dir
	if dir == "" {
		temp, err := os.MkdirTemp("", "mvp-cluster-")
		if err != nil {
			return fmt.Errorf("cluster: %w", err)
		}
		c.Dir = temp
		c.teardown = append(c.teardown, func() error { return os.RemoveAll(temp) })
	}
	for _, sub := range []string{"pki", "etcd", "kubeconfig", "bin"} {
		if err := os.MkdirAll(filepath.Join(c.Dir, sub), 0o700); err != nil {
			return fmt.Errorf("cluster: %w", err)
		}
	}
	return nil
}

func (c *Cluster) network(prefix string) (*subnet, error) {
	lease := leaseSubnet
	if prefix != "" {
		lease = func() (*subnet, error) { return fixedSubnet(prefix) }
	}
	network, err := lease()
	if err != nil {
		return nil, err
	}
	c.teardown = append(c.teardown, func() error { network.release(); return nil })
	return network, nil
}

func (c *Cluster) addHost(o HostOptions, ip string, builtinProxy bool) error {
	if c.Host(o.Name) != nil {
		return fmt.Errorf("cluster: two hosts are called %q", o.Name)
	}
	dir := filepath.Join(c.Dir, o.Name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("host %s: %w", o.Name, err)
	}
	port, err := freePort(ip, portAPIServer)
	if err != nil {
		return fmt.Errorf("host %s: %w", o.Name, err)
	}
	args, err := apiServerArgs(c.PKI, c.Etcd.URL(), o.Name, ip, port)
	if err != nil {
		return err
	}
	server := &APIServer{
		Version:   o.Version,
		ExtraArgs: slices.Clone(o.APIServerArgs),
		Hostname:  o.Hostname,
		name:      o.Name,
		ip:        ip,
		port:      port,
		dir:       dir,
		args:      args,
		admin:     c.admin,
		ca:        c.PKI.ServingCAFile,
		program:   c.binaries.APIServer,
	}
	if builtinProxy {
		server.ExtraArgs = append(server.BuiltinPeerProxyArgs(), server.ExtraArgs...)
		if server.Hostname == "" {
			server.Hostname = o.Name
		}
	}
	c.Hosts = append(c.Hosts, &Host{Name: o.Name, IP: ip, APIServer: server})
	return nil
}

// addNodes gives every host its node. All ports are chosen first, because every node's configuration names the seeds.
func (c *Cluster) addNodes(ctx context.Context, options []HostOptions) error {
	program := filepath.Join(c.Dir, "bin", "mvp-node")
	if err := c.binaries.Node(ctx, program); err != nil {
		return err
	}
	var seeds, members []string
	for i, host := range c.Hosts {
		node := &Node{
			Overlay: options[i].NodeOverlay,
			name:    host.Name,
			ip:      host.IP,
			dir:     filepath.Join(c.Dir, host.Name),
			program: program,
		}
		for _, want := range []struct {
			port      *int
			preferred int
		}{
			{&node.ports.front, portFront}, {&node.ports.mesh, portMesh},
			{&node.ports.gossip, portGossip}, {&node.ports.admin, portAdmin},
		} {
			port, err := freePort(host.IP, want.preferred)
			if err != nil {
				return fmt.Errorf("node %s: %w", host.Name, err)
			}
			*want.port = port
		}
		host.Node = node
		seeds = append(seeds, node.GossipAddress())
		members = append(members, host.Name)
	}
	for _, host := range c.Hosts {
		base, err := c.nodeConfig(host, host.Node.ports, seeds, members)
		if err != nil {
			return err
		}
		host.Node.base = base
	}
	return nil
}

// Start starts everything and waits until it is ready. When it fails, whatever runs keeps running until Close, for the
// caller to look at.
func (c *Cluster) Start(ctx context.Context) error {
	start := time.Now()
	if err := c.Etcd.Start(ctx); err != nil {
		return err
	}
	// The first apiserver writes the bootstrap objects alone: the others then find them instead of racing for them, and
	// are ready sooner for it.
	first := c.Hosts[0].APIServer
	c.progressf("starting kube-apiserver %s of %s\n", first.Version, c.Hosts[0].Name)
	if err := first.Start(ctx); err != nil {
		return err
	}
	if err := first.WaitReady(ctx); err != nil {
		return err
	}
	if err := c.bootstrap(ctx); err != nil {
		return err
	}
	for _, host := range c.Hosts[1:] {
		c.progressf("starting kube-apiserver %s of %s\n", host.APIServer.Version, host.Name)
		if err := host.APIServer.Start(ctx); err != nil {
			return err
		}
	}
	for _, host := range c.Hosts[1:] {
		if err := host.APIServer.WaitReady(ctx); err != nil {
			return err
		}
	}
	if err := c.startNodes(ctx); err != nil {
		return err
	}
	c.progressf("cluster %s is ready after %v\n", c.ID, time.Since(start).Round(100*time.Millisecond))
	return nil
}

func (c *Cluster) startNodes(ctx context.Context) error {
	for _, host := range c.Hosts {
		if host.Node == nil {
			continue
		}
		c.progressf("starting mvp-node %s\n", host.Name)
		if err := host.Node.Start(); err != nil {
			return err
		}
	}
	for _, host := range c.Hosts {
		if host.Node == nil {
			continue
		}
		if err := host.Node.WaitReady(ctx); err != nil {
			return err
		}
	}
	return nil
}

// Host returns the host of that name, or nil.
func (c *Cluster) Host(name string) *Host {
	for _, host := range c.Hosts {
		if host.Name == name {
			return host
		}
	}
	return nil
}

// AdminClient returns a client with all rights for the apiserver of a host, past any node.
func (c *Cluster) AdminClient(h *Host) (*Client, error) {
	return c.Client(h.APIServer.URL(), Credential{Cert: c.admin})
}

// AdminKubeconfig writes a kubeconfig with all rights for any server of the cluster, apiserver or front.
func (c *Cluster) AdminKubeconfig(serverURL string) (string, error) {
	return c.Kubeconfig(serverURL, Credential{Cert: c.admin})
}

// Tool returns the path of a development tool of tools/go.mod ("grpcurl"), built if need be.
func (c *Cluster) Tool(ctx context.Context, name string) (string, error) {
	return c.binaries.Tool(ctx, name)
}

// Close kills everything and removes what the cluster has put on the disk, except into a folder that the caller gave.
// Graceful ends are for those who test them: they would only cost time here. It may be called more than once.
func (c *Cluster) Close() error {
	var err error
	c.close.Do(func() {
		for _, k := range c.kubelets {
			err = errors.Join(err, k.Close())
		}
		for _, d := range c.daemons() {
			err = errors.Join(err, d.Kill())
		}
		for _, step := range slices.Backward(c.teardown) {
			err = errors.Join(err, step())
		}
	})
	return err
}

// daemons returns all that can run, in the order in which it is taken down: clients before their servers.
func (c *Cluster) daemons() []*daemon {
	var all []*daemon
	if c.controllers != nil {
		all = append(all, &c.controllers.daemon)
	}
	for _, host := range c.Hosts {
		if host.Node != nil {
			all = append(all, &host.Node.daemon)
		}
	}
	for _, host := range c.Hosts {
		all = append(all, &host.APIServer.daemon)
	}
	if c.Etcd != nil {
		all = append(all, &c.Etcd.daemon)
	}
	return all
}

// Processes returns what runs now.
func (c *Cluster) Processes() []*Process {
	var running []*Process
	for _, d := range c.daemons() {
		if d.Running() {
			running = append(running, d.Process)
		}
	}
	return running
}

func (c *Cluster) progressf(format string, args ...any) {
	if c.progress != nil {
		fmt.Fprintf(c.progress, format, args...)
	}
}
