package gossip

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/memberlist"
	"golang.org/x/sync/errgroup"

	"github.com/mvp-mesh/mvp-node/internal/catalog"
	"github.com/mvp-mesh/mvp-node/internal/route"
)

// Node is the own node's place in the mesh. Its methods are safe for concurrent use.
type Node struct {
	o         Options
	log       *slog.Logger
	metrics   *metrics
	transport *transport

	mail    mailbox
	results chan result
	dirty   chan struct{} // capacity 1: the own metadata changed
	kick    chan struct{} // capacity 1: sync has something to do

	view      atomic.Pointer[route.View]
	encoded   atomic.Pointer[[]byte] // own metadata as memberlist gets it
	contested atomic.Bool            // some member does not know the own node as it is

	// mu guards the table, what was last published from it, and the seeds. It is held for as long as building a View takes.
	// Announce works on the table itself instead of through the loop because its effect must be in the view when it returns,
	// also before Run.
	mu        sync.Mutex
	table     *table
	members   []route.Member // of the published View
	converged bool
	seeds     map[string]*seed
	fetches   uint64

	// running guards ml and started. Leave holds it for reading, so that memberlist is not shut down under it, which panics.
	running sync.RWMutex
	started bool
	ml      *memberlist.Memberlist // nil unless Run is in progress

	updating sync.Mutex // one UpdateNode at a time: memberlist reads the own address in it without a lock
}

// result is the end of a job.
type result struct {
	job job
	res FetchResult
	err error
}

// New checks the options and binds the listener. Nothing is sent and nobody is accepted before Run; a Node that is never run needs
// a Close. On an error nothing is left open.
func New(o Options) (*Node, error) {
	if err := o.validate(); err != nil {
		return nil, fmt.Errorf("gossip: %w", err)
	}
	o = o.complete()
	ln, err := net.Listen("tcp", o.BindAddress)
	if err != nil {
		return nil, fmt.Errorf("gossip: %w", err)
	}
	advertise, err := advertiseAddress(o, ln.Addr())
	if err != nil {
		ln.Close()
		return nil, fmt.Errorf("gossip: %w", err)
	}
	n := &Node{
		o:       o,
		log:     o.Logger.With("component", "gossip"),
		metrics: newMetrics(o.Registerer),
		mail:    mailbox{wake: make(chan struct{}, 1)},
		results: make(chan result),
		dirty:   make(chan struct{}, 1),
		kick:    make(chan struct{}, 1),
		seeds:   make(map[string]*seed),
	}
	n.transport = newTransport(o, ln, advertise, n.metrics, n.log)
	o.Seeds = slices.DeleteFunc(slices.Clone(o.Seeds), func(s string) bool {
		return s == o.AdvertiseAddress || s == o.BindAddress || s == advertise.String()
	})
	for _, s := range o.Seeds {
		n.seeds[s] = &seed{}
	}
	now := time.Now()
	n.table = newTable(o, max(1, rand.Uint64()), now)
	n.publish(now)
	return n, nil
}

// advertiseAddress is what members are told, as an address: memberlist knows no host names.
func advertiseAddress(o Options, bound net.Addr) (netip.AddrPort, error) {
	b, err := netip.ParseAddrPort(bound.String())
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("bound address: %w", err)
	}
	if o.AdvertiseAddress == "" {
		if b.Addr().IsUnspecified() {
			return netip.AddrPort{}, fmt.Errorf("bind address %s is every address of this host; an advertise address is needed", o.BindAddress)
		}
		return unmap(b), nil
	}
	host, port, err := net.SplitHostPort(o.AdvertiseAddress)
	if err != nil {
		return netip.AddrPort{}, err
	}
	p, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return netip.AddrPort{}, err
	}
	if p == 0 {
		p = uint64(b.Port())
	}
	ctx, cancel := context.WithTimeout(context.Background(), lookupTimeout)
	defer cancel()
	addrs, err := resolveHost(ctx, host, o.lookup)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("advertise address: %w", err)
	}
	if addrs[0].IsUnspecified() {
		return netip.AddrPort{}, fmt.Errorf("advertise address %s is no address of one host", o.AdvertiseAddress)
	}
	return netip.AddrPortFrom(addrs[0], uint16(p)), nil
}

func unmap(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}

