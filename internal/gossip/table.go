package gossip

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/catalog"
	"github.com/mvp-mesh/mvp-node/internal/route"
)

// maxNames bounds how many members a node remembers, so that a faulty one that makes up names cannot fill memory.
const maxNames = 256

// table is all that the node knows of the mesh, as plain data: methods take what happened and the time, read no clock, and do no
// I/O. The Node's mutex guards it.
type table struct {
	self        string
	expected    []string // sorted, without duplicates
	staleGrace  time.Duration
	catalogHold time.Duration

	own        meta
	ownCatalog *catalog.Catalog
	ownSince   time.Time // when ownCatalog was announced

	records map[string]*record
	// addresses is the last gossip address of each member that did not leave cleanly; sync calls them for ever.
	addresses map[string]string
	// seeds are the configured seeds, when Expected does not say who should be there; true while somebody is there. unseen are
	// those at which nobody was since the start: who stands there is not known, so they hold up the view as missing members do.
	seeds  map[string]bool
	unseen map[string]bool
	// open says why and since when a name may serve something that the view does not know. It has an entry as long as that is
	// so, also after the hold is over, so that the hold does not begin anew.
	open map[string]question
}

// question is why a name may serve something that is not known.
type question struct {
	kind  questionKind
	since time.Time
}

// questionKind is in the order in which a member comes up. A step forward is news of what it serves, and the hold begins anew: a
// member that was missing for an hour and is back with another catalog must not let a 404 through before that is pulled. A step
// back is not: what was given up stays given up.
type questionKind uint8

const (
	isMissing questionKind = iota + 1 // expected, or a seed, and not seen
	noCatalog                         // its metadata names none, or one that it is about to confirm, or cannot be read
	notHeld                           // its metadata names one that is not held
)

// record is one other member.
type record struct {
	meta     meta
	gossip   string    // gossip address
	alive    bool      // as memberlist says; a suspect is alive
	vanished time.Time // when it was found dead; zero while alive
	departed bool      // a third member says that it left cleanly: gone as soon as memberlist says so too

	held      *catalog.Catalog // newest that was pulled from it, nil if none was
	heldGen   uint64
	heldBoot  uint64    // boot to which heldGen belongs
	heldSince time.Time // when held was pulled or last confirmed

	// Of the fetch: at most one at a time.
	fetching  bool
	fetch     uint64 // identifies the one in flight; a result of another is ignored
	refetch   bool   // Refetch asked for one
	failures  int    // in a row
	nextFetch time.Time
	lastFetch time.Time
	lastError string
}

func newTable(o Options, boot uint64, now time.Time) *table {
	t := &table{
		self:        o.Name,
		expected:    slices.Compact(slices.Sorted(slices.Values(o.Expected))),
		staleGrace:  o.StaleGrace,
		catalogHold: o.CatalogHold,
		own: meta{
			format: metaFormat, known: true, state: route.Starting, mode: route.Enabled, boot: boot, nodeVersion: o.NodeVersion,
		},
		records:   make(map[string]*record),
		addresses: make(map[string]string),
		seeds:     make(map[string]bool),
		unseen:    make(map[string]bool),
		open:      make(map[string]question),
	}
	if len(t.expected) == 0 {
		for _, s := range o.Seeds {
			t.seeds[s], t.unseen[s] = false, true
		}
	}
	t.advance(now)
	return t
}

// restart counts the holds from now: between New and Run nobody could be reached.
func (t *table) restart(now time.Time) {
	clear(t.open)
	t.advance(now)
}

// alive takes what memberlist says of a live member, at first and after each change.
func (t *table) alive(now time.Time, name, address string, m meta, retry time.Duration) {
	if name == t.self {
		return
	}
	r := t.records[name]
	if m.leaving {
		t.forget(name)
		return
	}
	if r == nil {
		if len(t.records) >= maxNames {
			return
		}
		r = &record{nextFetch: now}
		t.records[name] = r
	}
	if len(t.addresses) < maxNames || t.addresses[name] != "" {
		t.addresses[name] = address
	}
	if !r.alive || r.gossip != address {
		r.failures, r.nextFetch = 0, now
	} else if r.meta.boot != m.boot || r.meta.digest != m.digest || r.meta.meshAddress != m.meshAddress {
		// A change is worth another try soon, but a member that changes all the time and cannot be asked is not asked each time.
		if soon := now.Add(retry); r.failures == 0 {
			r.nextFetch = now
		} else if r.nextFetch.After(soon) {
			r.nextFetch = soon
		}
	}
	if r.meta.boot != m.boot {
		r.departed = false
	}
	r.alive, r.vanished, r.gossip, r.meta = true, time.Time{}, address, m
	if r.held != nil && r.held.Digest() == m.digest {
		r.heldBoot, r.heldGen = m.boot, m.generation
		r.failures, r.lastError = 0, ""
	}
}

