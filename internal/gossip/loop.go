package gossip

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
)

// loop takes what happened, and what time brings, into the table, publishes, and starts the pulls that are due. It returns when
// its pulls have ended.
func (n *Node) loop(ctx context.Context) {
	var fetches sync.WaitGroup
	defer fetches.Wait()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		var done *result
		select {
		case <-ctx.Done():
			return
		case <-n.mail.wake:
		case <-timer.C:
		case r := <-n.results:
			done = &r
		}
		now := time.Now()
		n.mu.Lock()
		// Events first: a result is judged by the newest facts.
		for _, e := range n.mail.take() {
			n.apply(now, e)
		}
		if done != nil {
			n.fetched(now, *done)
		}
		n.publish(now)
		jobs := n.table.due(now, func() uint64 { n.fetches++; return n.fetches })
		next := n.table.next(now)
		n.mu.Unlock()

		for _, j := range jobs {
			fetches.Go(func() { n.fetch(ctx, j) })
		}
		if next.IsZero() {
			timer.Stop()
		} else {
			timer.Reset(time.Until(next))
		}
	}
}

// apply takes one event into the table. The caller holds mu.
func (n *Node) apply(now time.Time, e event) {
	before := n.describe(e.name)
	switch e.kind {
	case eventAlive:
		n.table.alive(now, e.name, e.address, e.meta, n.o.Timing.FetchRetry)
	case eventDead:
		n.table.dead(now, e.name)
		notify(n.kick)
	case eventLeft:
		n.table.left(e.name, e.meta.boot)
	case eventSeed, eventNoSeed:
		n.table.seed(e.name, e.kind == eventSeed)
	case eventRefetch:
		n.table.refetch(now, e.name, n.o.Timing.RefetchInterval)
	}
	if after := n.describe(e.name); after != before {
		n.log.Info("member changed", "peer", e.name, "from", before, "to", after, "address", e.address)
	}
}

// describe is the member's state for the log.
func (n *Node) describe(name string) string {
	if r := n.table.records[name]; r != nil {
		return r.state().String()
	}
	return "absent"
}

// fetch does one job and hands the outcome to the loop.
func (n *Node) fetch(ctx context.Context, j job) {
	start := time.Now()
	fctx, cancel := context.WithTimeout(ctx, n.o.Timing.FetchTimeout)
	defer cancel()
	res, err := n.o.Fetcher.Fetch(fctx, j.name, j.address, j.have)
	n.metrics.fetchSeconds.Observe(time.Since(start).Seconds())
	select {
	case n.results <- result{j, res, err}:
	case <-ctx.Done():
	}
}

// fetched takes the outcome of a pull into the table. The caller holds mu.
func (n *Node) fetched(now time.Time, r result) {
	mattered, err := n.table.fetched(now, r.job, r.res, r.err, func(failures int) time.Duration {
		return backOff(failures, n.o.Timing.FetchRetry, n.o.Timing.FetchRetryMax, rand.Float64())
	})
	switch {
	case err != nil:
		n.metrics.fetches.WithLabelValues(resultError).Inc()
	case r.res.Catalog == nil:
		n.metrics.fetches.WithLabelValues(resultCurrent).Inc()
	default:
		n.metrics.fetches.WithLabelValues(resultOK).Inc()
	}
	if !mattered {
		return
	}
	rec := n.table.records[r.job.name]
	switch {
	case err == nil:
		n.log.Debug("catalog pulled", "peer", r.job.name, "digest", r.res.Digest.Short(), "generation", r.res.Generation)
	case rec.failures == 1:
		n.log.Warn("catalog cannot be pulled", "peer", r.job.name, "address", r.job.address, "err", err)
	default:
		n.log.Debug("catalog cannot be pulled", "peer", r.job.name, "address", r.job.address, "failures", rec.failures, "err", err)
	}
}

// backOff is the wait after so many failures in a row: it doubles from first up to most. r, from 0 to 1, takes away up to half, so
// that nodes that failed together do not come back together.
func backOff(failures int, first, most time.Duration, r float64) time.Duration {
	d := first
	for i := 1; i < failures && d < most; i++ {
		d *= 2
	}
	d = min(d, most)
	return d - time.Duration(r*float64(d)/2)
}

// announcer hands the own metadata to memberlist when it changed, the first time at once and then no more often than the update
// interval. A change of the view hash is such a change; it does not change any view, so that the exchange comes to rest.
func (n *Node) announcer(ctx context.Context, ml *memberlist.Memberlist) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.dirty:
		}
		n.update(ml)
		if !sleep(ctx, n.o.Timing.UpdateInterval) {
			return
		}
	}
}

// update has memberlist send the own metadata. It does not wait for the broadcast.
func (n *Node) update(ml *memberlist.Memberlist) {
	n.updating.Lock()
	defer n.updating.Unlock()
	n.metrics.updates.Inc()
	// The only error is that the broadcast was not out in time, which nobody wants to know; 0 would mean to wait for ever.
	_ = ml.UpdateNode(time.Nanosecond)
}
