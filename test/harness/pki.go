//go:build linux

package harness

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/pki"
)

// lifetime of everything the harness issues. Tests of expiry issue their own through the CAs.
const lifetime = 7 * 24 * time.Hour

// frontProxyName is the common name by which apiservers know a front proxy (--requestheader-allowed-names).
const frontProxyName = "front-proxy-client"

// kubeletClientName is the common name by which kubelets know an apiserver.
const kubeletClientName = "kube-apiserver-kubelet-client"

// CertFiles is where a certificate and its key are.
type CertFiles struct {
	Cert string
	Key  string
}

// PKI holds the authorities of one cluster and issues certificates into files. They are kept apart as in a cluster made
// by kubeadm: a certificate that is good for one purpose proves nothing for another.
//
// Asking twice for the same certificate returns the same files. It is safe for concurrent use.
type PKI struct {
	Dir       string // everything is written here
	ClusterID string

	ClientCA         *pki.CA // clients of apiservers and fronts
	ClientCAFile     string
	ServingCA        *pki.CA // serving certificates of apiservers and fronts
	ServingCAFile    string
	FrontProxyCA     *pki.CA // front proxies: who may assert X-Remote-User to an apiserver
	FrontProxyCAFile string
	MeshCA           *pki.CA // nodes and operators
	MeshCAFile       string

	ServiceAccountKeyFile    string // private; signs tokens
	ServiceAccountPublicFile string // verifies them

	mu sync.Mutex // guards issuing into Dir
}

// NewPKI makes all authorities and the service-account key of a cluster in dir.
func NewPKI(dir, clusterID string) (*PKI, error) {
	p := &PKI{Dir: dir, ClusterID: clusterID}
	now := time.Now()
	for _, ca := range []struct {
		name string
		ca   **pki.CA
		file *string
	}{
		{"client-ca", &p.ClientCA, &p.ClientCAFile},
		{"serving-ca", &p.ServingCA, &p.ServingCAFile},
		{"front-proxy-ca", &p.FrontProxyCA, &p.FrontProxyCAFile},
		{"mesh-ca", &p.MeshCA, &p.MeshCAFile},
	} {
		var made *pki.CA
		var err error
		if ca.ca == &p.MeshCA {
			made, err = pki.NewMeshCA(clusterID, now, lifetime)
		} else {
			made, err = pki.NewCA(pki.CAOptions{CommonName: clusterID + " " + ca.name, Now: now, Lifetime: lifetime})
		}
		if err != nil {
			return nil, fmt.Errorf("PKI of cluster %s: %w", clusterID, err)
		}
		files := p.files(ca.name)
		if err := pki.WritePair(files.Cert, files.Key, made.Pair()); err != nil {
			return nil, fmt.Errorf("PKI of cluster %s: %w", clusterID, err)
		}
		*ca.ca, *ca.file = made, files.Cert
	}
	private, public, err := pki.NewSigningKey()
	if err != nil {
		return nil, fmt.Errorf("PKI of cluster %s: %w", clusterID, err)
	}
	p.ServiceAccountKeyFile = filepath.Join(dir, "service-account.key")
	p.ServiceAccountPublicFile = filepath.Join(dir, "service-account.pub")
	if err := errors.Join(
		os.WriteFile(p.ServiceAccountKeyFile, private, 0o600),
		os.WriteFile(p.ServiceAccountPublicFile, public, 0o644),
	); err != nil {
		return nil, fmt.Errorf("PKI of cluster %s: %w", clusterID, err)
	}
	return p, nil
}

// UserCert returns a client certificate for a Kubernetes user: the name is the user's, the organizations its groups.
func (p *PKI) UserCert(user string, groups ...string) (CertFiles, error) {
	// Users and groups hold characters that files had better not (system:masters), and the same user may be wanted with
	// other groups.
	name := "user-" + shortHash([]byte(fmt.Sprintf("%q %q", user, groups)))
	return p.issue(name, p.ClientCA, pki.LeafOptions{CommonName: user, Organizations: groups, Client: true})
}

