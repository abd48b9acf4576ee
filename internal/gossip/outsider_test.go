package gossip

import (
	"errors"
	"testing"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	"github.com/mvp-mesh/mvp-node/internal/route"
)

// CASES G-05, by the trust domain of the certificate.
func TestForeignClusterByCertificate(t *testing.T) {
	m := newMesh(t)
	a := m.node("a", nil, nil)
	x := m.node("x", []string{a.Addr()}, func(o *Options) {
		o.ClusterID = "other"
		o.TLS = m.ca.meshTLS("spiffe://other/mvp-node/x", authz.PeerRules{ClusterID: "other"})
	})
	eventually(t, 5*time.Second, "x counts the foreign cluster", func() error {
		if n := x.metric(t, "mvp_gossip_foreign_cluster_rejected_total"); n == 0 {
			return errors.New("0")
		}
		return nil
	})
	m.notMembers(a, x)
}

// CASES G-05, by the label, where the certificates name no cluster.
func TestForeignClusterByLabel(t *testing.T) {
	m := newMesh(t)
	names := map[string]string{"a.example": "a", "x.example": "x"}
	a := m.node("a", nil, func(o *Options) {
		o.TLS = m.ca.meshTLS("a.example", authz.PeerRules{ClusterID: testCluster, DNSNames: names})
	})
	x := m.node("x", []string{a.Addr()}, func(o *Options) {
		o.ClusterID = "other"
		o.TLS = m.ca.meshTLS("x.example", authz.PeerRules{ClusterID: "other", DNSNames: names})
	})
	eventually(t, 5*time.Second, "a counts the foreign cluster", func() error {
		if n := a.metric(t, "mvp_gossip_foreign_cluster_rejected_total"); n == 0 {
			return errors.New("0")
		}
		return nil
	})
	m.notMembers(a, x)
}

// notMembers checks that a, which is alone in its mesh, and x have nothing to do with each other.
func (m *mesh) notMembers(a, x *peer) {
	m.t.Helper()
	if a.View().Member(x.o.Name) != nil || x.View().Member(a.o.Name) != nil {
		m.t.Errorf("they know each other: %s", show(a, x))
	}
	if x.Converged() || x.View().Complete() {
		m.t.Errorf("x, whose seed did not let it in, calls itself converged or complete: %s", show(x))
	}
}

// Who has no certificate of a member does not get a connection, and the reason is counted.
func TestOutsidersAreRejected(t *testing.T) {
	for _, tc := range []struct {
		name   string
		reason rejectReason
		edit   func(m *mesh, o *Options)
	}{
		{"stranger", rejectUntrusted, func(m *mesh, o *Options) {
			other := newCA(m.t)
			o.TLS = other.nodeTLS("x")
			o.TLS.Roots = m.ca.nodeTLS("x").Roots // it would accept us
		}},
		{"not on the list", rejectNotAllowed, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := newMesh(t)
			a := m.node("a", nil, func(o *Options) { o.TLS.Rules.AllowedNames = []string{"a", "b"} })
			x := m.node("x", []string{a.Addr()}, func(o *Options) {
				if tc.edit != nil {
					tc.edit(m, o)
				}
			})
			eventually(t, 5*time.Second, "a counts "+string(tc.reason), func() error {
				if n := a.metric(t, "mvp_gossip_connections_rejected_total", "in", string(tc.reason)); n == 0 {
					return errors.New("0")
				}
				return nil
			})
			m.notMembers(a, x)
		})
	}
}

// A node that may join cannot bring one along that may not.
func TestMemberNotOnTheListIsRefused(t *testing.T) {
	m := newMesh(t)
	b := m.node("b", nil, nil)
	x := m.node("x", []string{b.Addr()}, nil)
	m.serve(b, 1, "old")
	m.serve(x, 1, "old")
	m.converge(b, x)
	a := m.node("a", []string{b.Addr()}, func(o *Options) { o.TLS.Rules.AllowedNames = []string{"a", "b"} })
	m.serve(a, 1, "old")
	m.state(a, "b", 5*time.Second, route.Ready)
	eventually(t, 5*time.Second, "a refuses x", func() error {
		if a.metric(t, "mvp_gossip_members_refused_total") == 0 {
			return errors.New(show(a))
		}
		return nil
	})
	if a.View().Member("x") != nil {
		t.Error(show(a))
	}
}
