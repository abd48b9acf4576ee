package node

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"runtime"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"k8s.io/apiserver/pkg/server/healthz"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	"github.com/mvp-mesh/mvp-node/internal/config"
	"github.com/mvp-mesh/mvp-node/internal/discovery"
	"github.com/mvp-mesh/mvp-node/internal/forward"
	"github.com/mvp-mesh/mvp-node/internal/front"
	"github.com/mvp-mesh/mvp-node/internal/gossip"
	"github.com/mvp-mesh/mvp-node/internal/mesh"
	"github.com/mvp-mesh/mvp-node/internal/route"
	"github.com/mvp-mesh/mvp-node/internal/upstream"
)

// Options say what node to make.
type Options struct {
	Config  *config.Config // complete and checked: config.Load
	Logger  *slog.Logger
	Version string // of this program
}

// Node is a whole node. Make it with New, then call Run once.
type Node struct {
	cfg      *config.Config
	logger   *slog.Logger
	registry *prometheus.Registry
	certs    *certificates
	local    *local
	resolver *front.Resolver

	upstream     *upstream.Transport
	probe        *discovery.Probe
	discovery    *discovery.Watcher
	gossip       *gossip.Node
	pool         *mesh.Pool
	forward      *forward.Client
	mesh         *mesh.Server
	meshListener net.Listener
	front        *front.Server
	admin        *adminServer

	undo []func() // what New must close again if a later step fails, and Run at its end
}

// New builds every part and binds every port. It starts no goroutine that outlives it, and on an error leaves nothing open.
func New(o Options) (_ *Node, err error) {
	n := &Node{cfg: o.Config, logger: o.Logger, registry: prometheus.NewRegistry(), resolver: front.NewResolver()}
	defer func() {
		if err != nil {
			n.close()
		}
	}()
	promauto.With(n.registry).NewGaugeVec(prometheus.GaugeOpts{
		Name: "mvp_node_build_info",
		Help: "1, with the version of mvp-node and Go as labels.",
	}, []string{"version", "go_version"}).WithLabelValues(o.Version, runtime.Version()).Set(1)

	if n.certs, err = loadCertificates(n.cfg, n.registry, n.logger); err != nil {
		return nil, err
	}
	meshTLS := authz.MeshTLS{Certificate: n.certs.mesh.certificate, Roots: n.certs.meshCA.roots, Rules: n.cfg.PeerRules()}

	// The ports first: whatever else is wrong, a port that is taken is found before anything is built.
	frontListener, err := n.listen("front", n.cfg.Front.Address)
	if err != nil {
		return nil, err
	}
	if n.meshListener, err = n.listen("mesh", n.cfg.Mesh.Address); err != nil {
		return nil, err
	}
	adminListener, err := n.listen("admin", n.cfg.Admin.Address)
	if err != nil {
		return nil, err
	}

	// Towards the local apiserver: as its users by the front-proxy certificate, and as the node itself by the kubeconfig.
	if n.upstream, err = n.newUpstream(); err != nil {
		return nil, err
	}
	n.undo = append(n.undo, n.upstream.Close)
	own, client, err := ownClient(n.cfg.APIServer.Kubeconfig, o.Version)
	if err != nil {
		return nil, err
	}

	// Towards the other nodes.
	n.pool, err = mesh.NewPool(mesh.PoolOptions{TLS: meshTLS, Logger: n.logger, Registerer: n.registry})
	if err != nil {
		return nil, err
	}
	n.undo = append(n.undo, n.pool.Close)
	n.gossip, err = gossip.New(gossip.Options{
		Name: n.cfg.Name, ClusterID: n.cfg.ClusterID, TLS: meshTLS,
		BindAddress: n.cfg.Gossip.Address, AdvertiseAddress: n.cfg.Gossip.AdvertiseAddress,
		Seeds: n.cfg.Gossip.Seeds, Expected: n.cfg.ExpectedMembers,
		StaleGrace: n.cfg.View.StaleGrace, CatalogHold: n.cfg.View.UnknownCatalogHold,
		Fetcher: fetcher{mesh.NewFetcher(n.pool)}, NodeVersion: o.Version,
		Logger: n.logger, Registerer: n.registry,
	})
	if err != nil {
		return nil, err
	}
	n.undo = append(n.undo, func() { _ = n.gossip.Close() })
	n.local = &local{announce: n.announce, mode: n.cfg.Mode, address: n.cfg.Mesh.AdvertiseAddress}

	// What the local apiserver is and serves.
	watch := discovery.DefaultOptions()
	watch.Config, watch.OnCatalog, watch.OnRead = own, n.local.setCatalog, n.local.setRead
	watch.Logger, watch.Registerer = n.logger, n.registry
	if n.discovery, err = discovery.New(watch); err != nil {
		return nil, err
	}
	probe := discovery.DefaultProbeOptions()
	probe.Config, probe.OnChange, probe.Logger, probe.Registerer = own, n.health, n.logger, n.registry
	if n.probe, err = discovery.NewProbe(probe); err != nil {
		return nil, err
	}

	// The mesh port: forwards from others, and what they and operators may look at.
	forwardServer, err := forward.NewServer(forward.ServerOptions{
		Name: n.cfg.Name, ClusterID: n.cfg.ClusterID, Upstream: n.upstream, Resolver: resolver{n.resolver},
		Catalog: n.local.current, CatalogRead: n.local.lastRead, Ready: n.local.checkCatalog, Peer: mesh.PeerFromContext,
		Policy: n.cfg.AssertPolicy(), HeaderNames: n.cfg.APIServer.RequestHeaders.HeaderNames(),
		Logger: n.logger, Registerer: n.registry,
	})
	if err != nil {
		return nil, err
	}
	n.mesh, err = mesh.NewServer(mesh.Options{
		Name: n.cfg.Name, ClusterID: n.cfg.ClusterID, TLS: meshTLS,
		Gossip: introspection{n.gossip}, Explain: n.explain, Catalog: n.local.current,
		Register:           []func(grpc.ServiceRegistrar){forwardServer.Register},
		StreamInterceptors: []grpc.StreamServerInterceptor{forward.RequireDeadline()},
		Logger:             n.logger, Registerer: n.registry,
	})
	if err != nil {
		return nil, err
	}

	// The front: what clients talk to.
	n.forward, err = forward.NewClient(forward.ClientOptions{
		Name: n.cfg.Name, ClusterID: n.cfg.ClusterID, Conns: n.pool,
		HeaderNames: n.cfg.APIServer.RequestHeaders.HeaderNames(),
		OnNotServed: func(peer string, _ uint64) { n.gossip.Refetch(peer) },
		Logger:      n.logger, Registerer: n.registry,
	})
	if err != nil {
		return nil, err
	}
	handler, err := n.newFront(client)
	if err != nil {
		return nil, err
	}
	n.front = front.NewServer(frontListener, handler, front.ServerOptions{
		TLS: &tls.Config{
			MinVersion:     tls.VersionTLS12,
			GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return n.certs.front.certificate(), nil },
			ClientCAs:      n.certs.clientCA.roots(), // only the hint to clients; the authenticator verifies
		},
		MaxHeaderBytes: n.cfg.Front.MaxHeaderBytes, MaxConcurrentStreams: n.cfg.Front.MaxConcurrentStreams,
		Logger: n.logger.With("component", "front"),
	})
	n.admin = newAdminServer(adminListener, n.registry, n.readyChecks(), n.logger.With("component", "admin"))
	return n, nil
}

