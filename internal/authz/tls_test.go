package authz

import (
	"crypto/ecdsa"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"strings"
	"testing"
	"time"
)

const alpn = "mvp-test/1"

func meshTLS(cert *tls.Certificate, roots *x509.CertPool, rules PeerRules) MeshTLS {
	return MeshTLS{
		Certificate: func() *tls.Certificate { return cert },
		Roots:       func() *x509.CertPool { return roots },
		Rules:       rules,
	}
}

// shake does a handshake and exchanges a byte each way, as a TLS 1.3 client learns only then that it was refused. It returns
// what each side has to say.
func shake(t *testing.T, server, client *tls.Config) (serverState, clientState tls.ConnectionState, serverErr, clientErr error) {
	t.Helper()
	a, b := loopback(t)
	s, c := tls.Server(a, server), tls.Client(b, client)
	done := make(chan error, 1)
	go func() { // ends with the handshake or the deadline; waited for below
		err := s.Handshake()
		if err == nil {
			_, err = s.Write([]byte{1})
		}
		_ = s.Close()
		done <- err
	}()
	clientErr = c.Handshake()
	if clientErr == nil {
		_, clientErr = c.Read(make([]byte, 1))
	}
	clientState = c.ConnectionState()
	_ = c.Close()
	serverErr = <-done
	return s.ConnectionState(), clientState, serverErr, clientErr
}

// loopback is a TCP connection. net.Pipe has no buffer: two sides that refuse each other would wait for each other.
func loopback(t *testing.T) (a, b net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if b, err = net.Dial("tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if a, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	for _, c := range []net.Conn{a, b} {
		t.Cleanup(func() { _ = c.Close() })
		if err := c.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
			t.Fatal(err)
		}
	}
	return a, b
}

var rules = PeerRules{ClusterID: "demo", AllowedNames: []string{"cp-a", "cp-b"}, DNSNames: map[string]string{"b.example": "cp-b"}}

func invalid(reason x509.InvalidReason) func(error) bool {
	return func(err error) bool {
		var e x509.CertificateInvalidError
		return errors.As(err, &e) && e.Reason == reason
	}
}

func is(want error) func(error) bool { return func(err error) bool { return errors.Is(err, want) } }

func unknownAuthority(err error) bool {
	var e x509.UnknownAuthorityError
	return errors.As(err, &e)
}

