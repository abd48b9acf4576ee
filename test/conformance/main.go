//go:build linux

// Command conformance runs Kubernetes' own end-to-end tests three times with the same specs: straight to the newer of two apiservers,
// through the node before it, and through the node before the older one, which forwards almost every request. Then it prints a table
// of what passed by each way. Each way has a cluster of its own, fresh and of the same making.
//
//	conformance                          all three ways, the table and the verdict
//	conformance -way forwarded           one way, without a verdict
//	conformance -focus 'Watchers'        any specs of Kubernetes whose names fit, without a verdict
//	conformance -dir DIR                 keep logs, reports and the files of the clusters in DIR
//
// The exit code is 0 if every spec that passed directly passed by the other ways, if there are enough of them, and if the nodes' own
// counters say that the requests went the way they should. docs/conformance.md says which specs are in and why.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/mvp-mesh/mvp-node/test/harness"
)

const (
	// attempts is how often a spec may try. On two cores that run two control planes and the tests, a spec may miss a deadline of its
	// own by any way; those that did are in the table.
	attempts = 2
	// longest bounds a run by all ways several times over; building from nothing has its own, longer bound.
	longest      = 70 * time.Minute
	longestBuild = 80 * time.Minute
)

type options struct {
	ways     []string
	focus    string // instead of the selections; empty: these
	out      string // file for the table; empty: none
	dir      string // for logs and reports; empty: a temporary one, removed at the end
	parallel int
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	o, err := parseFlags(os.Args[1:], os.Stderr)
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err == nil {
		err = conformance(ctx, o, os.Stdout)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "conformance:", err)
		os.Exit(1)
	}
}

func parseFlags(args []string, usage io.Writer) (options, error) {
	var names []string
	for _, w := range ways {
		names = append(names, w.Name)
	}
	flags := flag.NewFlagSet("conformance", flag.ContinueOnError)
	flags.SetOutput(usage)
	only := flags.String("way", strings.Join(names, ","), "ways to run by, in this order")
	focus := flags.String("focus", "", "run these specs instead of the selections: a regular expression for their names")
	out := flags.String("out", "", "also write the table to this file")
	dir := flags.String("dir", "", "keep logs, reports and the files of the clusters in this folder")
	parallel := flags.Int("parallel", 3, "selections to run at a time")
	if err := flags.Parse(args); err != nil {
		return options{}, err
	}
	o := options{ways: strings.Split(*only, ","), focus: *focus, out: *out, dir: *dir, parallel: *parallel}
	for _, name := range o.ways {
		if !slices.Contains(names, name) {
			return options{}, fmt.Errorf("-way %s: want some of %s", name, strings.Join(names, ","))
		}
	}
	if o.parallel < 1 {
		return options{}, fmt.Errorf("-parallel %d: want at least 1", o.parallel)
	}
	if _, err := regexp.Compile(o.focus); err != nil {
		return options{}, fmt.Errorf("-focus: %w", err)
	}
	return o, nil
}

// whole reports whether a run shows what the verdict needs.
func (o options) whole() bool { return o.focus == "" && len(o.ways) == len(ways) }

func conformance(ctx context.Context, o options, w io.Writer) error {
	programs, err := harness.FindBinaries(w)
	if err != nil {
		return err
	}
	if err := build(ctx, programs); err != nil {
		return err
	}
	dir, err := filepath.Abs(o.dir)
	if o.dir == "" {
		if dir, err = os.MkdirTemp("", "mvp-conformance-"); err == nil {
			defer os.RemoveAll(dir)
		}
	}
	if err != nil {
		return err
	}
	r := &runner{programs: programs, selections: selections, parallel: o.parallel, dir: dir, out: w}
	if o.focus != "" {
		r.selections = []selection{{Name: "focus", Focus: []string{o.focus}}}
	}
	ctx, cancel := context.WithTimeout(ctx, longest)
	defer cancel()
	var c comparison
	for _, way := range ways {
		if !slices.Contains(o.ways, way.Name) {
			continue
		}
		run, err := r.run(ctx, way)
		if err != nil {
			return fmt.Errorf("%s: %w", way.Name, err)
		}
		c = append(c, run)
		fmt.Fprintf(w, "%s: done in %v\n%s", way.Name, run.Took.Round(time.Second), run.failures())
	}
	table := c.markdown()
	fmt.Fprintf(w, "\n%s\n", table)
	if o.out != "" {
		if err := os.WriteFile(o.out, []byte(table), 0o644); err != nil {
			return err
		}
	}
	if !o.whole() {
		fmt.Fprintln(w, "No verdict: that takes all specs by all ways.")
		return nil
	}
	return c.verdict()
}

// build builds what is missing before anything is timed.
func build(ctx context.Context, programs *harness.Binaries) error {
	ctx, cancel := context.WithTimeout(ctx, longestBuild)
	defer cancel()
	if err := programs.Ensure(ctx, harness.V135, harness.V136); err != nil {
		return err
	}
	if _, err := programs.ControllerManager(ctx); err != nil {
		return err
	}
	_, err := programs.KubernetesE2E(ctx)
	return err
}
