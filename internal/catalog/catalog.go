package catalog

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash"
	"slices"
	"strings"
)

// Limits on what a catalog may hold. They bound what a faulty or lying peer can make a node keep in memory; a real v1.37
// apiserver has about 120 entries, a cluster with 5,000 CRDs about 15,000.
const (
	MaxGroupVersions = 20_000
	MaxResources     = 100_000
	// maxName bounds each name. DNS subdomains end at 253 bytes.
	maxName = 253
)

// Source says who makes a group-version exist at an apiserver.
type Source uint8

// A group-version that comes from a CRD or an APIService exists at every apiserver through etcd, so it is always served by the
// local one and never forwarded because of a peer's (possibly old) list.
const (
	SourceBuiltin Source = iota + 1
	SourceCRD
	SourceAggregated
)

// String names the source; the same string is used in tables, JSON and metrics.
func (s Source) String() string {
	switch s {
	case SourceBuiltin:
		return "Builtin"
	case SourceCRD:
		return "CRD"
	case SourceAggregated:
		return "Aggregated"
	}
	return "Unknown"
}

// Shared reports whether the group-version reaches every apiserver through etcd.
func (s Source) Shared() bool { return s == SourceCRD || s == SourceAggregated }

// GV names a group-version. The core group is "".
type GV struct{ Group, Version string }

// String writes "v1" for the core group, "group/version" otherwise.
func (g GV) String() string {
	if g.Group == "" {
		return g.Version
	}
	return g.Group + "/" + g.Version
}

// Key names what a request addresses: a resource, or a subresource of it.
type Key struct{ Group, Version, Resource, Subresource string }

// GV is the group-version of the key.
func (k Key) GV() GV { return GV{k.Group, k.Version} }

// String writes "group/version/resource" or "group/version/resource/subresource".
func (k Key) String() string {
	s := k.GV().String() + "/" + k.Resource
	if k.Subresource != "" {
		s += "/" + k.Subresource
	}
	return s
}

// Resource is one resource or subresource of a group-version, as discovery describes it.
type Resource struct {
	Name        string // plural, "deployments"
	Subresource string // "scale", or "" for the resource itself
	Kind        string // kind of the response, informational
	Namespaced  bool
	Verbs       Verbs
}

// GroupVersion is one group-version with its resources and subresources.
type GroupVersion struct {
	GV
	Source Source
	// Stale is set when the apiserver lists the group-version but could not learn its resources (an aggregated API that is
	// away). Its resources may then be missing; it is never taken as proof that they do not exist.
	Stale     bool
	Resources []Resource
}

// Catalog is what one apiserver serves at one moment. Immutable; made by New.
type Catalog struct {
	serverVersion string
	gvs           []GroupVersion
	byGV          map[GV]int
	byKey         map[Key]Verbs
	digest        Digest
}

// Digest identifies the content of a Catalog: equal digests mean equal server version, group-versions, sources, resources and
// verbs.
type Digest [sha256.Size]byte

// IsZero reports whether no catalog is named.
func (d Digest) IsZero() bool { return d == Digest{} }

// String is the whole digest in hexadecimal.
func (d Digest) String() string { return hex.EncodeToString(d[:]) }

// Short is the first 12 hexadecimal digits, for tables and logs.
func (d Digest) Short() string { return d.String()[:12] }

