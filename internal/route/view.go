package route

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash/fnv"
	"slices"
	"strings"

	"github.com/mvp-mesh/mvp-node/internal/catalog"
)

// State is what a member can do now, as the member itself or the failure detector says.
type State uint8

// The states of a member.
const (
	// Starting: the node runs; its local catalog is not known yet, or was not read again since its apiserver came back.
	Starting State = iota + 1
	// Ready: the node's apiserver is ready and its catalog known.
	Ready
	// Draining: the node is about to stop; new requests go elsewhere.
	Draining
	// LocalDown: the node runs, its apiserver is not ready.
	LocalDown
	// Stale: the node vanished without leaving; its catalog is kept for the grace time.
	Stale
	// Missing: the node is expected by configuration and was never seen, or not since its grace time ended.
	Missing
)

var stateNames = [...]string{"Unknown", "Starting", "Ready", "Draining", "LocalDown", "Stale", "Missing"}

// String names the state as gossip, tables, metrics and the scenario files spell it.
func (s State) String() string {
	if int(s) < len(stateNames) {
		return stateNames[s]
	}
	return stateNames[0]
}

// ParseState is the inverse of String; zero for a name it does not know.
func ParseState(name string) State {
	if i := slices.Index(stateNames[:], name); i > 0 {
		return State(i)
	}
	return 0
}

// Mode switches a node between routing, watching and standing aside.
type Mode uint8

// The modes of a node.
const (
	// Enabled: requests are routed.
	Enabled Mode = iota + 1
	// ObserveOnly: decisions are made and recorded, every request is still served locally.
	ObserveOnly
	// Disabled: the node is a transparent proxy to its local apiserver.
	Disabled
)

var modeNames = [...]string{"Unknown", "Enabled", "ObserveOnly", "Disabled"}

// String names the mode as the configuration file spells it.
func (m Mode) String() string {
	if int(m) < len(modeNames) {
		return modeNames[m]
	}
	return modeNames[0]
}

// MarshalText implements encoding.TextMarshaler by String.
func (m Mode) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

// ParseMode is the inverse of String; zero for a name it does not know.
func ParseMode(name string) Mode {
	if i := slices.Index(modeNames[:], name); i > 0 {
		return Mode(i)
	}
	return 0
}

// Member is one node of the mesh as seen by the node that holds the View. Immutable once in a View.
type Member struct {
	Name          string
	Address       string // mesh port, host:port; "" while Missing
	State         State
	Mode          Mode
	ServerVersion string         // of the member's apiserver, as advertised; "" while unknown
	Digest        catalog.Digest // of the catalog that the member advertises now; zero while it has none
	Generation    uint64         // counts the member's catalogs; larger is newer
	// Catalog is the newest catalog that was pulled from the member itself, nil if none was. It may lag behind Digest.
	Catalog *catalog.Catalog
	// HoldsUp is set while the member may serve something that the View does not know: its catalog is unknown or older than
	// what it advertises, or it is expected and missing, and the time for which that may hold up a true 404 is not over.
	HoldsUp bool

	rank uint64 // hash of Name, for Decide's choice among peers
	age  int    // position of ServerVersion among those of the View, oldest first; equal for equal ones, -1 if it says nothing
}

// Available reports whether a request may be forwarded to the member.
func (m *Member) Available() bool {
	return m.State == Ready && m.Mode != Disabled && m.Address != "" && m.Catalog != nil
}

// Hash identifies the content of a View: members, states and catalogs. Equal hashes on all members mean a converged mesh.
type Hash [16]byte

// String is the hash in hexadecimal.
func (h Hash) String() string { return hex.EncodeToString(h[:]) }

// IsZero reports whether no view is named.
func (h Hash) IsZero() bool { return h == Hash{} }

