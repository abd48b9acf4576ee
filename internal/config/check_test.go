package config

import (
	"errors"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/mvp-mesh/mvp-node/internal/pki"
)

// certDir is a folder with every file that minimal names, all of them right at the time now.
type certDir struct {
	t                    *testing.T
	dir                  string
	now                  time.Time
	client, proxy, mesh  *pki.CA
	frontLeaf, proxyLeaf pki.LeafOptions
}

func newCertDir(t *testing.T, now time.Time) *certDir {
	d := &certDir{t: t, dir: t.TempDir(), now: now}
	d.client, d.proxy = d.ca("clients"), d.ca("front proxy")
	var err error
	if d.mesh, err = pki.NewMeshCA("demo", now, time.Hour); err != nil {
		t.Fatal(err)
	}
	d.frontLeaf = pki.LeafOptions{CommonName: "front", DNSNames: []string{"front"}, Server: true, Now: now, Lifetime: time.Hour}
	d.proxyLeaf = pki.LeafOptions{CommonName: "front-proxy-client", Client: true, Now: now, Lifetime: time.Hour}
	d.write("client-ca.crt", d.client.CertPEM())
	d.write("ca.crt", d.client.CertPEM())
	d.write("proxy-ca.crt", d.proxy.CertPEM())
	d.write("mesh-ca.crt", d.mesh.CertPEM())
	d.write("node.kubeconfig", []byte("kind: Config\n"))
	d.pair("front", d.issue(d.client, d.frontLeaf))
	d.pair("proxy", d.issue(d.proxy, d.proxyLeaf))
	d.pair("mesh", d.node("demo", "cp-a"))
	return d
}

func (d *certDir) ca(name string) *pki.CA {
	ca, err := pki.NewCA(pki.CAOptions{CommonName: name, Now: d.now, Lifetime: time.Hour})
	if err != nil {
		d.t.Fatal(err)
	}
	return ca
}

func (d *certDir) issue(ca *pki.CA, o pki.LeafOptions) pki.Pair {
	p, err := ca.Issue(o)
	if err != nil {
		d.t.Fatal(err)
	}
	return p
}

func (d *certDir) node(cluster, name string) pki.Pair {
	p, err := d.mesh.IssueNode(cluster, name, pki.Extra{}, d.now, time.Hour)
	if err != nil {
		d.t.Fatal(err)
	}
	return p
}

func (d *certDir) write(name string, data []byte) {
	if err := os.WriteFile(filepath.Join(d.dir, name), data, 0o600); err != nil {
		d.t.Fatal(err)
	}
}

func (d *certDir) pair(name string, p pki.Pair) {
	d.write(name+".crt", p.CertPEM)
	d.write(name+".key", p.KeyPEM)
}

func (d *certDir) remove(name string) {
	if err := os.Remove(filepath.Join(d.dir, name)); err != nil {
		d.t.Fatal(err)
	}
}

// text is minimal with all of its files in the folder.
func (d *certDir) text() string { return strings.ReplaceAll(minimal, "/pki/", "") }

func (d *certDir) parse(text string) *Config {
	c, err := Parse([]byte(text), filepath.Join(d.dir, "node.yaml"))
	if err != nil {
		d.t.Fatal(err)
	}
	return c
}

// says compares the text of err, with the folder cut out of it.
func (d *certDir) says(err error, want string) {
	d.t.Helper()
	var bad *Error
	if !errors.As(err, &bad) {
		d.t.Fatalf("err = %v, want an *Error", err)
	}
	got := strings.ReplaceAll(err.Error(), d.dir+"/", "")
	if diff := cmp.Diff(strings.Split(want, "\n"), strings.Split(got, "\n")); diff != "" {
		d.t.Error(diff)
	}
}