// The matrix of certificates: each is shown to a node as client and as server. Of all of them only what carries one allowed
// identity of this cluster, signed by the mesh CA, in time and for the use, gets a connection (CASES I-09, RELIABILITY row 16).
func TestHandshakeMatrix(t *testing.T) {
	ca, other := newCA(t, "mesh", nil), newCA(t, "clients", nil)
	below := newCA(t, "issuing", ca)
	const nodeB = "spiffe://demo/mvp-node/cp-b"
	usage := func(u ...x509.ExtKeyUsage) func(*x509.Certificate) {
		return func(c *x509.Certificate) { c.ExtKeyUsage = u }
	}
	shift := func(d time.Duration) func(*x509.Certificate) {
		return func(c *x509.Certificate) { c.NotBefore, c.NotAfter = c.NotBefore.Add(d), c.NotAfter.Add(d) }
	}
	dns := func(names ...string) func(*x509.Certificate) {
		return func(c *x509.Certificate) { c.DNSNames = names }
	}
	for _, tc := range []struct {
		name     string
		cert     *tls.Certificate
		asClient func(error) bool // nil: accepted
		asServer func(error) bool
	}{
		{name: "right", cert: ca.leaf(nil, nodeB)},
		{name: "right, by an intermediate", cert: below.leaf(nil, nodeB)},
		{name: "right, by DNS name", cert: ca.leaf(dns("b.example"))},
		{name: "right, any usage", cert: ca.leaf(usage(x509.ExtKeyUsageAny), nodeB)},
		{name: "for servers only", cert: ca.leaf(usage(x509.ExtKeyUsageServerAuth), nodeB), asClient: invalid(x509.IncompatibleUsage)},
		{name: "for clients only", cert: ca.leaf(usage(x509.ExtKeyUsageClientAuth), nodeB), asServer: invalid(x509.IncompatibleUsage)},
		{
			name: "for neither", cert: ca.leaf(usage(x509.ExtKeyUsageCodeSigning), nodeB),
			asClient: invalid(x509.IncompatibleUsage), asServer: invalid(x509.IncompatibleUsage),
		},
		{name: "expired", cert: ca.leaf(shift(-2*time.Hour), nodeB), asClient: invalid(x509.Expired), asServer: invalid(x509.Expired)},
		{name: "not valid yet", cert: ca.leaf(shift(2*time.Hour), nodeB), asClient: invalid(x509.Expired), asServer: invalid(x509.Expired)},
		{name: "another CA", cert: other.leaf(nil, nodeB), asClient: unknownAuthority, asServer: unknownAuthority},
		{name: "self-signed", cert: selfSigned(t, nodeB), asClient: unknownAuthority, asServer: unknownAuthority},
		{
			name: "by an intermediate that it does not send", cert: withoutChain(below.leaf(nil, nodeB)),
			asClient: unknownAuthority, asServer: unknownAuthority,
		},
		{
			name: "signed by another leaf", cert: signedByLeaf(ca, nodeB),
			asClient: unknownAuthority, asServer: unknownAuthority,
		},
		{name: "two URIs", cert: ca.leaf(nil, nodeB, nodeB), asClient: is(ErrManyIdentities), asServer: is(ErrManyIdentities)},
		{name: "another cluster", cert: ca.leaf(nil, "spiffe://prod/mvp-node/cp-b"), asClient: is(ErrForeignCluster), asServer: is(ErrForeignCluster)},
		{name: "no identity", cert: ca.leaf(nil), asClient: is(ErrNoIdentity), asServer: is(ErrNoIdentity)},
		{name: "a common name is no identity", cert: ca.leaf(func(c *x509.Certificate) { c.Subject.CommonName = "cp-b" }), asClient: is(ErrNoIdentity), asServer: is(ErrNoIdentity)},
		{name: "a wildcard DNS name", cert: ca.leaf(dns("*.example")), asClient: is(ErrNoIdentity), asServer: is(ErrNoIdentity)},
		{name: "not on the allow list", cert: ca.leaf(nil, "spiffe://demo/mvp-node/cp-z"), asClient: is(ErrNotAllowed), asServer: is(ErrNotAllowed)},
		{name: "an operator", cert: ca.leaf(nil, "spiffe://demo/mvp-operator/jane"), asClient: is(ErrNotAllowed), asServer: is(ErrNotAllowed)},
	} {
		t.Run(tc.name, func(t *testing.T) {
			us := meshTLS(ca.leaf(nil, "spiffe://demo/mvp-node/cp-a"), ca.pool(), rules)
			// Whoever shows the certificate accepts us without a look; it is we who must refuse.
			asClient := &tls.Config{
				InsecureSkipVerify: true, NextProtos: []string{alpn},
				GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return tc.cert, nil },
			}
			state, _, err, _ := shake(t, us.Server(alpn, RoleNode), asClient)
			judge(t, "as client", us, state, err, tc.asClient)

			asServer := &tls.Config{Certificates: []tls.Certificate{*tc.cert}, ClientAuth: tls.RequireAnyClientCert, NextProtos: []string{alpn}}
			_, state, _, err = shake(t, asServer, us.Client(alpn, "cp-b"))
			judge(t, "as server", us, state, err, tc.asServer)
		})
	}
}

func judge(t *testing.T, what string, us MeshTLS, state tls.ConnectionState, err error, want func(error) bool) {
	t.Helper()
	if want != nil {
		if err == nil || !want(err) {
			t.Errorf("%s: err = %v", what, err)
		}
		return
	}
	if err != nil {
		t.Errorf("%s: %v", what, err)
		return
	}
	if p, err := us.PeerFromTLS(state); err != nil || p != (Peer{"cp-b", RoleNode}) {
		t.Errorf("%s: peer = %+v, %v", what, p, err)
	}
	if state.Version != tls.VersionTLS13 || state.NegotiatedProtocol != alpn {
		t.Errorf("%s: version %x, protocol %q", what, state.Version, state.NegotiatedProtocol)
	}
}

// selfSigned is a certificate that answers for itself.
func selfSigned(t *testing.T, uri string) *tls.Certificate {
	ca := newCA(t, "self", nil)
	ca.cert.IsCA = false
	return &tls.Certificate{
		Certificate: ca.leaf(func(c *x509.Certificate) { c.Subject = ca.cert.Subject }, uri).Certificate,
		PrivateKey:  ca.key,
	}
}

func withoutChain(c *tls.Certificate) *tls.Certificate {
	c.Certificate = c.Certificate[:1]
	return c
}

