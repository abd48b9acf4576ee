package config

import (
	"log/slog"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	"github.com/mvp-mesh/mvp-node/internal/route"
)

// APIVersion and Kind are what the file must say it is.
const (
	APIVersion = "config.mvp-node.io/v1alpha1"
	Kind       = "NodeConfiguration"
)

// Config is the configuration of one node, complete: every default is filled in and every path is relative to the working
// directory, not to the file. Fields tagged required must be in the file.
type Config struct {
	// APIVersion and Kind say how to read the rest.
	APIVersion string `yaml:"apiVersion" config:"required"`
	Kind       string `yaml:"kind" config:"required"`
	// ClusterID names the mesh; it is the trust domain of the mesh certificates and the gossip label. A lower-case DNS
	// subdomain.
	ClusterID string `yaml:"clusterID" config:"required"`
	// Name of the node, the same as in its mesh certificate. A lower-case DNS subdomain of at most 63 characters.
	Name string `yaml:"name" config:"required"`
	// Mode the node starts in: Enabled, ObserveOnly or Disabled.
	Mode route.Mode `yaml:"mode"`

	Front     Front     `yaml:"front"`
	APIServer APIServer `yaml:"apiserver"`
	Mesh      Mesh      `yaml:"mesh"`
	Gossip    Gossip    `yaml:"gossip"`

	// ExpectedMembers are the nodes that should be there, this one included. A node that sees fewer does not call its view
	// complete (for as long as view.unknownCatalogHold allows). Empty: only members that were met count.
	ExpectedMembers []string `yaml:"expectedMembers"`

	Routing  Routing  `yaml:"routing"`
	View     View     `yaml:"view"`
	Admin    Admin    `yaml:"admin"`
	Logging  Logging  `yaml:"logging"`
	Shutdown Shutdown `yaml:"shutdown"`

	src source
}

// Front is the HTTPS port that clients talk to.
type Front struct {
	// Address to listen on: IP:port; ":port" listens on every address of the host.
	Address string `yaml:"address" config:"required"`
	// TLS is the serving certificate, valid for the names that clients dial.
	TLS            KeyPair        `yaml:"tls"`
	Authentication Authentication `yaml:"authentication"`
	// RequestTimeout bounds requests that are not long-running, as kube-apiserver's --request-timeout does.
	RequestTimeout time.Duration `yaml:"requestTimeout"`
	// StallTimeout is how long a client may leave an answer unread (a suspended kubectl, a dead laptop) before that answer is cut off.
	StallTimeout time.Duration `yaml:"stallTimeout"`
	// MaxHeaderBytes bounds the header of a request; at most 1 MiB.
	MaxHeaderBytes int `yaml:"maxHeaderBytes"`
	// MaxConcurrentStreams bounds the requests on one HTTP/2 connection.
	MaxConcurrentStreams int `yaml:"maxConcurrentStreams"`
}

// KeyPair names the PEM files of a certificate, with intermediates after it, and its private key.
type KeyPair struct {
	CertFile string `yaml:"certFile" config:"required,file"`
	KeyFile  string `yaml:"keyFile" config:"required,file"`
}

// VerifiedKeyPair is a KeyPair with the authorities it belongs to.
type VerifiedKeyPair struct {
	CertFile string `yaml:"certFile" config:"required,file"`
	KeyFile  string `yaml:"keyFile" config:"required,file"`
	// CAFile has the authorities in PEM; the certificate is signed by one of them.
	CAFile string `yaml:"caFile" config:"required,file"`
}

// KeyPair is the pair without its authorities.
func (p VerifiedKeyPair) KeyPair() KeyPair { return KeyPair{p.CertFile, p.KeyFile} }

// Authentication says how clients prove who they are.
type Authentication struct {
	// ClientCAFile has the authorities of client certificates: kube-apiserver's --client-ca-file.
	ClientCAFile string `yaml:"clientCAFile" config:"required,file"`
	// Anonymous lets requests without credentials through as system:anonymous: kube-apiserver's --anonymous-auth.
	Anonymous bool `yaml:"anonymous"`
	// TokenCacheTTL is how long the verdict of a TokenReview is remembered; 0 asks every time.
	TokenCacheTTL time.Duration `yaml:"tokenCacheTTL"`
}

// APIServer is the local kube-apiserver.
type APIServer struct {
	// URL of the apiserver, https, without a path.
	URL string `yaml:"url" config:"required"`
	// CAFile has the authorities of its serving certificate.
	CAFile string `yaml:"caFile" config:"required,file"`
	// TLSServerName is the name its certificate is checked for. Empty: the host in URL.
	TLSServerName string `yaml:"tlsServerName"`
	// Kubeconfig is for the node's own calls: discovery, informers, TokenReview, SubjectAccessReview.
	Kubeconfig string `yaml:"kubeconfig" config:"required,file"`
	// FrontProxy is the client certificate by which the apiserver believes the identity headers, and the authorities that its
	// --requestheader-client-ca-file has.
	FrontProxy VerifiedKeyPair `yaml:"frontProxy"`
	// RequestHeaders are the names of those headers.
	RequestHeaders RequestHeaders `yaml:"requestHeaders"`
}

