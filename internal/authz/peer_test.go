package authz

import (
	"crypto/x509"
	"errors"
	"net/url"
	"testing"
)

func TestPeerFromCertificate(t *testing.T) {
	rules := PeerRules{
		ClusterID:    "demo",
		AllowedNames: []string{"cp-a", "cp-b"},
		DNSNames:     map[string]string{"a.example": "cp-a", "a2.example": "cp-a", "b.example": "cp-b", "z.example": "cp-z"},
	}
	for _, tc := range []struct {
		name string
		uris []string
		dns  []string
		want Peer
		err  error
		text string
	}{
		{name: "node", uris: []string{"spiffe://demo/mvp-node/cp-a"}, want: Peer{"cp-a", RoleNode}},
		{name: "operator, not subject to the allow list", uris: []string{"spiffe://demo/mvp-operator/jane"}, want: Peer{"jane", RoleOperator}},
		{name: "node by DNS name", dns: []string{"unknown.example", "a.example"}, want: Peer{"cp-a", RoleNode}},
		{name: "two DNS names of one node", dns: []string{"a.example", "a2.example"}, want: Peer{"cp-a", RoleNode}},
		{name: "URI goes before DNS name", uris: []string{"spiffe://demo/mvp-node/cp-b"}, dns: []string{"a.example"}, want: Peer{"cp-b", RoleNode}},
		{
			name: "a URI that is no identity is not made up for by a DNS name",
			uris: []string{"https://example.com/"}, dns: []string{"a.example"},
			err: ErrNoIdentity, text: `URI SAN "https://example.com/" is no plain SPIFFE ID: certificate carries no mvp-node identity`,
		},
		{name: "nothing", err: ErrNoIdentity, text: "certificate carries no mvp-node identity"},
		{name: "DNS name of nobody", dns: []string{"c.example"}, err: ErrNoIdentity, text: "certificate carries no mvp-node identity"},
		{
			name: "DNS names of two nodes", dns: []string{"a.example", "b.example"},
			err: ErrManyIdentities, text: `DNS SANs stand for nodes ["cp-a" "cp-b"]: certificate carries more than one identity`,
		},
		{
			name: "two URIs", uris: []string{"spiffe://demo/mvp-node/cp-a", "spiffe://demo/mvp-node/cp-a"},
			err: ErrManyIdentities, text: "2 URI SANs: certificate carries more than one identity",
		},
		{
			name: "another cluster", uris: []string{"spiffe://prod/mvp-node/cp-a"},
			err: ErrForeignCluster, text: `cluster "prod", want "demo": certificate belongs to another cluster`,
		},
		{
			name: "another cluster, with a port that is ours", uris: []string{"spiffe://demo:443/mvp-node/cp-a"},
			err: ErrForeignCluster, text: `cluster "demo:443", want "demo": certificate belongs to another cluster`,
		},
		{
			name: "not on the list", uris: []string{"spiffe://demo/mvp-node/cp-c"},
			err: ErrNotAllowed, text: `node "cp-c": node is not on the list of allowed names`,
		},
		{
			name: "by DNS name, not on the list", dns: []string{"z.example"},
			err: ErrNotAllowed, text: `node "cp-z": node is not on the list of allowed names`,
		},
		{name: "cluster only", uris: []string{"spiffe://demo"}, err: ErrNoIdentity, text: `URI SAN "spiffe://demo": certificate carries no mvp-node identity`},
		{name: "role only", uris: []string{"spiffe://demo/mvp-node"}, err: ErrNoIdentity, text: `URI SAN "spiffe://demo/mvp-node": certificate carries no mvp-node identity`},
		{name: "no name", uris: []string{"spiffe://demo/mvp-node/"}, err: ErrNoIdentity, text: `URI SAN "spiffe://demo/mvp-node/": certificate carries no mvp-node identity`},
		{name: "another role", uris: []string{"spiffe://demo/kubelet/cp-a"}, err: ErrNoIdentity, text: `URI SAN "spiffe://demo/kubelet/cp-a": certificate carries no mvp-node identity`},
		{name: "role in capitals", uris: []string{"spiffe://demo/MVP-NODE/cp-a"}, err: ErrNoIdentity, text: `URI SAN "spiffe://demo/MVP-NODE/cp-a": certificate carries no mvp-node identity`},
		{name: "a path below", uris: []string{"spiffe://demo/mvp-node/cp-a/x"}, err: ErrNoIdentity, text: `URI SAN "spiffe://demo/mvp-node/cp-a/x": certificate carries no mvp-node identity`},
		{name: "a slash more", uris: []string{"spiffe://demo//mvp-node/cp-a"}, err: ErrNoIdentity, text: `URI SAN "spiffe://demo//mvp-node/cp-a": certificate carries no mvp-node identity`},
		{name: "a slash at the end", uris: []string{"spiffe://demo/mvp-node/cp-a/"}, err: ErrNoIdentity, text: `URI SAN "spiffe://demo/mvp-node/cp-a/": certificate carries no mvp-node identity`},
		{name: "dots", uris: []string{"spiffe://demo/mvp-node/.."}, err: ErrNoIdentity, text: `URI SAN "spiffe://demo/mvp-node/..": certificate carries no mvp-node identity`},
		{name: "a name that is none", uris: []string{"spiffe://demo/mvp-node/cp%0Aa"}, err: ErrNoIdentity, text: `URI SAN "spiffe://demo/mvp-node/cp%0Aa": certificate carries no mvp-node identity`},
		{name: "another scheme", uris: []string{"https://demo/mvp-node/cp-a"}, err: ErrNoIdentity, text: `URI SAN "https://demo/mvp-node/cp-a" is no plain SPIFFE ID: certificate carries no mvp-node identity`},
		{name: "opaque", uris: []string{"spiffe:demo"}, err: ErrForeignCluster, text: `cluster "", want "demo": certificate belongs to another cluster`},
		{name: "user", uris: []string{"spiffe://x@demo/mvp-node/cp-a"}, err: ErrNoIdentity, text: `URI SAN "spiffe://x@demo/mvp-node/cp-a" is no plain SPIFFE ID: certificate carries no mvp-node identity`},
		{name: "query", uris: []string{"spiffe://demo/mvp-node/cp-a?x"}, err: ErrNoIdentity, text: `URI SAN "spiffe://demo/mvp-node/cp-a?x" is no plain SPIFFE ID: certificate carries no mvp-node identity`},
		{name: "empty query", uris: []string{"spiffe://demo/mvp-node/cp-a?"}, err: ErrNoIdentity, text: `URI SAN "spiffe://demo/mvp-node/cp-a?" is no plain SPIFFE ID: certificate carries no mvp-node identity`},
		{name: "fragment", uris: []string{"spiffe://demo/mvp-node/cp-a#x"}, err: ErrNoIdentity, text: `URI SAN "spiffe://demo/mvp-node/cp-a#x" is no plain SPIFFE ID: certificate carries no mvp-node identity`},
		{name: "escaped", uris: []string{"spiffe://demo/mvp-node/cp%2Da"}, err: ErrNoIdentity, text: `URI SAN "spiffe://demo/mvp-node/cp%2Da" is no plain SPIFFE ID: certificate carries no mvp-node identity`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cert := &x509.Certificate{DNSNames: tc.dns}
			for _, u := range tc.uris {
				cert.URIs = append(cert.URIs, mustURL(t, u))
			}
			got, err := PeerFromCertificate(cert, rules)
			if got != tc.want || !errors.Is(err, tc.err) || err != nil && err.Error() != tc.text {
				t.Errorf("got %+v, %v; want %+v, %s", got, err, tc.want, tc.text)
			}
		})
	}
}

