package route

import (
	"slices"

	"k8s.io/apimachinery/pkg/util/version"
)

// Preference says which server is asked for what several of them serve alike: a client that asks an old and a new one in turn sees
// fields come and go (CASES U-03). It never makes anything unavailable: with no such peer ready, the local apiserver answers.
type Preference uint8

// The preferences.
const (
	// PreferLocal asks the local apiserver. The default.
	PreferLocal Preference = iota
	// PreferNewest asks a peer if its apiserver is newer than the local one.
	PreferNewest
	// PreferOldest asks a peer if its apiserver is older than the local one.
	PreferOldest
)

var preferenceNames = [...]string{"local", "newest", "oldest"}

// String names the preference as the configuration file spells it.
func (p Preference) String() string {
	if int(p) < len(preferenceNames) {
		return preferenceNames[p]
	}
	return "unknown"
}

// MarshalText implements encoding.TextMarshaler by String.
func (p Preference) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// ParsePreference is the inverse of String; ok is false for a name it does not know.
func ParsePreference(name string) (p Preference, ok bool) {
	i := slices.Index(preferenceNames[:], name)
	return Preference(max(i, 0)), i >= 0
}

// preferred lists the ready peers that the policy wants asked instead of the local apiserver, which serves the request as well:
// those of the newest (or oldest) version among the ready ones that serve it, if that is newer (older) than the local one.
func (v *View) preferred(a Attributes, p Preference) []*Member {
	if p == PreferLocal || v.self.age < 0 {
		return nil
	}
	var out []*Member
	best := v.self.age
	consider := func(m *Member) {
		switch {
		case m == v.self || m.age < 0 || m.age == v.self.age || !m.Available():
		case m.age == best:
			out = append(out, m)
		case (m.age > best) == (p == PreferNewest):
			best, out = m.age, append(out[:0], m)
		}
	}
	if a.Document {
		for _, m := range v.members {
			consider(m)
		}
	} else {
		for _, s := range v.servers[a.Key] {
			if a.Verb == 0 || s.verbs.Has(a.Verb) { // as in Catalog.Serves
				consider(s.member)
			}
		}
	}
	rank(out, a.Affinity)
	return out
}

// orderByVersion sets age. Versions are compared as Kubernetes compares its own, build metadata ("+k3s1") left aside.
func orderByVersion(members []*Member) {
	var versions []*version.Version
	parsed := make([]*version.Version, len(members))
	for i, m := range members {
		m.age = -1
		if ver, err := version.ParseSemantic(m.ServerVersion); err == nil {
			parsed[i] = ver
			versions = append(versions, ver)
		}
	}
	compare := func(a, b *version.Version) int {
		switch {
		case a.LessThan(b):
			return -1
		case b.LessThan(a):
			return 1
		}
		return 0
	}
	slices.SortFunc(versions, compare)
	versions = slices.CompactFunc(versions, func(a, b *version.Version) bool { return compare(a, b) == 0 })
	for i, ver := range parsed {
		if ver != nil {
			members[i].age, _ = slices.BinarySearchFunc(versions, ver, compare)
		}
	}
}
