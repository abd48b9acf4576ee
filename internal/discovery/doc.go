// Package discovery knows the local kube-apiserver: Watcher keeps its catalog, Probe says whether it is up and which version it
// runs.
//
// The catalog is what this one apiserver serves. It is read from aggregated discovery with profile=nopeer, because a v1.36 or
// newer apiserver with Kubernetes' own peer proxy otherwise lists its peers' resources as well (CASES D-04); the older forms that
// the Watcher falls back to are never merged. A catalog is only believed when the apiserver was ready and of the same version
// before and after it was read, and an error never makes it smaller: the last good one stays.
//
// The package asks the apiserver directly, with the node's own kubeconfig, and nobody else. It refuses to merge catalogs and to
// serve discovery; internal/node hands the catalogs on to gossip. Watcher.Run and Probe.Run block; the goroutines they start
// (two reflectors, for APIServices and CRDs) have ended when they return.
//
//	w, err := discovery.New(discovery.Options{Config: kubeconfig, OnCatalog: announce, ...})
//	p, err := discovery.NewProbe(discovery.ProbeOptions{Config: kubeconfig, OnChange: func(discovery.Health) { w.Refresh() }, ...})
//	g.Go(func() error { return w.Run(ctx) })
//	g.Go(func() error { return p.Run(ctx) })
package discovery
