package gossip

import (
	"context"
	"errors"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/catalog"
	"github.com/mvp-mesh/mvp-node/internal/route"
)

func key(resource string) catalog.Key {
	return catalog.Key{Group: "example.com", Version: "v1", Resource: resource}
}

func decide(p *peer, resource string) route.Decision {
	a := route.Attributes{Resource: true, Key: key(resource), Verb: catalog.VerbGet}
	return route.Decide(a, p.View(), route.Policy{Mode: route.Enabled})
}

// wantDecision waits until p decides so.
func wantDecision(t *testing.T, p *peer, resource string, within time.Duration, want route.Reason) {
	t.Helper()
	eventually(t, within, fmt.Sprintf("%s decides %s for %s", p.o.Name, want, resource), func() error {
		if d := decide(p, resource); d.Reason != want {
			return fmt.Errorf("%s%s", d.Reason, show(p))
		}
		return nil
	})
}

func TestMeshConvergesAndRoutes(t *testing.T) {
	m := newMesh(t)
	a, b, c := m.three(nil)
	d := decide(a, "new")
	if d.Outcome != route.Forward || len(d.Candidates) != 2 {
		t.Errorf("a decides %+v for the new resource, want two candidates", d)
	}
	if d := decide(a, "typo"); d.Reason != route.NotServedAnywhere {
		t.Errorf("a decides %s for a resource that nobody serves", d.Reason)
	}
	if got := a.Detail("b"); got.GossipAddress != b.Addr() || got.NodeVersion != "v0.0.1" || got.ViewHash != a.View().Hash() ||
		got.HeldSince.IsZero() || got.LastError != "" {
		t.Errorf("a's detail of b: %+v", got)
	}
	if got := a.Detail("a"); got.GossipAddress != a.Addr() || got.ViewHash != a.View().Hash() {
		t.Errorf("a's detail of itself: %+v", got)
	}
	if got := a.Detail("nobody"); got != (Detail{}) {
		t.Errorf("detail of nobody: %+v", got)
	}
	for _, p := range []*peer{a, b, c} {
		if got := p.metric(t, "mvp_gossip_members", "Ready"); got != 3 {
			t.Errorf("%s: members{Ready} = %v", p.o.Name, got)
		}
		if p.metric(t, "mvp_gossip_converged") != 1 || p.metric(t, "mvp_gossip_view_complete") != 1 {
			t.Errorf("%s: gauges say that it is not converged or complete", p.o.Name)
		}
	}
	dump := c.Dump()
	if !dump.Running || len(dump.Members) != 3 || len(dump.Seeds) != 2 || !dump.Converged {
		t.Errorf("c's dump: %+v", dump)
	}
}

// A mesh in which nothing happens comes to rest: a view hash that is announced must not lead to another.
func TestViewHashReachesFixedPoint(t *testing.T) {
	m := newMesh(t)
	a, b, c := m.three(nil)
	updates := func() (n float64) {
		for _, p := range []*peer{a, b, c} {
			n += p.metric(t, "mvp_gossip_updates_total") + p.metric(t, "mvp_gossip_view_changes_total")
		}
		return n
	}
	var last float64
	since := time.Now()
	eventually(t, 10*time.Second, "no update for a second", func() error {
		if n := updates(); n != last {
			last, since = n, time.Now()
		}
		if time.Since(since) < time.Second {
			return fmt.Errorf("%v updates", last)
		}
		return nil
	})
}

func TestKilledMemberIsStaleThenGone(t *testing.T) {
	m := newMesh(t)
	a, b, c := m.three(func(o *Options) { o.StaleGrace = 1500 * time.Millisecond })
	b.kill()
	m.serve(c, 2, "old") // now b was the only server of "new"
	m.state(a, "b", 5*time.Second, route.Stale)
	if mem := a.View().Member("b"); mem.Catalog == nil || mem.HoldsUp {
		t.Errorf("b went with its catalog known: %+v", mem)
	}
	wantDecision(t, a, "new", time.Second, route.PeersNotReady)
	m.state(a, "b", 5*time.Second, 0)
	m.state(c, "b", 5*time.Second, 0)
	wantDecision(t, a, "new", 5*time.Second, route.NotServedAnywhere)
	eventually(t, 5*time.Second, "a and c agree", func() error {
		if a.View().Hash() != c.View().Hash() {
			return errors.New(show(a, c))
		}
		return nil
	})
	if c.Converged() {
		t.Error("c, whose seed b is away, calls the mesh converged")
	}
}

// With the default timing a killed process is found within about 4 s (RELIABILITY "peer node kill -9").
func TestKillIsFoundInTime(t *testing.T) {
	m := newMesh(t)
	a, b, c := m.three(func(o *Options) { o.Timing = Timing{} })
	start := time.Now()
	c.kill()
	m.state(a, "c", 6*time.Second, route.Stale)
	m.state(b, "c", 6*time.Second, route.Stale)
	t.Logf("found after %v", time.Since(start))
}