// Registry has the metrics of the node, those on /metrics less what the libraries of Kubernetes keep for themselves. For tests
// and for whoever embeds a node.
func (n *Node) Registry() *prometheus.Registry { return n.registry }

func (n *Node) listen(what, address string) (net.Listener, error) {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("%s port: %w", what, err)
	}
	n.undo = append(n.undo, func() { _ = l.Close() })
	return l, nil
}

func (n *Node) newUpstream() (*upstream.Transport, error) {
	u, err := url.Parse(n.cfg.APIServer.URL)
	if err != nil {
		return nil, fmt.Errorf("apiserver URL: %w", err)
	}
	o := upstream.DefaultOptions()
	o.URL, o.ServerName = u, n.cfg.APIServer.TLSServerName
	o.Certificate, o.Roots = n.certs.frontProxy.certificate, n.certs.apiserverCA.roots
	o.HeaderNames = n.cfg.APIServer.RequestHeaders.HeaderNames()
	o.OnOutdated = func() { n.discovery.Refresh() }
	o.Logger, o.Registerer = n.logger, n.registry
	return upstream.New(o)
}

// ownClient is the node's own access to its apiserver. It has no client-side rate limit: reviews are made while clients wait, and
// the apiserver's own priority and fairness is the judge of what is too much.
func ownClient(kubeconfig, version string) (*rest.Config, kubernetes.Interface, error) {
	c, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, nil, fmt.Errorf("kubeconfig: %w", err)
	}
	c.UserAgent = "mvp-node/" + version
	c.QPS = -1
	client, err := kubernetes.NewForConfig(c)
	if err != nil {
		return nil, nil, fmt.Errorf("kubeconfig %s: %w", kubeconfig, err)
	}
	return c, client, nil
}

