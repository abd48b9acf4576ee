package authz

import (
	"errors"
	"net/http"
	"net/textproto"
	"strings"
)

// HeaderNames are the request headers by which a kube-apiserver takes an identity from its front proxy: its
// --requestheader-*-headers flags. The first name of each list is the one that is written; all are stripped.
type HeaderNames struct {
	User, UID, Group, ExtraPrefix []string
}

// DefaultHeaderNames are the names that kubeadm configures, plus the UID header that it does not (DESIGN.md "Decided").
func DefaultHeaderNames() HeaderNames {
	return HeaderNames{
		User:        []string{"X-Remote-User"},
		UID:         []string{"X-Remote-Uid"},
		Group:       []string{"X-Remote-Group"},
		ExtraPrefix: []string{"X-Remote-Extra-"},
	}
}

// reservedPrefix is stripped whatever is configured: no apiserver gives these to clients for another purpose.
const reservedPrefix = "x-remote-"

// ErrNoUser reports that a request would leave the node without an identity; it must not be sent.
var ErrNoUser = errors.New("no user to write on the outgoing request")

// Strip deletes every header that could be taken for an identity: the configured names, anything that begins with X-Remote-, and
// the same with underscores, which some servers read as hyphens.
func (n HeaderNames) Strip(h http.Header) {
	for name := range h {
		if n.IsIdentity(name) {
			delete(h, name)
		}
	}
}

// IsIdentity reports whether Strip deletes a header of that name, in whatever case it is written. It allocates nothing: it is
// asked about every header of every request.
func (n HeaderNames) IsIdentity(name string) bool {
	if hasPrefix(name, reservedPrefix) || equalsOne(name, n.User) || equalsOne(name, n.UID) || equalsOne(name, n.Group) {
		return true
	}
	for _, p := range n.ExtraPrefix {
		if hasPrefix(name, p) {
			return true
		}
	}
	return false
}

func equalsOne(name string, list []string) bool {
	for _, want := range list {
		if len(name) == len(want) && hasPrefix(name, want) {
			return true
		}
	}
	return false
}

// hasPrefix compares without regard to ASCII case and with '_' equal to '-'. Field names are ASCII; what is not can equal no
// configured name.
func hasPrefix(name, prefix string) bool {
	if len(name) < len(prefix) {
		return false
	}
	for i := range len(prefix) {
		if fold(name[i]) != fold(prefix[i]) {
			return false
		}
	}
	return true
}

func fold(c byte) byte {
	switch {
	case 'A' <= c && c <= 'Z':
		return c + ('a' - 'A')
	case c == '_':
		return '-'
	}
	return c
}

// Set writes the identity on an outgoing request, after Strip and after hop-by-hop headers are gone: one value per group, extra
// keys lower-cased and percent-encoded. An empty user name is ErrNoUser and nothing is written.
func (n HeaderNames) Set(h http.Header, u *User) error {
	if u == nil || u.Name == "" || len(n.User) == 0 {
		return ErrNoUser
	}
	h[textproto.CanonicalMIMEHeaderKey(n.User[0])] = []string{u.Name}
	if u.UID != "" && len(n.UID) > 0 {
		h[textproto.CanonicalMIMEHeaderKey(n.UID[0])] = []string{u.UID}
	}
	if len(u.Groups) > 0 && len(n.Group) > 0 {
		h[textproto.CanonicalMIMEHeaderKey(n.Group[0])] = append([]string(nil), u.Groups...)
	}
	if len(n.ExtraPrefix) > 0 {
		for k, vs := range u.Extra {
			key := textproto.CanonicalMIMEHeaderKey(n.ExtraPrefix[0] + escapeKey(k))
			h[key] = append(h[key], vs...)
		}
	}
	return nil
}

// escapeKey lower-cases an extra key and percent-encodes every byte that RFC 9110 does not allow in a field name, and '%'
// itself, which is the inverse of what the apiserver's request-header authenticator does.
func escapeKey(key string) string {
	key = strings.ToLower(key)
	const hexDigits = "0123456789ABCDEF"
	var b strings.Builder
	for i := 0; i < len(key); i++ {
		if c := key[i]; isToken(c) && c != '%' {
			b.WriteByte(c)
		} else {
			b.WriteByte('%')
			b.WriteByte(hexDigits[c>>4])
			b.WriteByte(hexDigits[c&15])
		}
	}
	return b.String()
}

