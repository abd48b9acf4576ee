//go:build linux

package main

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/mvp-mesh/mvp-node/test/harness"
)

// series are the samples of a node's /metrics by the text before the value: name{label="value",...}. Label values of ours hold
// neither spaces nor quotes, so the text need not be taken apart further.
type series map[string]float64

// scrape reads the metrics of a node.
func scrape(ctx context.Context, n *harness.Node) (series, error) {
	client := &harness.Client{URL: n.AdminURL(), HTTP: &http.Client{Transport: &http.Transport{}}}
	defer client.Close()
	answer, err := client.Get(ctx, "/metrics")
	if err != nil {
		return nil, err
	}
	if answer.Status != http.StatusOK {
		return nil, fmt.Errorf("GET /metrics: %d", answer.Status)
	}
	return parseMetrics(string(answer.Body)), nil
}

func parseMetrics(text string) series {
	s := series{}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		at := strings.LastIndexByte(line, ' ')
		if at < 0 || strings.HasPrefix(line, "#") {
			continue
		}
		if value, err := strconv.ParseFloat(line[at+1:], 64); err == nil {
			s[line[:at]] = value
		}
	}
	return s
}

// sum adds up the series of a name that have all the given labels, each written label="value".
func (s series) sum(name string, labels ...string) float64 {
	total := 0.0
	for key, value := range s {
		own, rest, _ := strings.Cut(key, "{")
		if own != name {
			continue
		}
		has := "," + strings.TrimSuffix(rest, "}") + ","
		all := true
		for _, label := range labels {
			all = all && strings.Contains(has, ","+label+",")
		}
		if all {
			total += value
		}
	}
	return total
}

// Traffic is what the nodes counted during a run.
type Traffic struct {
	Entered   int // requests that the front which the run entered by has answered
	Forwarded int // of these, sent to the other node; the rest was for the local apiserver, or needed no apiserver
	Whole     int // of the forwarded ones, those whose answer got to its end: all but the watches that the client left
	Served    int // requests that the node of the newer apiserver has answered for a peer, by its own count
	Errors    int // answers that the entered front made itself instead of an apiserver
}

// pair are the metrics, at one time, of the node that requests enter by and of the node before the newer apiserver. They may be the
// same node.
type pair struct{ entered, newer series }

func scrapeBoth(ctx context.Context, c *harness.Cluster, w way) (p pair, err error) {
	if p.entered, err = scrape(ctx, c.Host(w.Host).Node); err != nil {
		return pair{}, fmt.Errorf("metrics of %s: %w", w.Host, err)
	}
	if p.newer, err = scrape(ctx, c.Host(newer).Node); err != nil {
		return pair{}, fmt.Errorf("metrics of %s: %w", newer, err)
	}
	return p, nil
}

// traffic takes the counts between two times.
func traffic(before, after pair) Traffic {
	between := func(a, b series, name string, labels ...string) int {
		return int(b.sum(name, labels...) - a.sum(name, labels...))
	}
	return Traffic{
		Entered:   between(before.entered, after.entered, "mvp_front_requests_total"),
		Forwarded: between(before.entered, after.entered, "mvp_front_requests_total", `outcome="Forward"`),
		Whole:     between(before.entered, after.entered, "mvp_front_forwarded_total"),
		Errors:    between(before.entered, after.entered, "mvp_front_errors_total"),
		// A watch that the client leaves counts as canceled: it has been served all the same.
		Served: between(before.newer, after.newer, "mvp_forward_served_total", `result="OK"`) +
			between(before.newer, after.newer, "mvp_forward_served_total", `result="Canceled"`),
	}
}

// routes counts the requests of a front between two scrapes by outcome and reason of the routing decision.
func routes(before, after series) map[string]int {
	counts := map[string]int{}
	for key, value := range after {
		name, rest, _ := strings.Cut(key, "{")
		if name != "mvp_front_requests_total" {
			continue
		}
		if n := int(value - before[key]); n > 0 {
			counts[label(rest, "outcome")+" "+label(rest, "reason")] += n
		}
	}
	return counts
}

// label returns the value of a label in the text between the braces.
func label(labels, name string) string {
	_, rest, _ := strings.Cut(","+labels, ","+name+`="`)
	value, _, _ := strings.Cut(rest, `"`)
	return value
}