// dead takes that memberlist gave a member up. One that said before that it leaves has no record any more.
func (t *table) dead(now time.Time, name string) {
	r := t.records[name]
	switch {
	case r == nil || !r.alive:
	case r.departed:
		t.forget(name)
	default:
		r.alive, r.vanished = false, now
	}
}

// left takes that another member knows this boot of name to have left cleanly.
func (t *table) left(name string, boot uint64) {
	r := t.records[name]
	if r == nil || !r.meta.known || r.meta.boot != boot {
		return
	}
	if r.departed = true; !r.alive {
		t.forget(name)
	}
}

// seed takes whether somebody is at a seed now.
func (t *table) seed(name string, there bool) {
	if _, ok := t.seeds[name]; !ok {
		return
	}
	if t.seeds[name] = there; there {
		delete(t.unseen, name)
	}
}

func (t *table) forget(name string) {
	delete(t.records, name)
	delete(t.addresses, name)
}

// settled reports whether what is held of the member is what it serves, as far as anybody can tell. Gossip may lag behind the
// origin: a newer generation of the same boot than the advertised one counts.
func (r *record) settled() bool {
	if r.held == nil || !r.meta.known || r.meta.digest.IsZero() {
		return false
	}
	return r.held.Digest() == r.meta.digest || r.heldBoot == r.meta.boot && r.heldGen > r.meta.generation
}

// advance ends what time ends and notes since when each name is an open question.
func (t *table) advance(now time.Time) {
	for name, r := range t.records {
		if !r.alive && !now.Before(r.vanished.Add(t.staleGrace)) {
			// Its address stays: sync goes on calling it.
			delete(t.records, name)
		}
	}
	unknown := make(map[string]questionKind)
	for name, r := range t.records {
		switch {
		case r.alive && r.state() == route.Starting:
			// Also with a digest: its apiserver came back and may be another version, and what it serves is being read.
			unknown[name] = noCatalog
		case r.settled():
		case r.meta.digest.IsZero():
			unknown[name] = noCatalog
		default:
			unknown[name] = notHeld
		}
	}
	for _, name := range t.expected {
		if name != t.self && t.records[name] == nil {
			unknown[name] = isMissing
		}
	}
	for s := range t.unseen {
		unknown[seedName(s)] = isMissing
	}
	for name := range t.open {
		if unknown[name] == 0 {
			delete(t.open, name)
		}
	}
	for name, kind := range unknown {
		q := t.open[name]
		if kind > q.kind {
			q.since = now
		}
		t.open[name] = question{kind, q.since}
	}
}

// seedName stands for whoever is at a seed. No member can be called so: names have no space.
func seedName(seed string) string { return "seed " + seed }

// holdsUp reports whether the open question about name still holds up a true 404.
func (t *table) holdsUp(name string, now time.Time) bool {
	q, ok := t.open[name]
	return ok && now.Before(q.since.Add(t.catalogHold))
}