func isToken(c byte) bool {
	switch {
	case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9':
		return true
	}
	return strings.IndexByte("!#$%&'*+-.^_`|~", c) >= 0
}

// hopByHop are the headers that concern one connection only (RFC 9110 section 7.6.1 and its predecessors).
var hopByHop = []string{
	"Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Te", "Trailer",
	"Transfer-Encoding", "Upgrade",
}

// impersonation headers make a request run with fewer or other rights than its sender's. Connection may not take them away: a
// proxy that sets them for its own clients, with its own certificate, need not expect that a client's Connection header makes
// the request run as the proxy itself, because at a kube-apiserver it does not.
const impersonation = "impersonate-"

// StripHopByHop deletes the hop-by-hop headers and those that Connection names, Impersonate-* apart. It must run before Set: a
// client's "Connection: X-Remote-User" would otherwise take away what was set (CASES I-01).
func StripHopByHop(h http.Header) {
	for _, v := range h["Connection"] {
		for name := range strings.SplitSeq(v, ",") {
			if name = textproto.TrimString(name); name != "" && !hasPrefix(name, impersonation) {
				h.Del(name)
			}
		}
	}
	for _, name := range hopByHop {
		delete(h, name)
	}
}

// credentials are the headers that prove who the client is; they stay on the node that checked them.
var credentials = []string{"Authorization", "Cookie", "Proxy-Authorization"}

// WebSocketProtocol is the canonical name of the header by which a client offers subprotocols.
const WebSocketProtocol = "Sec-Websocket-Protocol"

// bearerProtocol begins the subprotocol by which browsers send a bearer token to Kubernetes (CASES I-07).
const bearerProtocol = "base64url.bearer.authorization.k8s.io."

// StripCredentials deletes what authenticates the client. The outgoing request carries the identity itself instead.
func StripCredentials(h http.Header) {
	for _, name := range credentials {
		delete(h, name)
	}
	values, ok := h[WebSocketProtocol]
	if !ok {
		return
	}
	out := make([]string, 0, len(values))
	for _, v := range values {
		if !strings.Contains(v, bearerProtocol) {
			out = append(out, v) // as it was written
			continue
		}
		var kept []string
		for p := range strings.SplitSeq(v, ",") {
			if p = textproto.TrimString(p); p != "" && !strings.HasPrefix(p, bearerProtocol) {
				kept = append(kept, p)
			}
		}
		if len(kept) > 0 {
			out = append(out, strings.Join(kept, ", "))
		}
	}
	if delete(h, WebSocketProtocol); len(out) > 0 {
		h[WebSocketProtocol] = out
	}
}

// StripForwarding deletes what tells where a request came from; upstream writes the true address (CASES A-02).
func StripForwarding(h http.Header) {
	for _, name := range forwarding {
		delete(h, name)
	}
}

var forwarding = []string{"X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Forwarded-Uri", "X-Real-Ip", "Forwarded"}

// StripReplayKeys deletes the headers that Go's http.Transport takes as permission to send a request twice.
func StripReplayKeys(h http.Header) {
	for _, name := range replayKeys {
		delete(h, name)
	}
}

var replayKeys = []string{"Idempotency-Key", "X-Idempotency-Key"}

// stopping is the union of the lists above.
var stopping = func() map[string]struct{} {
	m := make(map[string]struct{})
	for _, list := range [][]string{hopByHop, credentials, forwarding, replayKeys} {
		for _, name := range list {
			m[name] = struct{}{}
		}
	}
	return m
}()

// StopsHere reports whether a header of that canonical name is deleted by StripHopByHop, StripCredentials, StripForwarding or
// StripReplayKeys whatever else the request says; it lets a request be copied in one pass.
func StopsHere(canonical string) bool {
	_, ok := stopping[canonical]
	return ok
}
