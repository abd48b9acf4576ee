package gossip

import (
	"errors"
	"fmt"
	"testing"
	"time"

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
	_, err = s.tab.fetched(at(sec), j, res, err, func(failures int) time.Duration { return time.Duration(failures) * time.Second })
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
	t.Run("an apiserver comes back", func(t *testing.T) {
		s := &script{t: t, tab: testTable()}
		s.alive(0, "b", says(one, 7, 1))
		s.done(0, s.job(0), holds(one, 1), nil)
		down, starting := says(one, 7, 1), says(one, 7, 1)
		down.state, starting.state = route.LocalDown, route.Starting
		s.alive(20, "b", down)
		s.want(20, "b", route.LocalDown, one, false) // nobody serves anything there
		s.alive(30, "b", starting)
		s.want(30, "b", route.Starting, one, true) // perhaps as another version
		if jobs := s.jobs(30); len(jobs) != 0 {
			t.Errorf("%d pulls of a catalog that is held", len(jobs))
		}
		s.alive(31, "b", says(one, 7, 1))
		s.want(31, "b", route.Ready, one, false)
		s.alive(40, "b", starting)
		s.want(50, "b", route.Starting, one, false) // bounded
		s.dead(51, "b")
		s.want(51, "b", route.Stale, one, false)
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
	t.Run("made long before it runs", func(t *testing.T) {
		s := &script{t: t, tab: testTable("b")}
		s.want(50, "b", route.Missing, nil, false)
		s.tab.restart(at(50))
		s.want(59, "b", route.Missing, nil, true)
		s.want(60, "b", route.Missing, nil, false)
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
