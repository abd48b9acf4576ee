package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"
)

// leaveTimeout bounds how long the word "this node leaves" may take to get out.
const leaveTimeout = 3 * time.Second

// stop is the timeline of a stop:
//
//	   0 s  draining: /readyz turns red, peers are told and choose others for new requests; everything is still served
//	 delay  (shutdown.delay) load balancers have noticed: front and mesh accept nothing new
//	+drain  (shutdown.drainTimeout, at most) what runs has ended, or is cut; watches end and are resumed elsewhere
//	+ leave the mesh is told, so the node is gone at once and not suspected
//	  then  the watchers of apiserver, gossip and certificates end, connections close, the admin port last
//
// The node leaves the mesh only after the drain: a member that left is forgotten with its catalog, one that drains is not, and
// while it still runs a request for what only it serves must be a 503, not a 404. Every step runs whatever the ones before it
// came to.
func (n *Node) stop(endWatching context.CancelFunc) error {
	start := time.Now()
	step := func(name string, f func() error) error {
		begin := time.Now()
		err := f()
		n.logger.Info("stop", "step", name, "took", time.Since(begin).Round(time.Millisecond), "since_start", time.Since(start).Round(time.Millisecond), "err", err)
		if err != nil {
			return fmt.Errorf("stop: %s: %w", name, err)
		}
		return nil
	}
	return errors.Join(
		step("drain", func() error {
			n.local.drain()
			n.mesh.SetServing(false)
			time.Sleep(n.cfg.Shutdown.Delay)
			return nil
		}),
		step("ports", func() error {
			ctx, cancel := context.WithTimeout(context.Background(), n.cfg.Shutdown.DrainTimeout)
			defer cancel()
			var g errgroup.Group
			g.Go(func() error { return n.cut("front", n.front.Shutdown(ctx)) })
			g.Go(func() error { return n.cut("mesh", n.mesh.Shutdown(ctx)) })
			err := g.Wait()
			n.forward.Close()
			return err
		}),
		step("leave", func() error {
			ctx, cancel := context.WithTimeout(context.Background(), leaveTimeout)
			defer cancel()
			return n.gossip.Leave(ctx)
		}),
		step("watchers", func() error {
			endWatching()
			return nil
		}),
		step("admin", func() error {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			return n.admin.stop(ctx)
		}),
	)
}

// cut takes the end of the drain time for what it is, no error: something was still running (a watch has no end of its own).
func (n *Node) cut(port string, err error) error {
	if errors.Is(err, context.DeadlineExceeded) {
		n.logger.Info("requests that were still running were cut", "port", port)
		return nil
	}
	return err
}
