package authz

import (
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
)

// Role says what a mesh certificate may be used for.
type Role uint8

// The roles.
const (
	// RoleNode: a member of the mesh; may gossip, forward and pull catalogs.
	RoleNode Role = iota + 1
	// RoleOperator: a person or tool; may look, not forward and not join.
	RoleOperator
)

// pathSegments name the roles in a SPIFFE ID: spiffe://<cluster>/<segment>/<name>.
const (
	segmentNode     = "mvp-node"
	segmentOperator = "mvp-operator"
)

// String names the role.
func (r Role) String() string {
	switch r {
	case RoleNode:
		return "node"
	case RoleOperator:
		return "operator"
	}
	return "unknown"
}

// Peer is the other end of a mesh or gossip connection, as its certificate proves it.
type Peer struct {
	Name string
	Role Role
}

// PeerRules say which certificates are accepted, beyond being signed by the mesh CA.
type PeerRules struct {
	// ClusterID is the trust domain of the SPIFFE ID.
	ClusterID string
	// AllowedNames lists the nodes that may be members; empty allows every name that the mesh CA signed for. Operators are
	// not subject to it.
	AllowedNames []string
	// DNSNames maps a DNS SAN to the node name it stands for, for installations whose CA issues no URI SANs.
	DNSNames map[string]string
}

// Errors of PeerFromCertificate. They tell an operator what is wrong with a certificate; all of them refuse the connection.
var (
	ErrNoIdentity     = errors.New("certificate carries no mvp-node identity")
	ErrManyIdentities = errors.New("certificate carries more than one identity")
	ErrForeignCluster = errors.New("certificate belongs to another cluster")
	ErrNotAllowed     = errors.New("node is not on the list of allowed names")
)

// PeerFromCertificate reads the identity of a verified leaf certificate. It does not check signature, validity or key usage: the
// TLS handshake has done that against the mesh CA.
func PeerFromCertificate(cert *x509.Certificate, rules PeerRules) (Peer, error) {
	p, err := identity(cert, rules)
	if err != nil {
		return Peer{}, err
	}
	if p.Role == RoleNode && len(rules.AllowedNames) > 0 && !slices.Contains(rules.AllowedNames, p.Name) {
		return Peer{}, fmt.Errorf("node %q: %w", p.Name, ErrNotAllowed)
	}
	return p, nil
}

func identity(cert *x509.Certificate, rules PeerRules) (Peer, error) {
	// One URI SAN is an identity; two are none (SPIFFE X.509-SVID section 2).
	if len(cert.URIs) > 1 {
		return Peer{}, fmt.Errorf("%d URI SANs: %w", len(cert.URIs), ErrManyIdentities)
	}
	if len(cert.URIs) == 1 {
		return peerFromURI(cert.URIs[0], rules.ClusterID)
	}
	var found []string
	for _, dns := range cert.DNSNames {
		if name, ok := rules.DNSNames[dns]; ok && !slices.Contains(found, name) {
			found = append(found, name)
		}
	}
	switch len(found) {
	case 0:
		return Peer{}, ErrNoIdentity
	case 1:
		return Peer{Name: found[0], Role: RoleNode}, nil
	}
	return Peer{}, fmt.Errorf("DNS SANs stand for nodes %q: %w", found, ErrManyIdentities)
}

func peerFromURI(u *url.URL, clusterID string) (Peer, error) {
	if u.Scheme != "spiffe" || u.User != nil || u.RawQuery != "" || u.ForceQuery || u.Fragment != "" || u.RawPath != "" {
		return Peer{}, fmt.Errorf("URI SAN %q is no plain SPIFFE ID: %w", u, ErrNoIdentity)
	}
	if u.Host != clusterID {
		return Peer{}, fmt.Errorf("cluster %q, want %q: %w", u.Host, clusterID, ErrForeignCluster)
	}
	segment, name, ok := strings.Cut(strings.TrimPrefix(u.Path, "/"), "/")
	if !ok || !isName(name) {
		return Peer{}, fmt.Errorf("URI SAN %q: %w", u, ErrNoIdentity)
	}
	switch segment {
	case segmentNode:
		return Peer{Name: name, Role: RoleNode}, nil
	case segmentOperator:
		return Peer{Name: name, Role: RoleOperator}, nil
	}
	return Peer{}, fmt.Errorf("URI SAN %q: %w", u, ErrNoIdentity)
}

// isName reports whether s can be a path segment of a SPIFFE ID (SPIFFE-ID section 2.2). It keeps control characters and the
// like out of logs, tables and metrics, whatever the mesh CA was talked into signing.
func isName(s string) bool {
	if s == "" || s == "." || s == ".." {
		return false
	}
	return !strings.ContainsFunc(s, func(r rune) bool {
		return !('a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || strings.ContainsRune(".-_", r))
	})
}

// ID writes the SPIFFE ID of a peer.
func (p Peer) ID(clusterID string) *url.URL {
	segment := segmentNode
	if p.Role == RoleOperator {
		segment = segmentOperator
	}
	return &url.URL{Scheme: "spiffe", Host: clusterID, Path: "/" + segment + "/" + p.Name}
}
