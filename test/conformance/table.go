//go:build linux

package main

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

const (
	// fewest is how many specs have to be compared for the comparison to say something.
	fewest = 100
	// fewestRequests is how many requests a node must have answered for a run to have gone through it. A run is thousands.
	fewestRequests = 1000
	// leastForwarded is the part of the requests of a forwarded run that has to have been forwarded, in percent. What is not is local by
	// design: custom resources, health checks, metrics.
	leastForwarded = 90
	// leastServed is the part of these that the other node has to have counted, too, in percent: all but those whose client left at once.
	leastServed = 95
)

// comparison is what several runs of the same specs show. The first run is what the others are held against.
type comparison []Run

// passed returns, for every spec of a run, whether it passed.
func (r Run) passed() map[string]bool {
	all := map[string]bool{}
	for _, s := range r.Specs {
		all[s.Name] = s.Passed
	}
	return all
}

// missing returns the specs that passed in the first run and not in this one, whether they failed or did not run.
func (c comparison) missing(r Run) []string {
	passed := r.passed()
	var names []string
	for _, s := range c[0].Specs {
		if s.Passed && !passed[s.Name] {
			names = append(names, s.Name)
		}
	}
	slices.Sort(names)
	return names
}

// verdict returns everything that must not be, joined; nil if the runs show that mvp-node is not noticed.
func (c comparison) verdict() error {
	var errs []error
	compared := 0
	for _, s := range c[0].Specs {
		if s.Passed {
			compared++
		}
	}
	if compared < fewest {
		errs = append(errs, fmt.Errorf("only %d specs passed %s: want at least %d to compare", compared, c[0].Way, fewest))
	}
	for _, r := range c[1:] {
		if n := len(c.missing(r)); n > 0 {
			errs = append(errs, fmt.Errorf("%d specs that passed %s did not pass %s", n, c[0].Way, r.Way))
		}
	}
	for _, r := range c {
		w := ways[slices.IndexFunc(ways, func(w way) bool { return w.Name == r.Way })]
		t := r.Traffic
		if w.Node && t.Entered < fewestRequests {
			errs = append(errs, fmt.Errorf("%s: the node entered has answered %d requests: want at least %d for the tests to have gone through it",
				r.Way, t.Entered, fewestRequests))
		}
		switch forwards := w.Host != newer; {
		case forwards && t.Forwarded*100 < t.Entered*leastForwarded:
			errs = append(errs, fmt.Errorf("%s: %d of %d requests were forwarded: want %d%%", r.Way, t.Forwarded, t.Entered, leastForwarded))
		case forwards && t.Served*100 < t.Forwarded*leastServed:
			errs = append(errs, fmt.Errorf("%s: of %d forwarded requests the other node has counted only %d", r.Way, t.Forwarded, t.Served))
		}
	}
	return errors.Join(errs...)
}

// markdown shows all of it, without a machine's paths or the time of day, so that two runs can be compared.
func (c comparison) markdown() string {
	var b strings.Builder
	c.writeSpecs(&b)
	c.writeTraffic(&b)
	c.writeDifferences(&b)
	return b.String()
}

func (c comparison) writeSpecs(b *strings.Builder) {
	line := func(cells ...string) { fmt.Fprintf(b, "| %s |\n", strings.Join(cells, " | ")) }
	head, rule := []string{"specs of", "run"}, []string{"---", "---:"}
	for _, r := range c {
		head, rule = append(head, "passed "+r.Way), append(rule, "---:")
	}
	line(head...)
	line(rule...)
	ran := map[string]int{}
	passed := make([]map[string]int, len(c))
	for i, r := range c {
		passed[i] = map[string]int{}
		for _, s := range r.Specs {
			if s.Passed {
				passed[i][s.sig()]++
			}
		}
	}
	for _, s := range c[0].Specs {
		ran[s.sig()]++
	}
	row := func(name string, count func(map[string]int) int) {
		cells := []string{name, fmt.Sprint(count(ran))}
		for i := range c {
			cells = append(cells, fmt.Sprint(count(passed[i])))
		}
		line(cells...)
	}
	for _, sig := range slices.Sorted(maps.Keys(ran)) {
		row(sig, func(m map[string]int) int { return m[sig] })
	}
	row("**all**", func(m map[string]int) (sum int) {
		for _, n := range m {
			sum += n
		}
		return sum
	})
}

func (c comparison) writeTraffic(b *strings.Builder) {
	b.WriteString("\n| way | time | requests through the node | forwarded by it | answered to the end | served for it, the other node says | errors it made itself |\n" +
		"|---|---:|---:|---:|---:|---:|---:|\n")
	for _, r := range c {
		took := r.Took.Round(time.Second)
		if t := r.Traffic; t.Entered > 0 {
			fmt.Fprintf(b, "| %s | %v | %d | %d | %d | %d | %d |\n", r.Way, took, t.Entered, t.Forwarded, t.Whole, t.Served, t.Errors)
		} else {
			fmt.Fprintf(b, "| %s | %v | | | | | |\n", r.Way, took)
		}
	}
	for _, r := range c {
		if len(r.Routes) == 0 {
			continue
		}
		var parts []string
		for _, route := range slices.SortedFunc(maps.Keys(r.Routes), func(x, y string) int { return r.Routes[y] - r.Routes[x] }) {
			parts = append(parts, fmt.Sprintf("%s %d", route, r.Routes[route]))
		}
		fmt.Fprintf(b, "\nRouting decisions of %s: %s.\n", r.Way, strings.Join(parts, ", "))
	}
}

// writeDifferences lists, by name, what is not the same in all runs, what failed directly, and what needed another attempt.
func (c comparison) writeDifferences(b *strings.Builder) {
	list := func(title string, names []string) {
		if len(names) == 0 {
			fmt.Fprintf(b, "\n%s: none.\n", title)
			return
		}
		fmt.Fprintf(b, "\n%s:\n\n", title)
		for _, name := range names {
			fmt.Fprintf(b, "- `%s`\n", name)
		}
	}
	for _, r := range c[1:] {
		list(fmt.Sprintf("Passed %s and did not pass %s", c[0].Way, r.Way), c.missing(r))
	}
	var failed []string
	for _, s := range c[0].Specs {
		if !s.Passed {
			failed = append(failed, s.Name)
		}
	}
	slices.Sort(failed)
	list("Did not pass "+c[0].Way+", so that nothing is held against them", failed)
	for _, r := range c {
		var again []string
		for _, s := range r.Specs {
			if s.Passed && s.Attempts > 1 {
				again = append(again, s.Name)
			}
		}
		slices.Sort(again)
		list("Passed "+r.Way+" at the second attempt only", again)
	}
}

// failures tells, for a person who has to find out why, what the specs that failed said first, and those that passed at a second attempt.
func (r Run) failures() string {
	var b strings.Builder
	for _, s := range r.Specs {
		if s.Message != "" {
			fmt.Fprintf(&b, "%s: %s\n    passed %v, attempts %d, %v: %s\n", r.Way, s.Name, s.Passed, s.Attempts, s.Took.Round(100*time.Millisecond),
				strings.ReplaceAll(fmt.Sprintf("%.600s", s.Message), "\n", "\n    "))
		}
	}
	return b.String()
}
