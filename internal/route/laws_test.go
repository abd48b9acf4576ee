package route

import (
	"fmt"
	"math/rand"
	"slices"
	"testing"
	"testing/quick"

	"github.com/google/go-cmp/cmp"

	"github.com/mvp-mesh/mvp-node/internal/catalog"
)

func mustView(t testing.TB, self string, members []Member) *View {
	t.Helper()
	v, err := NewView(self, members)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// plainDecide is DESIGN.md "Deciding" read aloud: no index, no order, every member looked at for every question. It names the
// candidates as a set.
func plainDecide(a Attributes, self string, members []Member, p Policy) string {
	if p.Mode == Disabled {
		return "Local ModeDisabled"
	}
	answer := plainEnabled(a, self, members, p)
	if p.Mode == ObserveOnly && answer[:5] != "Local" {
		return "Local, observed " + answer
	}
	return answer
}

func plainEnabled(a Attributes, self string, members []Member, p Policy) string {
	if !a.Resource {
		return "Local NonResource"
	}
	serves := func(m Member) bool { return m.Catalog != nil && m.Catalog.Serves(a.Key, a.Verb) }
	shared := func(m Member) bool {
		if m.Catalog == nil {
			return false
		}
		gv, ok := m.Catalog.Lookup(a.Key.GV())
		return ok && gv.Source != catalog.SourceBuiltin
	}
	var me Member
	var standIn, own, ownReady []string // peers that serve it at all; from a built-in group-version; and can be asked
	complete := true
	for _, m := range members {
		if m.Name == self {
			me = m
			continue
		}
		if m.HoldsUp {
			complete = false
		}
		if m.Catalog != nil && !shared(m) {
			if gv, ok := m.Catalog.Lookup(a.Key.GV()); ok && gv.Stale {
				complete = false // for this request
			}
		}
		ready := m.State == Ready && m.Mode != Disabled && m.Address != ""
		if serves(m) && ready {
			standIn = append(standIn, m.Name)
		}
		if serves(m) && !shared(m) {
			own = append(own, m.Name)
			if ready {
				ownReady = append(ownReady, m.Name)
			}
		}
	}
	slices.Sort(standIn)
	slices.Sort(ownReady)
	mine := serves(me) || shared(me)
	switch {
	case (me.Catalog == nil || mine && me.State == LocalDown) && p.LocalOutage && len(standIn) > 0:
		return fmt.Sprintf("Forward LocalOutage %v", standIn)
	case me.Catalog == nil:
		return "Unavailable LocalNotKnown LocalUnavailable"
	case serves(me):
		return "Local ServedLocally"
	case shared(me):
		return "Local SharedGroup"
	case len(ownReady) > 0:
		return fmt.Sprintf("Forward ServedByPeer %v", ownReady)
	case len(own) > 0:
		return "Unavailable PeersNotReady NoPeerAvailable"
	case complete:
		return "Local NotServedAnywhere"
	}
	return "Unavailable IncompleteView ViewIncomplete"
}

// inPlainWords writes a Decision as plainDecide does.
func inPlainWords(d Decision) string {
	if d.Observed != nil {
		return "Local, observed " + inPlainWords(*d.Observed)
	}
	s := d.Outcome.String() + " " + d.Reason.String()
	if d.Outcome == Forward {
		names := candidateNames(d)
		slices.Sort(names)
		s += fmt.Sprintf(" %v", names)
	}
	if d.Cause != CauseNone {
		s += " " + d.Cause.String()
	}
	return s
}

func candidateNames(d Decision) []string {
	var out []string
	for _, m := range d.Candidates {
		out = append(out, m.Name)
	}
	return out
}

// checkRules holds one decision to the rules of DESIGN.md, each stated without regard to how Decide goes about it.
func checkRules(a Attributes, members []Member, v *View, p Policy, d Decision) error {
	if p.Mode == Disabled && (d.Outcome != Local || d.Reason != ModeDisabled) {
		return fmt.Errorf("disabled, and not transparent")
	}
	if p.Mode == ObserveOnly && d.Outcome != Local {
		return fmt.Errorf("only observing, and not local")
	}
	if (d.Outcome == Unavailable) != (d.Cause != CauseNone) {
		return fmt.Errorf("a cause goes with Unavailable and nothing else")
	}
	if (d.Outcome == Forward) != (len(d.Candidates) > 0) {
		return fmt.Errorf("candidates go with Forward and nothing else")
	}
	seen := map[string]bool{}
	for _, m := range d.Candidates {
		switch {
		case m == v.Self() || m.Name == v.Self().Name:
			return fmt.Errorf("forwards to itself")
		case m != v.Member(m.Name):
			return fmt.Errorf("candidate %s is not of this view", m.Name)
		case !m.Available() || m.State != Ready || m.Address == "":
			return fmt.Errorf("candidate %s cannot be asked", m.Name)
		case !m.Catalog.Serves(a.Key, a.Verb):
			return fmt.Errorf("candidate %s does not serve it", m.Name)
		case seen[m.Name]:
			return fmt.Errorf("candidate %s is there twice", m.Name)
		}
		seen[m.Name] = true
	}
	self := v.Self().Catalog
	if a.Resource && self != nil && self.Serves(a.Key, a.Verb) && v.Self().State != LocalDown && d.Outcome != Local {
		return fmt.Errorf("not local, although served locally")
	}
	if !a.Resource && d.Outcome != Local {
		return fmt.Errorf("a non-resource request is not local")
	}
	if p.Mode != Enabled || d.Outcome != Local || !a.Resource {
		return nil
	}
	return checkNotMisleading(a, members, v, d)
}

// checkNotMisleading is rule 1 for a request that is answered locally.
func checkNotMisleading(a Attributes, members []Member, v *View, d Decision) error {
	if d.Reason == NotServedAnywhere && !v.Complete() {
		return fmt.Errorf("says nobody serves it, and the view is not complete")
	}
	self := v.Self().Catalog
	if self == nil {
		return fmt.Errorf("local, although it is not known what the local apiserver serves")
	}
	if gv, ok := self.Lookup(a.Key.GV()); self.Serves(a.Key, a.Verb) || ok && gv.Source.Shared() {
		return nil
	}
	for _, m := range members {
		if m.Name == v.Self().Name {
			continue
		}
		if m.HoldsUp {
			return fmt.Errorf("a misleading 404: %s may serve it", m.Name)
		}
		if m.Catalog == nil {
			continue
		}
		gv, ok := m.Catalog.Lookup(a.Key.GV())
		if ok && !gv.Source.Shared() && (gv.Stale || m.Catalog.Serves(a.Key, a.Verb)) {
			return fmt.Errorf("a misleading 404: %s serves it", m.Name)
		}
	}
	return nil
}

// FuzzDecide holds Decide to the rules and to the plain reading of the design, for any mesh and request.
func FuzzDecide(f *testing.F) {
	r := rand.New(rand.NewSource(1))
	for range 64 {
		seed := make([]byte, 160)
		r.Read(seed)
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		d := &dice{data}
		a, p := genAttributes(d), genPolicy(d)
		members := genMembers(d)
		v := mustView(t, members[0].Name, members)
		got := Decide(a, v, p)
		if err := checkRules(a, members, v, p, got); err != nil {
			t.Fatalf("%v: %+v %+v: %v", err, a, p, describe(got))
		}
		if got, want := inPlainWords(got), plainDecide(a, members[0].Name, members, p); got != want {
			t.Fatalf("%+v %+v: got %s, plainly %s", a, p, got, want)
		}
		if again := Decide(a, v, p); describe(again) != describe(got) {
			t.Fatalf("asked twice: %s, then %s", describe(got), describe(again))
		}
	})
}

