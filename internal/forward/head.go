package forward

import (
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"net/textproto"
	"net/url"
	"strings"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	"github.com/mvp-mesh/mvp-node/internal/loopguard"
	"github.com/mvp-mesh/mvp-node/internal/reqctx"
	mvpv1 "github.com/mvp-mesh/mvp-node/proto/mvp/v1"
	"golang.org/x/net/http/httpguts"
)

// chunkSize bounds the body bytes of one message: large enough that a list costs few messages, small enough that one stream never
// holds much (CASES F-07, S-09). With what is around it a message stays below 32 KiB, the last size of gRPC's buffers before 1 MiB:
// a message that is a few bytes longer would hold that much while it waits for a slow reader.
const chunkSize = 31 << 10

// headBody bounds the body bytes that travel with a head, for the same reason: usual headers leave room. A request or answer that fits
// is one message.
const headBody = 24 << 10

// Limits on what a head may hold, above anything a real request has. They keep a faulty peer from making us build nonsense;
// the size of the whole message is limited by gRPC.
const (
	maxSourceIPs = 16
	maxAuditID   = 64 // as kube-apiserver cuts it
)

// target is the request-target as the client sent it, in origin form.
func target(req *http.Request) string {
	if t := req.RequestURI; strings.HasPrefix(t, "/") {
		return t
	} else if _, rest, ok := strings.Cut(t, "://"); ok { // absolute form, as sent to proxies
		if i := strings.IndexByte(rest, '/'); i >= 0 {
			return rest[i:]
		}
	}
	return req.URL.RequestURI()
}

// cleanRequest deletes what may not travel with a request: credentials, identity, hop marks, hop-by-hop headers, claims about
// where it came from, and permissions to replay it. Both ends see to it, each for itself.
func cleanRequest(h http.Header, names authz.HeaderNames) {
	authz.StripHopByHop(h) // also what Connection names
	for name := range h {
		if staysHere(name, names) {
			delete(h, name)
		}
	}
	authz.StripCredentials(h) // also those inside other headers
}

// staysHere reports whether a header never travels, whatever the rest of the request says.
func staysHere(canonical string, names authz.HeaderNames) bool {
	switch canonical {
	case "Content-Length": // a field of its own
		return true
	}
	return authz.StopsHere(canonical) || loopguard.IsMark(canonical) || names.IsIdentity(canonical)
}

// newHead writes everything about a request but its body and the parts that depend on the peer.
func newHead(req *http.Request, rc *reqctx.Request, hop loopguard.Hop, o *ClientOptions) *mvpv1.RequestHead {
	class := mvpv1.DeadlineClass_DEADLINE_CLASS_SHORT
	switch {
	case rc.Upgrade != "":
		class = mvpv1.DeadlineClass_DEADLINE_CLASS_UPGRADE
	case rc.LongRunning:
		class = mvpv1.DeadlineClass_DEADLINE_CLASS_LONG_RUNNING
	}
	k := rc.Attributes.Key
	return &mvpv1.RequestHead{
		ClusterId: o.ClusterID,
		Hop:       uint32(hop),
		Identity:  encodeIdentity(rc.User),
		Audit: &mvpv1.AuditContext{
			AuditId:     rc.AuditID,
			SourceIps:   rc.ClientAddrs,
			IngressNode: o.Name,
		},
		Http: &mvpv1.HttpRequest{
			Method:        req.Method,
			Target:        target(req),
			Host:          req.Host,
			Headers:       encodeRequestHeader(req.Header, o.HeaderNames),
			ContentLength: req.ContentLength,
			TrailerNames:  requestTrailers(req, o.HeaderNames),
			Upgrade:       rc.Upgrade,
		},
		Attributes: &mvpv1.RequestAttributes{
			Group:       k.Group,
			Version:     k.Version,
			Resource:    k.Resource,
			Subresource: k.Subresource,
			Verb:        verbName(rc),
			Namespace:   rc.Namespace,
			Name:        rc.Name,
		},
		DeadlineClass: class,
	}
}

// requestTrailers names the announced trailers that may travel.
func requestTrailers(req *http.Request, names authz.HeaderNames) []string {
	if len(req.Trailer) == 0 || req.ContentLength >= 0 {
		return nil
	}
	var out []string
	for name := range req.Trailer {
		if !staysHere(textproto.CanonicalMIMEHeaderKey(name), names) {
			out = append(out, name)
		}
	}
	return out
}

// verbName is empty for a verb that discovery does not name, so that both ends compare the same thing.
func verbName(rc *reqctx.Request) string {
	if rc.Attributes.Verb == 0 {
		return ""
	}
	return rc.Attributes.Verb.String()
}

func encodeIdentity(u *authz.User) *mvpv1.Identity {
	id := &mvpv1.Identity{User: u.Name, Uid: u.UID, Groups: u.Groups}
	if len(u.Extra) > 0 {
		id.Extra = make([]*mvpv1.Extra, 0, len(u.Extra))
		for k, vs := range u.Extra {
			id.Extra = append(id.Extra, &mvpv1.Extra{Key: k, Values: vs})
		}
	}
	return id
}

// encodeRequestHeader writes what may travel of a request's headers, and leaves h as it is.
func encodeRequestHeader(h http.Header, names authz.HeaderNames) []*mvpv1.Header {
	if len(h["Connection"]) > 0 || len(h[authz.WebSocketProtocol]) > 0 {
		c := h.Clone() // rare: what else must go depends on values
		cleanRequest(c, names)
		return encodeHeader(c)
	}
	block := make([]mvpv1.Header, len(h))
	out := make([]*mvpv1.Header, 0, len(h))
	for name, values := range h {
		if staysHere(textproto.CanonicalMIMEHeaderKey(name), names) {
			continue
		}
		m := &block[len(out)]
		m.Name, m.Values = name, values
		out = append(out, m)
	}
	return out
}

