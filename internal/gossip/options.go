package gossip

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	"github.com/mvp-mesh/mvp-node/internal/catalog"
	"github.com/mvp-mesh/mvp-node/internal/route"
)

// ALPN is the protocol that the gossip port speaks inside TLS.
const ALPN = "mvp-gossip/1"

// Defaults of Options.
const (
	DefaultStaleGrace  = 5 * time.Minute
	DefaultCatalogHold = time.Minute
)

// Options are the resolved settings of a Node.
type Options struct {
	// Name is the node's name; its certificate carries the same.
	Name string
	// ClusterID is mandatory. It is the trust domain of the certificates and the label of every packet and stream.
	ClusterID string
	// BindAddress is the host:port to listen on; port 0 takes a free one.
	BindAddress string
	// AdvertiseAddress is the host:port that members are told; "" is the bound address. A host name is resolved once, by New.
	AdvertiseAddress string
	// Seeds are host:port of nodes to join. Host names are resolved again on each try; the own address among them is ignored.
	Seeds []string
	// Expected names the members that should be there, the own node included or not; empty if that is not known.
	Expected []string
	// TLS proves who is at the other end. Only authz.RoleNode is admitted.
	TLS authz.MeshTLS
	// StaleGrace is how long a member that vanished stays in the view as Stale; 0 is DefaultStaleGrace.
	StaleGrace time.Duration
	// CatalogHold bounds how long a catalog that is not known, or an expected member that is missing, may hold up a true 404;
	// 0 is DefaultCatalogHold.
	CatalogHold time.Duration
	// Fetcher pulls catalogs. Required.
	Fetcher Fetcher
	// Logger gets the node's and memberlist's lines; nil discards them.
	Logger *slog.Logger
	// Registerer gets the mvp_gossip_* metrics; nil keeps them to the Node.
	Registerer prometheus.Registerer
	// NodeVersion is the version of this program, told to all members for tables. At most 80 bytes.
	NodeVersion string
	// Timing holds the intervals; the zero value means the defaults.
	Timing Timing

	// For tests: how to dial and to resolve. Nil is the real network.
	dial   func(ctx context.Context, address string) (net.Conn, error)
	lookup func(ctx context.Context, host string) ([]netip.Addr, error)
}

// Fetcher pulls the catalog of one member from that member, over a connection whose certificate carries its name. It is called
// from goroutines of the Node, for several members at once but never twice at the same time for one; it may block until ctx
// ends. have is the digest that is held already; the result's Catalog is nil when the origin still has that one.
type Fetcher interface {
	Fetch(ctx context.Context, name, address string, have catalog.Digest) (FetchResult, error)
}

// FetchResult is what an origin says about its catalog: the content, which is immutable and from then on shared with the View,
// its digest, and the generation that the origin gives it.
type FetchResult struct {
	Catalog    *catalog.Catalog
	Generation uint64
	Digest     catalog.Digest
}

// Local is what the own node is now.
type Local struct {
	// State is Starting, Ready, Draining or LocalDown. Ready needs a catalog and a mesh address.
	State route.State
	Mode  route.Mode
	// MeshAddress is the host:port of the mesh port, as other members reach it. A host of at most 253 bytes.
	MeshAddress string
	// ServerVersion is the local apiserver's; "" while unknown. At most 80 bytes.
	ServerVersion string
	// Catalog is what the local apiserver serves; nil while unknown.
	Catalog *catalog.Catalog
	// Generation counts the catalogs of this process; larger is newer.
	Generation uint64
}

