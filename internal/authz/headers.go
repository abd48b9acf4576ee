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
		if n.isIdentity(name) {
			delete(h, name)
		}
	}
}

func (n HeaderNames) isIdentity(name string) bool {
	// Almost no header gets past the first byte; the rest may be slower.
	s := strings.ToLower(strings.ReplaceAll(name, "_", "-"))
	if strings.HasPrefix(s, reservedPrefix) {
		return true
	}
	for _, list := range [][]string{n.User, n.UID, n.Group} {
		for _, want := range list {
			if strings.EqualFold(s, strings.ReplaceAll(want, "_", "-")) {
				return true
			}
		}
	}
	for _, p := range n.ExtraPrefix {
		p = strings.ReplaceAll(p, "_", "-")
		if len(s) >= len(p) && strings.EqualFold(s[:len(p)], p) {
			return true
		}
	}
	return false
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

// StripHopByHop deletes the hop-by-hop headers and those that Connection names. It must run before Set: a client's
// "Connection: X-Remote-User" would otherwise take away what was set (CASES I-01).
func StripHopByHop(h http.Header) {
	for _, v := range h["Connection"] {
		for name := range strings.SplitSeq(v, ",") {
			if name = textproto.TrimString(name); name != "" {
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

// StripCredentials deletes what authenticates the client. The outgoing request carries the identity itself instead.
func StripCredentials(h http.Header) {
	for _, name := range credentials {
		delete(h, name)
	}
}

// StripForwarding deletes what tells where a request came from; upstream writes the true address (CASES A-02).
func StripForwarding(h http.Header) {
	for _, name := range []string{"X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Forwarded-Uri", "X-Real-Ip", "Forwarded"} {
		delete(h, name)
	}
}

// StripReplayKeys deletes the headers that Go's http.Transport takes as permission to send a request twice.
func StripReplayKeys(h http.Header) {
	delete(h, "Idempotency-Key")
	delete(h, "X-Idempotency-Key")
}
