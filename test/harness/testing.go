//go:build linux

package harness

import (
	"context"
	"os"
	"strings"
	"time"
)

// startTimeout bounds a cluster's start in a test, without the building of programs that are missing.
const startTimeout = 8 * time.Minute

// keepVariable, if set, keeps the files of clusters whose test failed.
const keepVariable = "MVP_TEST_KEEP"

// TB is the part of [testing.TB] that is used here. Package testing itself stays out of the harness and so of the demo.
type TB interface {
	Helper()
	Logf(format string, args ...any)
	Fatalf(format string, args ...any)
	Cleanup(func())
	Failed() bool
	Context() context.Context
}

// New returns a running cluster that ends with the test. If the test fails, the ends of all logs are in its output, and
// with MVP_TEST_KEEP set all files stay.
func New(t TB, o Options) *Cluster {
	t.Helper()
	if o.Progress == nil {
		o.Progress = logWriter{t}
	}
	kept := ""
	if os.Getenv(keepVariable) != "" && o.Dir == "" {
		dir, err := os.MkdirTemp("", "mvp-cluster-")
		if err != nil {
			t.Fatalf("cluster: %v", err)
		}
		o.Dir, kept = dir, dir
	}
	c, err := NewCluster(t.Context(), o)
	if err != nil {
		t.Fatalf("cluster: %v", err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			for _, d := range c.daemons() {
				if d.Process != nil {
					t.Logf("end of the log of %s:\n%s", d.Process.Name(), d.Process.LogTail(40))
				}
			}
		}
		if err := c.Close(); err != nil {
			t.Logf("closing the cluster: %v", err)
		}
		switch {
		case kept == "":
		case t.Failed():
			t.Logf("the files of the cluster are kept in %s", kept)
		default:
			os.RemoveAll(kept)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), startTimeout)
	defer cancel()
	if err := c.Start(ctx); err != nil {
		t.Fatalf("cluster: %v", err)
	}
	return c
}

// logWriter writes progress lines to the log of a test.
type logWriter struct{ t TB }

func (w logWriter) Write(line []byte) (int, error) {
	w.t.Logf("%s", strings.TrimSuffix(string(line), "\n"))
	return len(line), nil
}
