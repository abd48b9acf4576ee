package mesh

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	mvpv1 "github.com/mvp-mesh/mvp-node/proto/mvp/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
)

// OperatorConn is a command line's connection to one node.
type OperatorConn struct {
	mvpv1.MeshServiceClient
	conn *grpc.ClientConn
}

// Close ends it.
func (c *OperatorConn) Close() error { return c.conn.Close() }

// DialOperator connects to the node at a host:port with the certificate of an operator (or of a node), in PEM, and waits until the
// connection is up. It fails when ctx ends, and as soon as it is clear that the two do not accept each other or that nobody listens.
func DialOperator(ctx context.Context, address string, certPEM, keyPEM, caPEM []byte, clusterID string) (*OperatorConn, error) {
	pair, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		return nil, fmt.Errorf("mesh certificate: %w", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(caPEM) {
		return nil, errors.New("mesh CA: no certificate in it")
	}
	m := authz.MeshTLS{
		Certificate: func() *tls.Certificate { return &pair },
		Roots:       func() *x509.CertPool { return roots },
		Rules:       authz.PeerRules{ClusterID: clusterID},
	}
	h := newHandshakes(m.Client(alpn, ""))
	cc, err := grpc.NewClient("passthrough:///"+address, append(clientLimits(false),
		grpc.WithTransportCredentials(h),
		grpc.WithAuthority(clusterID),
		grpc.WithContextDialer(h.dialer(dialTCP)),
		// A dump with the catalogs of a large mesh is many catalogs in one answer.
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(16*maxCatalogBytes)),
	)...)
	if err != nil {
		return nil, fmt.Errorf("node at %s: %w", address, err)
	}
	for cc.Connect(); ; {
		state := cc.GetState()
		switch {
		case state == connectivity.Ready:
			return &OperatorConn{mvpv1.NewMeshServiceClient(cc), cc}, nil
		case state == connectivity.TransientFailure:
			return nil, errors.Join(fmt.Errorf("node at %s: %w", address, h.lastError()), cc.Close())
		case !cc.WaitForStateChange(ctx, state):
			return nil, errors.Join(fmt.Errorf("node at %s: %w", address, ctx.Err()), cc.Close())
		}
	}
}
