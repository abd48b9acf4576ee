package pki

import (
	"errors"
	"fmt"
	"net/url"
	"strings"
)

// Roles: the first path element of a mesh identity. It says what the holder of a certificate is.
const (
	roleNode     = "mvp-node"
	roleOperator = "mvp-operator"
)

const (
	// maxCluster is the longest DNS subdomain (RFC 1123). A SPIFFE trust domain may have two characters more.
	maxCluster = 253
	// maxName is the longest DNS label. A name is also the certificate's common name (64 at most, X.520) and part of
	// the gossip metadata, which has 512 bytes for everything.
	maxName = 63
	// maxLabel is the longest part between two dots (RFC 1123).
	maxLabel = 63
)

// ClusterURI returns the identity of a whole cluster, spiffe://<cluster>, which its mesh CA carries.
func ClusterURI(cluster string) (*url.URL, error) {
	if err := ValidateCluster(cluster); err != nil {
		return nil, err
	}
	return &url.URL{Scheme: "spiffe", Host: cluster}, nil
}

// NodeURI returns the identity of the mesh node called name.
func NodeURI(cluster, name string) (*url.URL, error) {
	return identityURI(cluster, roleNode, name)
}

// OperatorURI returns the identity of the operator called name: somebody who may look and administer, but never be a
// member of the mesh.
func OperatorURI(cluster, name string) (*url.URL, error) {
	return identityURI(cluster, roleOperator, name)
}

func identityURI(cluster, role, name string) (*url.URL, error) {
	if err := errors.Join(ValidateCluster(cluster), ValidateName(name)); err != nil {
		return nil, err
	}
	return &url.URL{Scheme: "spiffe", Host: cluster, Path: "/" + role + "/" + name}, nil
}

// ValidateCluster reports whether a cluster ID can be the trust domain of an identity: a lower-case DNS subdomain of at
// most 253 characters.
func ValidateCluster(cluster string) error {
	return validateSubdomain("cluster ID", cluster, maxCluster)
}

// ValidateName reports whether a node or operator name can be part of an identity: a lower-case DNS subdomain of at
// most 63 characters.
func ValidateName(name string) error {
	return validateSubdomain("name", name, maxName)
}

// ValidateDNSName reports whether a name can be an extra DNS name of a mesh certificate: a lower-case DNS subdomain, no
// wildcard.
func ValidateDNSName(name string) error {
	return validateSubdomain("DNS name", name, maxCluster)
}

// validateSubdomain is the rule of RFC 1123 as Kubernetes applies it to object names. It is written out here because
// the words of the error are what the user of "mvp-node certs" sees.
func validateSubdomain(what, s string, limit int) error {
	if s == "" {
		return fmt.Errorf("%s is empty", what)
	}
	if len(s) > limit {
		return fmt.Errorf("%s %q is %d characters long, at most %d are allowed", what, s, len(s), limit)
	}
	for label := range strings.SplitSeq(s, ".") {
		if label == "" {
			return fmt.Errorf("%s %q has an empty part: dots may only stand between other characters", what, s)
		}
		if len(label) > maxLabel {
			return fmt.Errorf("%s %q: the part %q is longer than %d characters", what, s, label, maxLabel)
		}
		for _, r := range label {
			if !('a' <= r && r <= 'z' || '0' <= r && r <= '9' || r == '-') {
				return fmt.Errorf("%s %q has the character %q: only a-z, 0-9, '-' and '.' are allowed", what, s, r)
			}
		}
		if label[0] == '-' || label[len(label)-1] == '-' {
			return fmt.Errorf("%s %q: the part %q begins or ends with '-'", what, s, label)
		}
	}
	return nil
}
