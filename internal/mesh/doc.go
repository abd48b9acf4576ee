// Package mesh is the mesh port: the gRPC server that other nodes and operators talk to, and the connections to other nodes.
//
// Server listens with TLS that admits mesh certificates only, knows for each method which role may call it, and carries health,
// reflection, MeshService (catalogs, views, explanations) and whatever services node registers with it; internal/forward is one.
// Pool holds the connections to peers, pinned to a peer's name, short and long-running calls apart. Fetcher pulls a peer's catalog
// from the peer itself and believes nothing that it has not recomputed. DialOperator is the way in for command lines.
//
// Reading order: limits.go (every number that both ends must agree about), server.go, interceptors.go (the chain, in order),
// access.go (who may call what), service.go, then pool.go, fetch.go and operator.go for the calling side.
//
// The package decides nothing about requests and keeps no state of the mesh: it shows what the interfaces in service.go give it.
// Goroutines: gRPC's own, ended by Server.Shutdown and Pool.Close, which wait for them.
//
//	srv, err := mesh.NewServer(mesh.Options{TLS: tls, Gossip: gossip, Register: []func(grpc.ServiceRegistrar){fwd.Register}, ...})
//	go srv.Serve(listener)
//	...
//	srv.Shutdown(ctx)
package mesh