func TestCheck(t *testing.T) {
	now := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	spiffe := func(path string) []*url.URL { return []*url.URL{{Scheme: "spiffe", Host: "demo", Path: path}} }
	for _, tc := range []struct {
		name  string
		edit  [2]string // old, new in minimal
		spoil func(d *certDir)
		after time.Duration // how much later the check is
		want  string        // "" for no error
	}{
		{name: "all is well", spoil: func(*certDir) {}},
		{
			name: "files that are not there, or empty",
			spoil: func(d *certDir) {
				d.remove("front.crt")
				d.remove("mesh.key")
				d.remove("node.kubeconfig")
				d.write("proxy-ca.crt", nil)
			},
			want: `node.yaml:7: front.tls.certFile: open front.crt: no such file or directory
node.yaml:13: apiserver.kubeconfig: open node.kubeconfig: no such file or directory
node.yaml:14: apiserver.frontProxy.caFile: proxy-ca.crt is empty
node.yaml:17: mesh.tls.keyFile: open mesh.key: no such file or directory`,
		},
		{
			name: "files with something else in them",
			spoil: func(d *certDir) {
				d.write("front.crt", []byte("hello\n"))
				d.write("proxy.crt", []byte("-----BEGIN CERTIFICATE-----\naGVsbG8=\n-----END CERTIFICATE-----\n"))
				d.write("mesh.key", []byte("hello\n"))
				d.write("client-ca.crt", d.issue(d.client, d.frontLeaf).CertPEM)
			},
			want: `node.yaml:7: front.tls.certFile: front.crt has no PEM certificate
node.yaml:9: front.authentication.clientCAFile: client-ca.crt: certificate "front" is not an authority
node.yaml:14: apiserver.frontProxy.certFile: proxy.crt: certificate 1: x509: malformed certificate
node.yaml:17: mesh.tls.keyFile: mesh.key is not the key of mesh.crt: tls: failed to find any PEM data in key input`,
		},
		{
			name:  "a key that belongs to another certificate",
			spoil: func(d *certDir) { d.write("front.key", d.node("demo", "cp-b").KeyPEM) },
			want:  `node.yaml:7: front.tls.keyFile: front.key is not the key of front.crt: tls: private key does not match public key`,
		},
		{
			name:  "everything has expired",
			spoil: func(*certDir) {},
			after: 2 * time.Hour,
			want: `node.yaml:7: front.tls.certFile: front.crt expired at 2026-05-01T13:00:00Z
node.yaml:9: front.authentication.clientCAFile: client-ca.crt: authority "clients" expired at 2026-05-01T13:00:00Z
node.yaml:12: apiserver.caFile: ca.crt: authority "clients" expired at 2026-05-01T13:00:00Z
node.yaml:14: apiserver.frontProxy.caFile: proxy-ca.crt: authority "front proxy" expired at 2026-05-01T13:00:00Z
node.yaml:14: apiserver.frontProxy.certFile: proxy.crt expired at 2026-05-01T13:00:00Z
node.yaml:17: mesh.tls.caFile: mesh-ca.crt: authority "mvp-node mesh CA of demo" expired at 2026-05-01T13:00:00Z
node.yaml:17: mesh.tls.certFile: mesh.crt expired at 2026-05-01T13:00:00Z`,
		},
		{
			name: "a certificate that is not valid yet",
			spoil: func(d *certDir) {
				d.frontLeaf.Now = d.now.Add(30 * time.Minute)
				d.pair("front", d.issue(d.client, d.frontLeaf))
			},
			want: `node.yaml:7: front.tls.certFile: front.crt is not valid before 2026-05-01T12:25:00Z`,
		},
		{
			name: "while a CA is rotated its file has the expired one too",
			spoil: func(d *certDir) {
				old, err := pki.NewCA(pki.CAOptions{CommonName: "old", Now: d.now.Add(-2 * time.Hour), Lifetime: time.Hour})
				if err != nil {
					d.t.Fatal(err)
				}
				d.write("client-ca.crt", append(old.CertPEM(), d.client.CertPEM()...))
			},
		},
		{
			name: "certificates for another use",
			spoil: func(d *certDir) {
				d.proxyLeaf.Client, d.proxyLeaf.Server = false, true
				d.pair("proxy", d.issue(d.proxy, d.proxyLeaf))
				d.pair("mesh", d.issue(d.mesh, pki.LeafOptions{URIs: spiffe("/mvp-node/cp-a"), Client: true, Now: d.now, Lifetime: time.Hour}))
			},
			want: `node.yaml:14: apiserver.frontProxy.certFile: proxy.crt may not be used for clients (clientAuth), its extended key usage does not say so
node.yaml:17: mesh.tls.certFile: mesh.crt may not be used for servers (serverAuth), its extended key usage does not say so`,
		},
		{
			name:  "a certificate of another CA",
			spoil: func(d *certDir) { d.pair("proxy", d.issue(d.client, d.proxyLeaf)) },
			want:  `node.yaml:14: apiserver.frontProxy.certFile: proxy.crt was not signed by apiserver.frontProxy.caFile: x509: certificate signed by unknown authority`,
		},
		{
			name:  "the mesh certificate of another node",
			spoil: func(d *certDir) { d.pair("mesh", d.node("demo", "cp-b")) },
			want:  `node.yaml:17: mesh.tls.certFile: mesh.crt is the certificate of spiffe://demo/mvp-node/cp-b, this node is spiffe://demo/mvp-node/cp-a`,
		},
		{
			name:  "the mesh certificate of another node, on the allow list",
			edit:  [2]string{"gossip:", "  allowedNames: [cp-a]\ngossip:"},
			spoil: func(d *certDir) { d.pair("mesh", d.node("demo", "cp-b")) },
			want:  `node.yaml:17: mesh.tls.certFile: mesh.crt is the certificate of spiffe://demo/mvp-node/cp-b, this node is spiffe://demo/mvp-node/cp-a`,
		},
		{
			name: "the mesh certificate of another cluster",
			spoil: func(d *certDir) {
				other := []*url.URL{{Scheme: "spiffe", Host: "prod", Path: "/mvp-node/cp-a"}}
				d.pair("mesh", d.issue(d.mesh, pki.LeafOptions{URIs: other, Client: true, Server: true, Now: d.now, Lifetime: time.Hour}))
			},
			want: `node.yaml:17: mesh.tls.certFile: mesh.crt is not the certificate of spiffe://demo/mvp-node/cp-a: cluster "prod", want "demo": certificate belongs to another cluster`,
		},
		{
			name: "an operator's certificate as the mesh certificate",
			spoil: func(d *certDir) {
				d.pair("mesh", d.issue(d.mesh, pki.LeafOptions{URIs: spiffe("/mvp-operator/cp-a"), Client: true, Server: true, Now: d.now, Lifetime: time.Hour}))
			},
			want: `node.yaml:17: mesh.tls.certFile: mesh.crt is the certificate of spiffe://demo/mvp-operator/cp-a, this node is spiffe://demo/mvp-node/cp-a`,
		},
		{
			name: "a mesh certificate without URI, known by its DNS name",
			edit: [2]string{"gossip:", "  dnsNames: {a.example: cp-a}\ngossip:"},
			spoil: func(d *certDir) {
				d.pair("mesh", d.issue(d.mesh, pki.LeafOptions{DNSNames: []string{"a.example"}, Client: true, Server: true, Now: d.now, Lifetime: time.Hour}))
			},
		},
		{
			name: "authorities that two files share",
			spoil: func(d *certDir) {
				d.write("proxy-ca.crt", append(d.proxy.CertPEM(), d.client.CertPEM()...))
				d.write("mesh-ca.crt", append(d.mesh.CertPEM(), d.proxy.CertPEM()...))
			},
			want: `node.yaml:14: apiserver.frontProxy.caFile: proxy-ca.crt and client-ca.crt (front.authentication.clientCAFile on line 9) share the authority "clients": who is a client could pass for the front proxy
node.yaml:17: mesh.tls.caFile: mesh-ca.crt and proxy-ca.crt (apiserver.frontProxy.caFile on line 14) share the authority "front proxy": who is the front proxy could pass for a node of the mesh`,
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d := newCertDir(t, now)
			tc.spoil(d)
			c := d.parse(strings.Replace(d.text(), tc.edit[0], tc.edit[1], 1))
			// Twice, as a check leaves nothing behind.
			for range 2 {
				err := c.Check(now.Add(tc.after))
				if tc.want != "" {
					d.says(err, tc.want)
				} else if err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// Load reports what is wrong with the text and with the files together, and says nothing about files that no field names.
func TestLoad(t *testing.T) {
	d := newCertDir(t, time.Now())
	file := filepath.Join(d.dir, "node.yaml")
	d.write("node.yaml", []byte(d.text()))
	if _, err := Load(file); err != nil {
		t.Fatal(err)
	}
	d.remove("front.crt")
	text := strings.NewReplacer("name: cp-a", "name: CP-A", ", keyFile: proxy.key", "", "kubeconfig: node.kubeconfig", "kubeconfig: [x]").Replace(d.text())
	d.write("node.yaml", []byte(text))
	_, err := Load(file)
	d.says(err, `node.yaml:4: name: "CP-A" must be at most 63 characters, a-z, 0-9, '-' and '.', and each part begin and end with a letter or digit
node.yaml:7: front.tls.certFile: open front.crt: no such file or directory
node.yaml:13: apiserver.kubeconfig: must be a string, is a list
node.yaml:14: apiserver.frontProxy.keyFile: is missing`)
}

// A file of which nothing could be read says nothing about other files.
func TestLoadForeignFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "node.yaml")
	if err := os.WriteFile(file, []byte("apiVersion: v1\nkind: Pod\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := Load(file)
	want := file + `:1: apiVersion: "v1" is not known to this mvp-node, which reads "config.mvp-node.io/v1alpha1"
` + file + `:2: kind: "Pod" is not known to this mvp-node, which reads "NodeConfiguration"`
	if err == nil || err.Error() != want {
		t.Errorf("err = %v, want %s", err, want)
	}
}
