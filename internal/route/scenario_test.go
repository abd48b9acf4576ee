package route

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/mvp-mesh/mvp-node/internal/catalog"
)

var update = flag.Bool("update", false, "rewrite the expectations in testdata/*.txt")

// TestScenarios runs testdata/*.txt: stories of commands, each followed by "----" and the line that it must print. After a
// change of behaviour run it with -update and read the diff.
//
//	view self=a            the View of node a; the lines below, indented, are its members:
//	  NAME STATE WORD...   a WORD is
//	    apps/v1/deployments          a resource (v1/pods, v1/pods/exec) with all verbs
//	    apps/v1/deployments:get,list with these only
//	    crd:example.com/v1/widgets   of a group-version from a CRD; aggregated: likewise
//	    unread:batch/v1              a group-version whose resources the apiserver could not tell (discovery's "Stale")
//	    catalog=unknown              no catalog was received; it holds up the view
//	    catalog=outdated             a newer one is advertised; it holds up the view
//	    hold=over                    it does not hold up the view any more
//	    mode=ObserveOnly  address=none
//	policy mode=Enabled localOutage=true    these are the values before any policy line
//	decide VERB KEY [affinity=N]            VERB "other" is a method that discovery has no verb for
//	decide nonresource
//	complete                                whether the View is
func TestScenarios(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scenarios: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			want := strings.Split(string(text), "\n")
			got, err := runScenario(want)
			if err != nil {
				t.Fatalf("%s:%v", file, err)
			}
			if *update {
				if err := os.WriteFile(file, []byte(strings.Join(got, "\n")), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			for i := range min(len(got), len(want)) {
				if got[i] != want[i] {
					t.Fatalf("%s:%d: got\n\t%s\nwant\n\t%s", file, i+1, got[i], want[i])
				}
			}
			if len(got) != len(want) {
				t.Fatalf("%s: a command has no expectation; run with -update", file)
			}
		})
	}
}

type scenario struct {
	self    string
	members []Member
	policy  Policy
}

// runScenario returns the lines with the expectations replaced by what happened.
func runScenario(lines []string) (out []string, err error) {
	s := scenario{policy: Policy{Mode: Enabled, LocalOutage: true}}
	for i := 0; i < len(lines); i++ {
		line := lines[i]
		if line == "----" {
			i++ // the old expectation; the new one is there already
			continue
		}
		out = append(out, line)
		words := strings.Fields(line)
		if len(words) == 0 || strings.HasPrefix(words[0], "#") {
			continue
		}
		answer, err := s.run(words, strings.HasPrefix(line, " "))
		if err != nil {
			return nil, fmt.Errorf("%d: %w", i+1, err)
		}
		if answer != "" {
			out = append(out, "----", answer)
		}
	}
	return out, nil
}

func (s *scenario) run(words []string, indented bool) (answer string, err error) {
	if indented {
		m, err := parseMember(words)
		s.members = append(s.members, m)
		return "", err
	}
	switch words[0] {
	case "view":
		self, ok := strings.CutPrefix(words[1], "self=")
		if !ok {
			return "", fmt.Errorf("view needs self=NAME")
		}
		s.self, s.members = self, nil
		return "", nil
	case "policy":
		return "", s.setPolicy(words[1:])
	}
	v, err := NewView(s.self, s.members)
	if err != nil {
		return "", err
	}
	switch words[0] {
	case "complete":
		if v.Complete() {
			return "complete", nil
		}
		return fmt.Sprintf("incomplete holders=%v", v.Holders()), nil
	case "decide":
		a, err := parseAttributes(words[1:])
		if err != nil {
			return "", err
		}
		return describe(Decide(a, v, s.policy)), nil
	}
	return "", fmt.Errorf("unknown command %q", words[0])
}

func (s *scenario) setPolicy(words []string) error {
	for _, w := range words {
		key, value, _ := strings.Cut(w, "=")
		switch key {
		case "mode":
			if s.policy.Mode = ParseMode(value); s.policy.Mode == 0 {
				return fmt.Errorf("unknown mode %q", value)
			}
		case "localOutage":
			s.policy.LocalOutage = value == "true"
		case "prefer":
			var ok bool
			if s.policy.Prefer, ok = ParsePreference(value); !ok {
				return fmt.Errorf("unknown preference %q", value)
			}
		default:
			return fmt.Errorf("unknown policy %q", w)
		}
	}
	return nil
}

