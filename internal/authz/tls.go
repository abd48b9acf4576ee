package authz

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
)

// MeshTLS makes the TLS configurations of the mesh and gossip ports: TLS 1.3, both sides verified against the mesh CA, and the
// identity in the certificate checked as part of the handshake, so that a stranger never gets a connection. The two functions
// are called for each handshake, which lets the owner (internal/node) swap certificates and roots while the node runs.
type MeshTLS struct {
	Certificate func() *tls.Certificate
	Roots       func() *x509.CertPool
	Rules       PeerRules
}

// Server is the configuration of a listening port that speaks the given ALPN protocol and admits the given roles.
func (m MeshTLS) Server(alpn string, admit ...Role) *tls.Config {
	return &tls.Config{
		MinVersion:             tls.VersionTLS13,
		NextProtos:             []string{alpn},
		ClientAuth:             tls.RequireAnyClientCert, // verified in VerifyConnection, against the roots of the moment
		SessionTicketsDisabled: true,                     // a resumed session would skip a changed allow list
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			return m.Certificate(), nil
		},
		VerifyConnection: func(cs tls.ConnectionState) error {
			if cs.NegotiatedProtocol != alpn {
				return fmt.Errorf("peer does not speak %s", alpn)
			}
			p, err := m.verify(cs, x509.ExtKeyUsageClientAuth)
			if err != nil {
				return err
			}
			if !slices.Contains(admit, p.Role) {
				return fmt.Errorf("%s %q: role is not admitted on this port: %w", p.Role, p.Name, ErrNotAllowed)
			}
			return nil
		},
	}
}

// Client is the configuration for dialling a node. If name is not empty, the far end must be the node of that name; gossip seeds
// are dialled before a name is known and pass "".
func (m MeshTLS) Client(alpn, name string) *tls.Config {
	return &tls.Config{
		MinVersion:         tls.VersionTLS13,
		NextProtos:         []string{alpn},
		ServerName:         m.Rules.ClusterID, // not verified as a host name; tells nothing that the certificate does not
		InsecureSkipVerify: true,              //nolint:gosec // host names say nothing here; VerifyConnection checks chain and identity
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return m.Certificate(), nil
		},
		VerifyConnection: func(cs tls.ConnectionState) error {
			if cs.NegotiatedProtocol != alpn {
				return fmt.Errorf("peer does not speak %s", alpn)
			}
			p, err := m.verify(cs, x509.ExtKeyUsageServerAuth)
			if err != nil {
				return err
			}
			if p.Role != RoleNode {
				return fmt.Errorf("%s %q does not serve: %w", p.Role, p.Name, ErrNotAllowed)
			}
			if name != "" && p.Name != name {
				return &WrongPeerError{Want: name, Got: p.Name}
			}
			return nil
		},
	}
}

// PeerFromTLS is the identity of the far end of an established mesh connection. The caller passes the state of a connection that
// was made with Server or Client.
func (m MeshTLS) PeerFromTLS(cs tls.ConnectionState) (Peer, error) {
	if len(cs.PeerCertificates) == 0 {
		return Peer{}, errors.New("connection has no peer certificate")
	}
	return PeerFromCertificate(cs.PeerCertificates[0], m.Rules)
}

func (m MeshTLS) verify(cs tls.ConnectionState, usage x509.ExtKeyUsage) (Peer, error) {
	if len(cs.PeerCertificates) == 0 {
		return Peer{}, errors.New("peer sent no certificate")
	}
	leaf := cs.PeerCertificates[0]
	intermediates := x509.NewCertPool()
	for _, c := range cs.PeerCertificates[1:] {
		intermediates.AddCert(c)
	}
	roots := m.Roots()
	if roots == nil {
		return Peer{}, errors.New("verify peer certificate: no mesh CA is loaded") // nil would mean the roots of the system
	}
	if _, err := leaf.Verify(x509.VerifyOptions{
		Roots:         roots,
		Intermediates: intermediates,
		KeyUsages:     []x509.ExtKeyUsage{usage},
	}); err != nil {
		return Peer{}, fmt.Errorf("verify peer certificate: %w", err)
	}
	return PeerFromCertificate(leaf, m.Rules)
}

// WrongPeerError reports that another node than the wanted one answered at an address.
type WrongPeerError struct{ Want, Got string }

// Error implements error.
func (e *WrongPeerError) Error() string {
	return fmt.Sprintf("node %q answered where %q was expected", e.Got, e.Want)
}