func TestExpectedMemberGoesMissing(t *testing.T) {
	m := newMesh(t)
	a, b, c := m.three(func(o *Options) {
		o.StaleGrace, o.CatalogHold, o.Expected = 200*time.Millisecond, time.Second, []string{"a", "b", "c"}
	})
	b.kill()
	m.state(a, "b", 5*time.Second, route.Missing)
	if d := decide(a, "typo"); d.Reason != route.IncompleteView {
		t.Errorf("while b is missing a decides %s", d.Reason)
	}
	wantDecision(t, a, "typo", 5*time.Second, route.NotServedAnywhere)
	if a.Converged() || a.metric(t, "mvp_gossip_missing_members") != 1 || a.metric(t, "mvp_gossip_expected_members") != 3 {
		t.Errorf("an expected member is missing: %s", show(a))
	}
	m.state(c, "b", 5*time.Second, route.Missing)
}

func TestCleanLeaveIsGoneAtOnce(t *testing.T) {
	m := newMesh(t)
	a, b, c := m.three(func(o *Options) { o.Timing.SyncInterval, o.Timing.GossipInterval = time.Minute, 100*time.Millisecond })
	start := time.Now()
	if err := c.Leave(context.Background()); err != nil {
		t.Error(err)
	}
	c.kill()
	m.state(a, "c", time.Second, 0)
	m.state(b, "c", time.Second, 0)
	t.Logf("gone after %v", time.Since(start))
	m.converge(a, b)
	// It stays gone, and nobody counts it as dead later.
	if got := a.Dump(); len(got.Members) != 2 {
		t.Errorf("%+v", got.Members)
	}
}

func TestLeaveIsSafeInAnyState(t *testing.T) {
	m := newMesh(t)
	alone := m.node("alone", nil, nil)
	ctx := context.Background()
	for range 2 {
		if err := alone.Leave(ctx); err != nil {
			t.Error(err)
		}
	}
	alone.kill()
	if err := alone.Leave(ctx); err != nil {
		t.Error("after the end:", err)
	}
	if err := alone.Run(ctx); err == nil {
		t.Error("Run twice succeeded")
	}
	o := alone.o
	o.Registerer = nil
	unborn, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	if err := unborn.Leave(ctx); err != nil {
		t.Error("before Run:", err)
	}
	if err := errors.Join(unborn.Close(), unborn.Close()); err != nil {
		t.Error(err)
	}
	if err := unborn.Run(ctx); err == nil {
		t.Error("Run after Close succeeded")
	}
}

// CASES G-01.
func TestSameNameNewAddress(t *testing.T) {
	for _, clean := range []bool{true, false} {
		t.Run(fmt.Sprintf("clean=%v", clean), func(t *testing.T) {
			m := newMesh(t)
			edit := func(o *Options) { o.Timing.SyncInterval = time.Minute } // the regular exchange is not what helps
			a, b, c := m.three(edit)
			old := c.Addr()
			if clean {
				if err := c.Leave(context.Background()); err != nil {
					t.Error(err)
				}
			}
			c.kill()
			// The old port is taken for a moment, so that the new process is given another.
			taken, err := net.Listen("tcp", old)
			if err != nil {
				t.Fatal(err)
			}
			c2 := m.node("c", []string{a.Addr(), b.Addr()}, edit)
			taken.Close()
			if c2.Addr() == old {
				t.Fatalf("c came back at %s", old)
			}
			m.serve(c2, 1, "old", "new", "newest") // generation 1 of a new process counts as newer
			start := time.Now()
			m.converge(a, b, c2)
			t.Logf("full member after %v", time.Since(start))
			if got := a.Detail("c").GossipAddress; got != c2.Addr() {
				t.Errorf("a knows c at %s, it is at %s", got, c2.Addr())
			}
			wantDecision(t, a, "newest", time.Second, route.ServedByPeer)
		})
	}
}

// A process that comes back at the same address begins its generations anew.
func TestRestartAtTheSameAddress(t *testing.T) {
	m := newMesh(t)
	a, b, c := m.three(nil)
	m.serve(c, 40, "old", "new", "forty")
	wantDecision(t, a, "forty", 5*time.Second, route.ServedByPeer)
	addr := c.Addr()
	c.kill()
	c2 := m.node("c", []string{a.Addr()}, func(o *Options) { o.BindAddress = addr })
	m.serve(c2, 1, "old", "new", "one")
	m.converge(a, b, c2)
	wantDecision(t, a, "one", time.Second, route.ServedByPeer)
}