// View is a node's picture of the mesh at one moment. Immutable; made by NewView and swapped as a whole, so that a request sees
// the old picture or the new one and never half of each.
type View struct {
	self     *Member
	members  []*Member // by name, self included
	byName   map[string]*Member
	complete bool
	holders  []string
	hash     Hash

	// servers lists, for every key that is not shared through etcd, the peers that serve it; a request then costs one lookup
	// however many members there are.
	servers map[catalog.Key][]server
	// unread has the group-versions of peers, not shared through etcd, whose resources the peer itself could not learn. They
	// keep the View from being complete, but for what is in them only.
	unread map[catalog.GV]bool
}

type server struct {
	member *Member
	verbs  catalog.Verbs
}

// NewView builds a View for the node named self from members in any order, itself included. The Member values are copied. It
// fails if self is not among them or a name occurs twice: both are bugs of the caller.
func NewView(self string, members []Member) (*View, error) {
	v := &View{
		members:  make([]*Member, 0, len(members)),
		byName:   make(map[string]*Member, len(members)),
		servers:  make(map[catalog.Key][]server),
		unread:   make(map[catalog.GV]bool),
		complete: true,
	}
	for _, m := range members {
		m.rank = hashString(m.Name)
		v.members = append(v.members, &m)
	}
	slices.SortFunc(v.members, func(a, b *Member) int { return strings.Compare(a.Name, b.Name) })
	for _, m := range v.members {
		if v.byName[m.Name] != nil {
			return nil, fmt.Errorf("route: view of %q: member %q listed twice", self, m.Name)
		}
		v.byName[m.Name] = m
		if m.Name == self {
			v.self = m
			continue
		}
		if m.HoldsUp {
			v.complete = false
			v.holders = append(v.holders, m.Name)
		}
		v.index(m)
	}
	if v.self == nil {
		return nil, fmt.Errorf("route: view of %q: it is not among the %d members", self, len(members))
	}
	orderByVersion(v.members)
	v.hash = v.sum()
	return v, nil
}

func (v *View) index(m *Member) {
	if m.Catalog == nil {
		return
	}
	for _, gv := range m.Catalog.GroupVersions() {
		if gv.Source.Shared() {
			continue
		}
		if gv.Stale {
			v.unread[gv.GV] = true
		}
		for _, r := range gv.Resources {
			k := catalog.Key{Group: gv.Group, Version: gv.Version, Resource: r.Name, Subresource: r.Subresource}
			v.servers[k] = append(v.servers[k], server{m, r.Verbs})
		}
	}
}

// Self is the member whose View this is.
func (v *View) Self() *Member { return v.self }

// Members lists all members by name, self included. Read only.
func (v *View) Members() []*Member { return v.members }

// Member returns the member of that name, nil if there is none.
func (v *View) Member(name string) *Member { return v.byName[name] }

// Complete reports whether everything that any member may serve is known, so that a local 404 is the truth.
func (v *View) Complete() bool { return v.complete }

// Holders names the members that keep the View from being complete.
func (v *View) Holders() []string { return v.holders }

// Hash identifies the content.
func (v *View) Hash() Hash { return v.hash }

// sum covers what routing depends on and every member can agree about. HoldsUp is left out: it depends on when a node was
// started, not on the mesh.
func (v *View) sum() Hash {
	h := sha256.New()
	var n [8]byte
	for _, m := range v.members {
		for _, s := range []string{m.Name, m.Address, m.State.String(), m.Mode.String(), m.ServerVersion} {
			binary.BigEndian.PutUint64(n[:], uint64(len(s)))
			h.Write(n[:])
			h.Write([]byte(s))
		}
		h.Write(m.Digest[:])
		binary.BigEndian.PutUint64(n[:], m.Generation)
		h.Write(n[:])
		// A member whose catalog is advertised and not held is a difference, so that "converged" includes the catalogs.
		held := catalog.Digest{}
		if m.Catalog != nil {
			held = m.Catalog.Digest()
		}
		h.Write(held[:])
	}
	var out Hash
	copy(out[:], h.Sum(nil))
	return out
}

func hashString(s string) uint64 {
	h := fnv.New64a()
	h.Write([]byte(s))
	return h.Sum64()
}

// Copy returns the member's facts, for building another View.
func (m *Member) Copy() Member { return *m }