// quickly checks f for many random throws of the dice.
func quickly(t *testing.T, f func(seed [200]byte) bool) {
	t.Helper()
	if err := quick.Check(f, &quick.Config{MaxCount: 3000, Rand: rand.New(rand.NewSource(7))}); err != nil {
		t.Error(err)
	}
}

// However the members are listed, the View is the same: hash, completeness, and every decision with the order of candidates.
func TestLawOrderOfMembersDoesNotMatter(t *testing.T) {
	quickly(t, func(seed [200]byte) bool {
		d := &dice{seed[:]}
		a, p := genAttributes(d), genPolicy(d)
		members := genMembers(d)
		self := members[0].Name
		one := mustView(t, self, members)
		shuffled := slices.Clone(members)
		rand.New(rand.NewSource(int64(seed[0]))).Shuffle(len(shuffled), func(i, j int) {
			shuffled[i], shuffled[j] = shuffled[j], shuffled[i]
		})
		two := mustView(t, self, shuffled)
		return one.Hash() == two.Hash() && one.Complete() == two.Complete() && slices.Equal(one.Holders(), two.Holders()) &&
			describe(Decide(a, one, p)) == describe(Decide(a, two, p))
	})
}

// The hash is the mesh's, not the node's: it is the same from every member's view, whoever is still being waited for.
func TestLawHashIsTheSameForEveryMember(t *testing.T) {
	quickly(t, func(seed [200]byte) bool {
		members := genMembers(&dice{seed[:]})
		want := mustView(t, members[0].Name, members).Hash()
		for i := range members {
			members[i].HoldsUp = !members[i].HoldsUp
			if mustView(t, members[i].Name, members).Hash() != want {
				return false
			}
		}
		return true
	})
}

