package node

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/mvp-mesh/mvp-node/internal/catalog"
	"github.com/mvp-mesh/mvp-node/internal/gossip"
	"github.com/mvp-mesh/mvp-node/internal/route"
)

// The states that the mesh is told, in the life of a node whose apiserver is upgraded under it. A node whose apiserver came back
// is not Ready before its catalog was read again: between the two, peers would take the old list for the truth and answer 404.
func TestLocalStates(t *testing.T) {
	old := testCatalog(t, "v1.35.4")
	upgraded := testCatalog(t, "v1.36.3")
	var told []string
	l := &local{mode: route.Enabled, address: "a:1", announce: func(a gossip.Local) { told = append(told, a.State.String()+" "+a.ServerVersion) }}
	now := time.Unix(1000, 0)
	at := func(seconds int) time.Time { return now.Add(time.Duration(seconds) * time.Second) }

	l.setUp(true, at(0))
	l.setCatalog(old, 1)
	l.setRead(at(0))
	if l.frontReady() != nil || l.checkApiserver() != nil {
		t.Errorf("not ready: %v, %v", l.frontReady(), l.checkApiserver())
	}
	l.setUp(false, at(10))
	if l.checkApiserver() == nil || l.frontReady() != nil {
		t.Error("a node whose apiserver is down leaves /readyz of the front to the apiserver, and is not ready on the admin port")
	}
	l.setRead(at(9)) // a reading from before the outage proves nothing
	l.setUp(true, at(20))
	l.setRead(at(19)) // nor does one that began before it came back
	if l.frontReady() == nil {
		t.Error("ready before the catalog was read again")
	}
	l.setCatalog(upgraded, 2)
	l.setRead(at(21))
	l.setRead(at(51)) // every later reading is no news
	l.setUp(false, at(60))
	l.setUp(true, at(61))
	l.setRead(at(62)) // unchanged after a restart of the same version
	l.drain()
	want := []string{
		"Starting ", "Starting v1.35.4", "Ready v1.35.4", "LocalDown v1.35.4", "Starting v1.35.4", "Starting v1.36.3", "Ready v1.36.3",
		"LocalDown v1.36.3", "Starting v1.36.3", "Ready v1.36.3", "Draining v1.36.3",
	}
	if d := cmp.Diff(want, told); d != "" {
		t.Errorf("announced (-want +got):\n%s", d)
	}
	if l.frontReady() == nil {
		t.Error("ready while draining")
	}
	if c, generation := l.current(); c != upgraded || generation != 2 {
		t.Errorf("current catalog is %v, generation %d", c, generation)
	}
}

func testCatalog(t *testing.T, version string) *catalog.Catalog {
	t.Helper()
	c, err := catalog.New(version, []catalog.GroupVersion{{GV: catalog.GV{Version: "v1"}, Source: catalog.SourceBuiltin, Resources: []catalog.Resource{
		{Name: "pods", Verbs: catalog.ParseVerbs([]string{"get"})},
	}}})
	if err != nil {
		t.Fatal(err)
	}
	return c
}
