package catalog

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestVerbs(t *testing.T) {
	all := []string{"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"}
	for _, name := range all {
		v := ParseVerb(name)
		if v == 0 || v.String() != name {
			t.Errorf("%s reads as %v", name, v)
		}
		if want := name == "get" || name == "list" || name == "watch"; v.ReadOnly() != want {
			t.Errorf("%s: ReadOnly() = %v", name, v.ReadOnly())
		}
		if s := ParseVerbs([]string{name}); !s.Has(v) || s.String() != name {
			t.Errorf("the set of %s is %s", name, s)
		}
	}
	for _, name := range []string{"", "GET", "proxy", "unknown", "connect"} {
		if v := ParseVerb(name); v != 0 || v.ReadOnly() {
			t.Errorf("%q reads as %v", name, v)
		}
	}
	if Verb(0).String() != "unknown" || Verb(1<<12).String() != "unknown" || (VerbGet|VerbList).String() != "unknown" {
		t.Error("what is no verb has a name")
	}
	// Order and repetition do not matter, strangers are passed over.
	s := ParseVerbs([]string{"watch", "get", "frobnicate", "get", "deletecollection"})
	if diff := cmp.Diff([]string{"get", "watch", "deletecollection"}, s.Names()); diff != "" {
		t.Error(diff)
	}
	if s.String() != "get,watch,deletecollection" || s.Has(VerbList) || s.Has(0) || Verbs(0).String() != "" {
		t.Errorf("set = %s", s)
	}
	if diff := cmp.Diff(all, ParseVerbs(all).Names()); diff != "" {
		t.Error(diff)
	}
}