// Changing anything about a member that members could disagree about changes the hash.
func TestHashSeesEveryField(t *testing.T) {
	c := func(version string) *catalog.Catalog {
		c, err := catalog.New(version, nil)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	base := func() []Member {
		return []Member{{
			Name: "a", Address: "a:1", State: Ready, Mode: Enabled, ServerVersion: "v1.36.0",
			Digest: c("v1.36.0").Digest(), Generation: 1, Catalog: c("v1.36.0"),
		}, {Name: "b", State: Missing, Mode: Enabled}}
	}
	seen := map[Hash]string{mustView(t, "a", base()).Hash(): "nothing"}
	for name, change := range map[string]func(m []Member) []Member{
		"name":           func(m []Member) []Member { m[1].Name = "c"; return m },
		"address":        func(m []Member) []Member { m[0].Address = "a:2"; return m },
		"state":          func(m []Member) []Member { m[0].State = Draining; return m },
		"mode":           func(m []Member) []Member { m[0].Mode = ObserveOnly; return m },
		"version":        func(m []Member) []Member { m[0].ServerVersion = "v1.36.1"; return m },
		"digest":         func(m []Member) []Member { m[0].Digest = c("v1.37.0").Digest(); return m },
		"generation":     func(m []Member) []Member { m[0].Generation = 2; return m },
		"catalog":        func(m []Member) []Member { m[0].Catalog = c("v1.37.0"); return m },
		"catalog unheld": func(m []Member) []Member { m[0].Catalog = nil; return m },
		"one less":       func(m []Member) []Member { return m[:1] },
		"one more":       func(m []Member) []Member { return append(m, Member{Name: "d"}) },
		"moved border":   func(m []Member) []Member { m[1].Name, m[1].Address = "", "b"; return m },
	} {
		h := mustView(t, "a", change(base())).Hash()
		if other, dup := seen[h]; dup {
			t.Errorf("changing %s gives the same hash as changing %s", name, other)
		}
		seen[h] = name
	}
}

// The order of candidates depends on nothing but the affinity: when one of them goes, the others keep their order, so only those
// requests move that it had.
func TestLawRemovalMovesOnlyItsShare(t *testing.T) {
	c, err := catalog.New("v1.36.0", []catalog.GroupVersion{{
		GV: catalog.GV{Version: "v1"}, Source: catalog.SourceBuiltin,
		Resources: []catalog.Resource{{Name: "pods", Verbs: catalog.Verbs(catalog.VerbGet)}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	empty, err := catalog.New("v1.35.0", nil)
	if err != nil {
		t.Fatal(err)
	}
	const peers, affinities = 5, 20_000
	members := []Member{{Name: "cp-0", State: Ready, Mode: Enabled, Catalog: empty}}
	for i := 1; i <= peers; i++ {
		name := fmt.Sprintf("cp-%d", i)
		members = append(members, Member{Name: name, Address: name + ":1", State: Ready, Mode: Enabled, Catalog: c})
	}
	order := func(v *View, affinity uint64) []string {
		return candidateNames(Decide(Attributes{
			Resource: true, Key: catalog.Key{Version: "v1", Resource: "pods"}, Verb: catalog.VerbGet, Affinity: affinity,
		}, v, Policy{Mode: Enabled}))
	}
	whole := mustView(t, "cp-0", members)
	gone := slices.Clone(members)
	gone[2].State = Stale // cp-2
	less := mustView(t, "cp-0", gone)
	first := map[string]int{}
	r := rand.New(rand.NewSource(3))
	for range affinities {
		affinity := r.Uint64()
		before, after := order(whole, affinity), order(less, affinity)
		first[before[0]]++
		want := slices.DeleteFunc(slices.Clone(before), func(n string) bool { return n == "cp-2" })
		if diff := cmp.Diff(want, after); diff != "" {
			t.Fatalf("affinity %d: %s", affinity, diff)
		}
	}
	// Five standard deviations of a binomial with n = 20,000 and p = 1/5.
	for name, n := range first {
		if share := affinities / peers; n < share-280 || n > share+280 {
			t.Errorf("%s comes first for %d of %d affinities, want about %d", name, n, affinities, share)
		}
	}
}

// A View keeps no hold of what it was made from.
func TestViewCopiesMembers(t *testing.T) {
	members := []Member{{Name: "a", State: Ready}, {Name: "b", State: Ready}}
	v := mustView(t, "a", members)
	members[1].State = Stale
	if got := v.Member("b").State; got != Ready {
		t.Errorf("state of b = %v after the caller changed its own slice", got)
	}
	if v.Member("c") != nil {
		t.Error("a member that is not there was found")
	}
	if got := v.Self().Name; got != "a" {
		t.Errorf("self = %q", got)
	}
}

func TestNewViewErrors(t *testing.T) {
	for _, tc := range []struct {
		self    string
		members []Member
		want    string
	}{
		{"a", nil, `route: view of "a": it is not among the 0 members`},
		{"a", []Member{{Name: "b"}}, `route: view of "a": it is not among the 1 members`},
		{"a", []Member{{Name: "a"}, {Name: "b"}, {Name: "b"}}, `route: view of "a": member "b" listed twice`},
	} {
		if _, err := NewView(tc.self, tc.members); err == nil || err.Error() != tc.want {
			t.Errorf("err = %v, want %s", err, tc.want)
		}
	}
}
