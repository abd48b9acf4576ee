package config

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/authz"
)

// checkFiles reads every file that the configuration names. Fields that are missing or wrong already are passed over.
func (c *Config) checkFiles(now time.Time) {
	s := &c.src
	f := checker{s, now}
	f.pair("front.tls", c.Front.TLS, nil, x509.ExtKeyUsageServerAuth)
	clientCAs := f.authorities("front.authentication.clientCAFile", c.Front.Authentication.ClientCAFile)
	f.authorities("apiserver.caFile", c.APIServer.CAFile)
	if path := "apiserver.kubeconfig"; c.APIServer.Kubeconfig != "" && s.good(path) {
		f.read(path, c.APIServer.Kubeconfig)
	}
	proxyCAs := f.authorities("apiserver.frontProxy.caFile", c.APIServer.FrontProxy.CAFile)
	f.pair("apiserver.frontProxy", c.APIServer.FrontProxy.KeyPair(), proxyCAs, x509.ExtKeyUsageClientAuth)
	meshCAs := f.authorities("mesh.tls.caFile", c.Mesh.TLS.CAFile)
	leaf := f.pair("mesh.tls", c.Mesh.TLS.KeyPair(), meshCAs, x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth)
	if leaf != nil && s.good("clusterID", "name") && c.ClusterID != "" && c.Name != "" {
		f.identity("mesh.tls.certFile", c, leaf)
	}

	// Whoever is signed by one of these can be something that the others must never be: any user, the front proxy that may
	// claim to be any user, a node of the mesh.
	sets := []caSet{
		{"front.authentication.clientCAFile", c.Front.Authentication.ClientCAFile, "a client", clientCAs},
		{"apiserver.frontProxy.caFile", c.APIServer.FrontProxy.CAFile, "the front proxy", proxyCAs},
		{"mesh.tls.caFile", c.Mesh.TLS.CAFile, "a node of the mesh", meshCAs},
	}
	for i, b := range sets {
		for _, a := range sets[:i] {
			f.apart(a, b)
		}
	}
}

// checker reads files and reports what is wrong with them.
type checker struct {
	*source
	now time.Time
}

// caSet is the authorities of one file, and what a certificate signed by them makes its holder.
type caSet struct {
	path, file, who string
	certs           []*x509.Certificate
}

// apart reports two files that share an authority, by key: a renewed certificate of the same key is the same authority.
func (f checker) apart(a, b caSet) {
	for _, x := range b.certs {
		for _, y := range a.certs {
			if bytes.Equal(x.RawSubjectPublicKeyInfo, y.RawSubjectPublicKeyInfo) {
				f.report(b.path, "%s and %s (%s on line %d) share the authority %q: who is %s could pass for %s",
					b.file, a.file, a.path, f.line(a.path), x.Subject.CommonName, a.who, b.who)
				return
			}
		}
	}
}

func (f checker) read(path, file string) []byte {
	data, err := os.ReadFile(file)
	switch {
	case err != nil:
		f.report(path, "%v", err)
	case len(bytes.TrimSpace(data)) == 0:
		f.report(path, "%s is empty", file)
	default:
		return data
	}
	return nil
}

// certificates reads the certificates of a PEM file, nil after a problem.
func (f checker) certificates(path, file string) []*x509.Certificate {
	if file == "" || !f.good(path) {
		return nil
	}
	data := f.read(path, file)
	if data == nil {
		return nil
	}
	var out []*x509.Certificate
	for {
		var block *pem.Block
		if block, data = pem.Decode(data); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			continue
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			f.report(path, "%s: certificate %d: %v", file, len(out)+1, err)
			return nil
		}
		out = append(out, cert)
	}
	if len(out) == 0 {
		f.report(path, "%s has no PEM certificate", file)
	}
	return out
}

// authorities reads a CA file. While a CA is rotated the file has the old one too, so one valid authority is enough.
func (f checker) authorities(path, file string) []*x509.Certificate {
	certs := f.certificates(path, file)
	if len(certs) == 0 {
		return nil
	}
	var first error
	for _, cert := range certs {
		if cert.BasicConstraintsValid && !cert.IsCA {
			f.report(path, "%s: certificate %q is not an authority", file, cert.Subject.CommonName)
			return nil
		}
		err := f.valid(cert)
		if err == nil {
			return certs
		}
		if first == nil {
			first = fmt.Errorf("%s: authority %q %w", file, cert.Subject.CommonName, err)
		}
	}
	f.report(path, "%v", first)
	return nil
}

