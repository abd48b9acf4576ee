// Package duplex joins two connections that carry bytes both ways and end each way by itself: what is left of HTTP after a 101.
//
// Conn is one of them, whatever it runs over: TLS (OverTLS, for clients and the apiserver) or a Forward stream (internal/forward).
// Splice joins two. It promises that every byte received from one side is handed to the other before that is closed, that the end of
// one direction (a half-close) is passed on as just that, that a close is passed on as a close and a failure as a failure, at once.
//
// The package looks at no byte that it carries, and refuses to bound how long a connection may be silent. It opens nothing. Goroutines:
// two for each Splice, which its caller waits for.
//
//	wait, err := duplex.Splice(client, apiserver)
//	defer wait()
package duplex