// Addr is the host:port that is bound.
func (n *Node) Addr() string { return n.transport.listener.Addr().String() }

// View is the mesh as the node knows it now. It is never nil: before the first Announce the own node is in it as Starting.
func (n *Node) View() *route.View { return n.view.Load() }

// Converged reports whether all expected members are there and ready and every live member holds the same view as the own node.
// Where Options.Expected does not say who should be there, somebody must be at each seed instead.
func (n *Node) Converged() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.converged
}

// Announce says what the own node is now. The View has it when Announce returns, the other members soon after. It returns an
// error, and changes nothing, if a value is not legal or too long for gossip.
func (n *Node) Announce(l Local) error {
	now := time.Now()
	n.mu.Lock()
	defer n.mu.Unlock()
	own := n.table.own
	own.state, own.mode, own.generation = l.State, l.Mode, l.Generation
	own.meshAddress, own.serverVersion, own.digest = l.MeshAddress, l.ServerVersion, catalog.Digest{}
	if l.Catalog != nil {
		own.digest = l.Catalog.Digest()
	}
	if err := own.check(); err != nil {
		return fmt.Errorf("gossip: announce: %w", err)
	}
	if own.digest != n.table.own.digest {
		n.table.ownSince = now
	}
	n.table.own, n.table.ownCatalog = own, l.Catalog
	n.publish(now)
	return nil
}

// Refetch asks for a pull of a member's catalog although it seems to be known: the member has answered that it does not serve what
// its catalog says. It returns at once; calls for the same member within Timing.RefetchInterval are one.
func (n *Node) Refetch(name string) { n.mail.put(event{kind: eventRefetch, name: name}) }

// publish makes the table's picture the View, and the own metadata what memberlist gets. The caller holds mu.
func (n *Node) publish(now time.Time) {
	n.table.advance(now)
	members := n.table.members(now)
	if !slices.Equal(members, n.members) {
		v, err := route.NewView(n.o.Name, members)
		if err != nil {
			panic(err) // members lists each name once and the own one among them
		}
		n.members = members
		n.view.Store(v)
		n.metrics.viewChanges.Inc()
		n.table.own.viewHash = v.Hash()
	}
	if b := n.table.own.encode(); n.encoded.Load() == nil || !slices.Equal(b, *n.encoded.Load()) {
		n.encoded.Store(&b)
		notify(n.dirty)
	}
	n.converged = n.table.converged(n.table.own.viewHash)
	n.observe()
}

// observe sets the gauges. The caller holds mu.
func (n *Node) observe() {
	count := make(map[route.State]int)
	for _, m := range n.members {
		count[m.State]++
	}
	for s := route.Starting; s <= route.Missing; s++ {
		n.metrics.members.WithLabelValues(s.String()).Set(float64(count[s]))
	}
	missing := 0
	for _, name := range n.table.expected {
		if r := n.table.records[name]; name != n.o.Name && (r == nil || !r.alive) {
			missing++
		}
	}
	behind := 0
	for _, r := range n.table.records {
		if !r.settled() {
			behind++
		}
	}
	expected := len(n.table.expected)
	if expected > 0 && !slices.Contains(n.table.expected, n.o.Name) {
		expected++
	}
	n.metrics.expected.Set(float64(expected))
	n.metrics.missing.Set(float64(missing))
	n.metrics.behind.Set(float64(behind))
	n.metrics.complete.Set(bit(n.view.Load().Complete()))
	n.metrics.converged.Set(bit(n.converged))
}

// Run takes part in the mesh until ctx ends, then stops without saying good-bye (see Leave), waits for its goroutines and returns
// nil. It returns an error if the listener dies, and if it is called twice.
func (n *Node) Run(ctx context.Context) error {
	n.running.Lock()
	if n.started {
		n.running.Unlock()
		return errors.New("gossip: Run was called twice, or after Close")
	}
	n.started = true
	n.transport.start()
	ml, err := memberlist.Create(n.config())
	if err == nil {
		n.ml = ml
	}
	n.running.Unlock()
	if err != nil {
		return errors.Join(fmt.Errorf("gossip: %w", err), n.transport.Shutdown())
	}
	n.mu.Lock()
	n.table.restart(time.Now())
	n.mu.Unlock()
	n.log.Info("gossip started", "address", n.transport.advertise.String(), "seeds", n.o.Seeds)

	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { n.loop(ctx); return nil })
	g.Go(func() error { n.announcer(ctx, ml); return nil })
	g.Go(func() error { n.sync(ctx, ml); return nil })
	g.Go(func() error {
		select {
		case err := <-n.transport.broken:
			return err
		case <-ctx.Done():
		}
		// A join may wait for another node until its timeout; without the transport it does not.
		return n.stop()
	})
	if err := g.Wait(); err != nil {
		return errors.Join(fmt.Errorf("gossip: %w", err), n.stop())
	}
	return nil
}

