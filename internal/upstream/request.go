package upstream

import (
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	"github.com/mvp-mesh/mvp-node/internal/loopguard"
	"github.com/mvp-mesh/mvp-node/internal/reqctx"
	"github.com/mvp-mesh/mvp-node/internal/route"
)

const (
	headerAuditID      = "Audit-Id"
	headerForwardedFor = "X-Forwarded-For"
	headerUserAgent    = "User-Agent"
)

// teTrailers is shared by all requests that announce trailers; nobody writes to it.
var teTrailers = []string{"trailers"}

// connectionUpgrade likewise.
var connectionUpgrade = []string{"Upgrade"}

// outgoing makes the request that the apiserver is to see. Neither in nor its header is changed; header values are shared.
func (t *Transport) outgoing(in *http.Request, rc *reqctx.Request) (*http.Request, error) {
	u, err := t.target(in)
	if err != nil {
		return nil, &Error{Op: OpTarget, Err: err}
	}
	h, err := t.header(in.Header, rc)
	if err != nil {
		return nil, &Error{Op: OpIdentity, Err: err}
	}
	out := in.WithContext(in.Context())
	out.URL = u
	out.Header = h
	// What belongs to the client's connection or to the server side of net/http stays there.
	out.RequestURI = ""
	out.Close = false
	out.TransferEncoding = nil
	out.Trailer = t.trailer(in)
	out.Form, out.PostForm, out.MultipartForm = nil, nil, nil
	out.Response = nil
	// A body can be sent once. Without GetBody nothing below can try.
	out.GetBody = nil
	return out, nil
}

// trailer announces the trailers of in that may pass; nil if there are none, or no body to follow. Values come with the body's end.
func (t *Transport) trailer(in *http.Request) http.Header {
	if len(in.Trailer) == 0 || in.ContentLength >= 0 {
		return nil
	}
	out := make(http.Header, len(in.Trailer))
	for name := range in.Trailer {
		name = http.CanonicalHeaderKey(name)
		if name != headerAuditID && !authz.StopsHere(name) && !loopguard.IsMark(name) && !t.names.IsIdentity(name) {
			out[name] = nil
		}
	}
	return out
}

// header copies what may pass and adds what the apiserver is to believe.
func (t *Transport) header(in http.Header, rc *reqctx.Request) (http.Header, error) {
	if err := sendable(rc.User); err != nil {
		return nil, err
	}
	h := make(http.Header, len(in)+len(rc.User.Extra)+6)
	for name, values := range in {
		// Keys that are not in canonical form come from callers that made the request themselves.
		name = http.CanonicalHeaderKey(name)
		if name == headerAuditID || authz.StopsHere(name) || loopguard.IsMark(name) || t.names.IsIdentity(name) {
			continue
		}
		if have, twice := h[name]; twice {
			values = append(have[:len(have):len(have)], values...)
		}
		h[name] = values
	}
	if c, ok := in["Connection"]; ok {
		h["Connection"] = c
		authz.StripHopByHop(h)
	}
	for _, v := range in["Te"] {
		if strings.Contains(v, "trailers") {
			h["Te"] = teTrailers
		}
	}
	if rc.Upgrade != "" {
		h["Connection"], h["Upgrade"] = connectionUpgrade, []string{rc.Upgrade}
	}
	if _, ok := h[headerUserAgent]; !ok {
		h[headerUserAgent] = nil // net/http would name itself
	}

	single := make([]string, 0, 2)
	if rc.AuditID != "" {
		single = append(single, rc.AuditID)
		h[headerAuditID] = single[0:1:1]
	}
	if len(rc.ClientAddrs) > 0 {
		single = append(single, strings.Join(rc.ClientAddrs, ", "))
		h[headerForwardedFor] = single[len(single)-1:]
	}
	// A node that stands aside, or only watches what it would have forwarded, leaves the apiserver's own peer proxy its work.
	if d := rc.Decision; d.Reason != route.ModeDisabled && d.Observed == nil {
		loopguard.Mark(h)
	}
	if err := t.names.Set(h, rc.User); err != nil {
		return nil, err
	}
	return h, nil
}

// sendable reports whether u can be written as headers and read back as it is.
func sendable(u *authz.User) error {
	if u == nil || u.Name == "" {
		return authz.ErrNoUser
	}
	if !survives(u.Name) || !survives(u.UID) {
		return fmt.Errorf("name or UID of user %q: %w", u.Name, ErrIdentity)
	}
	for _, g := range u.Groups {
		if !survives(g) {
			return fmt.Errorf("group %q: %w", g, ErrIdentity)
		}
	}
	for k, vs := range u.Extra {
		for _, v := range vs {
			if !survives(v) {
				return fmt.Errorf("extra %q: %w", k, ErrIdentity)
			}
		}
	}
	return nil
}

// survives reports whether a header value is read as it was written: white space around it would be trimmed, and control
// characters are not allowed.
func survives(s string) bool {
	if s == "" {
		return true
	}
	first, last := s[0], s[len(s)-1]
	if first == ' ' || first == '\t' || last == ' ' || last == '\t' {
		return false
	}
	for i := range len(s) {
		if c := s[i]; c < ' ' && c != '\t' || c == 0x7f {
			return false
		}
	}
	return true
}

// identified is asked of the request that is about to be written: whatever was done to it before, the identity must be on it.
func (t *Transport) identified(out *http.Request, rc *reqctx.Request) bool {
	v := out.Header[t.userKey]
	return len(v) == 1 && v[0] != "" && v[0] == rc.User.Name
}

// target returns the URL by which net/http writes the request-target of in, byte for byte.
func (t *Transport) target(in *http.Request) (*url.URL, error) {
	u := *in.URL
	u.Scheme, u.Host = t.url.Scheme, t.url.Host
	u.User = nil
	u.Fragment, u.RawFragment = "", ""
	want := in.RequestURI
	if want == "" {
		// Not from a server: the URL is all there is.
		if u.Opaque != "" {
			return nil, fmt.Errorf("%w: opaque URL %q", ErrTarget, in.URL)
		}
		return &u, nil
	}
	if in.Method == http.MethodConnect {
		return nil, fmt.Errorf("%w: method CONNECT", ErrTarget)
	}
	if want[0] != '/' && want != "*" {
		// Absolute form, for proxies: what follows the authority is what an origin server is asked for.
		_, rest, ok := strings.Cut(want, "://")
		if i := strings.IndexAny(rest, "/?"); ok && i >= 0 && rest[i] == '/' {
			want = rest[i:]
		} else {
			return nil, fmt.Errorf("%w: %q", ErrTarget, want)
		}
	}
	path, query, question := strings.Cut(want, "?")
	force := question && query == ""
	if u.Opaque == "" && u.EscapedPath() == path && u.RawQuery == query && (query != "" || u.ForceQuery == force) {
		return &u, nil
	}
	// net/url would write the path escaped in its own way, for example %7C for a bare '|'. An opaque path is written as it is,
	// unless two slashes begin it.
	if strings.HasPrefix(path, "//") {
		return nil, fmt.Errorf("%w: %q", ErrTarget, want)
	}
	u.Path, u.RawPath, u.Opaque = "", "", path
	u.RawQuery, u.ForceQuery = query, force
	return &u, nil
}
