package gossip

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/mvp-mesh/mvp-node/internal/catalog"
	"github.com/mvp-mesh/mvp-node/internal/route"
)

// The times of the tests are whole seconds after start; grace and hold are round numbers of them.
const (
	testGrace = 100 * time.Second
	testHold  = 10 * time.Second
)

var start = time.Unix(1_800_000_000, 0)

func at(seconds int) time.Time { return start.Add(time.Duration(seconds) * time.Second) }

func testTable(expected ...string) *table {
	return newTable(Options{Name: "self", Expected: expected, StaleGrace: testGrace, CatalogHold: testHold}, 1, start)
}

// says is what a ready member says.
func says(c *catalog.Catalog, boot, generation uint64) meta {
	m := meta{
		format: metaFormat, known: true, state: route.Ready, mode: route.Enabled, boot: boot, generation: generation,
		meshAddress: "m.example:7443", serverVersion: "v1.36.0",
	}
	if c != nil {
		m.digest = c.Digest()
	} else {
		m.state = route.Starting
	}
	return m
}

func holds(c *catalog.Catalog, generation uint64) FetchResult {
	return FetchResult{Catalog: c, Generation: generation, Digest: c.Digest()}
}

// script drives a table through time.
type script struct {
	t   *testing.T
	tab *table
	ids uint64
}

func (s *script) alive(sec int, name string, m meta) {
	s.tab.alive(at(sec), name, name+":7946", m, time.Second)
	s.tab.advance(at(sec))
}

func (s *script) dead(sec int, name string) {
	s.tab.dead(at(sec), name)
	s.tab.advance(at(sec))
}

// jobs are the pulls that start at that time.
func (s *script) jobs(sec int) []job {
	s.tab.advance(at(sec))
	return s.tab.due(at(sec), func() uint64 { s.ids++; return s.ids })
}

// job is the only pull that starts at that time.
func (s *script) job(sec int) job {
	s.t.Helper()
	js := s.jobs(sec)
	if len(js) != 1 {
		s.t.Fatalf("at %d: %d pulls start, want 1", sec, len(js))
	}
	return js[0]
}

func (s *script) done(sec int, j job, res FetchResult, err error) error {
	err, _ = s.tab.fetched(at(sec), j, res, err, func(failures int) time.Duration { return time.Duration(failures) * time.Second })
	s.tab.advance(at(sec))
	return err
}

// want checks one member: its state, the catalog held, and whether it holds up.
func (s *script) want(sec int, name string, state route.State, held *catalog.Catalog, holdsUp bool) {
	s.t.Helper()
	s.tab.advance(at(sec))
	var got route.Member
	for _, m := range s.tab.members(at(sec)) {
		if m.Name == name {
			got = m
		}
	}
	if got.State != state || got.Catalog != held || got.HoldsUp != holdsUp {
		s.t.Errorf("at %d: %s is %s with catalog %p, holds up %v; want %s, %p, %v",
			sec, name, got.State, got.Catalog, got.HoldsUp, state, held, holdsUp)
	}
}