// encodeHeader shares the values of h, which must not change until the message is sent.
func encodeHeader(h http.Header) []*mvpv1.Header {
	if len(h) == 0 {
		return nil
	}
	// One allocation for all messages instead of one for each.
	block := make([]mvpv1.Header, len(h))
	out := make([]*mvpv1.Header, 0, len(h))
	for name, values := range h {
		m := &block[len(out)]
		m.Name, m.Values = name, values
		out = append(out, m)
	}
	return out
}

var errBadHeader = errors.New("invalid header")

// decodeHeader makes canonical names, so that no spelling escapes the functions that strip, and refuses what HTTP does not allow:
// a line break in a value would be another header to some reader.
func decodeHeader(in []*mvpv1.Header) (http.Header, error) {
	h := make(http.Header, len(in)+8) // upstream adds about eight
	for _, m := range in {
		if !httpguts.ValidHeaderFieldName(m.GetName()) {
			return nil, fmt.Errorf("%w: name %.40q", errBadHeader, m.GetName())
		}
		for _, v := range m.GetValues() {
			if !httpguts.ValidHeaderFieldValue(v) {
				return nil, fmt.Errorf("%w: value of %.40q", errBadHeader, m.GetName())
			}
		}
		name := textproto.CanonicalMIMEHeaderKey(m.GetName())
		if old, dup := h[name]; dup {
			h[name] = append(old[:len(old):len(old)], m.GetValues()...)
		} else {
			h[name] = m.GetValues()
		}
	}
	return h, nil
}

func decodeIdentity(id *mvpv1.Identity) *authz.User {
	u := &authz.User{Name: id.GetUser(), UID: id.GetUid(), Groups: id.GetGroups()}
	if extra := id.GetExtra(); len(extra) > 0 {
		u.Extra = make(map[string][]string, len(extra))
		for _, e := range extra {
			u.Extra[e.GetKey()] = append(u.Extra[e.GetKey()], e.GetValues()...)
		}
	}
	return u
}

// incoming is a decoded head: well-formed, not yet allowed.
type incoming struct {
	head   *mvpv1.RequestHead
	user   *authz.User
	url    *url.URL
	header http.Header // cleaned
	length int64       // of the body, -1 if unknown
}

// decodeHead checks that a head is well-formed and decodes it. It decides nothing about who sent it. The error says what is wrong.
func decodeHead(h *mvpv1.RequestHead, names authz.HeaderNames) (*incoming, error) {
	if h == nil {
		return nil, errors.New("the first part is not a head")
	}
	req := h.GetHttp()
	if !httpguts.ValidHeaderFieldName(req.GetMethod()) { // a method is a token, as a field name is
		return nil, fmt.Errorf("method %.20q is no token", req.GetMethod())
	}
	if !strings.HasPrefix(req.GetTarget(), "/") {
		return nil, fmt.Errorf("target %.40q is not in origin form", req.GetTarget())
	}
	if strings.IndexFunc(req.GetTarget(), func(r rune) bool { return r <= ' ' || r == 0x7f }) >= 0 {
		// net/url takes a space, which HTTP/2 can carry; on a request line it would end the target.
		return nil, fmt.Errorf("target %.40q holds white space or control characters", req.GetTarget())
	}
	u, err := url.ParseRequestURI(req.GetTarget())
	if err != nil {
		return nil, fmt.Errorf("target: %w", err)
	}
	if !httpguts.ValidHostHeader(req.GetHost()) {
		return nil, fmt.Errorf("host %.40q", req.GetHost())
	}
	length, body := req.GetContentLength(), int64(len(h.GetBody()))
	switch {
	case length < -1:
		return nil, fmt.Errorf("content length %d", length)
	case length >= 0 && body > length:
		return nil, fmt.Errorf("%d body bytes, %d announced", body, length)
	case h.GetEnd() && length >= 0 && body != length:
		return nil, fmt.Errorf("body ends after %d bytes, %d announced", body, length)
	}
	audit := h.GetAudit()
	if id := audit.GetAuditId(); id == "" || len(id) > maxAuditID || !httpguts.ValidHeaderFieldValue(id) {
		return nil, fmt.Errorf("audit ID %.80q", id)
	}
	if n := len(audit.GetSourceIps()); n == 0 || n > maxSourceIPs {
		return nil, fmt.Errorf("%d source addresses, want 1 to %d", n, maxSourceIPs)
	}
	for _, ip := range audit.GetSourceIps() {
		if _, err := netip.ParseAddr(ip); err != nil {
			return nil, fmt.Errorf("source address: %w", err)
		}
	}
	switch up := req.GetUpgrade(); {
	case (up != "") != (h.GetDeadlineClass() == mvpv1.DeadlineClass_DEADLINE_CLASS_UPGRADE):
		return nil, fmt.Errorf("upgrade to %.40q with deadline class %v", up, h.GetDeadlineClass())
	case up != "" && (reqctx.ParseUpgrade(up) != up || length != 0 || !h.GetEnd()):
		return nil, fmt.Errorf("upgrade to %.40q, or one with a body", up)
	}
	header, err := decodeHeader(req.GetHeaders())
	if err != nil {
		return nil, err
	}
	cleanRequest(header, names)
	for _, name := range req.GetTrailerNames() {
		if !httpguts.ValidTrailerHeader(name) {
			return nil, fmt.Errorf("trailer %.40q", name)
		}
	}
	return &incoming{head: h, user: decodeIdentity(h.GetIdentity()), url: u, header: header, length: length}, nil
}