func (n *Node) newFront(client kubernetes.Interface) (http.Handler, error) {
	authenticator, err := front.NewAuthenticator(front.AuthenticationOptions{
		ClientCA: n.certs.clientCA, Client: client,
		CacheTTL: n.cfg.Front.Authentication.TokenCacheTTL, Anonymous: n.cfg.Front.Authentication.Anonymous,
	})
	if err != nil {
		return nil, err
	}
	authorizer, err := front.NewAuthorizer(client)
	if err != nil {
		return nil, err
	}
	policy := n.cfg.Policy()
	return front.New(front.Options{
		NodeName: n.cfg.Name, Views: n.gossip, Policy: func() route.Policy { return policy }, CatalogRead: n.local.lastRead, Resolver: n.resolver,
		Local: n.upstream, Forwarder: forwarder{n.forward}, Authenticator: authenticator, Authorizer: authorizer,
		HeaderNames: n.cfg.APIServer.RequestHeaders.HeaderNames(), Ready: n.local.frontReady,
		RequestTimeout: n.cfg.Front.RequestTimeout, StallTimeout: n.cfg.Front.StallTimeout, Logger: n.logger.With("component", "front"), Registerer: n.registry,
	})
}

func (n *Node) readyChecks() []healthz.HealthChecker {
	check := func(name string, f func() error) healthz.HealthChecker {
		return healthz.NamedCheck(name, func(*http.Request) error { return f() })
	}
	return []healthz.HealthChecker{
		healthz.PingHealthz,
		check("local-catalog", n.local.checkCatalog),
		check("local-apiserver", n.local.checkApiserver),
		check("not-draining", n.local.checkDraining),
	}
}

// announce is called by local with each change.
func (n *Node) announce(l gossip.Local) {
	if err := n.gossip.Announce(l); err != nil {
		n.logger.Error("the mesh cannot be told what this node is", "state", l.State.String(), "err", err)
	}
}

// health is called by the probe when the local apiserver turns ready, stops being so, or changes its version.
func (n *Node) health(h discovery.Health) {
	n.local.setUp(h.Up, time.Now())
	if h.Up {
		n.discovery.Refresh()
	}
}

// Run serves until ctx ends or a part fails; then it stops in the order that stop states, and returns nil or what failed. It
// returns after every goroutine of the node has ended.
func (n *Node) Run(ctx context.Context) error {
	defer n.close()
	n.logger.Info("starting", "node", n.cfg.Name, "cluster", n.cfg.ClusterID, "mode", n.cfg.Mode.String(),
		"front", n.cfg.Front.Address, "mesh", n.cfg.Mesh.Address, "gossip", n.gossip.Addr(), "admin", n.cfg.Admin.Address)

	// Two groups: the ports, which stop by being told so, in order; and the watchers behind them, which stop with their
	// context, after the last port that needs them.
	watching, endWatching := context.WithCancel(context.WithoutCancel(ctx))
	defer endWatching()
	failed, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	var g errgroup.Group
	part := func(name string, f func() error) {
		g.Go(func() error {
			err := f()
			if err != nil {
				err = fmt.Errorf("%s: %w", name, err)
				fail(err) // a part that dies ends the node: half a node misleads more than none
			}
			return err
		})
	}
	part("certificates", func() error { return n.certs.run(watching) })
	part("gossip", func() error { return n.gossip.Run(watching) })
	part("probe", func() error { return n.probe.Run(watching) })
	part("discovery", func() error { return n.discovery.Run(watching) })
	part("connections", func() error { return n.retainConnections(watching) })
	part("mesh", func() error { return n.mesh.Serve(n.meshListener) })
	part("front", n.front.Serve)
	part("admin", n.admin.serve)
	n.mesh.SetServing(true)

	<-failed.Done()
	if err := context.Cause(failed); ctx.Err() == nil {
		n.logger.Error("a part of the node failed", "err", err)
	}
	return errors.Join(n.stop(endWatching), g.Wait())
}

// retainInterval is how often connections to members that are gone are looked for. They cost a socket, no correctness: nothing
// is sent to a member that is not in the view.
const retainInterval = 5 * time.Second

func (n *Node) retainConnections(ctx context.Context) error {
	tick := time.NewTicker(retainInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			n.pool.Retain(n.gossip.View().Members())
		}
	}
}

// close gives back what New opened, last first. Everything in it may be called again.
func (n *Node) close() {
	for i := len(n.undo) - 1; i >= 0; i-- {
		n.undo[i]()
	}
	n.undo = nil
}
