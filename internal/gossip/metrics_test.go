package gossip

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

func TestMetrics(t *testing.T) {
	m := newMesh(t)
	reg := prometheus.NewRegistry()
	n, err := New(Options{
		Name: "a", ClusterID: testCluster, BindAddress: "127.0.0.1:0", TLS: m.ca.nodeTLS("a"), Fetcher: m.origins, Registerer: reg,
		Expected: []string{"b", "c"},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	problems, err := testutil.GatherAndLint(reg)
	if err != nil || len(problems) > 0 {
		t.Error(problems, err)
	}
	want := `
# HELP mvp_gossip_expected_members Members that the configuration says should be there, the own node included; 0 if it does not say.
# TYPE mvp_gossip_expected_members gauge
mvp_gossip_expected_members 3
# HELP mvp_gossip_foreign_cluster_rejected_total Connections, packets and streams of another cluster that were rejected.
# TYPE mvp_gossip_foreign_cluster_rejected_total counter
mvp_gossip_foreign_cluster_rejected_total 0
# HELP mvp_gossip_members Members in the view by state, the own node included.
# TYPE mvp_gossip_members gauge
mvp_gossip_members{state="Draining"} 0
mvp_gossip_members{state="LocalDown"} 0
mvp_gossip_members{state="Missing"} 2
mvp_gossip_members{state="Ready"} 0
mvp_gossip_members{state="Stale"} 0
mvp_gossip_members{state="Starting"} 1
# HELP mvp_gossip_missing_members Expected members that are not alive. Alert when this stays above 0.
# TYPE mvp_gossip_missing_members gauge
mvp_gossip_missing_members 2
# HELP mvp_gossip_view_complete 1 while everything that any member may serve is known, so that a 404 is the truth.
# TYPE mvp_gossip_view_complete gauge
mvp_gossip_view_complete 0
`
	if err := testutil.GatherAndCompare(reg, strings.NewReader(want), "mvp_gossip_expected_members", "mvp_gossip_members",
		"mvp_gossip_missing_members", "mvp_gossip_view_complete", "mvp_gossip_foreign_cluster_rejected_total"); err != nil {
		t.Error(err)
	}
}

func TestMemberlistLines(t *testing.T) {
	for line, want := range map[string]string{
		"[DEBUG] memberlist: Stream connection from=1.2.3.4:5\n":           `level=DEBUG msg=memberlist line="Stream connection from=1.2.3.4:5"`,
		"[WARN] memberlist: slow\n":                                        `level=WARN msg=memberlist line=slow`,
		"[ERR] memberlist: bad\n":                                          `level=ERROR msg=memberlist line=bad`,
		"[ERROR] memberlist: bad\n":                                        `level=ERROR msg=memberlist line=bad`,
		"Err: Could not set the deadline":                                  `level=INFO msg=memberlist line="Err: Could not set the deadline"`,
		"[WARN] memberlist: Binding to public address without encryption!": "",
		"[INFO] memberlist: " + strings.Repeat("x", 5000):                  `level=INFO msg=memberlist line=` + strings.Repeat("x", maxLogLine),
	} {
		var out bytes.Buffer
		log := slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{
			Level:       slog.LevelDebug,
			ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr { return dropTime(a) },
		}))
		if n, err := (logWriter{log}).Write([]byte(line)); n != len(line) || err != nil {
			t.Errorf("%q: %d, %v", line, n, err)
		}
		if got := strings.TrimSpace(out.String()); got != want {
			t.Errorf("%q is logged as %q", line, got)
		}
	}
}

func dropTime(a slog.Attr) slog.Attr {
	if a.Key == slog.TimeKey {
		return slog.Attr{}
	}
	return a
}
