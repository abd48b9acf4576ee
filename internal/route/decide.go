package route

import (
	"slices"
	"strings"

	"github.com/mvp-mesh/mvp-node/internal/catalog"
)

// Attributes is what Decide needs to know of a request. front makes it from Kubernetes' own RequestInfo.
type Attributes struct {
	// Resource is false for paths that name no resource (/version, /apis, //api/v1/pods); they are served locally.
	Resource bool
	// Document is set for reads of what a server says about itself as a whole: discovery, OpenAPI, version. They name no resource.
	Document bool
	Key      catalog.Key
	Verb     catalog.Verb // zero for a method that discovery has no verb for
	// Affinity is a hash of who asks for what. Requests of equal affinity go to the same peer while it is healthy, so that a
	// LIST and the WATCH that follows meet the same watch cache.
	Affinity uint64
}

// connectSubresources open a channel into a pod, node or service: what they do is not told by their verb (CASES R-08).
var connectSubresources = []string{"exec", "attach", "portforward", "proxy"}

// ReadOnly reports whether the request certainly changes nothing, so that it may be sent again if no byte came back.
func (a Attributes) ReadOnly() bool {
	return a.Document || a.Resource && a.Verb.ReadOnly() && !slices.Contains(connectSubresources, a.Key.Subresource)
}

// Policy is the part of the configuration that Decide obeys.
type Policy struct {
	Mode Mode
	// LocalOutage allows requests that the local apiserver would serve to go to a peer while it is down.
	LocalOutage bool
	// Prefer says which of several servers of the same thing is asked. Zero is PreferLocal.
	Prefer Preference
}

// Outcome says which way a request goes.
type Outcome uint8

// The outcomes. The zero Outcome is none, so that a forgotten one is seen.
const (
	Local Outcome = iota + 1
	Forward
	Unavailable
)

// String names the outcome; also the metric label.
func (o Outcome) String() string {
	switch o {
	case Local:
		return "Local"
	case Forward:
		return "Forward"
	case Unavailable:
		return "Unavailable"
	}
	return "Unknown"
}

// Reason says by which rule an outcome was chosen. It is the log value, metric label and audit annotation.
type Reason uint8

// The reasons, in the order in which Decide looks for them.
const (
	ModeDisabled      Reason = iota + 1 // the node stands aside
	NonResource                         // not a resource path
	ServedLocally                       // the local apiserver serves it
	SharedGroup                         // the group-version comes from a CRD or APIService: every apiserver has it or none
	ServedByPeer                        // a ready peer serves it, the local apiserver does not
	LocalOutage                         // the local apiserver would serve it, is down, and a ready peer serves it
	Preferred                           // the local apiserver serves it, and policy prefers a ready peer that does too
	PeersNotReady                       // only peers that cannot be asked now serve it
	LocalNotKnown                       // the local catalog is not known yet
	NotServedAnywhere                   // nobody serves it and the view is complete: the local 404 is the truth
	IncompleteView                      // nobody known serves it, and not all is known
	reasonEnd
)

var reasonNames = [...]string{
	"Unknown", "ModeDisabled", "NonResource", "ServedLocally", "SharedGroup", "ServedByPeer", "LocalOutage", "Preferred",
	"PeersNotReady", "LocalNotKnown", "NotServedAnywhere", "IncompleteView",
}

// String names the reason.
func (r Reason) String() string {
	if int(r) < len(reasonNames) {
		return reasonNames[r]
	}
	return reasonNames[0]
}

// Reasons lists every reason, for the pre-created label sets of metrics.
func Reasons() []Reason {
	out := make([]Reason, 0, reasonEnd-1)
	for r := Reason(1); r < reasonEnd; r++ {
		out = append(out, r)
	}
	return out
}

// Decision is the answer of Decide.
type Decision struct {
	Outcome Outcome
	Reason  Reason
	// Cause is set with Unavailable only.
	Cause Cause
	// Candidates are the peers to ask with Forward, best first; never empty then. They are members of the View that was given.
	Candidates []*Member
	// Observed is set in mode ObserveOnly when the outcome would have been another than Local.
	Observed *Decision
}

