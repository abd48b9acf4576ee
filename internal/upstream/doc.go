// Package upstream sends requests to the local kube-apiserver under the identity of the user that the ingress node
// authenticated, by the front-proxy request-header method.
//
// Transport is an http.RoundTripper. front calls it with a client's request, forward's server with a forwarded one; both put the
// facts about the request into its context (reqctx) and copy the response themselves. Three promises are kept here and nowhere
// else:
//
//   - What leaves carries the user of the context and no identity, credential, forwarding header or hop mark of the client's.
//     Without a user nothing is sent.
//   - The request-target and Host are the client's, byte for byte, or nothing is sent.
//   - One RoundTrip hands the request to at most one connection that could have delivered it. Connections are
//     http.ClientConns in a pool of our own, because http.Transport itself sends some requests again (a write without body after
//     a stream error, anything with an Idempotency-Key). A request is moved to another connection only if the first certainly
//     did not deliver it and its body is untouched; Error.NotSent tells the caller the same.
//
// A request that asks for an upgrade goes over a connection of its own, which nothing else ever uses (upgrade.go).
//
// The package refuses to follow redirects, to retry what may have been executed, to decompress, and to write answers: an error
// is returned, and the caller says it to the client. Goroutines: each connection has net/http's own; the pool dials in
// goroutines that Close waits for.
//
//	t, err := upstream.New(upstream.Options{URL: u, Certificate: pair, Roots: roots, ...})
//	defer t.Close()
//	resp, err := t.RoundTrip(req.WithContext(reqctx.With(ctx, rc)))
package upstream