func TestHoldsBeginAndEnd(t *testing.T) {
	one, two := testCatalog(t, "one"), testCatalog(t, "one", "two")

	t.Run("unknown catalog", func(t *testing.T) {
		s := &script{t: t, tab: testTable()}
		s.alive(0, "b", says(one, 7, 1))
		s.want(9, "b", route.Ready, nil, true)
		s.want(10, "b", route.Ready, nil, false)
		s.done(11, s.job(11), holds(one, 1), nil)
		s.want(11, "b", route.Ready, one, false)
		s.alive(50, "b", says(two, 7, 2)) // a new question, with its own hold
		s.want(59, "b", route.Ready, one, true)
		s.want(60, "b", route.Ready, one, false)
	})
	t.Run("a catalog that changes and cannot be pulled", func(t *testing.T) {
		s := &script{t: t, tab: testTable()}
		for i := range 12 {
			s.alive(i, "b", says(testCatalog(t, fmt.Sprint("r", i)), 7, uint64(i)))
		}
		s.want(11, "b", route.Ready, nil, false) // bounded all the same
	})
	t.Run("slow start", func(t *testing.T) {
		s := &script{t: t, tab: testTable()}
		s.alive(0, "b", says(nil, 7, 0))
		s.want(9, "b", route.Starting, nil, true)
		s.want(30, "b", route.Starting, nil, false)
		s.alive(31, "b", says(one, 7, 1)) // it has a catalog now, which is news
		s.want(31, "b", route.Ready, nil, true)
		s.want(41, "b", route.Ready, nil, false)
		s.alive(42, "b", says(nil, 7, 1)) // back to not knowing: no new hold
		s.want(42, "b", route.Starting, nil, false)
	})
	t.Run("missing", func(t *testing.T) {
		s := &script{t: t, tab: testTable("self", "b")}
		s.want(0, "b", route.Missing, nil, true)
		s.want(10, "b", route.Missing, nil, false)
		s.alive(20, "b", says(one, 7, 1)) // it is back, and not yet asked
		s.want(20, "b", route.Ready, nil, true)
		s.done(21, s.job(21), holds(one, 1), nil)
		s.want(21, "b", route.Ready, one, false)
		s.dead(30, "b")
		s.want(30, "b", route.Stale, one, false) // what it serves is known
		s.want(129, "b", route.Stale, one, false)
		s.want(130, "b", route.Missing, nil, true)
		s.want(140, "b", route.Missing, nil, false)
	})
	t.Run("stale with an unknown catalog", func(t *testing.T) {
		s := &script{t: t, tab: testTable("b")}
		s.alive(0, "b", says(one, 7, 1))
		s.dead(1, "b")
		s.want(9, "b", route.Stale, nil, true)
		s.want(10, "b", route.Stale, nil, false)
		s.want(101, "b", route.Missing, nil, false) // still the same question
	})
	t.Run("not expected", func(t *testing.T) {
		s := &script{t: t, tab: testTable()}
		s.alive(0, "b", says(one, 7, 1))
		s.dead(1, "b")
		s.want(101, "b", 0, nil, false)
		if s.tab.addresses["b"] == "" {
			t.Error("nobody will call b again")
		}
	})
	t.Run("left cleanly", func(t *testing.T) {
		s := &script{t: t, tab: testTable("b")}
		m := says(one, 7, 1)
		s.alive(0, "b", m)
		s.alive(0, "c", m)
		m.leaving = true
		s.alive(1, "b", m)
		s.alive(1, "c", m)
		s.want(1, "b", route.Missing, nil, true)
		s.want(1, "c", 0, nil, false)
		s.dead(2, "b")
		s.dead(2, "c")
		s.want(2, "c", 0, nil, false)
		if len(s.tab.addresses) != 0 {
			t.Errorf("who left is still called: %v", s.tab.addresses)
		}
	})
	t.Run("left, as another knows", func(t *testing.T) {
		s := &script{t: t, tab: testTable()}
		for _, name := range []string{"b", "c", "d"} {
			s.alive(0, name, says(one, 7, 1))
		}
		s.tab.left("b", 7) // before memberlist says that it is dead
		s.want(1, "b", route.Ready, nil, true)
		s.dead(2, "b")
		s.want(2, "b", 0, nil, false)
		s.dead(3, "c")
		s.tab.left("c", 7) // after
		s.want(3, "c", 0, nil, false)
		s.tab.left("d", 6) // an earlier boot
		s.dead(4, "d")
		s.want(4, "d", route.Stale, nil, true)
	})
}

