package mesh

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/catalog"
	"github.com/mvp-mesh/mvp-node/internal/route"
	mvpv1 "github.com/mvp-mesh/mvp-node/proto/mvp/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
)

// Catalog gives what the local apiserver serves now and its generation; nil while unknown. It is called on a call's goroutine and
// must not block.
type Catalog func() (*catalog.Catalog, uint64)

// Gossip is what this node knows of the mesh. The methods are called on a call's goroutine and must not block for long.
type Gossip interface {
	View() *route.View
	// Converged reports whether every expected member is there and all hold the same view.
	Converged() bool
	// Detail is what is known of a member besides the view; the zero Detail for one that is not known.
	Detail(name string) Detail
	// Dump is the gossip library's own state.
	Dump() Dump
}

// Detail is what a node knows of a member besides what routing needs.
type Detail struct {
	ViewHash    string        // that the member says it holds, hexadecimal; "" while unknown
	CatalogAge  time.Duration // since the held catalog was pulled or confirmed; negative if none is held
	LastError   string        // why its catalog could not be pulled; "" if it could
	NodeVersion string        // of its mvp-node
}

// Dump is what the gossip layer knows below the view.
type Dump struct {
	Members        []GossipMember
	HealthScore    int // 0 is healthy
	PendingPackets int // queued for a peer, or sent and not acknowledged
	Seeds          []Seed
}

// GossipMember is one member as the failure detector sees it.
type GossipMember struct {
	Name          string
	Address       string        // of gossip, host:port
	Status        string        // alive, dead or absent
	Vanished      time.Duration // since when it is dead; 0 if it is not
	Boot          uint64        // drawn at random by each process; 0 while unknown
	MetaFormat    int
	FetchFailures int
}

// Seed is one configured seed.
type Seed struct {
	Seed      string
	Addresses []string
	LastError string
}

// Explainer tells what this node would do with a request, without sending it. The error is the caller's: a method or target that
// cannot be read. It is called on a call's goroutine and must not block.
type Explainer func(method, target, user string) (Explanation, error)

// Explanation is a decision with everything that led to it.
type Explanation struct {
	Attributes   route.Attributes
	Verb         string // as RequestInfo spells it
	Namespace    string
	Name         string
	LongRunning  bool
	Decision     route.Decision
	Mode         route.Mode
	ViewComplete bool
	ServedBy     []ServedBy // every member, by name
}

// ServedBy tells what a member does with the resource and verb.
type ServedBy struct {
	Member *route.Member
	Serves string // Yes, No or Unknown
}

// service implements MeshService.
type service struct {
	mvpv1.UnimplementedMeshServiceServer
	o *Options
}

// GetCatalog implements mvpv1.MeshServiceServer.
func (s *service) GetCatalog(_ context.Context, req *mvpv1.GetCatalogRequest) (*mvpv1.GetCatalogResponse, error) {
	c, generation := s.o.Catalog()
	if c == nil {
		return nil, status.Error(codes.Unavailable, "the local catalog is not known yet")
	}
	d := c.Digest()
	resp := &mvpv1.GetCatalogResponse{Node: s.o.Name, Generation: generation, Digest: d[:]}
	if string(req.GetIfNotDigest()) != string(d[:]) {
		resp.Catalog = EncodeCatalog(c)
	}
	return resp, nil
}

// GetView implements mvpv1.MeshServiceServer.
func (s *service) GetView(context.Context, *mvpv1.GetViewRequest) (*mvpv1.GetViewResponse, error) {
	return s.view(s.o.Gossip.View()), nil
}

// DumpGossip implements mvpv1.MeshServiceServer.
func (s *service) DumpGossip(_ context.Context, req *mvpv1.DumpGossipRequest) (*mvpv1.DumpGossipResponse, error) {
	v, d := s.o.Gossip.View(), s.o.Gossip.Dump()
	resp := &mvpv1.DumpGossipResponse{
		View:           s.view(v),
		HealthScore:    int32(d.HealthScore),
		PendingPackets: int32(d.PendingPackets),
	}
	for _, seed := range d.Seeds {
		resp.Seeds = append(resp.Seeds, &mvpv1.Seed{Seed: seed.Seed, Addresses: seed.Addresses, LastError: seed.LastError})
	}
	for _, m := range d.Members {
		out := &mvpv1.GossipMember{
			Name: m.Name, Address: m.Address, Status: m.Status, MetaFormat: uint32(m.MetaFormat), FetchFailures: uint32(m.FetchFailures),
		}
		if m.Boot != 0 {
			out.Boot = strconv.FormatUint(m.Boot, 16)
		}
		if m.Vanished > 0 {
			out.Vanished = durationpb.New(m.Vanished)
		}
		resp.GossipMembers = append(resp.GossipMembers, out)
	}
	if !req.GetCatalogs() {
		return resp, nil
	}
	for _, m := range v.Members() {
		if m.Catalog != nil {
			resp.Catalogs = append(resp.Catalogs, &mvpv1.MemberCatalog{
				Name: m.Name, Digest: m.Catalog.Digest().String(), Catalog: EncodeCatalog(m.Catalog),
			})
		}
	}
	return resp, nil
}

