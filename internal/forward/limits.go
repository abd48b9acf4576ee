package forward

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/route"
	"golang.org/x/sync/semaphore"
)

// Limits bound what one node asks of one peer at a time. Short and long-running requests have places of their own, so that watches
// cannot keep writes out (RELIABILITY section 2).
type Limits struct {
	// Short is the number of requests with a deadline that may be under way to one peer.
	Short int64
	// Long is the same for watches, logs and the like.
	Long int64
	// Wait is how long a request waits for a place before it is answered with PeerBusy. Zero does not wait.
	Wait time.Duration
}

// DefaultLimits are the values of RELIABILITY section 2: lists count as short.
func DefaultLimits() Limits { return Limits{Short: 256, Long: 2000, Wait: 100 * time.Millisecond} }

// limiter holds the places of each peer. Peers are never forgotten: their names come from certificates of the mesh CA, so there
// are as many as nodes ever were.
type limiter struct {
	limits Limits
	mu     sync.RWMutex
	peers  map[string]*places
}

type places struct{ short, long *semaphore.Weighted }

func newLimiter(l Limits) *limiter {
	return &limiter{limits: l, peers: make(map[string]*places)}
}

func (l *limiter) of(peer string, long bool) *semaphore.Weighted {
	l.mu.RLock()
	p := l.peers[peer]
	l.mu.RUnlock()
	if p == nil {
		l.mu.Lock()
		if p = l.peers[peer]; p == nil {
			p = &places{semaphore.NewWeighted(l.limits.Short), semaphore.NewWeighted(l.limits.Long)}
			l.peers[peer] = p
		}
		l.mu.Unlock()
	}
	if long {
		return p.long
	}
	return p.short
}

// acquire takes a place at a peer, which the caller gives back with Release(1). It fails with PeerBusy after the wait, or with the
// context's end.
func (l *limiter) acquire(ctx context.Context, peer string, long bool) (*semaphore.Weighted, *Error) {
	s := l.of(peer, long)
	if s.TryAcquire(1) {
		return s, nil
	}
	wait, cancel := context.WithTimeout(ctx, l.limits.Wait)
	defer cancel()
	if s.Acquire(wait, 1) == nil {
		return s, nil
	}
	if err := ctx.Err(); err != nil {
		return nil, &Error{Cause: route.DeadlineBeforeDispatch, Peer: peer, Err: err}
	}
	return nil, &Error{Cause: route.PeerBusy, Peer: peer, Err: fmt.Errorf("no place within %v", l.limits.Wait)}
}

// The retry budget: how many reads that a peer may already have worked on are sent to another one. When everything is slow, each
// such retry is work done twice. Attempts that no apiserver saw are free, and a burst is allowed, so that the death of one peer
// costs its readers nothing (RELIABILITY section 2: 10 %, floor 3/s).
const (
	budgetShare = 0.1 // of requests
	budgetRate  = 3.0 // per second
	budgetBurst = 100.0
)

// budget is a token bucket that requests and time fill. Only retries take its lock.
type budget struct {
	requests atomic.Int64

	mu     sync.Mutex
	tokens float64
	seen   int64     // requests that are counted in tokens
	at     time.Time // time that is counted in tokens
}

func newBudget(now time.Time) *budget { return &budget{tokens: budgetBurst, at: now} }

// take reports whether one more retry is within the budget, and counts it.
func (b *budget) take(now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	seen := b.requests.Load()
	b.tokens += budgetShare*float64(seen-b.seen) + budgetRate*max(0, now.Sub(b.at).Seconds())
	b.tokens = min(b.tokens, budgetBurst)
	b.seen, b.at = seen, now
	if b.tokens < 1 {
		return false
	}
	b.tokens--
	return true
}
