// Package forward carries one HTTP request from the node it arrived at to the node that can serve it, over one bidirectional gRPC
// stream, and the answer back.
//
// Client is the ingress node's end: a request and its candidates go in, an *http.Response comes out, exactly as from the local
// apiserver, so that front has one place that writes to clients. Server is the serving node's end: it asks who is calling, whether
// the head is sound, whether the request was forwarded before, whether this peer may speak for this user, whether the local
// apiserver serves the resource, and then hands an *http.Request to internal/upstream. Server holds no Client and no router, so
// what was forwarded cannot be forwarded again.
//
// Reading order: client.go (attempts, and the rule when a second one is allowed), server.go (the questions, in order), errors.go
// (the one table between causes and gRPC), then the details: head.go, upload.go, download.go, respond.go, informational.go, tunnel.go (after a 101), deadline.go, limits.go.
//
// The package refuses to choose peers (internal/route does), to open connections (internal/mesh does, behind Conns) and to write
// identity headers (internal/upstream does, from reqctx). Goroutines: one per request body that does not fit a head, which Client.Close
// waits for; on the serving side none but gRPC's own, apart from a timer that lives as long as the handler, and two that carry the bytes of
// an upgraded connection and end with its stream.
//
//	client, err := forward.NewClient(forward.ClientOptions{ClusterID: "demo", Name: "cp-a", Conns: pool, ...})
//	resp, served, err := client.RoundTrip(req, decision.Candidates)
//	if e, ok := errors.AsType[*forward.Error](err); ok { answer(e.Cause) }
package forward