// Explain implements mvpv1.MeshServiceServer.
func (s *service) Explain(_ context.Context, req *mvpv1.ExplainRequest) (*mvpv1.ExplainResponse, error) {
	e, err := s.o.Explain(req.GetMethod(), req.GetTarget(), req.GetUser())
	if err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	k, d := e.Attributes.Key, e.Decision
	resp := &mvpv1.ExplainResponse{
		Node:            s.o.Name,
		Group:           k.Group,
		Version:         k.Version,
		Resource:        k.Resource,
		Subresource:     k.Subresource,
		Verb:            e.Verb,
		Namespace:       e.Namespace,
		Name:            e.Name,
		ResourceRequest: e.Attributes.Resource,
		LongRunning:     e.LongRunning,
		Outcome:         d.Outcome.String(),
		Reason:          d.Reason.String(),
		Cause:           d.Cause.String(),
		Mode:            e.Mode.String(),
		ViewComplete:    e.ViewComplete,
	}
	candidates := d.Candidates
	if d.Observed != nil {
		resp.ObservedOutcome = d.Observed.Outcome.String()
		candidates = d.Observed.Candidates
	}
	for _, m := range candidates {
		resp.Candidates = append(resp.Candidates, m.Name)
	}
	for _, b := range e.ServedBy {
		resp.ServedBy = append(resp.ServedBy, &mvpv1.ServedBy{
			Name: b.Member.Name, State: b.Member.State.String(), ServerVersion: b.Member.ServerVersion, Serves: b.Serves,
		})
	}
	return resp, nil
}

func (s *service) view(v *route.View) *mvpv1.GetViewResponse {
	resp := &mvpv1.GetViewResponse{
		Self:      v.Self().Name,
		ClusterId: s.o.ClusterID,
		ViewHash:  v.Hash().String(),
		Complete:  v.Complete(),
		Converged: s.o.Gossip.Converged(),
	}
	for _, m := range v.Members() {
		d := s.o.Gossip.Detail(m.Name)
		out := &mvpv1.Member{
			Name:              m.Name,
			Address:           m.Address,
			State:             m.State.String(),
			Mode:              m.Mode.String(),
			ServerVersion:     m.ServerVersion,
			CatalogGeneration: m.Generation,
			ViewHash:          d.ViewHash,
			HoldsUp:           m.HoldsUp,
			LastError:         d.LastError,
			NodeVersion:       d.NodeVersion,
		}
		if !m.Digest.IsZero() {
			out.CatalogDigest = m.Digest.String()
		}
		if m.Catalog != nil {
			out.HeldDigest = m.Catalog.Digest().String()
			out.Resources = uint32(m.Catalog.Len())
			if d.CatalogAge >= 0 {
				out.CatalogAge = durationpb.New(d.CatalogAge)
			}
		}
		resp.Members = append(resp.Members, out)
	}
	return resp
}

// EncodeCatalog writes a catalog as a message.
func EncodeCatalog(c *catalog.Catalog) *mvpv1.Catalog {
	out := &mvpv1.Catalog{
		ServerVersion: c.ServerVersion(),
		GroupVersions: make([]*mvpv1.GroupVersion, 0, len(c.GroupVersions())),
	}
	for _, gv := range c.GroupVersions() {
		m := &mvpv1.GroupVersion{
			Group:     gv.Group,
			Version:   gv.Version,
			Source:    mvpv1.Source(gv.Source),
			Stale:     gv.Stale,
			Resources: make([]*mvpv1.Resource, 0, len(gv.Resources)),
		}
		for _, r := range gv.Resources {
			m.Resources = append(m.Resources, &mvpv1.Resource{
				Name: r.Name, Subresource: r.Subresource, Kind: r.Kind, Namespaced: r.Namespaced, Verbs: r.Verbs.Names(),
			})
		}
		out.GroupVersions = append(out.GroupVersions, m)
	}
	return out
}

// sources maps what the wire names to what the catalog knows. Anything else is refused: routing depends on it.
var sources = map[mvpv1.Source]catalog.Source{
	mvpv1.Source_SOURCE_BUILTIN:    catalog.SourceBuiltin,
	mvpv1.Source_SOURCE_CRD:        catalog.SourceCRD,
	mvpv1.Source_SOURCE_AGGREGATED: catalog.SourceAggregated,
}

// DecodeCatalog reads a catalog from a message and validates it, through catalog.New.
func DecodeCatalog(m *mvpv1.Catalog) (*catalog.Catalog, error) {
	gvs := make([]catalog.GroupVersion, 0, len(m.GetGroupVersions()))
	for _, gv := range m.GetGroupVersions() {
		source, ok := sources[gv.GetSource()]
		if !ok {
			return nil, fmt.Errorf("mesh: group-version %.60q/%.60q: source %v is not known", gv.GetGroup(), gv.GetVersion(), gv.GetSource())
		}
		out := catalog.GroupVersion{
			GV:        catalog.GV{Group: gv.GetGroup(), Version: gv.GetVersion()},
			Source:    source,
			Stale:     gv.GetStale(),
			Resources: make([]catalog.Resource, 0, len(gv.GetResources())),
		}
		for _, r := range gv.GetResources() {
			out.Resources = append(out.Resources, catalog.Resource{
				Name: r.GetName(), Subresource: r.GetSubresource(), Kind: r.GetKind(), Namespaced: r.GetNamespaced(),
				Verbs: catalog.ParseVerbs(r.GetVerbs()),
			})
		}
		gvs = append(gvs, out)
	}
	return catalog.New(m.GetServerVersion(), gvs)
}
