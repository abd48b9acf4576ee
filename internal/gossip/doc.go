// Package gossip says who is in the mesh and what each member serves. It runs memberlist over its own mTLS transport, pulls the
// catalog of every member from that member, and keeps one immutable route.View current behind an atomic pointer.
//
// What it refuses: to believe a catalog that did not come from its origin (memberlist's facts only suggest when to ask), to talk
// to anything whose certificate is not that of a node of this cluster, to call a group complete that has not found everybody who
// should be there, and to work for a request: nothing here is on the request path but a load of the pointer.
//
// Callers: internal/node makes a Node, calls Run in its own goroutine, Announce whenever the own node changes, and Leave before
// it stops; front and the mesh port read View, Converged, Detail and Dump; forward's client calls Refetch when a peer turns out to
// serve something else than its catalog says. The Fetcher is handed in: gossip knows nothing of gRPC.
//
// How facts flow, and which goroutine does what:
//
//	memberlist callbacks (under its lock) ── copy, enqueue ──▶ events
//	loop      owns the timers; takes events and fetch results, changes the table, publishes a new View; starts pulls
//	pulls     one per member at most, outside all locks, with its own deadline
//	announcer hands the own node's metadata to memberlist, at most once per Timing.UpdateInterval
//	sync      resolves the seeds, joins everybody who should be there and is not, exchanges full state with one member now and then
//	transport one goroutine per connection, one per peer that packets are sent to, one that accepts
//
// All of them are started by Run and have ended when it returns; memberlist's own end within four probe intervals after that.
// The table of members (table.go) is plain data with the clock passed in, so that the step from facts to route.Member is tested
// without a network.
//
//	n, err := gossip.New(gossip.Options{Name: "cp-a", ClusterID: "demo", BindAddress: "10.0.0.1:7946", Seeds: seeds, TLS: tls, Fetcher: f})
//	if err != nil { ... }
//	g.Go(func() error { return n.Run(ctx) })
//	err = n.Announce(gossip.Local{State: route.Ready, Mode: route.Enabled, MeshAddress: "10.0.0.1:7443", Catalog: c, Generation: 1})
//	d := route.Decide(attrs, n.View(), policy)
package gossip