// AdminCert returns a client certificate that may do everything (group system:masters).
func (p *PKI) AdminCert() (CertFiles, error) { return p.UserCert("admin", "system:masters") }

// ServingCert returns a serving certificate for the given address, the DNS names, and the names by which pods know the
// apiserver.
func (p *PKI) ServingCert(name, ip string, dnsNames ...string) (CertFiles, error) {
	return p.issue("serving-"+name, p.ServingCA, pki.LeafOptions{
		CommonName: name,
		DNSNames:   append([]string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"}, dnsNames...),
		IPs:        []net.IP{net.ParseIP(ip), net.ParseIP("127.0.0.1"), net.ParseIP("10.96.0.1")},
		Server:     true,
	})
}

// FrontProxyCert returns the client certificate with which a front proxy asserts the identity of a user.
func (p *PKI) FrontProxyCert() (CertFiles, error) {
	return p.issue(frontProxyName, p.FrontProxyCA, pki.LeafOptions{CommonName: frontProxyName, Client: true})
}

// KubeletClientCert returns the client certificate that apiservers show to kubelets. It gives no rights at an apiserver.
func (p *PKI) KubeletClientCert() (CertFiles, error) {
	return p.issue(kubeletClientName, p.ClientCA, pki.LeafOptions{CommonName: kubeletClientName, Client: true})
}

// KubeletCert returns the serving certificate of the kubelet of a Node.
func (p *PKI) KubeletCert(node, ip string) (CertFiles, error) {
	return p.issue("kubelet-"+node, p.ServingCA, pki.LeafOptions{
		CommonName:    "system:node:" + node,
		Organizations: []string{"system:nodes"},
		DNSNames:      []string{node},
		IPs:           []net.IP{net.ParseIP(ip)},
		Server:        true,
	})
}

// MeshCert returns the mesh certificate of a node.
func (p *PKI) MeshCert(node, ip string) (CertFiles, error) {
	return p.pair("mesh-"+node, func() (pki.Pair, error) {
		extra := pki.Extra{DNSNames: []string{node, "localhost"}, IPs: []net.IP{net.ParseIP(ip)}}
		return p.MeshCA.IssueNode(p.ClusterID, node, extra, time.Now(), lifetime)
	})
}

// OperatorCert returns the certificate with which a person calls the mesh port (mvp-node commands, grpcurl).
func (p *PKI) OperatorCert(operator string) (CertFiles, error) {
	return p.pair("operator-"+operator, func() (pki.Pair, error) {
		return p.MeshCA.IssueOperator(p.ClusterID, operator, pki.Extra{}, time.Now(), lifetime)
	})
}

func (p *PKI) issue(name string, ca *pki.CA, o pki.LeafOptions) (CertFiles, error) {
	return p.pair(name, func() (pki.Pair, error) {
		o.Now, o.Lifetime = time.Now(), lifetime
		return ca.Issue(o)
	})
}

// pair returns the files of a certificate, made by issue if they are not there yet.
func (p *PKI) pair(name string, issue func() (pki.Pair, error)) (CertFiles, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	files := p.files(name)
	if _, err := os.Stat(files.Cert); err == nil {
		return files, nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		return CertFiles{}, fmt.Errorf("certificate %s: %w", name, err)
	}
	made, err := issue()
	if err != nil {
		return CertFiles{}, err
	}
	if err := pki.WritePair(files.Cert, files.Key, made); err != nil {
		return CertFiles{}, fmt.Errorf("certificate %s: %w", name, err)
	}
	return files, nil
}

func (p *PKI) files(name string) CertFiles {
	return CertFiles{Cert: filepath.Join(p.Dir, name+".crt"), Key: filepath.Join(p.Dir, name+".key")}
}
