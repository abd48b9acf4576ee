package gossip

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hashicorp/memberlist"
	"golang.org/x/sync/errgroup"
)

const (
	// lookupTimeout bounds the resolution of one host name.
	lookupTimeout = 3 * time.Second
	// joinsAtOnce bounds parallel exchanges; most of them wait for hosts that are down.
	joinsAtOnce = 8
)

// seed is what is known of one configured seed.
type seed struct {
	addresses []netip.AddrPort // of the last resolution that succeeded
	answered  map[netip.AddrPort]bool
	lastTry   time.Time
	lastError string // of the resolution or the exchange; "" when somebody is there
}

// target is somebody to exchange full state with.
type target struct {
	name    string // "" for a seed
	address string
}

// attempt is the history of a target that is away.
type attempt struct {
	failures int
	next     time.Time
}

// sync calls, for as long as the node runs, everybody who should be there and is not: seeds and all members ever known. It never
// gives up, because after a partition nobody else begins (CASES G-04). While all are there it exchanges full state with one of them
// now and then, which repairs what lost packets left behind.
func (n *Node) sync(ctx context.Context, ml *memberlist.Memberlist) {
	attempts := make(map[target]*attempt)
	var (
		full   time.Time // last exchange with a live member
		doubts int       // rounds in a row in which somebody did not know the own node as it is
	)
	for {
		n.mu.Lock()
		leaving := n.table.own.leaving
		n.mu.Unlock()
		if leaving {
			return
		}
		n.resolveSeeds(ctx)
		now := time.Now()
		away, live := n.targets()
		maps.DeleteFunc(attempts, func(t target, _ *attempt) bool { return !slices.Contains(away, t) })
		var due []target
		for _, t := range away {
			if a := attempts[t]; a == nil {
				attempts[t] = &attempt{}
			} else if now.Before(a.next) {
				continue
			}
			due = append(due, t)
		}
		if n.contested.Swap(false) {
			// Somebody did not know the own node; who, is not to be had. Tell all.
			doubts++
			due, full = append(due, live...), now
		} else {
			doubts = 0
			if len(live) > 0 && now.Sub(full) >= n.o.Timing.SyncInterval {
				due, full = append(due, live[rand.IntN(len(live))]), now
			}
		}
		errs := n.join(ctx, ml, due)
		if ctx.Err() != nil {
			return
		}
		now = time.Now()
		for i, t := range due {
			a := attempts[t]
			if a == nil {
				continue // a live one
			}
			if errs[i] == nil {
				// Somebody answers there who is none of the live members: an address in front of several, or not seen yet.
				*a = attempt{next: now.Add(n.o.Timing.RejoinMax)}
				continue
			}
			a.failures++
			a.next = now.Add(backOff(a.failures, n.o.Timing.RejoinInterval, n.o.Timing.RejoinMax, rand.Float64()))
		}
		n.noteSeeds(now, due, errs)
		n.metrics.health.Set(float64(ml.GetHealthScore()))

		wait := backOff(1, n.o.Timing.SyncInterval, n.o.Timing.SyncInterval, rand.Float64())
		for _, a := range attempts {
			wait = min(wait, max(0, a.next.Sub(now)))
		}
		if !n.rest(ctx, wait, doubts) {
			return
		}
	}
}

// rest waits for the next round; false if ctx ended. A kick ends the wait, but not sooner than the rejoin interval allows.
func (n *Node) rest(ctx context.Context, wait time.Duration, doubts int) bool {
	least := backOff(doubts+1, n.o.Timing.RejoinInterval, n.o.Timing.SyncInterval, rand.Float64())
	if !sleep(ctx, min(wait, least)) {
		return false
	}
	if wait <= least {
		return true
	}
	timer := time.NewTimer(wait - least)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-n.kick:
	case <-timer.C:
	}
	return true
}

// join exchanges full state with each target. The errors are in the order of the targets.
func (n *Node) join(ctx context.Context, ml *memberlist.Memberlist, targets []target) []error {
	errs := make([]error, len(targets))
	var g errgroup.Group
	g.SetLimit(joinsAtOnce)
	for i, t := range targets {
		g.Go(func() error {
			if errs[i] = ctx.Err(); errs[i] == nil {
				errs[i] = n.exchange(ml, t)
			}
			return nil
		})
	}
	g.Wait()
	return errs
}

// exchange sends the own state to a target and takes its. It blocks for as long as dialling and streams may.
func (n *Node) exchange(ml *memberlist.Memberlist, t target) error {
	where := t.address
	if t.name != "" {
		where = t.name + "/" + where // the certificate must have that name
	}
	_, err := ml.Join([]string{where})
	switch {
	case err == nil:
		n.metrics.joins.WithLabelValues(resultOK).Inc()
	case !n.transport.isSelf(t.address):
		n.metrics.joins.WithLabelValues(resultError).Inc()
	}
	return err
}

