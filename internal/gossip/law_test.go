package gossip

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/mvp-mesh/mvp-node/internal/catalog"
	"github.com/mvp-mesh/mvp-node/internal/route"
)

// Facts about different members may come in any order, and each as often as it likes, with gossip and the pulls racing: the view is
// the same.
func TestViewDoesNotDependOnOrder(t *testing.T) {
	cats := []*catalog.Catalog{testCatalog(t, "a"), testCatalog(t, "a", "b"), testCatalog(t, "c")}
	// Per member, in its own order, as memberlist keeps it.
	stories := map[string][]func(s *script, sec int){}
	add := func(name string, f func(s *script, sec int)) { stories[name] = append(stories[name], f) }
	for i, name := range []string{"b", "c", "d", "e", "f"} {
		add(name, func(s *script, sec int) { s.alive(sec, name, says(cats[0], 7, 1)) })
		add(name, func(s *script, sec int) { s.alive(sec, name, says(cats[i%3], 7, 2)) })
		switch i {
		case 1:
			add(name, func(s *script, sec int) { s.dead(sec, name) })
		case 2:
			add(name, func(s *script, sec int) { s.alive(sec, name, says(cats[1], 9, 1)) })
		case 3:
			add(name, func(s *script, sec int) { m := says(cats[0], 7, 1); m.leaving = true; s.alive(sec, name, m) })
		}
	}
	final := map[string]FetchResult{
		"b": holds(cats[0], 2), "c": holds(cats[1], 2), "d": holds(cats[1], 1), "e": holds(cats[0], 2), "f": holds(cats[1], 2),
	}
	run := func(r *rand.Rand) []route.Member {
		s := &script{t: t, tab: testTable("b", "c", "g")}
		left := map[string]int{}
		for {
			var open []string
			for name := range stories {
				if left[name] < len(stories[name]) {
					open = append(open, name)
				}
			}
			if len(open) == 0 {
				break
			}
			slices.Sort(open)
			name := open[r.IntN(len(open))]
			for range 1 + r.IntN(2) { // sometimes twice
				stories[name][left[name]](s, 1)
			}
			left[name]++
			if r.IntN(2) == 0 {
				for _, j := range s.jobs(1) {
					s.done(1, j, final[j.name], nil)
				}
			}
		}
		for sec := 1; sec < 40; sec++ {
			for _, j := range s.jobs(sec) {
				s.done(sec, j, final[j.name], nil)
			}
		}
		s.tab.advance(at(40))
		return s.tab.members(at(40))
	}
	want := run(rand.New(rand.NewPCG(0, 0)))
	byPointer := cmp.Comparer(func(a, b *catalog.Catalog) bool { return a == b })
	for i := range uint64(300) {
		got := run(rand.New(rand.NewPCG(i, 1)))
		if d := cmp.Diff(want, got, byPointer, cmp.AllowUnexported(route.Member{})); d != "" {
			t.Fatalf("order %d: %s", i, d)
		}
	}
}

// Nodes that know the same have the same view hash, whoever they are: otherwise no mesh would ever call itself converged.
func TestNodesWithTheSameFactsAgree(t *testing.T) {
	names := []string{"a", "b", "c", "d"}
	cats := map[string]*catalog.Catalog{}
	metas := map[string]meta{}
	for i, n := range names {
		cats[n] = testCatalog(t, "r", n)
		m := says(cats[n], uint64(i), uint64(i*3))
		m.meshAddress = n + ".example:1"
		metas[n] = m
	}
	metas["d"] = meta{format: metaFormat, known: true, state: route.Starting, mode: route.Disabled, boot: 4}
	delete(cats, "d")
	var hashes []route.Hash
	for _, self := range names {
		tab := newTable(Options{Name: self, Expected: append(names, "missing"), StaleGrace: testGrace, CatalogHold: testHold}, 0, start)
		s := &script{t: t, tab: tab}
		tab.own, tab.ownCatalog = metas[self], cats[self]
		for _, n := range names {
			s.alive(0, n, metas[n]) // its own, too, as memberlist tells it
		}
		for _, j := range s.jobs(0) {
			s.done(0, j, holds(cats[j.name], metas[j.name].generation), nil)
		}
		v, err := route.NewView(self, tab.members(at(0)))
		if err != nil {
			t.Fatal(err)
		}
		hashes = append(hashes, v.Hash())
		if tab.converged(v.Hash()) {
			t.Errorf("%s calls a mesh with a missing and a starting member converged", self)
		}
	}
	if len(slices.Compact(hashes)) != 1 {
		t.Errorf("hashes differ: %v", hashes)
	}
}