// New builds a Catalog from group-versions in any order. It copies and sorts what it is given. It fails, naming the entry, on
// empty or overlong names, on an unknown source, on duplicates, and on more entries than the limits allow: documents from peers
// pass through here, so this is also their validation.
func New(serverVersion string, gvs []GroupVersion) (*Catalog, error) {
	if serverVersion == "" || len(serverVersion) > maxName {
		return nil, fmt.Errorf("catalog: server version %.20q is empty or longer than %d bytes", serverVersion, maxName)
	}
	if len(gvs) > MaxGroupVersions {
		return nil, fmt.Errorf("catalog: %d group-versions, at most %d allowed", len(gvs), MaxGroupVersions)
	}
	c := &Catalog{
		serverVersion: serverVersion,
		gvs:           make([]GroupVersion, 0, len(gvs)),
		byGV:          make(map[GV]int, len(gvs)),
	}
	total := 0
	for _, gv := range gvs {
		total += len(gv.Resources)
		gv.Resources = slices.Clone(gv.Resources)
		slices.SortFunc(gv.Resources, func(a, b Resource) int {
			if d := strings.Compare(a.Name, b.Name); d != 0 {
				return d
			}
			return strings.Compare(a.Subresource, b.Subresource)
		})
		c.gvs = append(c.gvs, gv)
	}
	if total > MaxResources {
		return nil, fmt.Errorf("catalog: %d resources, at most %d allowed", total, MaxResources)
	}
	slices.SortFunc(c.gvs, func(a, b GroupVersion) int {
		if d := strings.Compare(a.Group, b.Group); d != 0 {
			return d
		}
		return strings.Compare(a.Version, b.Version)
	})
	c.byKey = make(map[Key]Verbs, total)
	for i, gv := range c.gvs {
		if gv.Version == "" || len(gv.Version) > maxName || len(gv.Group) > maxName {
			return nil, fmt.Errorf("catalog: group-version %.60q: empty version or a name longer than %d bytes", gv.GV, maxName)
		}
		if gv.Source < SourceBuiltin || gv.Source > SourceAggregated {
			return nil, fmt.Errorf("catalog: group-version %s: unknown source %d", gv.GV, gv.Source)
		}
		if _, dup := c.byGV[gv.GV]; dup {
			return nil, fmt.Errorf("catalog: group-version %s: listed twice", gv.GV)
		}
		c.byGV[gv.GV] = i
		for _, r := range gv.Resources {
			k := Key{gv.Group, gv.Version, r.Name, r.Subresource}
			if r.Name == "" || len(r.Name) > maxName || len(r.Subresource) > maxName || len(r.Kind) > maxName {
				return nil, fmt.Errorf("catalog: resource %.60q: empty name or a name longer than %d bytes", k, maxName)
			}
			if _, dup := c.byKey[k]; dup {
				return nil, fmt.Errorf("catalog: resource %s: listed twice", k)
			}
			c.byKey[k] = r.Verbs
		}
	}
	c.digest = c.sum()
	return c, nil
}

// ServerVersion is the apiserver's gitVersion, for example "v1.36.3".
func (c *Catalog) ServerVersion() string { return c.serverVersion }

// Digest identifies the content.
func (c *Catalog) Digest() Digest { return c.digest }

// GroupVersions lists all group-versions by group, then version, each with its resources by name, then subresource. The
// result is the catalog's own memory: read only.
func (c *Catalog) GroupVersions() []GroupVersion { return c.gvs }

// Len is the number of resources and subresources.
func (c *Catalog) Len() int { return len(c.byKey) }

// Lookup returns the group-version, and whether the catalog has it.
func (c *Catalog) Lookup(gv GV) (GroupVersion, bool) {
	i, ok := c.byGV[gv]
	if !ok {
		return GroupVersion{}, false
	}
	return c.gvs[i], true
}

// Serves reports whether the apiserver serves the verb on the key. The zero Verb stands for a method that discovery has no name
// for, such as OPTIONS on a proxy subresource; what it does is up to whoever has the resource.
func (c *Catalog) Serves(k Key, v Verb) bool {
	verbs, ok := c.byKey[k]
	return ok && (v == 0 || verbs.Has(v))
}

// Has reports whether the apiserver knows the resource or subresource at all, whatever the verb.
func (c *Catalog) Has(k Key) bool {
	_, ok := c.byKey[k]
	return ok
}

// sum hashes a canonical form: every string is length-prefixed, so no two different catalogs write the same bytes.
func (c *Catalog) sum() Digest {
	h := sha256.New()
	put(h, "mvp-catalog-v1", c.serverVersion)
	putInt(h, len(c.gvs))
	for _, gv := range c.gvs {
		put(h, gv.Group, gv.Version)
		putInt(h, int(gv.Source))
		putBool(h, gv.Stale)
		putInt(h, len(gv.Resources))
		for _, r := range gv.Resources {
			put(h, r.Name, r.Subresource, r.Kind)
			putBool(h, r.Namespaced)
			putInt(h, int(r.Verbs))
		}
	}
	var d Digest
	h.Sum(d[:0])
	return d
}

func put(h hash.Hash, ss ...string) {
	for _, s := range ss {
		putInt(h, len(s))
		h.Write([]byte(s))
	}
}

func putInt(h hash.Hash, n int) {
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], uint64(n))
	h.Write(b[:])
}

func putBool(h hash.Hash, b bool) {
	if b {
		putInt(h, 1)
		return
	}
	putInt(h, 0)
}
