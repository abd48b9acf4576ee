package parity_test

import (
	"os"
	"regexp"
	"slices"
	"testing"
)

const fidelityFile = "../../docs/fidelity.md"

// differencePattern finds the row of a documented difference in the tables of the file.
var differencePattern = regexp.MustCompile(`(?m)^\| \*\*([^*]+)\*\* \| (both|local|forwarded) \|`)

// TestFidelityDocument holds docs/fidelity.md to the table: the same differences, on the same ways.
func TestFidelityDocument(t *testing.T) {
	data, err := os.ReadFile(fidelityFile)
	if err != nil {
		t.Fatal(err)
	}
	var named []string
	for _, m := range differencePattern.FindAllStringSubmatch(string(data), -1) {
		named = append(named, m[1]+" | "+m[2])
	}
	var want []string
	for _, d := range table {
		ways := "both"
		if len(d.ways) == 1 {
			ways = string(d.ways[0])
		}
		want = append(want, d.id+" | "+ways)
		if d.why == "" {
			t.Errorf("%s: no reason", d.id)
		}
	}
	for _, w := range want {
		if !slices.Contains(named, w) {
			t.Errorf("docs/fidelity.md does not name %q", w)
		}
	}
	for _, n := range named {
		if !slices.Contains(want, n) {
			t.Errorf("docs/fidelity.md names %q, which is not in the table of documented_test.go", n)
		}
	}
}