// signedByLeaf has a certificate that a node signed with its own, for another name.
func signedByLeaf(ca *testCA, uri string) *tls.Certificate {
	leaf := ca.leaf(nil, "spiffe://demo/mvp-node/cp-a")
	forger := &testCA{t: ca.t, cert: leaf.Leaf, key: leaf.PrivateKey.(*ecdsa.PrivateKey), chain: leaf.Certificate}
	return forger.leaf(nil, uri)
}

func TestHandshakeRoles(t *testing.T) {
	ca := newCA(t, "mesh", nil)
	us := meshTLS(ca.leaf(nil, "spiffe://demo/mvp-node/cp-a"), ca.pool(), rules)
	jane := meshTLS(ca.leaf(nil, "spiffe://demo/mvp-operator/jane"), ca.pool(), rules)
	state, _, err, clientErr := shake(t, us.Server(alpn, RoleNode, RoleOperator), jane.Client(alpn, "cp-a"))
	if err != nil || clientErr != nil {
		t.Fatal(err, clientErr)
	}
	if p, err := us.PeerFromTLS(state); err != nil || p != (Peer{"jane", RoleOperator}) {
		t.Errorf("peer = %+v, %v", p, err)
	}
	// The port that admits nodes alone says why.
	_, _, err, clientErr = shake(t, us.Server(alpn, RoleNode), jane.Client(alpn, "cp-a"))
	want := `operator "jane": role is not admitted on this port: node is not on the list of allowed names`
	if err == nil || err.Error() != want || clientErr == nil {
		t.Errorf("server: %v, want %s; client: %v", err, want, clientErr)
	}
	// Nobody may serve as an operator.
	_, _, _, err = shake(t, jane.Server(alpn, RoleNode), us.Client(alpn, ""))
	if want := `operator "jane" does not serve: node is not on the list of allowed names`; err == nil || err.Error() != want {
		t.Errorf("client: %v, want %s", err, want)
	}
}

// Whoever is dialled must be who was meant (CASES I-09); only gossip seeds are dialled without a name.
func TestHandshakeWrongName(t *testing.T) {
	ca := newCA(t, "mesh", nil)
	a := meshTLS(ca.leaf(nil, "spiffe://demo/mvp-node/cp-a"), ca.pool(), rules)
	b := meshTLS(ca.leaf(nil, "spiffe://demo/mvp-node/cp-b"), ca.pool(), rules)
	for name, want := range map[string]*WrongPeerError{
		"cp-b": nil,
		"":     nil,
		"cp-c": {Want: "cp-c", Got: "cp-b"},
		"CP-B": {Want: "CP-B", Got: "cp-b"},
	} {
		_, _, _, err := shake(t, b.Server(alpn, RoleNode), a.Client(alpn, name))
		var wrong *WrongPeerError
		switch {
		case want == nil && err != nil:
			t.Errorf("%q: %v", name, err)
		case want != nil && (!errors.As(err, &wrong) || *wrong != *want):
			t.Errorf("%q: err = %v, want %v", name, err, want)
		}
	}
	if got, want := (&WrongPeerError{"cp-c", "cp-b"}).Error(), `node "cp-b" answered where "cp-c" was expected`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// What is wrong with the connection itself, whatever the certificate.
func TestHandshakeRefused(t *testing.T) {
	ca := newCA(t, "mesh", nil)
	node := func(roots *x509.CertPool) MeshTLS {
		return meshTLS(ca.leaf(nil, "spiffe://demo/mvp-node/cp-a"), roots, rules)
	}
	us := node(ca.pool())
	change := func(c *tls.Config, f func(*tls.Config)) *tls.Config { f(c); return c }
	for _, tc := range []struct {
		name           string
		server, client *tls.Config
		serverSays     string // part of the error; "" if it does not matter what it says
		clientSays     string
	}{
		{
			name: "no client certificate", server: us.Server(alpn, RoleNode),
			client:     &tls.Config{InsecureSkipVerify: true, NextProtos: []string{alpn}},
			serverSays: "client didn't provide a certificate",
		},
		{
			name: "TLS 1.2 client", server: us.Server(alpn, RoleNode),
			client: change(us.Client(alpn, ""), func(c *tls.Config) {
				c.MinVersion, c.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
			}),
			serverSays: "client offered only unsupported versions",
		},
		{
			name: "TLS 1.2 server", client: us.Client(alpn, ""),
			server: change(us.Server(alpn, RoleNode), func(c *tls.Config) {
				c.MinVersion, c.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
			}),
			clientSays: "protocol version not supported",
		},
		{
			name: "client of another protocol", server: us.Server(alpn, RoleNode), client: us.Client("h2", ""),
			serverSays: "client requested unsupported application protocols", clientSays: "no application protocol",
		},
		{
			name: "client without protocol", server: us.Server(alpn, RoleNode),
			client:     change(us.Client(alpn, ""), func(c *tls.Config) { c.NextProtos, c.VerifyConnection = nil, nil }),
			serverSays: "peer does not speak mvp-test/1",
		},
		{
			name: "server without protocol", client: us.Client(alpn, ""),
			server:     change(us.Server(alpn, RoleNode), func(c *tls.Config) { c.NextProtos, c.VerifyConnection = nil, nil }),
			clientSays: "peer does not speak mvp-test/1",
		},
		{
			// An empty pool is no pool; nil would be the roots of the system, who sign for anybody.
			name: "server has no CA", server: node(nil).Server(alpn, RoleNode), client: us.Client(alpn, ""),
			serverSays: "verify peer certificate: no mesh CA is loaded",
		},
		{
			name: "client has no CA", server: us.Server(alpn, RoleNode), client: node(nil).Client(alpn, ""),
			clientSays: "verify peer certificate: no mesh CA is loaded",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, _, serverErr, clientErr := shake(t, tc.server, tc.client)
			if serverErr == nil || !strings.Contains(serverErr.Error(), tc.serverSays) {
				t.Errorf("server: %v, want %s", serverErr, tc.serverSays)
			}
			if clientErr == nil || !strings.Contains(clientErr.Error(), tc.clientSays) {
				t.Errorf("client: %v, want %s", clientErr, tc.clientSays)
			}
		})
	}
}

