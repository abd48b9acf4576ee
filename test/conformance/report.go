//go:build linux

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"time"
)

// Spec is what became of one spec in one run.
type Spec struct {
	Name     string // as ginkgo joins it: containers, then the spec, labels included
	Passed   bool   // at one of its attempts
	Attempts int    // 1 if it passed at once
	Took     time.Duration
	Message  string // of the first failure; empty if there was none
}

// sig is the name's first word, such as "sig-apps".
func (s Spec) sig() string {
	rest, ok := strings.CutPrefix(s.Name, "[")
	if sig, _, found := strings.Cut(rest, "]"); ok && found {
		return sig
	}
	return "other"
}

// suiteReport is the part that counts of a report by ginkgo's --ginkgo.json-report.
type suiteReport struct {
	SpecReports []struct {
		ContainerHierarchyTexts []string
		LeafNodeType            string
		LeafNodeText            string
		State                   string
		RunTime                 time.Duration // nanoseconds
		NumAttempts             int
		Failure                 failure
		AdditionalFailures      []struct{ Failure failure }
	}
}

type failure struct{ Message string }

// parseReport returns the specs that ran, in the order in which they ran. It is an error if the suite did not get to its specs.
func parseReport(data []byte) ([]Spec, error) {
	var suites []suiteReport
	if err := json.Unmarshal(data, &suites); err != nil {
		return nil, fmt.Errorf("report of ginkgo: %w", err)
	}
	var specs []Spec
	for _, suite := range suites {
		for _, r := range suite.SpecReports {
			if r.LeafNodeType != "It" {
				if strings.HasSuffix(r.LeafNodeType, "BeforeSuite") && r.State != "passed" {
					return nil, fmt.Errorf("report of ginkgo: %s %s: %.500s", r.LeafNodeType, r.State, r.Failure.Message)
				}
				continue
			}
			// What a spec skips by itself ("not supported by this provider") has shown nothing.
			if r.State == "skipped" || r.State == "pending" || r.State == "" {
				continue
			}
			first := r.Failure
			if len(r.AdditionalFailures) > 0 {
				first = r.AdditionalFailures[0].Failure
			}
			specs = append(specs, Spec{
				Name:     strings.Join(append(r.ContainerHierarchyTexts, r.LeafNodeText), " "),
				Passed:   r.State == "passed",
				Attempts: max(1, r.NumAttempts),
				Took:     r.RunTime,
				Message:  strings.TrimSpace(first.Message),
			})
		}
	}
	return specs, nil
}

func readReport(file string) ([]Spec, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("the tests left no report: %w", err)
	}
	return parseReport(data)
}
