package pki

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"time"
)

// Lifetimes that "mvp-node certs" uses unless told otherwise; the same as kubeadm's.
const (
	DefaultCALifetime   = 10 * 365 * 24 * time.Hour
	DefaultLeafLifetime = 365 * 24 * time.Hour
)

// backdate is how long before now a certificate begins to be valid, so that a host whose clock is a little behind
// accepts a certificate that was made a moment ago.
const backdate = 5 * time.Minute

// Pair is a certificate and its private key, each one PEM block. The key is PKCS #8.
type Pair struct {
	CertPEM []byte
	KeyPEM  []byte
}

// CAOptions say what a certificate authority is to look like.
type CAOptions struct {
	CommonName string
	URI        *url.URL      // optional; for a mesh CA the cluster's identity
	Now        time.Time     // validity begins five minutes before
	Lifetime   time.Duration // counted from Now; must be positive
}

// LeafOptions say what a certificate is to look like. At least one of Server and Client must be set.
type LeafOptions struct {
	CommonName    string
	Organizations []string // to Kubernetes, the groups of a user
	DNSNames      []string
	IPs           []net.IP
	URIs          []*url.URL
	Server        bool          // may be the server of a TLS connection
	Client        bool          // may be the client of a TLS connection
	Now           time.Time     // validity begins five minutes before
	Lifetime      time.Duration // counted from Now; must be positive; cut short where the CA ends earlier
}

// Extra are names added to a mesh certificate besides its identity. mvp-node itself does not look at them; other
// clients of the mesh port (grpcurl, probes) verify the address they dialled against them.
type Extra struct {
	DNSNames []string
	IPs      []net.IP
}

// CA signs certificates. It is immutable and safe for concurrent use.
type CA struct {
	cert *x509.Certificate
	key  crypto.Signer
	pair Pair
}

// NewCA makes a self-signed certificate authority, which signs leaves and no further authorities.
func NewCA(o CAOptions) (*CA, error) {
	if o.CommonName == "" {
		return nil, errors.New("CA: the common name is empty")
	}
	if o.Lifetime <= 0 {
		return nil, fmt.Errorf("CA %q: lifetime %v is not positive", o.CommonName, o.Lifetime)
	}
	template := &x509.Certificate{
		Subject:               pkix.Name{CommonName: o.CommonName},
		NotBefore:             o.Now.Add(-backdate),
		NotAfter:              o.Now.Add(o.Lifetime),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign | x509.KeyUsageDigitalSignature,
		BasicConstraintsValid: true,
		IsCA:                  true,
		MaxPathLenZero:        true,
	}
	if o.URI != nil {
		template.URIs = []*url.URL{o.URI}
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("key of CA %q: %w", o.CommonName, err)
	}
	pair, cert, err := sign(template, template, key, key)
	if err != nil {
		return nil, fmt.Errorf("CA %q: %w", o.CommonName, err)
	}
	return &CA{cert: cert, key: key, pair: pair}, nil
}

// NewMeshCA makes the authority of one cluster's mesh. Its name and its URI tell the cluster.
func NewMeshCA(cluster string, now time.Time, lifetime time.Duration) (*CA, error) {
	uri, err := ClusterURI(cluster)
	if err != nil {
		return nil, fmt.Errorf("mesh CA: %w", err)
	}
	// X.520 allows 64 characters in a common name; the URI has the whole cluster ID.
	name := "mvp-node mesh CA"
	if long := name + " of " + cluster; len(long) <= 64 {
		name = long
	}
	return NewCA(CAOptions{CommonName: name, URI: uri, Now: now, Lifetime: lifetime})
}