// stop shuts memberlist and with it the transport down, after a Leave that is in progress.
func (n *Node) stop() error {
	n.running.Lock()
	defer n.running.Unlock()
	if n.ml == nil {
		return nil
	}
	err := n.ml.Shutdown()
	n.ml = nil
	return err
}

// Close releases the listener of a Node that was never run. Otherwise it does nothing: Run cleans up after itself.
func (n *Node) Close() error {
	n.running.Lock()
	defer n.running.Unlock()
	if n.started {
		return nil
	}
	n.started = true
	return n.transport.Shutdown()
}

// Leave tells the members that the own node goes away on purpose, so that they forget it at once instead of keeping it as Stale.
// The node can still forward until Run ends; it is no candidate for others any more. Leave returns within ctx's deadline or
// Timing.LeaveTimeout, whichever is earlier, with an error if nobody may have heard. It may be called in any state and more than
// once; without a Run in progress it does nothing.
func (n *Node) Leave(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, n.o.Timing.LeaveTimeout)
	defer cancel()
	n.running.RLock()
	defer n.running.RUnlock()
	if n.ml == nil {
		return nil
	}
	n.mu.Lock()
	n.table.own.leaving = true
	n.publish(time.Now())
	n.mu.Unlock()

	// First the metadata that says so, because memberlist's own leave message tells the receivers no more than a death does.
	n.update(n.ml)
	err := n.farewell(ctx, n.ml)
	if ctx.Err() == nil {
		deadline, _ := ctx.Deadline()
		err = errors.Join(err, n.ml.Leave(max(time.Millisecond, time.Until(deadline))))
	}
	n.transport.flush(ctx)
	if err != nil {
		return fmt.Errorf("gossip: leave: %w", err)
	}
	return ctx.Err()
}

// suspicionMult is how many probe intervals a member is suspected before it is given up; the suspected member has that long to
// contradict.
const suspicionMult = 4

func (n *Node) config() *memberlist.Config {
	c := memberlist.DefaultLANConfig()
	d := delegate{n}
	c.Name, c.Label, c.Transport = n.o.Name, n.o.ClusterID, n.transport
	c.BindPort = int(n.transport.advertise.Port())
	c.AdvertiseAddr, c.AdvertisePort = n.transport.advertise.Addr().String(), c.BindPort
	c.Delegate, c.Events, c.Alive, c.Conflict, c.Merge = d, d, d, d, d
	c.Logger = slog.NewLogLogger(n.log.Handler(), slog.LevelInfo)
	c.Logger.SetFlags(0)
	c.Logger.SetOutput(logWriter{n.log})

	c.TCPTimeout = n.o.Timing.StreamTimeout
	c.ProbeInterval, c.ProbeTimeout = n.o.Timing.ProbeInterval, n.o.Timing.ProbeTimeout
	c.SuspicionMult = suspicionMult
	// With few members the confirmations by others, which shorten a suspicion, are slow to come; so the longest is not much
	// longer than the shortest.
	c.SuspicionMaxTimeoutMult = 2
	// A slow node slows its probing down fourfold at most, or it would not notice a death for half a minute.
	c.AwarenessMaxMultiplier = 4
	c.GossipInterval, c.GossipNodes = n.o.Timing.GossipInterval, 3
	// sync does the full exchanges, because it must know what the others think.
	c.PushPullInterval = 0
	// Packets go by TCP already. The fallback would cost a handshake and find the same.
	c.DisableTcpPings = true
	c.UDPBufferSize = packetBuffer
	c.EnableCompression = false
	// A dead member's name may come from another address as soon as it is dead (CASES G-01); 0 would mean never.
	c.DeadNodeReclaimTime = time.Millisecond
	return c
}
