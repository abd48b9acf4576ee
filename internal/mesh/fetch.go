package mesh

import (
	"bytes"
	"context"
	"fmt"

	"github.com/mvp-mesh/mvp-node/internal/catalog"
	"github.com/mvp-mesh/mvp-node/internal/route"
	mvpv1 "github.com/mvp-mesh/mvp-node/proto/mvp/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding/gzip" // also teaches servers of this process to speak it
)

// Fetcher pulls catalogs from the nodes whose they are. It is safe for concurrent use.
type Fetcher struct{ pool *Pool }

// NewFetcher makes a Fetcher over a pool.
func NewFetcher(p *Pool) *Fetcher { return &Fetcher{p} }

// Fetch asks the node of that name at that address for its catalog. The connection proves the name; the digest is computed from
// what arrived. If the node still has the catalog of digest have, the result's catalog is nil and the digest is have.
//
// Errors are the connection's, a *MismatchError if the answer contradicts itself, and catalog.New's if it holds what no catalog
// may. A context without a deadline gets one of 10 s.
func (f *Fetcher) Fetch(
	ctx context.Context, name, address string, have catalog.Digest,
) (c *catalog.Catalog, generation uint64, digest catalog.Digest, err error) {
	none := catalog.Digest{}
	conn, err := f.pool.Conn(&route.Member{Name: name, Address: address}, false)
	if err != nil {
		return nil, 0, none, err
	}
	req := &mvpv1.GetCatalogRequest{}
	if !have.IsZero() {
		req.IfNotDigest = have[:]
	}
	resp, err := mvpv1.NewMeshServiceClient(conn).GetCatalog(ctx, req,
		grpc.UseCompressor(gzip.Name), // names repeat: a catalog shrinks to a tenth
		grpc.MaxCallRecvMsgSize(maxCatalogBytes))
	if err != nil {
		return nil, 0, none, fmt.Errorf("catalog of %q: %w", name, err)
	}
	if resp.GetNode() != name {
		return nil, 0, none, &MismatchError{Peer: name, What: "name", Got: resp.GetNode(), Want: name}
	}
	if resp.GetCatalog() == nil {
		if have.IsZero() || !bytes.Equal(resp.GetDigest(), have[:]) {
			return nil, 0, none, &MismatchError{
				Peer: name, What: "digest of a catalog that was left out", Got: fmt.Sprintf("%x", resp.GetDigest()), Want: have.String(),
			}
		}
		return nil, resp.GetGeneration(), have, nil
	}
	c, err = DecodeCatalog(resp.GetCatalog())
	if err != nil {
		return nil, 0, none, fmt.Errorf("catalog of %q: %w", name, err)
	}
	if digest = c.Digest(); !bytes.Equal(resp.GetDigest(), digest[:]) {
		return nil, 0, none, &MismatchError{
			Peer: name, What: "digest", Got: fmt.Sprintf("%x", resp.GetDigest()), Want: digest.String(),
		}
	}
	return c, resp.GetGeneration(), digest, nil
}

// MismatchError reports an answer about a catalog that contradicts itself or the connection that it came over.
type MismatchError struct {
	Peer      string
	What      string
	Got, Want string
}

// Error implements error.
func (e *MismatchError) Error() string {
	return fmt.Sprintf("catalog of %q: %s is %.80q, want %q", e.Peer, e.What, e.Got, e.Want)
}