// pair reads a certificate and its key, and returns the certificate if all is well. roots are the authorities that must have
// signed it, nil if they are not known.
func (f checker) pair(section string, p KeyPair, roots []*x509.Certificate, usages ...x509.ExtKeyUsage) *x509.Certificate {
	certPath, keyPath := section+".certFile", section+".keyFile"
	certs := f.certificates(certPath, p.CertFile)
	var key []byte
	if p.KeyFile != "" && f.good(keyPath) {
		key = f.read(keyPath, p.KeyFile)
	}
	if len(certs) == 0 {
		return nil
	}
	leaf := certs[0]
	if err := f.valid(leaf); err != nil {
		f.report(certPath, "%s %v", p.CertFile, err)
	}
	if key != nil {
		f.match(keyPath, p, leaf, key)
	}
	for _, u := range usages {
		if !hasUsage(leaf, u) {
			f.report(certPath, "%s may not be used for %s, its extended key usage does not say so", p.CertFile, usageNames[u])
		}
	}
	if roots != nil && f.good(certPath) {
		if err := f.signed(certs, roots); err != nil {
			f.report(certPath, "%s was not signed by %s.caFile: %v", p.CertFile, section, err)
		}
	}
	if !f.good(certPath, keyPath) {
		return nil
	}
	return leaf
}

var usageNames = map[x509.ExtKeyUsage]string{
	x509.ExtKeyUsageServerAuth: "servers (serverAuth)",
	x509.ExtKeyUsageClientAuth: "clients (clientAuth)",
}

// hasUsage follows x509.Certificate.Verify: a certificate that names no usage may be used for any.
func hasUsage(cert *x509.Certificate, want x509.ExtKeyUsage) bool {
	if len(cert.ExtKeyUsage) == 0 && len(cert.UnknownExtKeyUsage) == 0 {
		return true
	}
	for _, u := range cert.ExtKeyUsage {
		if u == want || u == x509.ExtKeyUsageAny {
			return true
		}
	}
	return false
}

// match reports a key that cannot be read or belongs to another certificate.
func (f checker) match(path string, p KeyPair, leaf *x509.Certificate, key []byte) {
	cert := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: leaf.Raw})
	if _, err := tls.X509KeyPair(cert, key); err != nil {
		// The standard library says "tls: private key does not match public key"; the operator needs the names.
		f.report(path, "%s is not the key of %s: %v", p.KeyFile, p.CertFile, err)
	}
}

func (f checker) signed(chain, roots []*x509.Certificate) error {
	opts := x509.VerifyOptions{
		Roots:         x509.NewCertPool(),
		Intermediates: x509.NewCertPool(),
		CurrentTime:   f.now,
		KeyUsages:     []x509.ExtKeyUsage{x509.ExtKeyUsageAny}, // looked at by itself
	}
	for _, c := range roots {
		opts.Roots.AddCert(c)
	}
	for _, c := range chain[1:] {
		opts.Intermediates.AddCert(c)
	}
	_, err := chain[0].Verify(opts)
	return err
}

func (f checker) valid(cert *x509.Certificate) error {
	switch {
	case f.now.After(cert.NotAfter):
		return fmt.Errorf("expired at %s", cert.NotAfter.UTC().Format(time.RFC3339))
	case f.now.Before(cert.NotBefore):
		return fmt.Errorf("is not valid before %s", cert.NotBefore.UTC().Format(time.RFC3339))
	}
	return nil
}

// identity reports a mesh certificate that other nodes would not take for this node's.
func (f checker) identity(path string, c *Config, leaf *x509.Certificate) {
	want := authz.Peer{Name: c.Name, Role: authz.RoleNode}
	rules := c.PeerRules()
	rules.AllowedNames = nil // checked by validate; whose certificate it is can be said in any case
	got, err := authz.PeerFromCertificate(leaf, rules)
	switch {
	case err != nil:
		f.report(path, "%s is not the certificate of %s: %v", c.Mesh.TLS.CertFile, want.ID(c.ClusterID), err)
	case got != want:
		f.report(path, "%s is the certificate of %s, this node is %s", c.Mesh.TLS.CertFile, got.ID(c.ClusterID), want.ID(c.ClusterID))
	}
}