func TestConverged(t *testing.T) {
	c := testCatalog(t, "r")
	hash := route.Hash{1}
	agree := says(c, 7, 1)
	agree.viewHash = hash
	differ := agree
	differ.viewHash = route.Hash{2}
	draining := agree
	draining.state = route.Draining
	for _, tc := range []struct {
		name     string
		expected []string
		self     route.State
		b        *meta
		dead     bool
		seeds    []string
		want     bool
	}{
		{"alone", nil, route.Ready, nil, false, nil, true},
		{"alone, seed not reached", nil, route.Ready, nil, false, []string{"s:1"}, false},
		{"alone, other expected", []string{"self", "b"}, route.Ready, nil, false, nil, false},
		{"agree", []string{"self", "b"}, route.Ready, &agree, false, nil, true},
		{"differ", nil, route.Ready, &differ, false, nil, false},
		{"newer format", nil, route.Ready, &meta{format: 9}, false, nil, false},
		{"expected and draining", []string{"b"}, route.Ready, &draining, false, nil, false},
		{"draining", nil, route.Ready, &draining, false, nil, true},
		{"self not ready", []string{"self", "b"}, route.LocalDown, &agree, false, nil, false},
		{"expected and stale", []string{"b"}, route.Ready, &agree, true, nil, false},
		{"stale", nil, route.Ready, &differ, true, nil, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tab := newTable(Options{Name: "self", Expected: tc.expected, Seeds: tc.seeds, StaleGrace: testGrace, CatalogHold: testHold}, 1, start)
			tab.own.state = tc.self
			s := &script{t: t, tab: tab}
			if tc.b != nil {
				s.alive(0, "b", *tc.b)
			}
			if tc.dead {
				s.dead(1, "b")
			}
			if got := tab.converged(hash); got != tc.want {
				t.Errorf("converged = %v", got)
			}
		})
	}
}

// Whatever happens, in whatever order, the picture is sound, and time alone brings it to rest.
func TestRandomHistories(t *testing.T) {
	cats := []*catalog.Catalog{nil, testCatalog(t, "a"), testCatalog(t, "b"), testCatalog(t, "c")}
	names := []string{"self", "b", "c", "d", "e"}
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 9))
		tab := newTable(Options{
			Name: "self", Expected: []string{"b", "x"}[:r.IntN(3)], Seeds: []string{"s:1"}, StaleGrace: testGrace, CatalogHold: testHold,
		}, 1, start)
		s := &script{t: t, tab: tab}
		var running []job
		now := 0
		step := func() {
			running = append(running, s.jobs(now)...)
			members := tab.members(at(now))
			v, err := route.NewView("self", members)
			if err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			for _, m := range v.Members() {
				rec := tab.records[m.Name]
				switch {
				case m.HoldsUp && rec != nil && rec.settled() && rec.state() != route.Starting:
					t.Fatalf("seed %d: %s is settled and holds up", seed, m.Name)
				case m.Name == "self" && m.HoldsUp:
					t.Fatalf("seed %d: the own node holds up", seed)
				case m.State == route.Missing && m.Address != "":
					t.Fatalf("seed %d: %s is missing and has an address", seed, m.Name)
				case rec != nil && rec.fetching && !slices.ContainsFunc(running, func(j job) bool { return j.id == rec.fetch }):
					t.Fatalf("seed %d: %s waits for a pull that does not run", seed, m.Name)
				}
			}
			if next := tab.next(at(now)); !next.IsZero() && !next.After(at(now)) {
				t.Fatalf("seed %d: the next event is not in the future", seed)
			}
		}
		for range 80 {
			name := names[r.IntN(len(names))]
			switch r.IntN(8) {
			case 0, 1, 2:
				m := says(cats[r.IntN(len(cats))], uint64(r.IntN(3)), uint64(r.IntN(4)))
				m.leaving = r.IntN(8) == 0
				if r.IntN(10) == 0 {
					m = meta{format: 2}
				}
				s.alive(now, name, m)
			case 3:
				s.dead(now, name)
			case 4:
				tab.left(name, uint64(r.IntN(3)))
			case 5:
				tab.refetch(at(now), name, time.Second)
			case 6:
				tab.seed("s:1", r.IntN(3) > 0)
			case 7:
				now += r.IntN(30)
			}
			if len(running) > 0 && r.IntN(3) == 0 {
				j := running[0]
				running = running[1:]
				c := cats[1+r.IntN(3)]
				s.done(now, j, holds(c, uint64(r.IntN(4))), []error{nil, errors.New("refused")}[r.IntN(2)])
			}
			step()
		}
		// From here on nothing happens but time, and all pulls fail.
		for end := now + 1000; ; {
			for _, j := range running {
				s.done(now, j, FetchResult{}, errors.New("refused"))
			}
			running = nil
			step()
			next := tab.next(at(now))
			if len(running) == 0 && (next.IsZero() || next.After(at(end))) {
				break
			}
			if len(running) == 0 {
				now = int(next.Sub(start) / time.Second)
			}
		}
		for _, m := range tab.members(at(now)) {
			if m.HoldsUp {
				t.Fatalf("seed %d: %s holds up for ever", seed, m.Name)
			}
		}
	}
}

func TestBackOff(t *testing.T) {
	for failures, seconds := range map[int]int{1: 1, 2: 2, 3: 4, 4: 8, 5: 10, 100: 10, 1000: 10} {
		want := time.Duration(seconds) * time.Second
		if got := backOff(failures, time.Second, 10*time.Second, 0); got != want {
			t.Errorf("after %d failures: %v", failures, got)
		}
		if got := backOff(failures, time.Second, 10*time.Second, 1); got != want/2 {
			t.Errorf("after %d failures, with most jitter: %v", failures, got)
		}
	}
}
