package mesh_test

import (
	"flag"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/mvp-mesh/mvp-node/internal/node"
)

var update = flag.Bool("update", false, "write docs/metrics.md")

const metricsFile = "../../docs/metrics.md"

const metricsHead = `# Metrics

The admin port serves these on ` + "`/metrics`" + `, besides the series of Go, of the process and of the libraries of Kubernetes. Label values come
from closed sets, from member names or from catalogs; nothing that a client types becomes a label. This file is written by
` + "`go test ./test/mesh -update`" + ` from the code, and a test keeps it so.

| metric | labels | meaning |
|---|---|---|
`

// descPattern reads what prometheus.Desc prints; it has no other way to be asked.
var descPattern = regexp.MustCompile(`^Desc\{fqName: "([^"]+)", help: "((?:[^"\\]|\\.)*)", unit: "[^"]*", constLabels: \{[^}]*\}, variableLabels: \{([^}]*)\}`)

// metricsReference compares docs/metrics.md with what a node registers, and holds names and help texts to Prometheus' habits.
func metricsReference(t *testing.T, n *node.Node) {
	t.Helper()
	descs := make(chan *prometheus.Desc)
	go func() {
		n.Registry().Describe(descs)
		close(descs)
	}()
	var rows []string
	for d := range descs {
		m := descPattern.FindStringSubmatch(d.String())
		if m == nil {
			t.Fatalf("cannot read %s", d)
		}
		name, help, labels := m[1], strings.ReplaceAll(m[2], `\"`, `"`), m[3]
		if !strings.HasPrefix(name, "mvp_") && !strings.HasPrefix(name, "grpc_") {
			t.Errorf("%s does not begin with mvp_", name)
		}
		if help == "" || strings.Contains(help, "|") {
			t.Errorf("%s: help text %q", name, help)
		}
		if labels != "" {
			labels = "`" + strings.ReplaceAll(labels, ",", "`, `") + "`"
		}
		rows = append(rows, "| `"+name+"` | "+labels+" | "+help+" |\n")
	}
	slices.Sort(rows)
	want := metricsHead + strings.Join(slices.Compact(rows), "")
	if *update {
		if err := os.WriteFile(metricsFile, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(metricsFile)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(strings.Split(want, "\n"), strings.Split(string(got), "\n")); d != "" {
		t.Errorf("docs/metrics.md is not what the code says; go test ./test/mesh -update (-code +file):\n%s", d)
	}
}
