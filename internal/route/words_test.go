package route

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/mvp-mesh/mvp-node/internal/catalog"
)

// Every enum has one spelling, which reads back to the same value, and no two share one.
func TestSpellings(t *testing.T) {
	seen := map[string]bool{}
	unique := func(kind, name string) {
		if name == "" || name == "Unknown" || seen[kind+name] {
			t.Errorf("%s %q is empty, unknown or taken", kind, name)
		}
		seen[kind+name] = true
	}
	for s := Starting; s <= Missing; s++ {
		unique("state", s.String())
		if ParseState(s.String()) != s {
			t.Errorf("state %s reads back as %s", s, ParseState(s.String()))
		}
	}
	for m := Enabled; m <= Disabled; m++ {
		unique("mode", m.String())
		if ParseMode(m.String()) != m {
			t.Errorf("mode %s reads back as %s", m, ParseMode(m.String()))
		}
	}
	for _, c := range Causes() {
		unique("cause", c.String())
		if ParseCause(c.String()) != c {
			t.Errorf("cause %s reads back as %s", c, ParseCause(c.String()))
		}
	}
	for _, r := range Reasons() {
		unique("reason", r.String())
	}
	for o := Local; o <= Unavailable; o++ {
		unique("outcome", o.String())
	}
	for _, zero := range []interface{ String() string }{State(0), Mode(0), Reason(0), Outcome(0), State(99), Mode(99), Reason(99), Outcome(99), Cause(99)} {
		if zero.String() != "Unknown" {
			t.Errorf("%T: %q, want Unknown", zero, zero)
		}
	}
	if CauseNone.String() != "" || ParseCause("") != CauseNone || ParseCause("Nonsense") != CauseNone {
		t.Error("no cause is spelled as none")
	}
	if ParseState("Unknown") != 0 || ParseMode("Unknown") != 0 || ParseState("") != 0 || ParseMode("enabled") != 0 {
		t.Error("a name that is none was understood")
	}
}

// DESIGN.md "Causes" is the list; a new cause must be put there and in the error tables.
func TestCauses(t *testing.T) {
	var got []string
	for _, c := range Causes() {
		got = append(got, c.String())
	}
	want := []string{
		"ViewIncomplete", "NoPeerAvailable", "PeerTLS", "BreakerOpen", "PeerRefused", "NotServed", "LoopDetected", "LocalUnavailable",
		"AuthnUnavailable", "PeerBusy", "UserShare", "DeadlineBeforeDispatch", "OutcomeUnknown", "AssertionDenied",
		"BadAnswer",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// CASES R-08: connect subresources change things whatever their verb.
func TestReadOnly(t *testing.T) {
	for _, tc := range []struct {
		subresource string
		verb        catalog.Verb
		want        bool
	}{
		{"", catalog.VerbGet, true},
		{"", catalog.VerbList, true},
		{"", catalog.VerbWatch, true},
		{"log", catalog.VerbGet, true},
		{"status", catalog.VerbGet, true},
		{"exec", catalog.VerbGet, false},
		{"attach", catalog.VerbGet, false},
		{"portforward", catalog.VerbGet, false},
		{"proxy", catalog.VerbGet, false},
		{"", catalog.VerbCreate, false},
		{"", catalog.VerbUpdate, false},
		{"", catalog.VerbPatch, false},
		{"", catalog.VerbDelete, false},
		{"", catalog.VerbDeleteCollection, false},
		{"", 0, false},
	} {
		a := Attributes{Resource: true, Key: catalog.Key{Version: "v1", Resource: "pods", Subresource: tc.subresource}, Verb: tc.verb}
		if got := a.ReadOnly(); got != tc.want {
			t.Errorf("%s on %s: ReadOnly() = %v", tc.verb, a.Key, got)
		}
	}
}

// A request that stays local costs no memory, whatever the size of the mesh; see DESIGN.md "How fast".
func TestDecideLocalDoesNotAllocate(t *testing.T) {
	s := scenario{self: "a"}
	for _, line := range [][]string{{"a", "Ready", "v1/pods"}, {"b", "Ready", "v1/pods"}, {"c", "Ready", "catalog=unknown"}} {
		m, err := parseMember(line)
		if err != nil {
			t.Fatal(err)
		}
		s.members = append(s.members, m)
	}
	v := mustView(t, s.self, s.members)
	a := Attributes{Resource: true, Key: catalog.Key{Version: "v1", Resource: "pods"}, Verb: catalog.VerbGet}
	if n := testing.AllocsPerRun(100, func() { Decide(a, v, Policy{Mode: Enabled}) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
