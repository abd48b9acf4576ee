package node

import (
	"errors"
	"sync"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/catalog"
	"github.com/mvp-mesh/mvp-node/internal/gossip"
	"github.com/mvp-mesh/mvp-node/internal/route"
)

// local is what the node knows of its own apiserver, and what the mesh is told of it. Three parts report to it, each on its own
// goroutine: the readiness probe, the discovery watcher and the stop of the node. Every change is announced under the lock, so
// that the last announcement is the last state.
type local struct {
	announce func(gossip.Local)
	mode     route.Mode
	address  string // mesh address to advertise

	mu         sync.Mutex // guards what follows
	up         bool
	upSince    time.Time // when the probe saw it come up
	confirmed  bool      // the catalog was read since then
	readAt     time.Time // when the last complete reading began
	draining   bool
	catalog    *catalog.Catalog
	generation uint64
}

// setUp is called by the probe when the apiserver turns ready or stops being so. An apiserver that comes back may be another
// version: until its catalog was read again, the node is Starting once more, so that nobody takes the old one for the truth.
func (l *local) setUp(up bool, now time.Time) {
	l.change(func() {
		if up && !l.up {
			l.upSince, l.confirmed = now, false
		}
		l.up = up
	})
}

// setRead is called by the discovery watcher after each complete reading, begun at start, whether or not it found a change.
func (l *local) setRead(start time.Time) {
	l.mu.Lock()
	l.readAt = start
	news := l.up && !l.confirmed && !start.Before(l.upSince)
	l.mu.Unlock()
	if news {
		l.change(func() { l.confirmed = true })
	}
}

// setCatalog is called by the discovery watcher with each new catalog.
func (l *local) setCatalog(c *catalog.Catalog, generation uint64) {
	l.change(func() { l.catalog, l.generation = c, generation })
}

// lastRead is when the last complete reading of the catalog began.
func (l *local) lastRead() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.readAt
}

// drain is called once, at the beginning of a stop.
func (l *local) drain() { l.change(func() { l.draining = true }) }

func (l *local) change(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f()
	a := gossip.Local{State: l.state(), Mode: l.mode, MeshAddress: l.address, Catalog: l.catalog, Generation: l.generation}
	if l.catalog != nil {
		a.ServerVersion = l.catalog.ServerVersion()
	}
	l.announce(a)
}

// state needs mu.
func (l *local) state() route.State {
	switch {
	case l.draining:
		return route.Draining
	case l.catalog == nil:
		return route.Starting
	case !l.up:
		return route.LocalDown
	case !l.confirmed:
		return route.Starting
	}
	return route.Ready
}

// current is the local catalog for the serving side of a forward.
func (l *local) current() (*catalog.Catalog, uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.catalog, l.generation
}

// The checks behind /readyz, on the admin port each by its name, on the front together.

var (
	errCatalogUnknown = errors.New("what the local apiserver serves is not known yet")
	errDraining       = errors.New("the node is stopping")
	errLocalDown      = errors.New("the local apiserver is not ready")
)

func (l *local) checkCatalog() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.catalog == nil || l.up && !l.confirmed {
		return errCatalogUnknown
	}
	return nil
}

func (l *local) checkDraining() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.draining {
		return errDraining
	}
	return nil
}

func (l *local) checkApiserver() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.up {
		return errLocalDown
	}
	return nil
}

// frontReady leaves out whether the apiserver is up: the front's /readyz passes that question on to the apiserver itself.
func (l *local) frontReady() error { return errors.Join(l.checkDraining(), l.checkCatalog()) }