// RequestHeaders are the values of kube-apiserver's --requestheader-*-headers flags. The first name of each list is written,
// all are removed from what clients send.
type RequestHeaders struct {
	User []string `yaml:"user"`
	// UID may be empty: then none is sent (kubeadm configures none).
	UID           []string `yaml:"uid"`
	Group         []string `yaml:"group"`
	ExtraPrefixes []string `yaml:"extraPrefixes"`
}

// Mesh is the gRPC port that the other nodes and operators talk to.
type Mesh struct {
	// Address to listen on.
	Address string `yaml:"address" config:"required"`
	// AdvertiseAddress is where other nodes reach it, host:port. Default: address.
	AdvertiseAddress string `yaml:"advertiseAddress"`
	// TLS is the certificate of this node in the mesh and the mesh's own authorities.
	TLS VerifiedKeyPair `yaml:"tls"`
	// AllowedNames are the nodes that may be members. Empty: every node that the mesh CA signed for.
	AllowedNames []string `yaml:"allowedNames"`
	// DNSNames says which node a DNS SAN stands for, for a mesh CA that issues no URI SANs.
	DNSNames map[string]string `yaml:"dnsNames"`
	// DeniedGroups and DeniedUsers are identities that other nodes may not assert here.
	DeniedGroups []string `yaml:"deniedGroups"`
	DeniedUsers  []string `yaml:"deniedUsers"`
}

// Gossip is the membership port.
type Gossip struct {
	// Address to listen on.
	Address string `yaml:"address" config:"required"`
	// AdvertiseAddress is where other nodes reach it, IP:port. Default: address.
	AdvertiseAddress string `yaml:"advertiseAddress"`
	// Seeds are the gossip ports, host:port, that the node keeps asking for other members. Its own may be among them.
	Seeds []string `yaml:"seeds"`
}

// Routing is the policy of route.Decide.
type Routing struct {
	// LocalOutage sends requests that the local apiserver would serve to a peer while it is down.
	LocalOutage bool `yaml:"localOutage"`
	// Prefer says who answers what several apiservers serve alike: local (the one beside this node), newest or oldest (a peer with
	// a newer or older one, while there is a ready one; else local). Discovery, OpenAPI and version documents follow it too.
	Prefer route.Preference `yaml:"prefer"`
}

// View bounds for how long what is not known may hold up a true 404.
type View struct {
	// StaleGrace is how long the catalog of a member that vanished is kept, and its resources answered with 503.
	StaleGrace time.Duration `yaml:"staleGrace"`
	// UnknownCatalogHold is how long a member whose catalog was never received keeps the view from being complete.
	UnknownCatalogHold time.Duration `yaml:"unknownCatalogHold"`
}

// Admin is the plain HTTP port for metrics, probes, the status page and pprof.
type Admin struct {
	// Address to listen on; loopback only, as nothing on it is authenticated.
	Address string `yaml:"address"`
}

// Logging says what is logged and how.
type Logging struct {
	// Level is debug, info, warn or error.
	Level string `yaml:"level"`
	// Format is text or json.
	Format string `yaml:"format"`
}

// Shutdown is the timetable of a stop. Whatever stops the node (kubelet, systemd) must allow for the sum and a few seconds.
type Shutdown struct {
	// Delay between turning not ready and refusing connections, for load balancers to notice.
	Delay time.Duration `yaml:"delay"`
	// DrainTimeout is how long running requests may take to end after that.
	DrainTimeout time.Duration `yaml:"drainTimeout"`
}

// PeerRules are the rules by which mesh certificates are accepted.
func (c *Config) PeerRules() authz.PeerRules {
	return authz.PeerRules{ClusterID: c.ClusterID, AllowedNames: c.Mesh.AllowedNames, DNSNames: c.Mesh.DNSNames}
}

// AssertPolicy says which identities a peer may assert.
func (c *Config) AssertPolicy() authz.AssertPolicy {
	return authz.AssertPolicy{DeniedGroups: c.Mesh.DeniedGroups, DeniedUsers: c.Mesh.DeniedUsers}
}

// Policy is what route.Decide obeys at start; the mode may change while the node runs.
func (c *Config) Policy() route.Policy {
	return route.Policy{Mode: c.Mode, LocalOutage: c.Routing.LocalOutage, Prefer: c.Routing.Prefer}
}

// HeaderNames are the names of the identity headers.
func (h RequestHeaders) HeaderNames() authz.HeaderNames {
	return authz.HeaderNames{User: h.User, UID: h.UID, Group: h.Group, ExtraPrefix: h.ExtraPrefixes}
}

// SlogLevel is the level for a slog handler.
func (l Logging) SlogLevel() slog.Level {
	switch l.Level {
	case "debug":
		return slog.LevelDebug
	case "warn":
		return slog.LevelWarn
	case "error":
		return slog.LevelError
	}
	return slog.LevelInfo
}
