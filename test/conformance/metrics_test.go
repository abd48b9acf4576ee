//go:build linux

package main

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

const exposition = `# HELP mvp_front_requests_total Requests answered.
# TYPE mvp_front_requests_total counter
mvp_front_requests_total{code="200",outcome="Forward",reason="Preferred"} 40
mvp_front_requests_total{code="404",outcome="Forward",reason="Preferred"} 2
mvp_front_requests_total{code="200",outcome="Local",reason="ServedLocally"} 8
mvp_front_forwarded_total{peer="cp-b"} 41
mvp_front_errors_total{cause="None"} 0
mvp_front_errors_total{cause="PeerGone"} 1
mvp_forward_served_total{result="OK"} 1.1e+02
mvp_forward_served_total{result="Canceled"} 7
mvp_front_panics_total 0
nonsense
`

func TestParseMetrics(t *testing.T) {
	s := parseMetrics(exposition)
	for _, c := range []struct {
		name   string
		labels []string
		want   float64
	}{
		{"mvp_front_requests_total", nil, 50},
		{"mvp_front_requests_total", []string{`outcome="Forward"`}, 42},
		{"mvp_front_requests_total", []string{`outcome="Forward"`, `code="404"`}, 2},
		{"mvp_front_requests_total", []string{`outcome="For"`}, 0},
		{"mvp_forward_served_total", []string{`result="OK"`}, 110},
		{"mvp_front_panics_total", nil, 0},
		{"mvp_front", nil, 0},
	} {
		if got := s.sum(c.name, c.labels...); got != c.want {
			t.Errorf("sum of %s%v is %v, want %v", c.name, c.labels, got, c.want)
		}
	}
	if len(s) != 9 {
		t.Errorf("%d series, want 9", len(s))
	}
}

func TestTraffic(t *testing.T) {
	none, all := series{}, parseMetrics(exposition)
	want := Traffic{Entered: 50, Forwarded: 42, Whole: 41, Served: 117, Errors: 1}
	if diff := cmp.Diff(want, traffic(pair{none, none}, pair{all, all})); diff != "" {
		t.Errorf("since the start (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(Traffic{}, traffic(pair{all, all}, pair{all, all})); diff != "" {
		t.Errorf("nothing has happened (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]int{"Forward Preferred": 42, "Local ServedLocally": 8}, routes(none, all)); diff != "" {
		t.Errorf("routes (-want +got):\n%s", diff)
	}
}
