// Package loopguard holds the rule that a request is forwarded at most once.
//
// The hop count is a typed field of the Forward head, written by the ingress node and believed only because the stream's peer
// certificate proved that a mesh node wrote it. Clients cannot reach it: the marks that Kubernetes' built-in peer proxy uses are
// plain headers, so front strips them at the entrance (Strip) and upstream sets the one that stops the apiserver's own
// proxy from forwarding again (Mark). The package has no state, starts no goroutines and does no I/O.
package loopguard

import (
	"errors"
	"fmt"
	"net/http"
)

// Hop counts how many times a request was forwarded between nodes: 0 as it came from a client, 1 after one forward.
type Hop uint32

// MaxHops is the number of forwards a request may see (DESIGN.md rule 2).
const MaxHops Hop = 1

// ErrForwarded reports a request that was forwarded already, so must be served here or refused.
var ErrForwarded = errors.New("request was forwarded already")

// ErrNoHop reports a Forward head without a hop count: no ingress node sends that, so nothing can be said about where the
// request has been.
var ErrNoHop = errors.New("forwarded request carries no hop count")

// Next is the hop count that an ingress node writes into the head of a forward. It fails with ErrForwarded when the request
// has used its one hop.
func Next(h Hop) (Hop, error) {
	if h >= MaxHops {
		return h, fmt.Errorf("hop %d: %w", h, ErrForwarded)
	}
	return h + 1, nil
}

// Check is what a serving node asks of a head that arrived. Only exactly one hop is acceptable.
func Check(h Hop) error {
	switch {
	case h == 0:
		return ErrNoHop
	case h > MaxHops:
		return fmt.Errorf("hop %d of at most %d: %w", h, MaxHops, ErrForwarded)
	}
	return nil
}

// Headers with which Kubernetes' built-in peer proxy marks a request as forwarded. The first is the one released versions
// read (k8s.io/apiserver pkg/util/peerproxy); the second is named by KEP-4020 and was used by earlier ones.
const (
	HeaderPeerProxied = "X-Kubernetes-Peer-Proxied"
	HeaderRerouted    = "X-Kubernetes-Apiserver-Rerouted"
)

// prefix covers marks of our own. None is ever read from a header; the prefix is reserved so that none can be invented.
const prefix = "X-Mvp-Node-"

// IsMark reports whether a canonical header name is a hop mark, ours or the built-in proxy's.
func IsMark(canonical string) bool {
	return canonical == HeaderPeerProxied || canonical == HeaderRerouted ||
		len(canonical) >= len(prefix) && canonical[:len(prefix)] == prefix
}

// Strip deletes every hop mark. Front calls it on each request before anything reads headers, so that a client can neither
// switch forwarding off for itself nor fake where a request has been.
func Strip(h http.Header) {
	for name := range h {
		if IsMark(http.CanonicalHeaderKey(name)) {
			delete(h, name)
		}
	}
}

// Mark tells the local apiserver not to forward the request by its own peer proxy.
func Mark(h http.Header) { h.Set(HeaderPeerProxied, "true") }