// members lists everybody, the own node included, by name. Call advance first.
func (t *table) members(now time.Time) []route.Member {
	out := make([]route.Member, 0, len(t.records)+len(t.expected)+1)
	out = append(out, route.Member{
		Name: t.self, Address: t.own.meshAddress, State: t.own.state, Mode: t.own.mode, ServerVersion: t.own.serverVersion,
		Digest: t.own.digest, Generation: t.own.generation, Catalog: t.ownCatalog,
	})
	for name, r := range t.records {
		m := route.Member{
			Name: name, Address: r.meta.meshAddress, State: r.state(), Mode: r.meta.mode, ServerVersion: r.meta.serverVersion,
			Digest: r.meta.digest, Generation: r.meta.generation, Catalog: r.held, HoldsUp: t.holdsUp(name, now),
		}
		out = append(out, m)
	}
	for _, name := range t.expected {
		if name != t.self && t.records[name] == nil {
			out = append(out, route.Member{Name: name, State: route.Missing, HoldsUp: t.holdsUp(name, now)})
		}
	}
	for s := range t.unseen {
		// Once it does not hold up anything, an address is no member: only names are.
		if name := seedName(s); t.holdsUp(name, now) {
			out = append(out, route.Member{Name: name, State: route.Missing, HoldsUp: true})
		}
	}
	slices.SortFunc(out, func(a, b route.Member) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// state is what the view says of the member. One whose metadata cannot be read yet is shown as Starting: it runs, and what it
// serves is not known.
func (r *record) state() route.State {
	switch {
	case !r.alive:
		return route.Stale
	case !r.meta.known:
		return route.Starting
	}
	return r.meta.state
}

// converged reports whether everybody who should be there is, is ready, and holds the view with this hash.
func (t *table) converged(hash route.Hash) bool {
	for _, there := range t.seeds {
		if !there {
			return false
		}
	}
	for _, name := range t.expected {
		if name == t.self {
			if t.own.state != route.Ready {
				return false
			}
		} else if r := t.records[name]; r == nil || r.state() != route.Ready {
			return false
		}
	}
	for _, r := range t.records {
		if r.alive && (!r.meta.known || r.meta.viewHash != hash) {
			return false
		}
	}
	return true
}

// job is one pull to start.
type job struct {
	id      uint64
	name    string
	address string
	have    catalog.Digest
	meta    meta // as advertised when it was started
}

// wants reports whether the member should be asked for its catalog. A stale one is asked too: its gossip may be cut off while
// its mesh port answers, and what it says there is proven.
func (r *record) wants() bool {
	return !r.fetching && r.meta.known && r.meta.meshAddress != "" &&
		(r.refetch || !r.meta.digest.IsZero() && !r.settled())
}

// due marks and returns the pulls to start now, by name. ids are drawn from next.
func (t *table) due(now time.Time, next func() uint64) []job {
	var out []job
	for _, name := range slices.Sorted(maps.Keys(t.records)) {
		r := t.records[name]
		if !r.wants() || now.Before(r.nextFetch) {
			continue
		}
		r.fetching, r.fetch, r.refetch, r.lastFetch = true, next(), false, now
		j := job{id: r.fetch, name: name, address: r.meta.meshAddress, meta: r.meta}
		if r.held != nil {
			j.have = r.held.Digest()
		}
		out = append(out, j)
	}
	return out
}

// refetch asks for a pull of a member although its catalog seems to be held.
func (t *table) refetch(now time.Time, name string, least time.Duration) {
	r := t.records[name]
	if r == nil || r.refetch {
		return
	}
	r.refetch = true
	if r.failures == 0 {
		r.nextFetch = now
		if soonest := r.lastFetch.Add(least); soonest.After(now) {
			r.nextFetch = soonest
		}
	}
}

// fetched takes the outcome of a job. wait gives the pause before the next try after so many failures. It returns the error that
// the member's LastError shows, nil if there is none, and whether the outcome still mattered to anybody.
func (t *table) fetched(now time.Time, j job, res FetchResult, err error, wait func(failures int) time.Duration) (bool, error) {
	r := t.records[j.name]
	if r == nil || !r.fetching || r.fetch != j.id {
		return false, nil
	}
	r.fetching = false
	if err == nil {
		err = r.accept(now, j, res)
	}
	if err == nil && !r.settled() && r.meta.digest == j.meta.digest && r.meta.boot == j.meta.boot {
		err = fmt.Errorf("origin serves catalog %s (generation %d) and gossip says %s (generation %d)",
			res.Digest.Short(), res.Generation, r.meta.digest.Short(), r.meta.generation)
	}
	if err != nil {
		r.failures++
		r.nextFetch, r.lastError = now.Add(wait(r.failures)), err.Error()
		return true, err
	}
	r.failures, r.lastError = 0, ""
	if r.nextFetch = now; r.refetch {
		r.nextFetch = now.Add(wait(1))
	}
	return true, nil
}

// accept takes what the origin says about its catalog. The origin's word is newer than gossip, so it replaces what is held unless
// it is older by the origin's own count.
func (r *record) accept(now time.Time, j job, res FetchResult) error {
	// The job began in one boot of the member; when its digest is the one advertised now, it is of this one.
	boot := j.meta.boot
	if res.Digest == r.meta.digest {
		boot = r.meta.boot
	}
	c := cmp.Or(res.Catalog, r.held)
	switch {
	case res.Digest.IsZero():
		return fmt.Errorf("origin has no catalog")
	case c == nil || c.Digest() != res.Digest:
		return fmt.Errorf("origin's catalog is not the one that digest %s names", res.Digest.Short())
	case r.held != nil && r.held.Digest() == res.Digest && boot == r.heldBoot:
		res.Generation = max(res.Generation, r.heldGen)
	case r.held != nil && boot == r.heldBoot && res.Generation < r.heldGen:
		return fmt.Errorf("origin serves generation %d of its catalog, %d is held already", res.Generation, r.heldGen)
	}
	r.held, r.heldGen, r.heldBoot, r.heldSince = c, res.Generation, boot, now
	return nil
}

// next is the earliest moment at which time alone changes something; zero if it does not.
func (t *table) next(now time.Time) time.Time {
	var at time.Time
	consider := func(c time.Time) {
		if c.After(now) && (at.IsZero() || c.Before(at)) {
			at = c
		}
	}
	for _, r := range t.records {
		if !r.alive {
			consider(r.vanished.Add(t.staleGrace))
		}
		if r.wants() {
			consider(r.nextFetch)
		}
	}
	for _, q := range t.open {
		consider(q.since.Add(t.catalogHold))
	}
	return at
}
