package loopguard

import (
	"errors"
	"math"
	"net/http"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestNext(t *testing.T) {
	for _, tc := range []struct {
		hop, want Hop
		err       error
		text      string
	}{
		{hop: 0, want: 1},
		{hop: 1, want: 1, err: ErrForwarded, text: "hop 1: request was forwarded already"},
		{hop: 2, want: 2, err: ErrForwarded, text: "hop 2: request was forwarded already"},
		{hop: math.MaxUint32, want: math.MaxUint32, err: ErrForwarded, text: "hop 4294967295: request was forwarded already"},
	} {
		got, err := Next(tc.hop)
		if got != tc.want || !errors.Is(err, tc.err) || err != nil && err.Error() != tc.text {
			t.Errorf("Next(%d) = %d, %v; want %d, %s", tc.hop, got, err, tc.want, tc.text)
		}
	}
}

func TestCheck(t *testing.T) {
	for _, tc := range []struct {
		hop  Hop
		err  error
		text string
	}{
		{0, ErrNoHop, "forwarded request carries no hop count"},
		{1, nil, ""},
		{2, ErrForwarded, "hop 2 of at most 1: request was forwarded already"},
		{math.MaxUint32, ErrForwarded, "hop 4294967295 of at most 1: request was forwarded already"},
	} {
		if err := Check(tc.hop); !errors.Is(err, tc.err) || err != nil && err.Error() != tc.text {
			t.Errorf("Check(%d) = %v, want %s", tc.hop, err, tc.text)
		}
	}
}

// DESIGN.md rule 2: whatever hop a request has, it arrives somewhere after at most one forward. The ingress node writes Next, the
// serving node asks Check and, having no router, could at worst call Next again.
func TestAtMostOneForward(t *testing.T) {
	for _, start := range []Hop{0, 1, 2, math.MaxUint32 - 1, math.MaxUint32} {
		forwards := 0
		for hop := start; ; forwards++ {
			next, err := Next(hop)
			if err != nil || Check(next) != nil {
				break
			}
			hop = next
		}
		if forwards > 1 || start == 0 && forwards != 1 {
			t.Errorf("a request of hop %d was forwarded %d times", start, forwards)
		}
	}
}

// CASES R-07: no mark from a client survives, in whatever letter case it comes, and nothing else is touched.
func TestStrip(t *testing.T) {
	h := http.Header{
		// As net/http makes them of what a client sends.
		"X-Kubernetes-Peer-Proxied":       {"true", "false"},
		"X-Kubernetes-Apiserver-Rerouted": {"true"},
		"X-Mvp-Node-Hop":                  {"0"},
		"X-Mvp-Node-":                     {""},
		// As code can put them into the map.
		"x-kubernetes-peer-proxied":       {"true"},
		"X-Kubernetes-APIServer-Rerouted": {"true"},
		"X-MVP-NODE-INGRESS":              {"cp-b"},

		"X-Kubernetes-Peer-Proxied-By":   {"kept"},
		"X-Kubernetes-Pf-Flowschema-Uid": {"kept"},
		"X-Mvp-Node":                     {"kept"},
		"X-Mvp-Nodes":                    {"kept"},
		"Authorization":                  {"kept"},
	}
	Strip(h)
	want := http.Header{
		"X-Kubernetes-Peer-Proxied-By":   {"kept"},
		"X-Kubernetes-Pf-Flowschema-Uid": {"kept"},
		"X-Mvp-Node":                     {"kept"},
		"X-Mvp-Nodes":                    {"kept"},
		"Authorization":                  {"kept"},
	}
	if diff := cmp.Diff(want, h); diff != "" {
		t.Error(diff)
	}
	Strip(nil)
}

// The mark is the one that released apiservers read, with the value they compare with.
func TestMark(t *testing.T) {
	h := http.Header{"X-Kubernetes-Peer-Proxied": {"false", "no"}}
	Mark(h)
	if diff := cmp.Diff(http.Header{"X-Kubernetes-Peer-Proxied": {"true"}}, h); diff != "" {
		t.Error(diff)
	}
	for _, name := range []string{HeaderPeerProxied, HeaderRerouted, prefix + "X"} {
		if http.CanonicalHeaderKey(name) != name || !IsMark(name) {
			t.Errorf("%s is not canonical, or no mark", name)
		}
	}
}

func FuzzStrip(f *testing.F) {
	f.Add("X-Kubernetes-Peer-Proxied")
	f.Add("x-mvp-node-hop")
	f.Fuzz(func(t *testing.T, name string) {
		h := http.Header{name: {"1"}}
		Strip(h)
		for left := range h {
			if IsMark(http.CanonicalHeaderKey(left)) {
				t.Errorf("%q is still there", left)
			}
		}
	})
}
