package gossip

import (
	"maps"
	"slices"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/route"
)

// Detail is what is known of one member beyond its route.Member. The zero value belongs to a name that is not known.
type Detail struct {
	GossipAddress string
	NodeVersion   string
	ViewHash      route.Hash // of the view that the member says it holds
	HeldSince     time.Time  // when its catalog, as in the View, was pulled or last confirmed; zero if none is held
	LastError     string     // of the last pull of its catalog; "" if it succeeded
}

// Detail returns what is known of a member, the own node included.
func (n *Node) Detail(name string) Detail {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.detail(name)
}

func (n *Node) detail(name string) Detail {
	if name == n.o.Name {
		return Detail{
			GossipAddress: n.transport.advertise.String(), NodeVersion: n.table.own.nodeVersion, ViewHash: n.table.own.viewHash,
			HeldSince: n.table.ownSince,
		}
	}
	r := n.table.records[name]
	if r == nil {
		return Detail{GossipAddress: n.table.addresses[name]}
	}
	return Detail{
		GossipAddress: r.gossip, NodeVersion: r.meta.nodeVersion, ViewHash: r.meta.viewHash, HeldSince: r.heldSince,
		LastError: r.lastError,
	}
}

// Dump is the whole state of a Node for `mvp-node gossip dump` and support: plain values, in a stable order.
type Dump struct {
	Name      string
	ClusterID string
	Address   string // bound
	Advertise string
	Running   bool
	Leaving   bool
	Complete  bool
	Converged bool
	ViewHash  string
	Holders   []string
	// HealthScore is memberlist's: 0 is healthy.
	HealthScore int
	// PendingPackets are queued for a peer, or sent and not acknowledged. memberlist's own queue holds one update per member at
	// most and is not to be had.
	PendingPackets int
	Seeds          []DumpSeed
	Members        []DumpMember
}

// DumpSeed is one configured seed.
type DumpSeed struct {
	Seed      string
	Addresses []string
	LastTry   time.Time // of an exchange; zero while a live member is there
	LastError string
}

// DumpMember is one member, or an expected one that is missing.
type DumpMember struct {
	Name, State, Mode, MeshAddress, ServerVersion string

	GossipAddress, NodeVersion, ViewHash string
	// Format is the version of the member's metadata; it is only read up to our own.
	Format         int
	Boot           uint64
	Digest         string // advertised
	Generation     uint64
	HeldDigest     string // "" if no catalog is held
	HeldGeneration uint64
	HeldSince      time.Time
	Settled        bool // the held catalog is what the member serves
	HoldsUp        bool
	OpenSince      time.Time // since when what it serves is not known; zero if it is
	Vanished       time.Time // zero unless Stale
	Fetching       bool
	FetchFailures  int
	NextFetch      time.Time
	LastError      string
}

// Dump returns the whole state.
func (n *Node) Dump() Dump {
	n.running.RLock()
	running, health := n.ml != nil, 0
	if running {
		health = n.ml.GetHealthScore()
	}
	n.running.RUnlock()

	n.mu.Lock()
	defer n.mu.Unlock()
	v := n.view.Load()
	d := Dump{
		Name: n.o.Name, ClusterID: n.o.ClusterID, Address: n.Addr(), Advertise: n.transport.advertise.String(), Running: running,
		Leaving: n.table.own.leaving, Complete: v.Complete(), Converged: n.converged, ViewHash: v.Hash().String(),
		Holders: slices.Clone(v.Holders()), HealthScore: health, PendingPackets: int(n.transport.pending.Load()),
	}
	for _, name := range slices.Sorted(maps.Keys(n.seeds)) {
		s := n.seeds[name]
		ds := DumpSeed{Seed: name, LastTry: s.lastTry, LastError: s.lastError}
		for _, a := range s.addresses {
			ds.Addresses = append(ds.Addresses, a.String())
		}
		d.Seeds = append(d.Seeds, ds)
	}
	for _, m := range n.members {
		d.Members = append(d.Members, n.dumpMember(m))
	}
	return d
}

func (n *Node) dumpMember(m route.Member) DumpMember {
	more := n.detail(m.Name)
	d := DumpMember{
		Name: m.Name, State: m.State.String(), Mode: m.Mode.String(), MeshAddress: m.Address, ServerVersion: m.ServerVersion,
		GossipAddress: more.GossipAddress, NodeVersion: more.NodeVersion, Generation: m.Generation, HeldSince: more.HeldSince,
		HoldsUp: m.HoldsUp, OpenSince: n.table.open[m.Name].since, LastError: more.LastError,
	}
	if !more.ViewHash.IsZero() {
		d.ViewHash = more.ViewHash.String()
	}
	if !m.Digest.IsZero() {
		d.Digest = m.Digest.String()
	}
	if m.Catalog != nil {
		d.HeldDigest = m.Catalog.Digest().String()
	}
	if m.Name == n.o.Name {
		d.Format, d.Boot, d.HeldGeneration, d.Settled = metaFormat, n.table.own.boot, m.Generation, true
	} else if r := n.table.records[m.Name]; r != nil {
		d.Format, d.Boot, d.HeldGeneration, d.Settled = int(r.meta.format), r.meta.boot, r.heldGen, r.settled()
		d.Vanished, d.Fetching, d.FetchFailures, d.NextFetch = r.vanished, r.fetching, r.failures, r.nextFetch
	}
	return d
}