// ParseCA reads an authority back from PEM. It refuses a certificate that may not sign others, and a key that belongs to
// another certificate.
func ParseCA(certPEM, keyPEM []byte) (*CA, error) {
	block, _ := pem.Decode(certPEM)
	if block == nil || block.Type != "CERTIFICATE" {
		return nil, errors.New("CA certificate: no PEM block of type CERTIFICATE")
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("CA certificate: %w", err)
	}
	if !cert.IsCA || cert.KeyUsage&x509.KeyUsageCertSign == 0 {
		return nil, fmt.Errorf("certificate %q is not a CA", cert.Subject.CommonName)
	}
	key, err := parseKey(keyPEM)
	if err != nil {
		return nil, fmt.Errorf("key of CA %q: %w", cert.Subject.CommonName, err)
	}
	public, ok := cert.PublicKey.(interface{ Equal(crypto.PublicKey) bool })
	if !ok || !public.Equal(key.Public()) {
		return nil, fmt.Errorf("key of CA %q belongs to another certificate", cert.Subject.CommonName)
	}
	return &CA{cert: cert, key: key, pair: Pair{CertPEM: slices.Clone(certPEM), KeyPEM: slices.Clone(keyPEM)}}, nil
}

// parseKey reads a private key in the forms that openssl, kubeadm and this package write.
func parseKey(keyPEM []byte) (crypto.Signer, error) {
	block, _ := pem.Decode(keyPEM)
	if block == nil {
		return nil, errors.New("no PEM block")
	}
	var key any
	var err error
	switch block.Type {
	case "PRIVATE KEY":
		key, err = x509.ParsePKCS8PrivateKey(block.Bytes)
	case "EC PRIVATE KEY":
		key, err = x509.ParseECPrivateKey(block.Bytes)
	case "RSA PRIVATE KEY":
		key, err = x509.ParsePKCS1PrivateKey(block.Bytes)
	default:
		return nil, fmt.Errorf("PEM block of type %q is not a private key", block.Type)
	}
	if err != nil {
		return nil, err
	}
	signer, ok := key.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("%T cannot sign", key)
	}
	return signer, nil
}

// Pair returns the authority's own certificate and key. Callers must not change the bytes.
func (ca *CA) Pair() Pair { return ca.pair }

// CertPEM returns the authority's certificate, which those who shall trust it need. Callers must not change the bytes.
func (ca *CA) CertPEM() []byte { return ca.pair.CertPEM }

// NotAfter returns when the authority's certificate ends. Nothing it signs is valid longer.
func (ca *CA) NotAfter() time.Time { return ca.cert.NotAfter }

// Cluster returns the cluster whose mesh CA this is. It is an error if the authority does not carry exactly one cluster
// identity, as is the case for any CA that was not made by [NewMeshCA] or in its image.
func (ca *CA) Cluster() (string, error) {
	if len(ca.cert.URIs) != 1 || ca.cert.URIs[0].Scheme != "spiffe" || ca.cert.URIs[0].Path != "" {
		return "", fmt.Errorf("CA %q does not name its cluster (want exactly one URI SAN spiffe://<cluster>)",
			ca.cert.Subject.CommonName)
	}
	return ca.cert.URIs[0].Host, nil
}

// Issue makes a key and a certificate for it, signed by the authority.
func (ca *CA) Issue(o LeafOptions) (Pair, error) {
	subject := o.CommonName
	if subject == "" && len(o.URIs) > 0 {
		subject = o.URIs[0].String()
	}
	if subject == "" && len(o.DNSNames) == 0 && len(o.IPs) == 0 {
		return Pair{}, errors.New("certificate: no common name and no subject alternative name")
	}
	if o.Lifetime <= 0 {
		return Pair{}, fmt.Errorf("certificate %q: lifetime %v is not positive", subject, o.Lifetime)
	}
	if !o.Now.Before(ca.cert.NotAfter) {
		return Pair{}, fmt.Errorf("certificate %q: the CA %q expired at %s", subject, ca.cert.Subject.CommonName,
			ca.cert.NotAfter.Format(time.RFC3339))
	}
	var usage []x509.ExtKeyUsage
	if o.Server {
		usage = append(usage, x509.ExtKeyUsageServerAuth)
	}
	if o.Client {
		usage = append(usage, x509.ExtKeyUsageClientAuth)
	}
	if len(usage) == 0 {
		return Pair{}, fmt.Errorf("certificate %q: neither server nor client", subject)
	}
	notAfter := o.Now.Add(o.Lifetime)
	if notAfter.After(ca.cert.NotAfter) {
		notAfter = ca.cert.NotAfter
	}
	template := &x509.Certificate{
		Subject:               pkix.Name{CommonName: o.CommonName, Organization: o.Organizations},
		NotBefore:             o.Now.Add(-backdate),
		NotAfter:              notAfter,
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           usage,
		BasicConstraintsValid: true,
		DNSNames:              o.DNSNames,
		IPAddresses:           o.IPs,
		URIs:                  o.URIs,
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return Pair{}, fmt.Errorf("key of certificate %q: %w", subject, err)
	}
	pair, _, err := sign(template, ca.cert, key, ca.key)
	if err != nil {
		return Pair{}, fmt.Errorf("certificate %q: %w", subject, err)
	}
	return pair, nil
}