// CASES G-04: one cut off, and all cut from each other.
func TestPartitionHeals(t *testing.T) {
	for _, tc := range []struct {
		name string
		cuts [][2]string
	}{
		{"one cut off", [][2]string{{"a", "c"}, {"b", "c"}}},
		{"all apart", [][2]string{{"a", "b"}, {"a", "c"}, {"b", "c"}}},
	} {
		for _, grace := range []time.Duration{200 * time.Millisecond, time.Hour} {
			t.Run(fmt.Sprintf("%s/grace=%v", tc.name, grace), func(t *testing.T) {
				m := newMesh(t)
				a, b, c := m.three(func(o *Options) { o.StaleGrace = grace })
				m.net.set(true, tc.cuts...)
				want := route.Stale
				if grace < time.Second {
					want = 0
				}
				m.state(a, "c", 15*time.Second, want)
				m.state(b, "c", 15*time.Second, want)
				m.state(c, "a", 15*time.Second, want)
				if len(tc.cuts) == 3 {
					m.state(a, "b", 15*time.Second, want)
				}
				// The lone node, whose seeds are away, does not take itself for the mesh, however long it lasts.
				eventually(t, 15*time.Second, "c knows that it is not the mesh", func() error {
					if c.Converged() || c.metric(t, "mvp_gossip_seeds_unreached") != 2 {
						return errors.New(show(c))
					}
					return nil
				})
				m.serve(c, 2, "old", "new", "cut")
				m.net.set(false, tc.cuts...)
				start := time.Now()
				m.converge(a, b, c)
				t.Logf("whole again after %v", time.Since(start))
				wantDecision(t, a, "cut", time.Second, route.ServedByPeer)
			})
		}
	}
}

// CASES G-03, with a change every 20 ms.
func TestCatalogThatChangesAllTheTime(t *testing.T) {
	m := newMesh(t)
	a, b, c := m.three(nil)
	changes := 150
	if testing.Short() {
		changes = 30
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	most := 0
	for i := range changes {
		<-tick.C
		m.serve(b, uint64(i+2), "old", "new", fmt.Sprintf("res%d", i))
		most = max(most, b.Dump().PendingPackets, a.Dump().PendingPackets)
	}
	start := time.Now()
	m.converge(a, b, c)
	if d := time.Since(start); d > 2*time.Second {
		t.Errorf("the last catalog arrived after %v", d)
	}
	if most >= 50 {
		t.Errorf("up to %d packets were pending", most)
	}
	wantDecision(t, a, fmt.Sprintf("res%d", changes-1), time.Second, route.ServedByPeer)
	t.Logf("%d changes, %d pulls by two nodes, at most %d packets pending", changes, m.origins.count("b"), most)
}

func TestRefetch(t *testing.T) {
	m := newMesh(t)
	a, b, _ := m.three(nil)
	before := m.origins.count("b")
	for range 100 {
		a.Refetch("b")
		a.Refetch("nobody")
	}
	eventually(t, 5*time.Second, "b was asked", func() error {
		if m.origins.count("b") == before {
			return errors.New("not asked")
		}
		return nil
	})
	if n := m.origins.count("b") - before; n > 5 {
		t.Errorf("100 calls made %d pulls", n)
	}
	// What the origin serves is news even before gossip says so.
	m.origins.serve("b", testCatalog(t, "old", "new", "fresh"), 2)
	a.Refetch("b")
	wantDecision(t, a, "fresh", 5*time.Second, route.ServedByPeer)
	if mem := a.View().Member("b"); mem.HoldsUp {
		t.Errorf("a newer catalog than the advertised one holds up: %+v", mem)
	}
	m.serve(b, 2, "old", "new", "fresh")
	m.converge(a, b, m.last("c"))
}

func TestStatesTravel(t *testing.T) {
	m := newMesh(t)
	a, b, c := m.three(nil)
	for _, s := range []route.State{route.Draining, route.LocalDown, route.Ready} {
		l := ready("b", b.View().Self().Catalog, 1)
		l.State, l.Mode = s, route.ObserveOnly
		if err := b.Announce(l); err != nil {
			t.Fatal(err)
		}
		if got := b.View().Self().State; got != s {
			t.Errorf("after Announce the own view says %s", got)
		}
		m.state(a, "b", 2*time.Second, s)
		m.state(c, "b", 2*time.Second, s)
	}
	if got := a.View().Member("b").Mode; got != route.ObserveOnly {
		t.Errorf("mode %s", got)
	}
	// The apiserver restarts: its catalog is not known for a while, and what it may serve holds up.
	if err := b.Announce(Local{State: route.Starting, Mode: route.Enabled, MeshAddress: "b.example:7443"}); err != nil {
		t.Fatal(err)
	}
	m.state(a, "b", 2*time.Second, route.Starting)
	if mem := a.View().Member("b"); !mem.HoldsUp || mem.Catalog == nil {
		t.Errorf("a restarting apiserver: %+v", mem)
	}
	m.serve(b, 1, "old", "new")
	m.converge(a, b, c)
}
