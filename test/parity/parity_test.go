// Package parity_test proves that no client can tell a request that mvp-node serves from one sent straight to the serving
// kube-apiserver, but for the differences in the table of documented_test.go, which docs/fidelity.md explains.
//
// Two whole nodes run in this process, each before a recording apiserver (test/fake). The same bytes are sent three ways: to the
// apiserver that serves the resource, through the node before it, and through the other node, which forwards; each by HTTP/1.1 and by
// HTTP/2. What arrived at the apiserver and what came back are compared, field by field.
//
// Cases are named (named_*_test.go) or generated (generate_test.go). MVP_PARITY_SEED, a number, chooses the generated ones,
// MVP_PARITY_CASES how many, MVP_PARITY_ONLY, a regular expression, which cases run at all.
package parity_test

import (
	"fmt"
	"log/slog"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"
	"k8s.io/klog/v2"

	"github.com/mvp-mesh/mvp-node/test/fake"
)

func TestMain(tm *testing.M) {
	klog.SetSlogLogger(slog.New(slog.DiscardHandler)) // certificates that are followed, selectors that cannot be read
	goleak.VerifyTestMain(tm)
}

const (
	defaultSeed  = 20200131
	defaultCases = 1000 // each by two protocols, and two or three ways
	raceCases    = 300  // under the race detector, which makes everything several times as long
	// workers send at the same time. More than there are cores, as a forward waits now and then.
	workers = 6
)

// setting reads a number from the environment.
func setting(t *testing.T, name string, value uint64) uint64 {
	t.Helper()
	s := os.Getenv(name)
	if s == "" {
		return value
	}
	n, err := strconv.ParseUint(s, 10, 63)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return n
}

func TestParity(t *testing.T) {
	usual := uint64(defaultCases)
	if raceDetector {
		usual = raceCases
	}
	seed, n := setting(t, "MVP_PARITY_SEED", defaultSeed), setting(t, "MVP_PARITY_CASES", usual)
	only := os.Getenv("MVP_PARITY_ONLY")
	pattern, err := regexp.Compile(only)
	if err != nil {
		t.Fatal(err)
	}
	w := newWorld(t)
	cases := append(namedCases(), generate(seed, int(n))...)
	h := &harness{t: t, world: w, needed: map[string]int{}}
	todo := make(chan *testCase)
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			cl := w.clients()
			defer cl.close()
			for c := range todo {
				for _, p := range c.protocols() {
					h.compare(c, p, cl)
				}
			}
		})
	}
	seen := map[string]bool{}
	for _, c := range cases {
		if seen[c.name] {
			t.Errorf("two cases are named %q", c.name)
		}
		seen[c.name] = true
		if pattern.MatchString(c.name) {
			h.cases++
			todo <- c
		}
	}
	close(todo)
	wg.Wait()
	for _, s := range append(w.servers["a"].Stray(), w.servers["b"].Stray()...) {
		t.Errorf("a request that should not have come: %s", s)
	}
	t.Logf("seed %d: %d cases, %d requests, %d comparisons of %d fields; %d documented differences, %d others",
		seed, h.cases, h.requests, h.comparisons, h.fields, h.allowed, h.found)
	if only != "" {
		return
	}
	for _, d := range table {
		if t.Logf("%6d times: %s", h.needed[d.id], d.id); h.needed[d.id] == 0 {
			t.Errorf("no case needs the documented difference %q", d.id)
		}
	}
}

// harness counts and reports.
type harness struct {
	t     *testing.T
	world *world
	cases int // of the goroutine that hands them out

	mu                                            sync.Mutex
	requests, comparisons, fields, allowed, found int
	needed                                        map[string]int // by documented difference
}

// compare sends a case all its ways by one protocol.
func (h *harness) compare(c *testCase, p protocol, cl *clients) {
	want := c.run(cl, direct, p)
	wanted := want.facts(c.script.Read == fake.ReadAll)
	h.count(func() { h.requests++ })
	if len(want.problems) > 0 {
		h.report(c, p, direct, []difference{{field: fieldProblems, got: want.problems}}, &want)
		return
	}
	for _, v := range c.ways()[1:] {
		have := c.run(cl, v, p)
		facts := have.facts(c.script.Read == fake.ReadAll)
		diffs, fields := differences(wanted, facts)
		h.count(func() {
			h.requests++
			h.comparisons++
			h.fields += fields
		})
		if i := c.insteadOn(v); i != nil {
			if err := i.check(have); err != nil {
				h.report(c, p, v, []difference{{field: i.difference, direct: []string{"(as documented)"}, got: []string{err.Error()}}}, &have)
				continue
			}
			h.count(func() {
				h.allowed++
				h.needed[i.difference]++
			})
			continue
		}
		var bad []difference
		for _, d := range diffs {
			if id := h.documented(&compared{d, c, h.world, v, p, &want, &have}); id != "" {
				h.count(func() {
					h.allowed++
					h.needed[id]++
				})
				continue
			}
			bad = append(bad, d)
		}
		if len(bad) > 0 {
			h.report(c, p, v, bad, &have)
		}
	}
}

func (h *harness) count(f func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f()
}

// documented returns the ID of the entry that allows a difference, "" if none does.
func (h *harness) documented(d *compared) string {
	if len(d.want.arrived) == 0 || len(d.have.arrived) == 0 {
		// Nothing of a request to compare, so nothing to say about it but that it did not come.
		if d.field == fieldArrived || strings.HasPrefix(d.field, "request ") {
			return ""
		}
	}
	for _, e := range table {
		for _, v := range e.ways {
			if v == d.way && e.allow != nil && e.allow(d) {
				return e.id
			}
		}
	}
	return ""
}

func (h *harness) report(c *testCase, p protocol, v way, bad []difference, have *outcome) {
	var b strings.Builder
	fmt.Fprintf(&b, "%s, %s by %s:", c, v, p)
	for _, d := range bad {
		fmt.Fprintf(&b, "\n  %s\n    direct: %s\n    here:   %s", d.field, show(d.direct), show(d.got))
	}
	if have.answer.why != "" {
		fmt.Fprintf(&b, "\n  (the client: %s)", have.answer.why)
	}
	h.count(func() { h.found += len(bad) })
	h.t.Error(b.String())
}

// show writes values for people.
func show(values []string) string {
	if values == nil {
		return "(absent)"
	}
	out := make([]string, len(values))
	for i, v := range values {
		if out[i] = strconv.Quote(v); len(v) > 300 {
			out[i] = fmt.Sprintf("%.300q... (%d bytes)", v, len(v))
		}
	}
	return strings.Join(out, ", ")
}