// describe writes a Decision as the scenarios do.
func describe(d Decision) string {
	s := d.Outcome.String()
	if d.Outcome == Forward {
		var names []string
		for _, m := range d.Candidates {
			names = append(names, m.Name)
		}
		s += fmt.Sprintf(" candidates=%v", names)
	}
	if d.Cause != CauseNone {
		s += " cause=" + d.Cause.String()
	}
	s += " reason=" + d.Reason.String()
	if d.Observed != nil {
		s += " observed=(" + describe(*d.Observed) + ")"
	}
	return s
}

func parseMember(words []string) (Member, error) {
	m := Member{Name: words[0], State: ParseState(words[1]), Mode: Enabled, Address: words[0] + ":7444"}
	if m.State == 0 {
		return m, fmt.Errorf("unknown state %q", words[1])
	}
	known := m.State != Missing
	m.HoldsUp = !known
	gvs := map[catalog.GV]*catalog.GroupVersion{}
	for _, w := range words[2:] {
		switch key, value, _ := strings.Cut(w, "="); w {
		case "catalog=unknown":
			known, m.HoldsUp = false, true
		case "catalog=outdated":
			m.HoldsUp = true
		case "hold=over":
			m.HoldsUp = false
		case "address=none":
			m.Address = ""
		default:
			if key == "mode" {
				m.Mode = ParseMode(value)
			} else if key == "version" {
				m.ServerVersion = value
			} else if err := addResource(gvs, w); err != nil {
				return m, err
			}
		}
	}
	if !known {
		return m, nil
	}
	var list []catalog.GroupVersion
	for _, gv := range gvs {
		list = append(list, *gv)
	}
	var err error
	m.Catalog, err = catalog.New("v1.36.0", list)
	if err == nil {
		m.Digest, m.Generation = m.Catalog.Digest(), 1
	}
	return m, err
}

var allVerbs = catalog.ParseVerbs([]string{"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"})

func addResource(gvs map[catalog.GV]*catalog.GroupVersion, word string) error {
	source, stale := catalog.SourceBuiltin, false
	if rest, ok := strings.CutPrefix(word, "crd:"); ok {
		word, source = rest, catalog.SourceCRD
	} else if rest, ok := strings.CutPrefix(word, "aggregated:"); ok {
		word, source = rest, catalog.SourceAggregated
	} else if rest, ok := strings.CutPrefix(word, "unread:"); ok {
		word, stale = rest+"/", true
	}
	word, names, limited := strings.Cut(word, ":")
	verbs := allVerbs
	if limited {
		verbs = catalog.ParseVerbs(strings.Split(names, ","))
	}
	k, err := parseKey(word)
	if err != nil {
		return err
	}
	gv := gvs[k.GV()]
	if gv == nil {
		gv = &catalog.GroupVersion{GV: k.GV(), Source: source}
		gvs[k.GV()] = gv
	}
	gv.Stale = gv.Stale || stale
	if k.Resource != "" {
		gv.Resources = append(gv.Resources, catalog.Resource{Name: k.Resource, Subresource: k.Subresource, Verbs: verbs})
	}
	return nil
}

// parseKey reads group/version/resource[/subresource], without the group for the core group.
func parseKey(s string) (catalog.Key, error) {
	parts := strings.Split(s, "/")
	if parts[0] == "v1" {
		parts = slices.Insert(parts, 0, "")
	}
	if len(parts) < 3 || len(parts) > 4 {
		return catalog.Key{}, fmt.Errorf("%q is not group/version/resource", s)
	}
	k := catalog.Key{Group: parts[0], Version: parts[1], Resource: parts[2]}
	if len(parts) == 4 {
		k.Subresource = parts[3]
	}
	return k, nil
}

func parseAttributes(words []string) (Attributes, error) {
	switch words[0] {
	case "nonresource":
		return Attributes{}, nil
	case "document":
		return Attributes{Document: true}, nil
	}
	a := Attributes{Resource: true, Verb: catalog.ParseVerb(words[0])}
	if a.Verb == 0 && words[0] != "other" {
		return a, fmt.Errorf("unknown verb %q", words[0])
	}
	var err error
	if a.Key, err = parseKey(words[1]); err != nil {
		return a, err
	}
	for _, w := range words[2:] {
		n, ok := strings.CutPrefix(w, "affinity=")
		if a.Affinity, err = strconv.ParseUint(n, 10, 64); !ok || err != nil {
			return a, fmt.Errorf("unknown attribute %q", w)
		}
	}
	return a, nil
}
