package node

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/catalog"
	"github.com/mvp-mesh/mvp-node/internal/forward"
	"github.com/mvp-mesh/mvp-node/internal/front"
	"github.com/mvp-mesh/mvp-node/internal/gossip"
	"github.com/mvp-mesh/mvp-node/internal/mesh"
	"github.com/mvp-mesh/mvp-node/internal/route"
)

// The edges do not know each other; each says in an interface of its own what it needs. What follows fits one to the other and
// decides nothing.

// forwarder is forward.Client as front wants it.
type forwarder struct{ client *forward.Client }

// Forward implements front.Forwarder.
func (f forwarder) Forward(r *http.Request, candidates []*route.Member) (*http.Response, front.Served, error) {
	resp, served, err := f.client.RoundTrip(r, candidates)
	out := front.Served{Node: served.Node, ServerVersion: served.ServerVersion, Attempts: served.Attempts}
	if err == nil {
		return resp, out, nil
	}
	if e, ok := errors.AsType[*forward.Error](err); ok {
		return nil, out, &front.Failure{Cause: e.Cause, NotSent: !e.Dispatched, Err: e}
	}
	if e, ok := errors.AsType[*forward.RequestBodyError](err); ok {
		return nil, out, &front.BodyError{Err: e}
	}
	return nil, out, err
}

// resolver is front.Resolver as the serving side of a forward wants it.
type resolver struct{ r *front.Resolver }

// Resolve implements forward.AttributesResolver.
func (r resolver) Resolve(method, target string) (forward.ResolvedRequest, error) {
	res, err := r.r.Resolve(method, target)
	return forward.ResolvedRequest{Attributes: res.Attributes, Namespace: res.Namespace, Name: res.Name, LongRunning: res.LongRunning}, err
}

// fetcher is mesh.Fetcher as gossip wants it.
type fetcher struct{ f *mesh.Fetcher }

// Fetch implements gossip.Fetcher.
func (f fetcher) Fetch(ctx context.Context, name, address string, have catalog.Digest) (gossip.FetchResult, error) {
	c, generation, digest, err := f.f.Fetch(ctx, name, address, have)
	return gossip.FetchResult{Catalog: c, Generation: generation, Digest: digest}, err
}

// introspection is gossip.Node as the mesh port shows it.
type introspection struct{ *gossip.Node }

// Detail implements mesh.Gossip.
func (i introspection) Detail(name string) mesh.Detail {
	d := i.Node.Detail(name)
	out := mesh.Detail{CatalogAge: -1, LastError: d.LastError, NodeVersion: d.NodeVersion}
	if !d.ViewHash.IsZero() {
		out.ViewHash = d.ViewHash.String()
	}
	if !d.HeldSince.IsZero() {
		out.CatalogAge = time.Since(d.HeldSince)
	}
	return out
}

// Dump implements mesh.Gossip.
func (i introspection) Dump() mesh.Dump {
	d := i.Node.Dump()
	out := mesh.Dump{HealthScore: d.HealthScore, PendingPackets: d.PendingPackets}
	for _, s := range d.Seeds {
		out.Seeds = append(out.Seeds, mesh.Seed{Seed: s.Seed, Addresses: s.Addresses, LastError: s.LastError})
	}
	for _, m := range d.Members {
		g := mesh.GossipMember{
			Name: m.Name, Address: m.GossipAddress, Status: "alive", Boot: m.Boot, MetaFormat: m.Format, FetchFailures: m.FetchFailures,
		}
		switch m.State {
		case route.Stale.String():
			g.Status, g.Vanished = "dead", time.Since(m.Vanished)
		case route.Missing.String():
			g.Status = "absent"
		}
		out.Members = append(out.Members, g)
	}
	return out
}

// explain implements mesh.Explainer: the decision that front would make, on the same view, with the same parse.
func (n *Node) explain(method, target, user string) (mesh.Explanation, error) {
	view, policy := n.gossip.View(), n.cfg.Policy()
	res, err := n.resolver.Resolve(method, target)
	if err != nil {
		return mesh.Explanation{}, err
	}
	res.Attributes.Affinity = front.Affinity(user, res.Attributes.Key)
	e := mesh.Explanation{
		Attributes: res.Attributes, Verb: res.Verb, Namespace: res.Namespace, Name: res.Name, LongRunning: res.LongRunning,
		Decision: route.Decide(res.Attributes, view, policy), Mode: policy.Mode, ViewComplete: view.Complete(),
	}
	if !res.Attributes.Resource {
		return e, nil
	}
	for _, m := range view.Members() {
		serves := "Unknown"
		if m.Catalog != nil {
			serves = "No"
			if m.Catalog.Serves(res.Attributes.Key, res.Attributes.Verb) {
				serves = "Yes"
			}
		}
		e.ServedBy = append(e.ServedBy, mesh.ServedBy{Member: m, Serves: serves})
	}
	return e, nil
}
