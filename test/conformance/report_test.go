//go:build linux

package main

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestParseReport(t *testing.T) {
	const head = `[{"SuiteDescription": "Kubernetes e2e suite", "SpecReports": [`
	const began = `{"LeafNodeType": "SynchronizedBeforeSuite", "ContainerHierarchyTexts": null, "State": "passed"},`
	for _, c := range []struct {
		name, report string
		want         []Spec
		wantErr      string
	}{
		{
			name: "passed, failed, not run",
			report: head + began + `
				{"ContainerHierarchyTexts": ["[sig-apps] CronJob"], "LeafNodeType": "It", "LeafNodeText": "should a [Conformance]",
				 "State": "passed", "RunTime": 1500000000, "NumAttempts": 1},
				{"ContainerHierarchyTexts": ["[sig-auth] X", "when y"], "LeafNodeType": "It", "LeafNodeText": "b",
				 "State": "timedout", "RunTime": 2000000000, "NumAttempts": 1, "Failure": {"Message": " too late\n"}},
				{"ContainerHierarchyTexts": ["[sig-node] Z"], "LeafNodeType": "It", "LeafNodeText": "c", "State": "skipped", "NumAttempts": 0},
				{"ContainerHierarchyTexts": ["[sig-node] Z"], "LeafNodeType": "It", "LeafNodeText": "d", "State": "pending", "NumAttempts": 0},
				{"LeafNodeType": "ReportAfterSuite", "LeafNodeText": "Log Check", "State": "failed"}]}]`,
			want: []Spec{
				{Name: "[sig-apps] CronJob should a [Conformance]", Passed: true, Attempts: 1, Took: 1500 * time.Millisecond},
				{Name: "[sig-auth] X when y b", Attempts: 1, Took: 2 * time.Second, Message: "too late"},
			},
		},
		{
			name: "passed at the second attempt",
			report: head + began + `
				{"ContainerHierarchyTexts": ["[sig-cli] K"], "LeafNodeType": "It", "LeafNodeText": "a", "State": "passed", "NumAttempts": 2,
				 "AdditionalFailures": [{"State": "failed", "Failure": {"Message": "the first"}}]}]}]`,
			want: []Spec{{Name: "[sig-cli] K a", Passed: true, Attempts: 2, Message: "the first"}},
		},
		{
			name:    "never began",
			report:  head + `{"LeafNodeType": "SynchronizedBeforeSuite", "State": "failed", "Failure": {"Message": "no such host"}}]}]`,
			wantErr: "SynchronizedBeforeSuite failed: no such host",
		},
		{name: "cut off", report: head, wantErr: "report of ginkgo: "},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := parseReport([]byte(c.report))
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("specs (-want +got):\n%s", diff)
			}
			if (err == nil) != (c.wantErr == "") || err != nil && !strings.Contains(err.Error(), c.wantErr) {
				t.Errorf("error %v, want %q", err, c.wantErr)
			}
		})
	}
}

func TestReadReportThatIsNotThere(t *testing.T) {
	if _, err := readReport(t.TempDir() + "/report.json"); err == nil || !strings.Contains(err.Error(), "no report") {
		t.Errorf("error %v", err)
	}
}

func TestSIG(t *testing.T) {
	for name, want := range map[string]string{
		"[sig-apps] CronJob should [Conformance]": "sig-apps",
		"no brackets":     "other",
		"[sig-apps only ": "other",
	} {
		if got := (Spec{Name: name}).sig(); got != want {
			t.Errorf("sig of %q is %q, want %q", name, got, want)
		}
	}
}

func TestCountLog(t *testing.T) {
	const log = "Random Seed: 1\n\nWill run 7 of 7579 specs\n••\n------\n• [FAILED] [33.651 seconds]\n[sig-x] y\n------\n•••\n------\n" +
		"• [TIMEDOUT] [1 seconds]\n"
	passed, failed, total := countLog([]byte(log))
	if passed != 5 || failed != 2 || total != 7 {
		t.Errorf("%d passed, %d failed, %d in all; want 5, 2, 7", passed, failed, total)
	}
	if passed, failed, total = countLog(nil); passed != 0 || failed != 0 || total != 0 {
		t.Errorf("of nothing: %d, %d, %d", passed, failed, total)
	}
}