// farewell gives every live member the own state, which says by now that the node leaves. Broadcasts may be lost, and memberlist
// does not tell reliably when one is out. It returns an error if there were members and none has answered before ctx ended.
func (n *Node) farewell(ctx context.Context, ml *memberlist.Memberlist) error {
	_, live := n.targets()
	results := make(chan error, len(live))
	for _, t := range live {
		// The transport waits for it: a member that does not answer keeps it longer than Leave may take.
		if !n.transport.spawn(func() { results <- n.exchange(ml, t) }) {
			return errClosed
		}
	}
	var errs []error
	for range live {
		select {
		case err := <-results:
			if err != nil {
				errs = append(errs, err)
			}
		case <-ctx.Done():
			errs = append(errs, ctx.Err())
		}
	}
	if len(errs) > 0 && len(errs) == len(live) {
		return errors.Join(errs...)
	}
	return nil
}

// targets lists who is away, seeds and known members, and who is live, each in a stable order.
func (n *Node) targets() (away, live []target) {
	n.mu.Lock()
	defer n.mu.Unlock()
	at := make(map[string]bool)
	for _, name := range slices.Sorted(maps.Keys(n.table.records)) {
		if r := n.table.records[name]; r.alive {
			at[r.gossip] = true
			live = append(live, target{name, r.gossip})
		}
	}
	for _, name := range slices.Sorted(maps.Keys(n.table.addresses)) {
		if r := n.table.records[name]; r == nil || !r.alive {
			away = append(away, target{name, n.table.addresses[name]})
		}
	}
	for _, s := range slices.Sorted(maps.Keys(n.seeds)) {
		for _, a := range n.seeds[s].addresses {
			t := target{address: a.String()}
			if !at[t.address] && !n.isOwn(a) && !slices.Contains(away, t) {
				away = append(away, t)
			}
		}
	}
	return away, live
}

func (n *Node) isOwn(a netip.AddrPort) bool {
	return a == n.transport.advertise || n.transport.isSelf(a.String())
}

// resolveSeeds looks all seeds up again: an address in DNS may be another host's tomorrow.
func (n *Node) resolveSeeds(ctx context.Context) {
	n.mu.Lock()
	names := slices.Sorted(maps.Keys(n.seeds))
	n.mu.Unlock()
	var g errgroup.Group
	g.SetLimit(joinsAtOnce)
	for _, s := range names {
		g.Go(func() error {
			addrs, err := n.resolve(ctx, s)
			n.mu.Lock()
			defer n.mu.Unlock()
			if err != nil {
				n.seeds[s].lastError = err.Error() // the old addresses are better than none
				return nil
			}
			n.seeds[s].addresses = addrs
			return nil
		})
	}
	g.Wait()
}

func (n *Node) resolve(ctx context.Context, s string) ([]netip.AddrPort, error) {
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		return nil, err
	}
	p, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	addrs, err := resolveHost(ctx, host, n.o.lookup)
	if err != nil {
		return nil, err
	}
	out := make([]netip.AddrPort, 0, len(addrs))
	for _, a := range addrs {
		out = append(out, netip.AddrPortFrom(a, uint16(p)))
	}
	return out, nil
}

func resolveHost(ctx context.Context, host string, lookup func(context.Context, string) ([]netip.Addr, error)) ([]netip.Addr, error) {
	if a, err := netip.ParseAddr(host); err == nil {
		return []netip.Addr{a.Unmap()}, nil
	}
	addrs, err := lookup(ctx, host)
	if err != nil {
		return nil, err
	}
	if len(addrs) == 0 {
		return nil, fmt.Errorf("host %q has no address", host)
	}
	out := make([]netip.Addr, 0, len(addrs))
	for _, a := range addrs {
		out = append(out, a.Unmap())
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out), nil
}

// noteSeeds takes down which seeds were reached. One is when at each of its addresses is a live member, somebody answered, or the
// own node is.
func (n *Node) noteSeeds(now time.Time, due []target, errs []error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	at := make(map[string]bool)
	for _, r := range n.table.records {
		if r.alive {
			at[r.gossip] = true
		}
	}
	unreached := 0
	for name, s := range n.seeds {
		reached, failing := len(s.addresses) > 0, len(s.addresses) == 0
		for _, a := range s.addresses {
			if n.isOwn(a) || at[a.String()] {
				continue
			}
			if i := slices.Index(due, target{address: a.String()}); i >= 0 {
				s.lastTry = now
				if errs[i] != nil {
					s.lastError = oneLine(errs[i])
					delete(s.answered, a)
				} else {
					if s.answered == nil {
						s.answered = make(map[netip.AddrPort]bool)
					}
					s.answered[a] = true
				}
			}
			if !s.answered[a] {
				reached, failing = false, true
			}
		}
		if failing {
			unreached++
			n.mail.put(event{kind: eventNoSeed, name: name})
		}
		if reached {
			s.lastError = ""
			// By mail, so that the members who were met there are in the table before the seed stops holding up the view.
			n.mail.put(event{kind: eventSeed, name: name})
		}
	}
	n.metrics.unreached.Set(float64(unreached))
}

// oneLine undoes the list that memberlist makes of the errors of one Join.
func oneLine(err error) string {
	return strings.TrimPrefix(strings.Join(strings.Fields(err.Error()), " "), "1 error occurred: * ")
}
