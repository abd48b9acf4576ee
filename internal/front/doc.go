// Package front is where clients and load balancers enter: HTTPS with HTTP/1.1 and HTTP/2, authentication, one decision per
// request, and the answer copied out as it arrives.
//
// Reading order: New and newChain (the filters, in order), Handler.route (the one switch over a route.Decision), copyResponse.
// Both ways to an answer, the local apiserver and a forward, look alike from here: a request goes in, an *http.Response or an
// error comes out. So there is one place that writes to the client, one that aborts, and one that turns causes into a Status.
//
// The package does not choose peers (internal/route), does not talk gRPC (internal/forward) and does not know how the apiserver
// is reached (internal/upstream); internal/node hands those in. Goroutines: net/http's one per connection and request, and two for each
// upgraded connection, which its request waits for; Server.Shutdown waits for all requests.
package front
