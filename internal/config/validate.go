package config

import (
	"fmt"
	"maps"
	"net"
	"net/netip"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Limits that keep a slip of the keyboard from becoming an outage.
const (
	minHeaderBytes   = 4 << 10
	maxHeaderBytes   = 1 << 20 // net/http's and kube-apiserver's own
	maxStreams       = 100_000
	maxTokenCacheTTL = 10 * time.Minute // a revoked token is believed for so long
	maxRequest       = time.Hour
	minStall         = time.Second    // less would cut off clients behind a slow line
	maxHold          = 24 * time.Hour // how long a true 404 may be held up at most (DESIGN.md rule 1)
	maxShutdown      = time.Hour
	// maxClusterID is the longest DNS subdomain, maxNodeName the longest DNS label: the name has to fit into gossip metadata.
	maxClusterID = 253
	maxNodeName  = 63
)

// subdomain is RFC 1123's, as Kubernetes applies it to object names; internal/pki issues certificates for no others.
var subdomain = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*$`)

// validate checks values by themselves and against each other.
func (c *Config) validate() {
	s := &c.src
	s.name("clusterID", c.ClusterID, maxClusterID)
	s.name("name", c.Name, maxNodeName)

	s.within("front.requestTimeout", c.Front.RequestTimeout, time.Millisecond, maxRequest)
	s.within("front.stallTimeout", c.Front.StallTimeout, minStall, maxRequest)
	s.within("front.authentication.tokenCacheTTL", c.Front.Authentication.TokenCacheTTL, 0, maxTokenCacheTTL)
	s.between("front.maxHeaderBytes", c.Front.MaxHeaderBytes, minHeaderBytes, maxHeaderBytes)
	s.between("front.maxConcurrentStreams", c.Front.MaxConcurrentStreams, 1, maxStreams)
	s.within("view.staleGrace", c.View.StaleGrace, time.Millisecond, maxHold)
	s.within("view.unknownCatalogHold", c.View.UnknownCatalogHold, time.Millisecond, maxHold)
	s.within("shutdown.delay", c.Shutdown.Delay, 0, maxShutdown)
	s.within("shutdown.drainTimeout", c.Shutdown.DrainTimeout, time.Millisecond, maxShutdown)
	s.oneOf("logging.level", c.Logging.Level, "debug", "info", "warn", "error")
	s.oneOf("logging.format", c.Logging.Format, "text", "json")

	h := c.APIServer.RequestHeaders
	s.headers("apiserver.requestHeaders.user", h.User, true)
	s.headers("apiserver.requestHeaders.uid", h.UID, false)
	s.headers("apiserver.requestHeaders.group", h.Group, true)
	s.headers("apiserver.requestHeaders.extraPrefixes", h.ExtraPrefixes, true)

	c.validateMembers()
	c.validateAddresses()
}

// validateMembers checks the lists of node names, which must fit together: a member that is expected and not allowed would keep
// the view incomplete for ever.
func (c *Config) validateMembers() {
	s := &c.src
	s.unique("mesh.deniedGroups", c.Mesh.DeniedGroups)
	s.unique("mesh.deniedUsers", c.Mesh.DeniedUsers)
	s.unique("gossip.seeds", c.Gossip.Seeds)
	for _, list := range []struct {
		path  string
		names []string
	}{{"mesh.allowedNames", c.Mesh.AllowedNames}, {"expectedMembers", c.ExpectedMembers}} {
		for i, n := range list.names {
			s.name(fmt.Sprintf("%s[%d]", list.path, i), n, maxNodeName)
		}
		s.unique(list.path, list.names)
		if len(list.names) > 0 && s.good("name", list.path) && !slices.Contains(list.names, c.Name) {
			s.report(list.path, "does not list this node, %q", c.Name)
		}
	}
	if len(c.Mesh.AllowedNames) > 0 {
		for i, n := range c.ExpectedMembers {
			if !slices.Contains(c.Mesh.AllowedNames, n) {
				s.report(fmt.Sprintf("expectedMembers[%d]", i), "%q is not among mesh.allowedNames and could never join", n)
			}
		}
	}
	for _, dns := range slices.Sorted(maps.Keys(c.Mesh.DNSNames)) {
		s.name("mesh.dnsNames["+dns+"]", c.Mesh.DNSNames[dns], maxNodeName)
	}
}

// listener is an address that the node listens on.
type listener struct {
	path string
	addr netip.AddrPort
}

func (c *Config) validateAddresses() {
	s := &c.src
	var taken []listener
	for _, l := range []struct{ path, value string }{
		{"front.address", c.Front.Address},
		{"mesh.address", c.Mesh.Address},
		{"gossip.address", c.Gossip.Address},
		{"admin.address", c.Admin.Address},
	} {
		addr, ok := s.listenAddress(l.path, l.value)
		if !ok {
			continue
		}
		if l.path == "admin.address" && !addr.Addr().IsLoopback() {
			s.report(l.path, "%s is not a loopback address; nothing on the admin port is authenticated, so it must stay on 127.0.0.1 or [::1]", l.value)
		}
		for _, other := range taken {
			if clash(addr, other.addr) {
				s.report(l.path, "%s is taken by %s on line %d", l.value, other.path, s.line(other.path))
			}
		}
		taken = append(taken, listener{l.path, addr})
	}

	s.advertised("mesh", c.Mesh.Address, c.Mesh.AdvertiseAddress, false)
	s.advertised("gossip", c.Gossip.Address, c.Gossip.AdvertiseAddress, true)
	for i, seed := range c.Gossip.Seeds {
		s.dialAddress(fmt.Sprintf("gossip.seeds[%d]", i), seed)
	}

	if host := c.APIServer.TLSServerName; host != "" && !isHost(host) {
		s.report("apiserver.tlsServerName", "%q is neither a DNS name nor an IP address", host)
	}
	if api, ok := s.apiserverURL(c.APIServer.URL); ok {
		for _, l := range taken {
			// A wildcard listener takes the apiserver's port for certain only if the apiserver is on this host.
			if api == l.addr || api.Addr().IsLoopback() && clash(api, l.addr) {
				s.report("apiserver.url", "%s is %s on line %d, the node would talk to itself", c.APIServer.URL, l.path, s.line(l.path))
			}
		}
	}
}

// clash reports whether two sockets cannot listen at the same time. "0.0.0.0" takes the port on every IPv4 address, "::" on all.
func clash(a, b netip.AddrPort) bool {
	if a.Port() != b.Port() {
		return false
	}
	covers := func(x, y netip.Addr) bool { return x.IsUnspecified() && (x.Is6() || y.Is4()) }
	return a.Addr() == b.Addr() || covers(a.Addr(), b.Addr()) || covers(b.Addr(), a.Addr())
}

// listenAddress reads IP:port or :port.
func (s *source) listenAddress(path, value string) (netip.AddrPort, bool) {
	host, port, ok := s.hostPort(path, value)
	if !ok {
		return netip.AddrPort{}, false
	}
	if host == "" {
		return netip.AddrPortFrom(netip.IPv6Unspecified(), port), true
	}
	ip, err := netip.ParseAddr(host)
	if err != nil {
		s.report(path, "%q: the node listens on an IP address, %q is none", value, host)
		return netip.AddrPort{}, false
	}
	return netip.AddrPortFrom(ip.Unmap(), port), true
}

// advertised checks where other nodes are told to go: not to a wildcard.
func (s *source) advertised(section, listen, advertise string, ipOnly bool) {
	path := section + ".advertiseAddress"
	if !s.good(section + ".address") {
		return
	}
	_, set := s.lines[path]
	if !set || advertise == listen {
		if host, _, err := net.SplitHostPort(listen); err == nil && isWildcard(host) {
			s.report(path, "must be set, as %s.address is every address of the host", section)
		}
		return
	}
	host, ok := s.dialAddress(path, advertise)
	if !ok {
		return
	}
	if isWildcard(host) {
		s.report(path, "%q is no address that others could reach", advertise)
	} else if _, err := netip.ParseAddr(host); err != nil && ipOnly {
		s.report(path, "%q: gossip needs an IP address, %q is none", advertise, host)
	}
}

func isWildcard(host string) bool {
	ip, err := netip.ParseAddr(host)
	return host == "" || err == nil && ip.IsUnspecified()
}

// dialAddress reads host:port, the host being an IP address or a DNS name.
func (s *source) dialAddress(path, value string) (host string, ok bool) {
	host, _, ok = s.hostPort(path, value)
	if ok && !isHost(host) {
		s.report(path, "%q: %q is neither a DNS name nor an IP address", value, host)
		return "", false
	}
	return host, ok
}

func (s *source) hostPort(path, value string) (host string, port uint16, ok bool) {
	if value == "" || s.bad[path] {
		return "", 0, false // reported as missing, or not required
	}
	host, p, err := net.SplitHostPort(value)
	if err != nil {
		s.report(path, "%q is not host:port", value)
		return "", 0, false
	}
	n, err := strconv.ParseUint(p, 10, 16)
	if err != nil || n == 0 {
		s.report(path, "%q: the port must be a number from 1 to 65535", value)
		return "", 0, false
	}
	return host, uint16(n), true
}

func isHost(host string) bool {
	_, err := netip.ParseAddr(host)
	return err == nil || len(host) <= maxClusterID && subdomain.MatchString(strings.ToLower(strings.TrimSuffix(host, ".")))
}

// apiserverURL checks the URL and returns its address if that is an IP address.
func (s *source) apiserverURL(value string) (netip.AddrPort, bool) {
	const path = "apiserver.url"
	if value == "" || s.bad[path] {
		return netip.AddrPort{}, false
	}
	u, err := url.Parse(value)
	switch {
	case err != nil || u.Host == "" || !isHost(u.Hostname()):
		s.report(path, "%q is not a URL such as https://127.0.0.1:6443", value)
	case u.Scheme != "https":
		s.report(path, "%q: the scheme must be https, identities are never sent in the clear", value)
	case u.User != nil || u.RawQuery != "" || u.Fragment != "" || strings.Trim(u.Path, "/") != "":
		s.report(path, "%q must have nothing but a host and a port", value)
	default:
		port := uint64(443)
		if p := u.Port(); p != "" {
			if port, err = strconv.ParseUint(p, 10, 16); err != nil || port == 0 {
				s.report(path, "%q: the port must be a number from 1 to 65535", value)
				return netip.AddrPort{}, false
			}
		}
		ip, err := netip.ParseAddr(u.Hostname())
		return netip.AddrPortFrom(ip.Unmap(), uint16(port)), err == nil
	}
	return netip.AddrPort{}, false
}

func (s *source) name(path, value string, limit int) {
	if value == "" {
		return
	}
	if len(value) > limit || !subdomain.MatchString(value) {
		s.report(path, "%q must be at most %d characters, a-z, 0-9, '-' and '.', and each part begin and end with a letter or digit", value, limit)
	}
}

func (s *source) oneOf(path, value string, allowed ...string) bool {
	if slices.Contains(allowed, value) {
		return true
	}
	s.report(path, "%q is not one of %s", value, strings.Join(allowed, ", "))
	return false
}

func (s *source) within(path string, d, low, high time.Duration) {
	switch {
	case d < low && low == 0:
		s.report(path, "%s must not be negative", d)
	case d < low:
		s.report(path, "%s must be at least %s", d, low)
	case d > high:
		s.report(path, "%s must be at most %s", d, high)
	}
}

func (s *source) between(path string, n, low, high int) {
	if n < low || n > high {
		s.report(path, "%d must be from %d to %d", n, low, high)
	}
}

func (s *source) unique(path string, list []string) {
	for i, v := range list {
		if first := slices.Index(list, v); first < i && v != "" {
			s.report(fmt.Sprintf("%s[%d]", path, i), "%q is in the list twice, first on line %d", v, s.line(fmt.Sprintf("%s[%d]", path, first)))
		}
	}
}

// headerName is a field name of RFC 9110.
var headerName = regexp.MustCompile("^[-!#$%&'*+.^_`|~0-9A-Za-z]+$")

func (s *source) headers(path string, names []string, required bool) {
	if required && len(names) == 0 {
		s.report(path, "must name at least one header, or the apiserver would not learn it")
	}
	for i, n := range names {
		if n != "" && !headerName.MatchString(n) {
			s.report(fmt.Sprintf("%s[%d]", path, i), "%q is not the name of a header", n)
		}
	}
}
