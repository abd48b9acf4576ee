// Package pki makes the certificate authorities and certificates that a mesh of mvp-nodes runs on.
//
// A node proves who it is by its mesh certificate and by nothing else, so what such a certificate looks like is decided
// here, once: ECDSA P-256, exactly one URI SAN, and that URI is the identity.
//
//	spiffe://<cluster>/mvp-node/<name>       a node; may be the server and the client of a mesh connection
//	spiffe://<cluster>/mvp-operator/<name>   a person or a tool; may only be the client
//
// The mesh CA carries spiffe://<cluster> itself, so that a CA is never used for another cluster by mistake.
//
// The package is called by "mvp-node certs" and by the test harness. A running node does not import it: it reads
// certificates, it never makes them. There is no clock in here (callers pass now), no network and no goroutine;
// everything but [LoadCA] and [WritePair] is a function from values to PEM. It does not rotate, revoke or distribute
// anything: clusters that have SPIRE or cert-manager should let those issue certificates with the same URI.
//
//	ca, err := pki.NewMeshCA("demo", now, pki.DefaultCALifetime)
//	...
//	pair, err := ca.IssueNode("demo", "cp-a", pki.Extra{}, now, pki.DefaultLeafLifetime)
//	...
//	err = pki.WritePair("cp-a.crt", "cp-a.key", pair)
package pki