// IssueNode makes the mesh certificate of a node: server and client, its identity the only URI. The cluster is asked for
// again so that a certificate is never issued by the CA of another one.
func (ca *CA) IssueNode(cluster, name string, extra Extra, now time.Time, lifetime time.Duration) (Pair, error) {
	return ca.issueIdentity(NodeURI, true, cluster, name, extra, now, lifetime)
}

// IssueOperator makes the mesh certificate of an operator: a client only, so that it can never stand in for a node.
func (ca *CA) IssueOperator(cluster, name string, extra Extra, now time.Time, lifetime time.Duration) (Pair, error) {
	return ca.issueIdentity(OperatorURI, false, cluster, name, extra, now, lifetime)
}

func (ca *CA) issueIdentity(
	identity func(cluster, name string) (*url.URL, error), server bool,
	cluster, name string, extra Extra, now time.Time, lifetime time.Duration,
) (Pair, error) {
	uri, err := identity(cluster, name)
	if err != nil {
		return Pair{}, fmt.Errorf("mesh certificate: %w", err)
	}
	own, err := ca.Cluster()
	if err != nil {
		return Pair{}, fmt.Errorf("mesh certificate %q: %w", name, err)
	}
	if own != cluster {
		return Pair{}, fmt.Errorf("mesh certificate %q: the CA is that of cluster %q, not of %q", name, own, cluster)
	}
	for _, dns := range extra.DNSNames {
		if err := ValidateDNSName(dns); err != nil {
			return Pair{}, fmt.Errorf("mesh certificate %q: %w", name, err)
		}
	}
	return ca.Issue(LeafOptions{
		CommonName: name,
		DNSNames:   extra.DNSNames,
		IPs:        extra.IPs,
		URIs:       []*url.URL{uri},
		Server:     server,
		Client:     true,
		Now:        now,
		Lifetime:   lifetime,
	})
}

// NewSigningKey makes a key pair without a certificate, for service-account tokens: the private key (PKCS #8) and the
// public key (PKIX), both PEM.
func NewSigningKey() (privatePEM, publicPEM []byte, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("signing key: %w", err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, nil, fmt.Errorf("signing key: %w", err)
	}
	public, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return nil, nil, fmt.Errorf("signing key: %w", err)
	}
	return encode("PRIVATE KEY", private), encode("PUBLIC KEY", public), nil
}

// sign makes the certificate and returns it as PEM, with its key, and parsed.
func sign(template, parent *x509.Certificate, key *ecdsa.PrivateKey, signer crypto.Signer) (Pair, *x509.Certificate, error) {
	// The template has no serial number: crypto/x509 then takes a random one, as RFC 5280 wants it.
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err != nil {
		return Pair{}, nil, err
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return Pair{}, nil, err
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return Pair{}, nil, err
	}
	return Pair{CertPEM: encode("CERTIFICATE", der), KeyPEM: encode("PRIVATE KEY", keyDER)}, cert, nil
}

func encode(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}