// Timing are the intervals of a Node. Each zero field means its default. The defaults are for 3 to 7 members on one network: a
// killed process is found within about ProbeInterval for the next probe, as much again for its failure, and suspicionMult times
// ProbeInterval of suspicion: some 3.5 s.
type Timing struct {
	ProbeInterval    time.Duration // between probes; default 500 ms
	ProbeTimeout     time.Duration // until others are asked to probe too; default 300 ms
	GossipInterval   time.Duration // between rounds of queued updates; default 100 ms
	UpdateInterval   time.Duration // least time between two updates of the own metadata; default 200 ms
	SyncInterval     time.Duration // between full state exchanges while nobody is missing; default 10 s
	RejoinInterval   time.Duration // first retry of a seed or member that is missing; default 1 s
	RejoinMax        time.Duration // longest wait between two such retries; default 5 s
	FetchTimeout     time.Duration // of one pull of a catalog; default 10 s
	FetchRetry       time.Duration // first retry of a pull that failed; default 250 ms
	FetchRetryMax    time.Duration // longest wait between two pulls of one member; default 15 s
	RefetchInterval  time.Duration // least time between two pulls that Refetch asks for; default 1 s
	DialTimeout      time.Duration // TCP, TLS and greeting, outgoing; default 2 s
	HandshakeTimeout time.Duration // TLS and greeting, incoming; default 3 s
	WriteTimeout     time.Duration // until written packets must be acknowledged; default 2 s
	IdleTimeout      time.Duration // until an unused packet connection is closed; default 60 s
	StreamTimeout    time.Duration // of a full state exchange; default 5 s
	LeaveTimeout     time.Duration // bound on Leave beside its context; default 3 s
}

func (t Timing) withDefaults() Timing {
	for _, f := range []struct {
		d   *time.Duration
		def time.Duration
	}{
		{&t.ProbeInterval, 500 * time.Millisecond},
		{&t.ProbeTimeout, 300 * time.Millisecond},
		{&t.GossipInterval, 100 * time.Millisecond},
		{&t.UpdateInterval, 200 * time.Millisecond},
		{&t.SyncInterval, 10 * time.Second},
		{&t.RejoinInterval, time.Second},
		{&t.RejoinMax, 5 * time.Second},
		{&t.FetchTimeout, 10 * time.Second},
		{&t.FetchRetry, 250 * time.Millisecond},
		{&t.FetchRetryMax, 15 * time.Second},
		{&t.RefetchInterval, time.Second},
		{&t.DialTimeout, 2 * time.Second},
		{&t.HandshakeTimeout, 3 * time.Second},
		{&t.WriteTimeout, 2 * time.Second},
		{&t.IdleTimeout, time.Minute},
		{&t.StreamTimeout, 5 * time.Second},
		{&t.LeaveTimeout, 3 * time.Second},
	} {
		*f.d = cmp.Or(*f.d, f.def)
	}
	return t
}

func (t Timing) validate() error {
	for _, d := range []time.Duration{
		t.ProbeInterval, t.ProbeTimeout, t.GossipInterval, t.UpdateInterval, t.SyncInterval, t.RejoinInterval, t.RejoinMax,
		t.FetchTimeout, t.FetchRetry, t.FetchRetryMax, t.RefetchInterval, t.DialTimeout, t.HandshakeTimeout, t.WriteTimeout,
		t.IdleTimeout, t.StreamTimeout, t.LeaveTimeout,
	} {
		if d < 0 {
			return fmt.Errorf("timing: %v is negative", d)
		}
	}
	if p := t.withDefaults(); p.ProbeTimeout > p.ProbeInterval {
		return fmt.Errorf("timing: probe timeout %v is longer than the probe interval %v", p.ProbeTimeout, p.ProbeInterval)
	}
	return nil
}

// complete returns the options with all defaults filled in.
func (o Options) complete() Options {
	o.StaleGrace = cmp.Or(o.StaleGrace, DefaultStaleGrace)
	o.CatalogHold = cmp.Or(o.CatalogHold, DefaultCatalogHold)
	o.Timing = o.Timing.withDefaults()
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.dial == nil {
		o.dial = func(ctx context.Context, address string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "tcp", address)
		}
	}
	if o.lookup == nil {
		o.lookup = func(ctx context.Context, host string) ([]netip.Addr, error) {
			return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
		}
	}
	return o
}

