// Package authz says who is a peer, what a peer may say about a user, and how a user's identity is written to and kept out of
// HTTP headers. Everything here is a pure function of certificates, headers and configuration; the callers (gossip and mesh for
// peers, front and upstream for headers) own the connections. It starts no goroutines and asks nobody.
//
//	peer, err := authz.PeerFromCertificate(cert, rules)   // a node may speak only for peer.Name
//	err = policy.MayAssert(peer, user)                    // before the local apiserver sees that user
//	names.Strip(h); names.Set(h, user)                    // front-proxy headers towards the apiserver
package authz
