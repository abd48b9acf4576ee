//go:build linux

package main

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// runs returns what a good run by all ways gives, with n specs.
func runs(n int) comparison {
	var c comparison
	for _, w := range ways {
		r := Run{Way: w.Name, Took: 90*time.Second + 400*time.Millisecond}
		for i := range n {
			sig := []string{"sig-apps", "sig-auth"}[i%2]
			r.Specs = append(r.Specs, Spec{Name: fmt.Sprintf("[%s] spec %d", sig, i), Passed: true, Attempts: 1})
		}
		switch w.Name {
		case "local":
			r.Traffic = Traffic{Entered: 5000}
		case "forwarded":
			r.Traffic = Traffic{Entered: 6000, Forwarded: 5500, Whole: 5000, Served: 5400}
			r.Routes = map[string]int{"Forward Preferred": 5400, "Forward ServedByPeer": 100, "Local ServedLocally": 500}
		}
		c = append(c, r)
	}
	return c
}

func TestVerdict(t *testing.T) {
	const direct, local, forwarded = 0, 1, 2
	for _, c := range []struct {
		name   string
		change func(c comparison)
		want   []string // pieces of the error; none: no error
	}{
		{"all well", func(comparison) {}, nil},
		{"one failed locally", func(c comparison) { c[local].Specs[7].Passed = false }, []string{"1 specs that passed direct did not pass local"}},
		{"one failed forwarded", func(c comparison) { c[forwarded].Specs[7].Passed = false }, []string{"did not pass forwarded"}},
		{"some did not run forwarded", func(c comparison) { c[forwarded].Specs = c[forwarded].Specs[2:] }, []string{"2 specs that passed direct did not pass forwarded"}},
		{"one failed by all ways", func(c comparison) {
			for i := range c {
				c[i].Specs[3].Passed = false
			}
		}, nil},
		{"one failed directly only", func(c comparison) { c[direct].Specs[3].Passed = false }, nil},
		{"second attempts", func(c comparison) { c[forwarded].Specs[3].Attempts = 2 }, nil},
		{"too few", func(c comparison) {
			for i := range 21 {
				c[direct].Specs[i].Passed = false
			}
		}, []string{"only 99 specs passed direct"}},
		{"nothing went through the local node", func(c comparison) { c[local].Traffic.Entered = 12 }, []string{"local: the node entered has answered 12 requests"}},
		{"little was forwarded", func(c comparison) { c[forwarded].Traffic.Forwarded = 5300 }, []string{"forwarded: 5300 of 6000 requests were forwarded"}},
		{"the other node knows of nothing", func(c comparison) { c[forwarded].Traffic.Served = 3 }, []string{"has counted only 3"}},
		{"several at once", func(c comparison) {
			c[local].Specs[0].Passed = false
			c[forwarded].Traffic = Traffic{}
		}, []string{"did not pass local", "forwarded: the node entered has answered 0 requests"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			all := runs(120)
			c.change(all)
			err := all.verdict()
			if (err == nil) != (len(c.want) == 0) {
				t.Fatalf("verdict: %v, want %q", err, c.want)
			}
			for _, piece := range c.want {
				if !strings.Contains(err.Error(), piece) {
					t.Errorf("verdict: %v, want %q in it", err, piece)
				}
			}
			if err != nil && len(strings.Split(err.Error(), "\n")) != len(c.want) {
				t.Errorf("verdict says more than it should: %v", err)
			}
		})
	}
}

func TestMarkdown(t *testing.T) {
	c := runs(5)
	c[0].Specs[1].Passed = false
	c[1].Specs[2].Attempts = 2
	c[2].Specs[4].Passed = false
	const want = "| specs of | run | passed direct | passed local | passed forwarded |\n" +
		"| --- | ---: | ---: | ---: | ---: |\n" +
		"| sig-apps | 3 | 3 | 3 | 2 |\n" +
		"| sig-auth | 2 | 1 | 2 | 2 |\n" +
		"| **all** | 5 | 4 | 5 | 4 |\n" +
		"\n| way | time | requests through the node | forwarded by it | answered to the end | served for it, the other node says | errors it made itself |\n" +
		"|---|---:|---:|---:|---:|---:|---:|\n" +
		"| direct | 1m30s | | | | | |\n" +
		"| local | 1m30s | 5000 | 0 | 0 | 0 | 0 |\n" +
		"| forwarded | 1m30s | 6000 | 5500 | 5000 | 5400 | 0 |\n" +
		"\nRouting decisions of forwarded: Forward Preferred 5400, Local ServedLocally 500, Forward ServedByPeer 100.\n" +
		"\nPassed direct and did not pass local: none.\n" +
		"\nPassed direct and did not pass forwarded:\n\n- `[sig-apps] spec 4`\n" +
		"\nDid not pass direct, so that nothing is held against them:\n\n- `[sig-auth] spec 1`\n" +
		"\nPassed direct at the second attempt only: none.\n" +
		"\nPassed local at the second attempt only:\n\n- `[sig-apps] spec 2`\n" +
		"\nPassed forwarded at the second attempt only: none.\n"
	if diff := cmp.Diff(want, c.markdown()); diff != "" {
		t.Errorf("table (-want +got):\n%s", diff)
	}
}

// One way alone is for looking into something; it has a table as well.
func TestMarkdownOfOneWay(t *testing.T) {
	got := runs(3)[2:].markdown()
	if !strings.Contains(got, "| **all** | 3 | 3 |\n") || strings.Contains(got, "did not pass") {
		t.Errorf("table:\n%s", got)
	}
}

func TestFailures(t *testing.T) {
	r := Run{Way: "local", Specs: []Spec{
		{Name: "a", Passed: true, Attempts: 1},
		{Name: "b", Attempts: 2, Took: 1234 * time.Millisecond, Message: "one\ntwo"},
	}}
	if got, want := r.failures(), "local: b\n    passed false, attempts 2, 1.2s: one\n    two\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestParseFlags(t *testing.T) {
	for _, c := range []struct {
		name    string
		args    []string
		whole   bool
		wantErr bool
	}{
		{"nothing", nil, true, false},
		{"one way", []string{"-way", "local"}, false, false},
		{"a focus", []string{"-focus", "Watchers"}, false, false},
		{"no such way", []string{"-way", "sideways"}, false, true},
		{"no expression", []string{"-focus", "("}, false, true},
		{"none at a time", []string{"-parallel", "0"}, false, true},
	} {
		o, err := parseFlags(c.args, &strings.Builder{})
		if (err != nil) != c.wantErr || err == nil && o.whole() != c.whole {
			t.Errorf("%s: %+v, %v", c.name, o, err)
		}
	}
}