// Without a list every node that the mesh CA signed for is allowed; without an entry no DNS name is.
func TestPeerRulesZero(t *testing.T) {
	cert := &x509.Certificate{URIs: []*url.URL{mustURL(t, "spiffe://demo/mvp-node/cp-x")}}
	if p, err := PeerFromCertificate(cert, PeerRules{ClusterID: "demo"}); err != nil || p != (Peer{"cp-x", RoleNode}) {
		t.Errorf("got %+v, %v", p, err)
	}
	if _, err := PeerFromCertificate(&x509.Certificate{DNSNames: []string{"cp-x"}}, PeerRules{ClusterID: "demo"}); !errors.Is(err, ErrNoIdentity) {
		t.Errorf("err = %v", err)
	}
}

// ID and PeerFromCertificate are inverse to each other.
func TestID(t *testing.T) {
	for _, p := range []Peer{{"cp-a", RoleNode}, {"jane", RoleOperator}} {
		id := p.ID("demo")
		got, err := PeerFromCertificate(&x509.Certificate{URIs: []*url.URL{id}}, PeerRules{ClusterID: "demo"})
		if err != nil || got != p {
			t.Errorf("%s: got %+v, %v", id, got, err)
		}
	}
	if RoleNode.String() != "node" || RoleOperator.String() != "operator" || Role(0).String() != "unknown" {
		t.Error("roles are misspelt")
	}
}

// FuzzPeerURI: whatever the URI, an identity that is accepted writes the very same URI back.
func FuzzPeerURI(f *testing.F) {
	f.Add("spiffe://demo/mvp-node/cp-a")
	f.Add("spiffe://demo/mvp-operator/jane")
	f.Add("spiffe://demo/mvp-node/a?")
	f.Add("spiffe://demo/mvp-node/%2e%2e")
	f.Fuzz(func(t *testing.T, s string) {
		u, err := url.Parse(s)
		if err != nil {
			return // no URL, so no certificate can carry it
		}
		p, err := PeerFromCertificate(&x509.Certificate{URIs: []*url.URL{u}}, PeerRules{ClusterID: "demo"})
		if err == nil && p.ID("demo").String() != u.String() {
			t.Errorf("%q was taken for %s", s, p.ID("demo"))
		}
	})
}
