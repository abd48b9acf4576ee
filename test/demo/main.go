//go:build linux

// Command demo shows mvp-node doing its job on real kube-apiservers: two versions on one etcd, a node before each apiserver, and
// requests that only the newer version can answer sent to the older side. Every step states what must happen; the exit code says
// whether all of it did.
//
//	demo        tell the whole story, then stop everything
//	demo up     start act 1, leave it running and say how to reach it
//	demo down   end what "up" left running
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/mvp-mesh/mvp-node/test/harness"
)

// longest bounds a run from cache many times over; building from nothing has its own, longer bound.
const (
	longest      = 10 * time.Minute
	longestBuild = 80 * time.Minute
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	command := "run"
	if len(os.Args) > 1 {
		command = os.Args[1]
	}
	var err error
	switch command {
	case "run":
		err = run(ctx, os.Stdout)
	case "up":
		err = up(ctx, os.Stdout)
	case "down":
		err = down(ctx, os.Stdout)
	case holdCommand:
		err = hold(ctx)
	default:
		err = fmt.Errorf("unknown command %q: want nothing, up or down", command)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

// hosts of act 1. No two neighbours in an upgrade are more than one minor apart, as the version skew policy wants.
func hosts() []harness.HostOptions {
	return []harness.HostOptions{
		{Name: "cp-a", Version: harness.V135},
		{Name: "cp-b", Version: harness.V136},
		{Name: "cp-c", Version: harness.V136},
	}
}

// prepare builds what is missing and returns a cluster that is not started yet.
func prepare(ctx context.Context, w io.Writer, dir string) (*harness.Cluster, error) {
	binaries, err := harness.FindBinaries(w)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, longestBuild)
	defer cancel()
	if err := binaries.Ensure(ctx, harness.V135, harness.V136, harness.V137); err != nil {
		return nil, err
	}
	if _, err := binaries.Tool(ctx, "grpcurl"); err != nil {
		return nil, err
	}
	return harness.NewCluster(ctx, harness.Options{Binaries: binaries, Hosts: hosts(), Nodes: true, Dir: dir, Progress: w})
}

func run(ctx context.Context, w io.Writer) (err error) {
	start := time.Now()
	c, err := prepare(ctx, w, "")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, longest)
	defer cancel()
	s := &story{ctx: ctx, w: w, c: c}
	defer func() {
		dir, running := c.Dir, c.Processes()
		if cerr := c.Close(); cerr != nil && err == nil {
			err = cerr
		}
		if err == nil {
			err = nothingLeft(dir, running)
		}
		if err == nil {
			fmt.Fprintf(w, "\nAll %d steps went as they must; everything is stopped. %v\n", s.steps, time.Since(start).Round(time.Second))
		}
	}()
	if err := c.Start(ctx); err != nil {
		return err
	}
	if err := s.actOne(); err != nil {
		return fmt.Errorf("act 1, step %d: %w", s.steps, err)
	}
	if err := s.actTwo(); err != nil {
		return fmt.Errorf("act 2, step %d: %w", s.steps, err)
	}
	return nil
}

// nothingLeft checks that processes and files of a cluster are gone.
func nothingLeft(dir string, running []*harness.Process) error {
	for _, p := range running {
		if err := syscall.Kill(p.PID(), 0); err == nil {
			return fmt.Errorf("%s (pid %d) is still running", p.Name(), p.PID())
		}
	}
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		return fmt.Errorf("folder %s is still there", dir)
	}
	return nil
}
