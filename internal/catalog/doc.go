// Package catalog describes what one kube-apiserver serves: group-versions, resources, subresources and verbs, and where each
// group-version comes from. A Catalog is an immutable value with a canonical digest, so that two nodes that hold the same
// digest know the same thing, and gossip only ever needs to carry the digest.
//
// The package refuses to fetch, cache or time anything: internal/discovery builds the local Catalog from documents, peers'
// Catalogs arrive over the mesh through internal/mesh, and internal/route reads both. It starts no goroutines and is safe for
// concurrent use because nothing changes after New.
//
//	c, err := catalog.New("v1.36.3", groupVersions)
//	if err != nil { ... }
//	c.Serves(catalog.Key{Group: "apps", Version: "v1", Resource: "deployments", Subresource: "scale"}, catalog.VerbPatch)
package catalog
