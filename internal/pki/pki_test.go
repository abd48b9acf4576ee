package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"net"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"
)

var testNow = time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)

func parse(t *testing.T, pair Pair) *x509.Certificate {
	t.Helper()
	if _, err := tls.X509KeyPair(pair.CertPEM, pair.KeyPEM); err != nil {
		t.Fatalf("certificate and key do not belong together: %v", err)
	}
	block, rest := pem.Decode(pair.CertPEM)
	if block == nil || len(rest) != 0 {
		t.Fatalf("want exactly one PEM block, got %q", pair.CertPEM)
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

func meshCA(t *testing.T) *CA {
	t.Helper()
	ca, err := NewMeshCA("demo", testNow, DefaultCALifetime)
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

func uris(cert *x509.Certificate) []string {
	var all []string
	for _, uri := range cert.URIs {
		all = append(all, uri.String())
	}
	return all
}

func TestMeshCA(t *testing.T) {
	ca := meshCA(t)
	cert := parse(t, ca.Pair())
	if !cert.IsCA || !cert.MaxPathLenZero || cert.MaxPathLen != 0 {
		t.Errorf("IsCA %v, MaxPathLen %d: want a CA that signs no other", cert.IsCA, cert.MaxPathLen)
	}
	if got := uris(cert); !slices.Equal(got, []string{"spiffe://demo"}) {
		t.Errorf("URIs %q", got)
	}
	if key, ok := cert.PublicKey.(*ecdsa.PublicKey); !ok || key.Curve != elliptic.P256() {
		t.Errorf("key is %T, want ECDSA P-256", cert.PublicKey)
	}
	if want := testNow.Add(-5 * time.Minute); !cert.NotBefore.Equal(want) {
		t.Errorf("NotBefore %v, want %v", cert.NotBefore, want)
	}
	if want := testNow.Add(DefaultCALifetime); !cert.NotAfter.Equal(want) || !ca.NotAfter().Equal(want) {
		t.Errorf("NotAfter %v, want %v", cert.NotAfter, want)
	}
	if cluster, err := ca.Cluster(); cluster != "demo" || err != nil {
		t.Errorf("Cluster() = %q, %v", cluster, err)
	}
}

func TestMeshCertificates(t *testing.T) {
	extra := Extra{DNSNames: []string{"cp-a.example.com"}, IPs: []net.IP{net.IPv4(192, 0, 2, 1)}}
	both := []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	for _, test := range []struct {
		name  string
		issue func(*CA) (Pair, error)
		uri   string
		usage []x509.ExtKeyUsage
	}{
		{
			name:  "node",
			issue: func(ca *CA) (Pair, error) { return ca.IssueNode("demo", "cp-a", extra, testNow, time.Hour) },
			uri:   "spiffe://demo/mvp-node/cp-a",
			usage: both,
		},
		{
			name:  "operator",
			issue: func(ca *CA) (Pair, error) { return ca.IssueOperator("demo", "alice", extra, testNow, time.Hour) },
			uri:   "spiffe://demo/mvp-operator/alice",
			usage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			ca := meshCA(t)
			pair, err := test.issue(ca)
			if err != nil {
				t.Fatal(err)
			}
			cert := parse(t, pair)
			if got := uris(cert); !slices.Equal(got, []string{test.uri}) {
				t.Errorf("URIs %q, want exactly %q", got, test.uri)
			}
			if !slices.Equal(cert.ExtKeyUsage, test.usage) {
				t.Errorf("extended key usage %v, want %v", cert.ExtKeyUsage, test.usage)
			}
			if cert.IsCA || cert.KeyUsage != x509.KeyUsageDigitalSignature {
				t.Errorf("IsCA %v, key usage %b", cert.IsCA, cert.KeyUsage)
			}
			if !slices.Equal(cert.DNSNames, extra.DNSNames) || len(cert.IPAddresses) != 1 || !cert.IPAddresses[0].Equal(extra.IPs[0]) {
				t.Errorf("extra names %q %q", cert.DNSNames, cert.IPAddresses)
			}
			if want := testNow.Add(time.Hour); !cert.NotAfter.Equal(want) {
				t.Errorf("NotAfter %v, want %v", cert.NotAfter, want)
			}
			roots := x509.NewCertPool()
			roots.AppendCertsFromPEM(ca.CertPEM())
			for _, usage := range both {
				_, err := cert.Verify(x509.VerifyOptions{
					Roots: roots, CurrentTime: testNow, KeyUsages: []x509.ExtKeyUsage{usage},
				})
				if allowed := slices.Contains(test.usage, usage); (err == nil) != allowed {
					t.Errorf("verifying for usage %v: %v, allowed %v", usage, err, allowed)
				}
			}
		})
	}
}

func TestKubernetesUser(t *testing.T) {
	ca, err := NewCA(CAOptions{CommonName: "client-ca", Now: testNow, Lifetime: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	pair, err := ca.Issue(LeafOptions{
		CommonName: "admin", Organizations: []string{"system:masters"}, Client: true, Now: testNow, Lifetime: time.Minute,
	})
	if err != nil {
		t.Fatal(err)
	}
	cert := parse(t, pair)
	if cert.Subject.CommonName != "admin" || !slices.Equal(cert.Subject.Organization, []string{"system:masters"}) {
		t.Errorf("subject %v", cert.Subject)
	}
	if _, err := ca.Cluster(); err == nil || !strings.Contains(err.Error(), "does not name its cluster") {
		t.Errorf("Cluster() of another CA: %v", err)
	}
}

func TestLeafNeverOutlivesItsCA(t *testing.T) {
	ca, err := NewMeshCA("demo", testNow, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	pair, err := ca.IssueNode("demo", "cp-a", Extra{}, testNow, 2*time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	if got := parse(t, pair).NotAfter; !got.Equal(ca.NotAfter()) {
		t.Errorf("NotAfter %v, want that of the CA, %v", got, ca.NotAfter())
	}
}

func TestRefusals(t *testing.T) {
	ca := meshCA(t)
	plain, err := NewCA(CAOptions{CommonName: "plain", Now: testNow, Lifetime: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	leaf := func(change func(*LeafOptions)) func() error {
		return func() error {
			o := LeafOptions{CommonName: "x", Client: true, Now: testNow, Lifetime: time.Hour}
			change(&o)
			_, err := ca.Issue(o)
			return err
		}
	}
	for _, test := range []struct {
		name string
		do   func() error
		want string
	}{
		{"CA without a name", func() error { _, err := NewCA(CAOptions{Lifetime: 1}); return err }, "common name is empty"},
		{"CA without a lifetime", func() error { _, err := NewCA(CAOptions{CommonName: "x"}); return err }, "not positive"},
		{"mesh CA of a bad cluster", func() error { _, err := NewMeshCA("De_mo", testNow, 1); return err }, "cluster ID"},
		{"leaf without a name", leaf(func(o *LeafOptions) { o.CommonName = "" }), "no common name"},
		{"leaf without a lifetime", leaf(func(o *LeafOptions) { o.Lifetime = -1 }), "not positive"},
		{"leaf without a use", leaf(func(o *LeafOptions) { o.Client = false }), "neither server nor client"},
		{"leaf of an expired CA", leaf(func(o *LeafOptions) { o.Now = ca.NotAfter() }), "expired"},
		{
			"node of another cluster",
			func() error { _, err := ca.IssueNode("prod", "cp-a", Extra{}, testNow, 1); return err },
			`the CA is that of cluster "demo", not of "prod"`,
		},
		{
			"node from a CA that is no mesh CA",
			func() error { _, err := plain.IssueNode("demo", "cp-a", Extra{}, testNow, 1); return err },
			"does not name its cluster",
		},
		{
			"node with a bad DNS name",
			func() error {
				_, err := ca.IssueNode("demo", "cp-a", Extra{DNSNames: []string{"a b"}}, testNow, 1)
				return err
			},
			`DNS name "a b" has the character ' '`,
		},
		{
			"operator with a bad name",
			func() error { _, err := ca.IssueOperator("demo", "a/b", Extra{}, testNow, 1); return err },
			`name "a/b" has the character '/'`,
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			if err := test.do(); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want an error with %q", err, test.want)
			}
		})
	}
}

func TestParseCA(t *testing.T) {
	ca, other := meshCA(t), meshCA(t)
	leaf, err := ca.IssueNode("demo", "cp-a", Extra{}, testNow, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name      string
		cert, key []byte
		want      string // in the error; empty: none
	}{
		{"round trip", ca.CertPEM(), ca.Pair().KeyPEM, ""},
		{"key of another", ca.CertPEM(), other.Pair().KeyPEM, "belongs to another certificate"},
		{"leaf", leaf.CertPEM, leaf.KeyPEM, "is not a CA"},
		{"no certificate", []byte("x"), ca.Pair().KeyPEM, "no PEM block of type CERTIFICATE"},
		{"swapped", ca.Pair().KeyPEM, ca.CertPEM(), "no PEM block of type CERTIFICATE"},
		{"no key", ca.CertPEM(), nil, "no PEM block"},
		{"certificate as the key", ca.CertPEM(), ca.CertPEM(), "is not a private key"},
	} {
		t.Run(test.name, func(t *testing.T) {
			parsed, err := ParseCA(test.cert, test.key)
			if test.want != "" {
				if err == nil || !strings.Contains(err.Error(), test.want) {
					t.Fatalf("got %v, want an error with %q", err, test.want)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if _, err := parsed.IssueNode("demo", "cp-a", Extra{}, testNow, time.Hour); err != nil {
				t.Errorf("issuing: %v", err)
			}
		})
	}
}

func TestIdentities(t *testing.T) {
	long := strings.Repeat("a", 63)
	for _, test := range []struct {
		name string
		make func(cluster, name string) (*url.URL, error)
		cluster, node,
		want, wantErr string
	}{
		{"node", NodeURI, "demo", "cp-a", "spiffe://demo/mvp-node/cp-a", ""},
		{"operator", OperatorURI, "demo", "alice", "spiffe://demo/mvp-operator/alice", ""},
		{"dots", NodeURI, "prod.example.com", "cp-a.example", "spiffe://prod.example.com/mvp-node/cp-a.example", ""},
		{"digits", NodeURI, "1", "0", "spiffe://1/mvp-node/0", ""},
		{"longest name", NodeURI, "demo", long, "spiffe://demo/mvp-node/" + long, ""},
		{"empty cluster", NodeURI, "", "cp-a", "", "cluster ID is empty"},
		{"empty name", NodeURI, "demo", "", "", "name is empty"},
		{"upper case", NodeURI, "demo", "CP-A", "", `name "CP-A" has the character 'C'`},
		{"path", NodeURI, "demo", "../x", "", "empty part"},
		{"slash in the cluster", NodeURI, "demo/x", "cp-a", "", `cluster ID "demo/x" has the character '/'`},
		{"port in the cluster", NodeURI, "demo:1", "cp-a", "", `has the character ':'`},
		{"user in the cluster", NodeURI, "a@demo", "cp-a", "", `has the character '@'`},
		{"percent", NodeURI, "demo", "a%2fb", "", `has the character '%'`},
		{"not ASCII", NodeURI, "demo", "größe", "", `has the character 'ö'`},
		{"dash at the end", NodeURI, "demo", "cp-", "", "begins or ends with '-'"},
		{"dot at the end", NodeURI, "demo.", "cp-a", "", "empty part"},
		{"long name", NodeURI, "demo", long + "a", "", "64 characters long, at most 63"},
		{"long label", NodeURI, long + "a", "cp-a", "", "longer than 63"},
		{"long cluster", NodeURI, strings.Repeat("a.", 127), "cp-a", "", "254 characters long, at most 253"},
		{"both", NodeURI, "", "", "", "cluster ID is empty\nname is empty"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := test.make(test.cluster, test.node)
			if test.wantErr != "" {
				if err == nil || !strings.Contains(err.Error(), test.wantErr) {
					t.Fatalf("got %v, %v, want an error with %q", got, err, test.wantErr)
				}
				return
			}
			if err != nil || got.String() != test.want {
				t.Errorf("got %v, %v, want %s", got, err, test.want)
			}
		})
	}
}

func TestNewSigningKey(t *testing.T) {
	private, public, err := NewSigningKey()
	if err != nil {
		t.Fatal(err)
	}
	key, err := parseKey(private)
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(public)
	if block == nil || block.Type != "PUBLIC KEY" {
		t.Fatalf("public key is %q", public)
	}
	parsed, err := x509.ParsePKIXPublicKey(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	if !parsed.(*ecdsa.PublicKey).Equal(key.Public()) {
		t.Error("the two halves do not belong together")
	}
}
