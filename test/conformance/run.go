//go:build linux

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/mvp-mesh/mvp-node/test/harness"
)

const (
	// suiteTimeout is after how long ginkgo interrupts the specs of a selection, which then fail, but are reported. The longest
	// selection takes a fifth of it.
	suiteTimeout = 20 * time.Minute
	// progressEvery is how often a line says how far the tests are.
	progressEvery = 20 * time.Second
)

// Run is what came of the tests by one way.
type Run struct {
	Way     string
	Specs   []Spec
	Took    time.Duration // without the start of the cluster
	Traffic Traffic
	Routes  map[string]int // requests at the entered front, by outcome and reason of the routing decision
}

// runner runs the selections.
type runner struct {
	programs   *harness.Binaries
	selections []selection
	parallel   int    // selections at a time
	dir        string // each way has a folder in here for its cluster, logs and reports
	out        io.Writer
}

// run starts a cluster, runs the tests on it by one way and takes it down again. That specs fail is part of the result and no error.
func (r *runner) run(ctx context.Context, w way) (run Run, err error) {
	dir := filepath.Join(r.dir, w.Name)
	fmt.Fprintf(r.out, "\n== %s: %s\n", w.Name, w.About)
	if err := os.MkdirAll(r.dir, 0o700); err != nil {
		return Run{}, err
	}
	// An etcd started on the data of an earlier run would bring its objects back.
	if err := os.Mkdir(dir, 0o700); err != nil {
		return Run{}, err
	}
	c, err := startCluster(ctx, filepath.Join(dir, "cluster"), r.out)
	if c != nil {
		defer func() { err = errors.Join(err, c.Close()) }()
	}
	if err != nil {
		return Run{}, err
	}
	before, err := scrapeBoth(ctx, c, w)
	if err != nil {
		return Run{}, err
	}
	start := time.Now()
	specs, err := r.tests(ctx, c, w, dir)
	if err != nil {
		return Run{}, err
	}
	run = Run{Way: w.Name, Specs: specs, Took: time.Since(start)}
	after, err := scrapeBoth(ctx, c, w)
	if err != nil {
		return Run{}, err
	}
	if w.Node {
		run.Traffic = traffic(before, after)
		run.Routes = routes(before.entered, after.entered)
	}
	return run, nil
}

// tests runs all selections, some at a time, and returns their specs in the order of the selections.
func (r *runner) tests(ctx context.Context, c *harness.Cluster, w way, dir string) ([]Spec, error) {
	results := make([][]Spec, len(r.selections))
	logs := make([]string, len(r.selections))
	for i, s := range r.selections {
		logs[i] = filepath.Join(dir, s.Name, "e2e.log")
	}
	progress, stop := context.WithCancel(ctx)
	var printer errgroup.Group
	printer.Go(func() error { printProgress(progress, r.out, w.Name, logs); return nil })
	all, ctx := errgroup.WithContext(ctx)
	all.SetLimit(r.parallel)
	for i, s := range r.selections {
		all.Go(func() (err error) {
			if err = ctx.Err(); err == nil {
				results[i], err = r.test(ctx, c, w, s, filepath.Join(dir, s.Name))
			}
			return err
		})
	}
	err := all.Wait()
	stop()
	_ = printer.Wait()
	var specs []Spec
	for _, result := range results {
		specs = append(specs, result...)
	}
	return specs, err
}

// test runs Kubernetes' test program for one selection to its end. dir is made and gets the log and the report.
func (r *runner) test(ctx context.Context, c *harness.Cluster, w way, s selection, dir string) ([]Spec, error) {
	program, err := r.programs.KubernetesE2E(ctx)
	if err != nil {
		return nil, err
	}
	kubectl, err := r.programs.Kubectl(ctx)
	if err != nil {
		return nil, err
	}
	kubeconfig, err := c.AdminKubeconfig(w.url(c))
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	report := filepath.Join(dir, "report.json")
	args := []string{
		"--kubeconfig=" + kubeconfig,
		"--kubectl-path=" + kubectl,
		"--provider=skeleton",
		"--allowed-not-ready-nodes=-1", // nothing to wait for: there is one node, and no machine behind it
		"--minStartupPods=0",
		"--dump-logs-on-failure=false",
		"--e2e-output-dir=" + dir,
		"--ginkgo.json-report=" + report,
		"--ginkgo.seed=1", // the same order by every way
		"--ginkgo.flake-attempts=" + strconv.Itoa(attempts),
		"--ginkgo.timeout=" + suiteTimeout.String(),
		"--ginkgo.poll-progress-after=1m", // what a slow spec waits for is in the log
		"--ginkgo.silence-skips",
		"--ginkgo.no-color",
	}
	for _, pattern := range s.focus() {
		args = append(args, "--ginkgo.focus="+pattern)
	}
	for _, pattern := range s.skips() {
		args = append(args, "--ginkgo.skip="+pattern)
	}
	process, err := harness.StartProcess(harness.ProcessSpec{
		Name: "tests " + w.Name + " " + s.Name, Path: program, Args: args, Dir: dir, LogFile: filepath.Join(dir, "e2e.log"),
		// kubectl keeps what it has learned from discovery under HOME; it must not find there what another run has learned.
		Env: []string{"HOME=" + dir, "KUBECONFIG=", "KUBECACHEDIR=", "KUBERNETES_SERVICE_HOST="},
	})
	if err != nil {
		return nil, err
	}
	// The exit code only says whether all specs passed. A run that broke off has left no report.
	if err := process.Wait(ctx); err != nil && ctx.Err() != nil {
		return nil, errors.Join(err, process.Kill())
	}
	specs, err := readReport(report)
	if err != nil {
		return nil, fmt.Errorf("%s: %w\n%s", process.Name(), err, process.LogTail(30))
	}
	return specs, nil
}

// printProgress prints how far the tests are, by their logs, until ctx ends.
func printProgress(ctx context.Context, out io.Writer, name string, logs []string) {
	ticker := time.NewTicker(progressEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		var passed, failed, total int
		for _, file := range logs {
			data, err := os.ReadFile(file)
			if err != nil {
				continue // its turn has not come
			}
			p, f, t := countLog(data)
			passed, failed, total = passed+p, failed+f, total+t
		}
		fmt.Fprintf(out, "%s: %d of %d specs passed so far, %d failed\n", name, passed, total, failed)
	}
}

var (
	willRun     = regexp.MustCompile(`(?m)^Will run (\d+) of \d+ specs`)
	failedLine  = regexp.MustCompile(`(?m)^• \[(FAILED|PANICKED|TIMEDOUT|INTERRUPTED)\]`)
	skippedLine = regexp.MustCompile(`(?m)^[•S] \[SKIPPED\]`)
)

// countLog says how far a run is by what ginkgo has printed so far: a dot for each spec, and more about those that did not pass.
// total is how many specs will have run in the end.
func countLog(log []byte) (passed, failed, total int) {
	if m := willRun.FindSubmatch(log); m != nil {
		total, _ = strconv.Atoi(string(m[1])) // digits
	}
	failed = len(failedLine.FindAll(log, -1))
	passed = bytes.Count(log, []byte("•")) - failed - len(skippedLine.FindAll(log, -1))
	return max(0, passed), failed, total
}