func TestFetches(t *testing.T) {
	one, two, three := testCatalog(t, "one"), testCatalog(t, "one", "two"), testCatalog(t, "three")

	t.Run("one at a time, then again for what came meanwhile", func(t *testing.T) {
		s := &script{t: t, tab: testTable()}
		s.alive(0, "b", says(one, 7, 1))
		j := s.job(0)
		s.alive(1, "b", says(two, 7, 2))
		if js := s.jobs(1); len(js) != 0 {
			t.Fatal("a second pull began during the first")
		}
		if err := s.done(2, j, holds(one, 1), nil); err != nil {
			t.Error(err)
		}
		s.want(2, "b", route.Ready, one, true)
		j = s.job(2)
		if j.have != one.Digest() {
			t.Errorf("have = %s", j.have.Short())
		}
		s.done(3, j, holds(two, 2), nil)
		s.want(3, "b", route.Ready, two, false)
		if js := s.jobs(4); len(js) != 0 {
			t.Error("a pull of what is held")
		}
	})
	t.Run("failure backs off, a change tries sooner", func(t *testing.T) {
		s := &script{t: t, tab: testTable()}
		s.alive(0, "b", says(one, 7, 1))
		for i, sec := range []int{0, 1, 3, 6} {
			if s.done(sec, s.job(sec), FetchResult{}, errors.New("refused")) == nil {
				t.Errorf("failure %d is none", i)
			}
		}
		if next := s.tab.next(at(6)); next != at(10) {
			t.Errorf("next at %v", next.Sub(start))
		}
		s.alive(7, "b", says(two, 7, 2))
		if js := s.jobs(7); len(js) != 0 {
			t.Error("a change was followed at once although the member cannot be asked")
		}
		s.done(8, s.job(8), holds(two, 2), nil)
		if r := s.tab.records["b"]; r.lastError != "" || r.failures != 0 || r.heldSince != at(8) {
			t.Errorf("after success: %+v", r)
		}
	})
	t.Run("older generation of the same boot", func(t *testing.T) {
		s := &script{t: t, tab: testTable()}
		s.alive(0, "b", says(two, 7, 5))
		s.done(0, s.job(0), holds(two, 5), nil)
		s.tab.refetch(at(5), "b", time.Second)
		if s.done(5, s.job(5), holds(one, 4), nil) == nil {
			t.Error("an older generation was taken")
		}
		s.want(5, "b", route.Ready, two, false)
	})
	t.Run("newer than gossip says", func(t *testing.T) {
		s := &script{t: t, tab: testTable()}
		s.alive(0, "b", says(one, 7, 1))
		s.done(0, s.job(0), holds(two, 2), nil)
		s.want(0, "b", route.Ready, two, false)
		s.alive(1, "b", says(two, 7, 2))
		s.want(1, "b", route.Ready, two, false)
		if len(s.jobs(2)) != 0 {
			t.Error("pulled again")
		}
	})
	t.Run("a flip back", func(t *testing.T) { // one, two, one again; gossip is behind
		s := &script{t: t, tab: testTable()}
		s.alive(0, "b", says(one, 7, 1))
		s.done(0, s.job(0), holds(one, 1), nil)
		s.alive(1, "b", says(two, 7, 2))
		res := holds(one, 3)
		res.Catalog = nil // "you have it"
		s.done(1, s.job(1), res, nil)
		s.want(1, "b", route.Ready, one, false)
	})
	t.Run("restart counts anew", func(t *testing.T) {
		s := &script{t: t, tab: testTable()}
		s.alive(0, "b", says(two, 7, 40))
		s.done(0, s.job(0), holds(two, 40), nil)
		s.alive(1, "b", says(one, 8, 1))
		s.want(1, "b", route.Ready, two, true)
		s.done(1, s.job(1), holds(one, 1), nil)
		s.want(1, "b", route.Ready, one, false)
	})
	t.Run("restart with the same catalog", func(t *testing.T) {
		s := &script{t: t, tab: testTable()}
		s.alive(0, "b", says(one, 7, 40))
		s.done(0, s.job(0), holds(one, 40), nil)
		s.alive(1, "b", says(one, 8, 1))
		s.want(1, "b", route.Ready, one, false)
		s.alive(2, "b", says(two, 8, 2))
		s.done(2, s.job(2), holds(two, 2), nil)
		s.want(2, "b", route.Ready, two, false)
	})
	t.Run("restart during a pull", func(t *testing.T) {
		s := &script{t: t, tab: testTable()}
		s.alive(0, "b", says(one, 7, 5))
		j := s.job(0)
		s.alive(1, "b", says(three, 8, 1))
		s.done(1, j, holds(one, 5), nil) // answered before the restart
		s.want(1, "b", route.Ready, one, true)
		s.done(1, s.job(1), holds(three, 1), nil)
		s.want(1, "b", route.Ready, three, false)
	})
	t.Run("origin and gossip do not agree", func(t *testing.T) {
		s := &script{t: t, tab: testTable()}
		s.alive(0, "b", says(two, 7, 5))
		if s.done(0, s.job(0), holds(one, 4), nil) == nil {
			t.Error("no error")
		}
		s.want(0, "b", route.Ready, one, true) // better than nothing, and still a question
		if len(s.jobs(0)) != 0 || len(s.jobs(1)) != 1 {
			t.Error("the retry does not back off")
		}
	})
	t.Run("lies", func(t *testing.T) {
		s := &script{t: t, tab: testTable()}
		s.alive(0, "b", says(one, 7, 1))
		for i, res := range []FetchResult{
			{Catalog: two, Generation: 1, Digest: one.Digest()}, // not what it says it is
			{Generation: 1, Digest: one.Digest()},               // "you have it", which is not so
			{},
		} {
			sec := i * 10
			if s.done(sec, s.job(sec), res, nil) == nil {
				t.Errorf("lie %d was believed", i)
			}
			s.want(sec, "b", route.Ready, nil, sec < 10)
		}
	})
	t.Run("draining and stale members are asked too, departed ones not", func(t *testing.T) {
		s := &script{t: t, tab: testTable()}
		m := says(one, 7, 1)
		m.state = route.Draining
		s.alive(0, "b", m)
		j := s.job(0)
		s.dead(1, "b")
		s.done(1, j, FetchResult{}, errors.New("refused"))
		s.done(2, s.job(2), holds(one, 1), nil)
		s.want(2, "b", route.Stale, one, false)
		m.leaving = true
		s.alive(3, "b", m)
		if len(s.jobs(20)) != 0 {
			t.Error("who left is asked")
		}
	})
	t.Run("result for a member that left and came back", func(t *testing.T) {
		s := &script{t: t, tab: testTable()}
		s.alive(0, "b", says(one, 7, 1))
		j := s.job(0)
		m := says(one, 7, 1)
		m.leaving = true
		s.alive(1, "b", m)
		s.alive(2, "b", says(two, 8, 1))
		k := s.job(2)
		s.done(3, j, holds(one, 1), nil) // of the old record
		s.want(3, "b", route.Ready, nil, true)
		s.done(3, k, holds(two, 1), nil)
		s.want(3, "b", route.Ready, two, false)
	})
	t.Run("names are bounded", func(t *testing.T) {
		s := &script{t: t, tab: testTable()}
		for i := range 2 * maxNames {
			s.alive(0, fmt.Sprint("n", i), says(one, 7, 1))
		}
		if len(s.tab.records) > maxNames || len(s.tab.addresses) > maxNames {
			t.Errorf("%d records, %d addresses", len(s.tab.records), len(s.tab.addresses))
		}
	})
}

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
				case m.HoldsUp && rec != nil && rec.settled():
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
				delete(tab.seeds, "s:1")
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
	for failures, want := range map[int]time.Duration{1: 1, 2: 2, 3: 4, 4: 8, 5: 10, 100: 10, 1000: 10} {
		if got := backOff(failures, time.Second, 10*time.Second, 0); got != want*time.Second {
			t.Errorf("after %d failures: %v", failures, got)
		}
		if got := backOff(failures, time.Second, 10*time.Second, 1); got != want*time.Second/2 {
			t.Errorf("after %d failures, with most jitter: %v", failures, got)
		}
	}
}