// CASES I-08: certificates and authorities are those of the moment of each handshake, first old, then old and new, then new.
func TestHandshakeFollowsRotation(t *testing.T) {
	before, after := newCA(t, "mesh 1", nil), newCA(t, "mesh 2", nil)
	both := before.pool()
	both.AddCert(after.cert)
	const a, b = "spiffe://demo/mvp-node/cp-a", "spiffe://demo/mvp-node/cp-b"
	var serverCert, clientCert *tls.Certificate
	var roots *x509.CertPool
	server := MeshTLS{func() *tls.Certificate { return serverCert }, func() *x509.CertPool { return roots }, rules}.Server(alpn, RoleNode)
	client := MeshTLS{func() *tls.Certificate { return clientCert }, func() *x509.CertPool { return roots }, rules}.Client(alpn, "cp-a")
	for _, step := range []struct {
		name           string
		server, client *testCA
		roots          *x509.CertPool
		ok             bool
	}{
		{"old", before, before, before.pool(), true},
		{"new client too early", before, after, before.pool(), false},
		{"bundle", before, before, both, true},
		{"new client", before, after, both, true},
		{"new server", after, after, both, true},
		{"new CA only", after, after, after.pool(), true},
		{"old client left behind", after, before, after.pool(), false},
	} {
		serverCert, clientCert, roots = step.server.leaf(nil, a), step.client.leaf(nil, b), step.roots
		_, _, err, clientErr := shake(t, server, client)
		if ok := err == nil && clientErr == nil; ok != step.ok {
			t.Errorf("%s: %v, %v", step.name, err, clientErr)
		}
	}
}

// A resumed session would keep a peer in that a changed CA or allow list keeps out.
func TestHandshakeIsNeverResumed(t *testing.T) {
	ca := newCA(t, "mesh", nil)
	us := meshTLS(ca.leaf(nil, "spiffe://demo/mvp-node/cp-a"), ca.pool(), rules)
	server, client := us.Server(alpn, RoleNode), us.Client(alpn, "")
	client.ClientSessionCache = tls.NewLRUClientSessionCache(8)
	for range 3 {
		_, state, err, clientErr := shake(t, server, client)
		if err != nil || clientErr != nil || state.DidResume {
			t.Fatalf("resumed: %v; %v, %v", state.DidResume, err, clientErr)
		}
	}
}

func TestPeerFromTLSWithoutCertificate(t *testing.T) {
	_, err := MeshTLS{Rules: rules}.PeerFromTLS(tls.ConnectionState{})
	if want := "connection has no peer certificate"; err == nil || err.Error() != want {
		t.Errorf("err = %v, want %s", err, want)
	}
}
