package catalog

import "strings"

// Verb is one API verb as Kubernetes' RequestInfo and discovery name them.
type Verb uint16

// The verbs that discovery documents list. The set is closed in Kubernetes itself; a verb outside it is the zero Verb.
const (
	VerbGet Verb = 1 << iota
	VerbList
	VerbWatch
	VerbCreate
	VerbUpdate
	VerbPatch
	VerbDelete
	VerbDeleteCollection
)

// verbNames is in bit order: verbNames[i] names 1<<i.
var verbNames = [...]string{"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"}

// ParseVerb returns the Verb of that name, or zero if discovery has no such verb.
func ParseVerb(name string) Verb {
	for i, n := range verbNames {
		if n == name {
			return 1 << i
		}
	}
	return 0
}

// String names the verb; the zero Verb is "unknown".
func (v Verb) String() string {
	for i, n := range verbNames {
		if v == 1<<i {
			return n
		}
	}
	return "unknown"
}

// ReadOnly reports whether the verb never changes an object. Connect subresources (exec, proxy) are no reads whatever their
// verb; see route.Attributes.ReadOnly.
func (v Verb) ReadOnly() bool { return v == VerbGet || v == VerbList || v == VerbWatch }

// Verbs is a set of Verb.
type Verbs uint16

// ParseVerbs collects the known verbs of a discovery document. Verbs that discovery does not define (a CRD webhook may list
// anything) are ignored: nothing can be routed by them.
func ParseVerbs(names []string) Verbs {
	var s Verbs
	for _, n := range names {
		s |= Verbs(ParseVerb(n))
	}
	return s
}

// Has reports whether v is in the set.
func (s Verbs) Has(v Verb) bool { return s&Verbs(v) != 0 }

// Names lists the verbs in bit order.
func (s Verbs) Names() []string {
	out := make([]string, 0, len(verbNames))
	for i, n := range verbNames {
		if s&(1<<i) != 0 {
			out = append(out, n)
		}
	}
	return out
}

// String joins the names with commas.
func (s Verbs) String() string { return strings.Join(s.Names(), ",") }