// validate reports everything that is wrong with the options, joined.
func (o Options) validate() error {
	var errs []error
	fail := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if err := checkName(o.Name); err != nil {
		fail("name: %w", err)
	}
	switch {
	case o.ClusterID == "":
		fail("cluster ID is empty")
	case len(o.ClusterID) > memberlist.LabelMaxSize:
		// memberlist finds this too, but leaks the transport then.
		fail("cluster ID is %d bytes long, at most %d are allowed", len(o.ClusterID), memberlist.LabelMaxSize)
	case o.TLS.Rules.ClusterID != o.ClusterID:
		fail("cluster ID %q is not that of the TLS rules, %q", o.ClusterID, o.TLS.Rules.ClusterID)
	}
	if err := checkHostPort(o.BindAddress, true); err != nil {
		fail("bind address: %w", err)
	}
	if o.AdvertiseAddress != "" {
		if err := checkHostPort(o.AdvertiseAddress, true); err != nil {
			fail("advertise address: %w", err)
		}
	}
	for _, s := range o.Seeds {
		if err := checkHostPort(s, false); err != nil {
			fail("seed: %w", err)
		}
	}
	for _, name := range o.Expected {
		if err := checkName(name); err != nil {
			fail("expected member: %w", err)
		}
		if !o.allowed(name) {
			fail("expected member %q is not on the list of allowed names", name)
		}
	}
	if o.Fetcher == nil {
		fail("fetcher is missing")
	}
	if o.StaleGrace < 0 || o.CatalogHold < 0 {
		fail("stale grace %v or catalog hold %v is negative", o.StaleGrace, o.CatalogHold)
	}
	if err := checkVersion(o.NodeVersion); err != nil {
		fail("node version: %w", err)
	}
	if err := o.Timing.validate(); err != nil {
		errs = append(errs, err)
	}
	if err := o.checkCertificate(); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// checkCertificate finds the mistake of running under another name than the certificate's at start, instead of leaving it to
// every other node to refuse this one.
func (o Options) checkCertificate() error {
	if o.TLS.Certificate == nil || o.TLS.Roots == nil {
		return errors.New("TLS: certificate or roots are missing")
	}
	c := o.TLS.Certificate()
	if c == nil || len(c.Certificate) == 0 {
		return errors.New("TLS: there is no certificate")
	}
	leaf := c.Leaf
	if leaf == nil {
		var err error
		if leaf, err = x509.ParseCertificate(c.Certificate[0]); err != nil {
			return fmt.Errorf("TLS: own certificate: %w", err)
		}
	}
	p, err := authz.PeerFromCertificate(leaf, o.TLS.Rules)
	if err != nil {
		return fmt.Errorf("TLS: own certificate: %w", err)
	}
	if p.Role != authz.RoleNode || p.Name != o.Name {
		return fmt.Errorf("TLS: own certificate is that of %s %q, not of node %q", p.Role, p.Name, o.Name)
	}
	return nil
}

// allowed reports whether a node of that name may be a member.
func (o Options) allowed(name string) bool {
	names := o.TLS.Rules.AllowedNames
	return len(names) == 0 || slices.Contains(names, name)
}

// Limits on strings that travel in gossip. With them the longest legal metadata is 492 of memberlist's 512 bytes (meta.go).
const (
	maxName    = 128 // SPIFFE path segments have no limit of their own; pki issues up to 63
	maxHost    = 253 // a DNS name
	maxVersion = 80
)

// checkName keeps out what would break memberlist's "name/address" form, logs or tables.
func checkName(s string) error {
	if s == "" || len(s) > maxName {
		return fmt.Errorf("%.140q is empty or longer than %d bytes", s, maxName)
	}
	for _, c := range []byte(s) {
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '-', c == '.', c == '_':
		default:
			return fmt.Errorf("%q has a character that is none of a-z, A-Z, 0-9, '-', '.', '_'", s)
		}
	}
	return nil
}

func checkHostPort(s string, portZero bool) error {
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		return fmt.Errorf("%.300q: %w", s, err)
	}
	if host == "" || len(host) > maxHost {
		return fmt.Errorf("%.300q: the host is empty or longer than %d bytes", s, maxHost)
	}
	for _, c := range []byte(host) {
		if c <= ' ' || c >= 0x7f || c == '/' {
			return fmt.Errorf("%.300q: the host has a character that no host name has", s)
		}
	}
	p, err := strconv.ParseUint(port, 10, 16)
	if err != nil || p == 0 && !portZero {
		return fmt.Errorf("%.300q: the port is not a number from 1 to 65535", s)
	}
	return nil
}

func checkVersion(s string) error {
	if len(s) > maxVersion {
		return fmt.Errorf("%.100q is %d bytes long, at most %d are allowed", s, len(s), maxVersion)
	}
	for _, c := range []byte(s) {
		if c < ' ' || c >= 0x7f {
			return fmt.Errorf("%q is not printable ASCII", s)
		}
	}
	return nil
}
