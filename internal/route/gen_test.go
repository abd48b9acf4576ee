package route

import (
	"fmt"

	"github.com/mvp-mesh/mvp-node/internal/catalog"
)

// dice turns bytes into choices, so that one generator serves testing/quick, which brings random bytes, and the fuzzer, which
// brings chosen ones. Used up dice show 0.
type dice struct{ bytes []byte }

func (d *dice) roll(n int) int {
	if len(d.bytes) == 0 {
		return 0
	}
	b := d.bytes[0]
	d.bytes = d.bytes[1:]
	return int(b) % n
}

// The world of the generator is small, so that members often serve the same thing in different ways.
var (
	worldGVs   = []catalog.GV{{Version: "v1"}, {Group: "apps", Version: "v1"}, {Group: "example.com", Version: "v1"}}
	worldNames = [][2]string{{"pods", ""}, {"pods", "exec"}, {"jobs", ""}}
	worldVerbs = []catalog.Verb{0, catalog.VerbGet, catalog.VerbWatch, catalog.VerbCreate}
)

// genMembers makes 1 to 6 members; the first is self.
func genMembers(d *dice) []Member {
	members := make([]Member, 1+d.roll(6))
	for i := range members {
		m := &members[i]
		*m = Member{
			Name:  fmt.Sprintf("n%d", i),
			State: State(1 + d.roll(int(Missing))),
			Mode:  Mode(1 + d.roll(int(Disabled))),
		}
		if d.roll(5) > 0 {
			m.Address = m.Name + ":7444"
		}
		if d.roll(4) > 0 && m.State != Missing {
			m.Catalog = genCatalog(d)
			m.Digest, m.Generation = m.Catalog.Digest(), uint64(d.roll(3))
			m.ServerVersion = m.Catalog.ServerVersion()
		}
		// What gossip does, bounded hold included: an unknown or outdated catalog may hold up the view, or not any more.
		m.HoldsUp = (m.Catalog == nil || d.roll(4) == 0) && d.roll(2) == 0
	}
	return members
}

func genCatalog(d *dice) *catalog.Catalog {
	var gvs []catalog.GroupVersion
	for _, gv := range worldGVs {
		if d.roll(3) == 0 {
			continue
		}
		g := catalog.GroupVersion{GV: gv, Source: catalog.SourceBuiltin, Stale: d.roll(8) == 1}
		if d.roll(3) == 1 {
			g.Source = catalog.Source(1 + d.roll(3))
		}
		for _, name := range worldNames {
			if d.roll(2) == 0 {
				continue
			}
			g.Resources = append(g.Resources, catalog.Resource{
				Name: name[0], Subresource: name[1], Verbs: catalog.Verbs(1 + d.roll(255)),
			})
		}
		gvs = append(gvs, g)
	}
	c, err := catalog.New("v1.36.0", gvs)
	if err != nil {
		panic(err)
	}
	return c
}

func genAttributes(d *dice) Attributes {
	gv, name := worldGVs[d.roll(len(worldGVs))], worldNames[d.roll(len(worldNames))]
	return Attributes{
		Resource: d.roll(8) != 1,
		Key:      catalog.Key{Group: gv.Group, Version: gv.Version, Resource: name[0], Subresource: name[1]},
		Verb:     worldVerbs[d.roll(len(worldVerbs))],
		Affinity: uint64(d.roll(256))<<8 | uint64(d.roll(256)),
	}
}

func genPolicy(d *dice) Policy {
	return Policy{Mode: Mode(1 + d.roll(int(Disabled))), LocalOutage: d.roll(2) == 0}
}
