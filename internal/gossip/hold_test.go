package gossip

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/route"
)

// Parts b and c of CASES R-03: what is not known is held up, for a bounded time.
func TestHolds(t *testing.T) {
	m := newMesh(t)
	edit := func(o *Options) { o.CatalogHold = time.Second }
	a := m.node("a", nil, edit)
	m.serve(a, 1, "old")
	wantDecision(t, a, "typo", time.Second, route.NotServedAnywhere)

	m.origins.setFail("b", errors.New("the mesh port is shut"))
	b := m.node("b", []string{a.Addr()}, edit)
	m.serve(b, 1, "old", "new")
	wantDecision(t, a, "typo", 5*time.Second, route.IncompleteView)
	wantDecision(t, a, "typo", 5*time.Second, route.NotServedAnywhere) // bounded
	if a.metric(t, "mvp_gossip_catalogs_behind") != 1 || a.View().Member("b").HoldsUp {
		t.Errorf("%s", show(a))
	}
	if got := a.Detail("b").LastError; !strings.Contains(got, "the mesh port is shut") {
		t.Errorf("last error %q", got)
	}
	if a.metric(t, "mvp_gossip_fetches_total", "error") == 0 {
		t.Error("failed fetches are not counted")
	}

	m.origins.setFail("b", nil)
	wantDecision(t, a, "new", 2*time.Second, route.ServedByPeer)
	m.converge(a, b)

	// A change holds up anew, and the end of it is seen within 2 s of its arrival.
	m.origins.setFail("b", errors.New("shut again"))
	m.serve(b, 2, "old", "new", "newer")
	wantDecision(t, a, "newer", 5*time.Second, route.IncompleteView)
	m.origins.setFail("b", nil)
	start := time.Now()
	m.converge(a, b)
	if d := time.Since(start); d > 2*time.Second {
		t.Errorf("complete only %v after the last catalog could be had", d)
	}
}

// A node that has just started does not take its own ignorance for the truth.
func TestStartHoldsUp(t *testing.T) {
	m := newMesh(t)
	for _, tc := range []struct {
		name string
		edit func(*Options)
	}{
		{"expected", func(o *Options) { o.Expected = []string{"a", "b"} }},
		{"seeds", func(o *Options) { o.Seeds = []string{"127.0.0.1:1"} }},
		{"unresolvable seed", func(o *Options) { o.Seeds = []string{"nowhere.invalid:1"} }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a := m.node("a", nil, func(o *Options) {
				o.CatalogHold = 700 * time.Millisecond
				o.lookup = func(context.Context, string) ([]netip.Addr, error) { return nil, errors.New("no such host") }
				tc.edit(o)
			})
			defer a.kill()
			m.serve(a, 1, "old")
			if d := decide(a, "typo"); d.Reason != route.IncompleteView {
				t.Errorf("at start a decides %s", d.Reason)
			}
			if d := decide(a, "old"); d.Reason != route.ServedLocally {
				t.Errorf("at start a decides %s for what it serves itself", d.Reason)
			}
			wantDecision(t, a, "typo", 5*time.Second, route.NotServedAnywhere)
			if a.Converged() {
				t.Error("a group that has not found its seeds or members calls itself converged")
			}
		})
	}
}

// Seeds are resolved again on each try, and the own node among them is no member that is missing.
func TestSeedsAreResolvedAgain(t *testing.T) {
	m := newMesh(t)
	a := m.node("a", nil, nil)
	_, port, err := net.SplitHostPort(a.Addr())
	if err != nil {
		t.Fatal(err)
	}
	var lookups atomic.Int32
	b := m.node("b", []string{"mesh.example:" + port}, func(o *Options) {
		o.lookup = func(context.Context, string) ([]netip.Addr, error) {
			switch lookups.Add(1) {
			case 1:
				return nil, errors.New("server misbehaving")
			case 2:
				return []netip.Addr{netip.MustParseAddr("127.0.0.9")}, nil
			}
			return []netip.Addr{netip.MustParseAddr("127.0.0.1")}, nil
		}
	})
	m.serve(a, 1, "old")
	m.serve(b, 1, "old")
	m.converge(a, b)
	eventually(t, 5*time.Second, "b has reached its seed", func() error {
		if n := b.metric(t, "mvp_gossip_seeds_unreached"); n != 0 {
			return fmt.Errorf("%v: %+v", n, b.Dump().Seeds)
		}
		return nil
	})
}

func TestOwnAddressAmongSeeds(t *testing.T) {
	m := newMesh(t)
	var addr string
	a := m.node("a", nil, func(o *Options) {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		addr = ln.Addr().String()
		ln.Close()
		_, port, _ := net.SplitHostPort(addr)
		o.BindAddress = addr
		o.Seeds = []string{addr, "self.example:" + port}
		o.lookup = func(context.Context, string) ([]netip.Addr, error) {
			return []netip.Addr{netip.MustParseAddr("127.0.0.1")}, nil
		}
	})
	m.serve(a, 1, "old")
	m.converge(a)
}

// After a partition members find each other also when the seeds lead nowhere any more: everybody ever known is called.
func TestKnownMembersAreCalled(t *testing.T) {
	m := newMesh(t)
	a := m.node("a", nil, nil)
	_, port, err := net.SplitHostPort(a.Addr())
	if err != nil {
		t.Fatal(err)
	}
	var moved atomic.Bool
	b := m.node("b", []string{"mesh.example:" + port}, func(o *Options) {
		o.lookup = func(context.Context, string) ([]netip.Addr, error) {
			if moved.Load() {
				return []netip.Addr{netip.MustParseAddr("127.0.0.9")}, nil
			}
			return []netip.Addr{netip.MustParseAddr("127.0.0.1")}, nil
		}
	})
	m.serve(a, 1, "old")
	m.serve(b, 1, "old")
	m.converge(a, b)
	moved.Store(true)
	m.net.set(true, pair("a", "b"))
	m.state(a, "b", 10*time.Second, route.Stale)
	m.state(b, "a", 10*time.Second, route.Stale)
	m.net.set(false, pair("a", "b"))
	m.state(a, "b", 20*time.Second, route.Ready)
	m.state(b, "a", 20*time.Second, route.Ready)
}