// Decide says who answers a request (DESIGN.md "Deciding"). It never returns Local for a resource that some member may serve and
// the local apiserver does not, and never returns Forward with a candidate that is not available.
func Decide(a Attributes, v *View, p Policy) Decision {
	if p.Mode == Disabled {
		return Decision{Outcome: Local, Reason: ModeDisabled}
	}
	d := decide(a, v, p)
	if p.Mode == ObserveOnly && d.Outcome != Local {
		observed := d // a copy, so that d itself stays off the heap in every other case
		return Decision{Outcome: Local, Reason: d.Reason, Observed: &observed}
	}
	return d
}

func decide(a Attributes, v *View, p Policy) Decision {
	self := v.self
	if !a.Resource {
		if a.Document && self.State != LocalDown {
			if c := v.preferred(a, p.Prefer); len(c) > 0 {
				return Decision{Outcome: Forward, Reason: Preferred, Candidates: c}
			}
		}
		return Decision{Outcome: Local, Reason: NonResource}
	}
	if self.Catalog == nil {
		// What the local apiserver serves is not known, so its 404 would prove nothing; a peer can still be certain.
		if c := v.available(a); len(c) > 0 && p.LocalOutage {
			return Decision{Outcome: Forward, Reason: LocalOutage, Candidates: c}
		}
		return Decision{Outcome: Unavailable, Reason: LocalNotKnown, Cause: LocalUnavailable}
	}
	local, shared := self.Catalog.Serves(a.Key, a.Verb), false
	if gv, ok := self.Catalog.Lookup(a.Key.GV()); ok {
		shared = gv.Source.Shared()
	}
	if local || shared {
		if self.State == LocalDown && p.LocalOutage {
			if c := v.available(a); len(c) > 0 {
				return Decision{Outcome: Forward, Reason: LocalOutage, Candidates: c}
			}
		}
		// What all servers share through etcd is the same on each of them, so there is nothing to prefer.
		if !shared {
			if c := v.preferred(a, p.Prefer); len(c) > 0 {
				return Decision{Outcome: Forward, Reason: Preferred, Candidates: c}
			}
		}
		// With nobody to stand in, the local apiserver gives its own answer, even that it is shutting down.
		if local {
			return Decision{Outcome: Local, Reason: ServedLocally}
		}
		return Decision{Outcome: Local, Reason: SharedGroup}
	}

	var candidates []*Member
	known := false
	for _, s := range v.servers[a.Key] {
		if a.Verb != 0 && !s.verbs.Has(a.Verb) { // as in Catalog.Serves
			continue
		}
		known = true
		if s.member.Available() {
			candidates = append(candidates, s.member)
		}
	}
	switch {
	case len(candidates) > 0:
		rank(candidates, a.Affinity)
		return Decision{Outcome: Forward, Reason: ServedByPeer, Candidates: candidates}
	case known:
		return Decision{Outcome: Unavailable, Reason: PeersNotReady, Cause: NoPeerAvailable}
	case v.complete && !v.unread[a.Key.GV()]:
		return Decision{Outcome: Local, Reason: NotServedAnywhere}
	default:
		return Decision{Outcome: Unavailable, Reason: IncompleteView, Cause: ViewIncomplete}
	}
}

// available lists the ready peers that serve the request, group-versions shared through etcd included. Only the outage path
// asks; it walks the members.
func (v *View) available(a Attributes) []*Member {
	var out []*Member
	for _, m := range v.members {
		if m != v.self && m.Available() && m.Catalog.Serves(a.Key, a.Verb) {
			out = append(out, m)
		}
	}
	rank(out, a.Affinity)
	return out
}

// rank orders candidates by rendezvous hashing: each affinity has its own order, and taking one member away moves only the
// requests that it would have had.
func rank(ms []*Member, affinity uint64) {
	slices.SortFunc(ms, func(a, b *Member) int {
		x, y := mix(affinity^a.rank), mix(affinity^b.rank)
		switch {
		case x > y:
			return -1
		case x < y:
			return 1
		}
		return strings.Compare(a.Name, b.Name)
	})
}

// mix is the 64-bit finaliser of MurmurHash3 (public domain): without it, FNV's weak high bits would favour some members.
func mix(x uint64) uint64 {
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	x ^= x >> 33
	return x
}
