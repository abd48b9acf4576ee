// Package route decides who can answer a request. Decide is a pure function of the request's Attributes, an immutable View of
// the mesh and a Policy; it reads no clock, draws no random number and does no I/O, so every rule of the design can be stated as
// a line in testdata/*.txt and a fuzzer can hold it to them.
//
// The package refuses to build Views from the network (internal/gossip does), to send anything (internal/forward,
// internal/upstream) and to look at headers or users. front calls Decide once per request; the mesh port calls it for `explain`.
// It starts no goroutines.
//
//	d := route.Decide(attrs, views.View(), policy)
//	switch d.Outcome {
//	case route.Local:       // the local apiserver answers, its 404 included
//	case route.Forward:     // one of d.Candidates answers, best first
//	case route.Unavailable: // 503 with d.Cause
//	}
package route
