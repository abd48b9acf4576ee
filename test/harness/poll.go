//go:build linux

package harness

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// pollInterval is how often a condition is looked at. All conditions are cheap questions to a local process.
const pollInterval = 100 * time.Millisecond

var errProcessEnded = errors.New("the process has ended")

// Eventually asks check until it returns nil. When ctx ends first, the error is the last one of check together with
// the context's. check must give up when its context ends.
func Eventually(ctx context.Context, check func(context.Context) error) error {
	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	var last error
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		// A check cut off by the end of ctx only says so; the one before says what is wrong.
		if last == nil || ctx.Err() == nil {
			last = err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", context.Cause(ctx), last)
		case <-ticker.C:
		}
	}
}

// eventuallyRunning is Eventually for a process: it gives up at once when the process ends, and its error has the end of
// the log.
func eventuallyRunning(ctx context.Context, p *Process, check func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	var watch sync.WaitGroup
	watch.Go(func() {
		select {
		case <-p.Done():
			cancel(errProcessEnded)
		case <-ctx.Done():
		}
	})
	err := Eventually(ctx, check)
	cancel(nil)
	watch.Wait()
	if err != nil {
		return p.failure(err)
	}
	return nil
}
