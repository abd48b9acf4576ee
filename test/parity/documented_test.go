package parity_test

import (
	"net/http"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/uuid"

	"github.com/mvp-mesh/mvp-node/test/fake"
)

// compared is one difference with everything that is known about where it comes from.
type compared struct {
	difference
	c        *testCase
	world    *world
	way      way
	protocol protocol
	want     *outcome // direct
	have     *outcome
}

// documented is one difference between a request served through mvp-node and one sent straight to the serving apiserver.
type documented struct {
	id   string // heading in docs/fidelity.md
	ways []way
	why  string
	// allow decides about one field of a comparison. It is nil for a difference that is only expected of a case as a whole, by instead.
	allow func(d *compared) bool
}

var (
	both = []way{local, forwarded}
	onA  = []way{forwarded}
	onB  = []way{local}
)

// table is every difference that there may be. Anything else fails; so does an entry that no case needs, or that docs/fidelity.md
// does not name.
var table = []documented{
	{
		id: "identity headers", ways: both,
		why: "the apiserver is told the client's identity by its front proxy's headers, instead of by the client's credential",
		allow: func(d *compared) bool {
			name, ok := strings.CutPrefix(d.field, requestHeader)
			want := d.world.identityHeaders(d.c.cred)[name]
			return ok && want != nil && slices.Equal(d.got, want)
		},
	},
	{
		id: "forged identity headers", ways: both,
		why: "what a client says about itself in such headers or trailers, in any spelling, is deleted; an apiserver believes no client's either",
		allow: func(d *compared) bool {
			name, isHeader := strings.CutPrefix(d.field, requestHeader)
			name, isTrailer := strings.CutPrefix(name, requestTrailer)
			name = strings.ReplaceAll(strings.ToLower(name), "_", "-")
			return (isHeader || isTrailer) && d.got == nil && strings.HasPrefix(name, "x-remote-")
		},
	},
	{
		id: "credentials", ways: both,
		why:   "who the client is was checked by the node that it talks to; what proves it goes no further",
		allow: removed("Authorization", "Cookie", "Proxy-Authorization"),
	},
	{
		id: "peer mark", ways: both,
		why: "the apiserver's own peer proxy must not forward what a node has routed; a client's mark has no effect",
		allow: func(d *compared) bool {
			return d.field == requestHeader+"X-Kubernetes-Peer-Proxied" && slices.Equal(d.got, []string{"true"}) ||
				d.field == requestHeader+"X-Kubernetes-Apiserver-Rerouted" && d.got == nil
		},
	},
	{
		id: "audit ID", ways: both,
		why: "every request gets a fresh one, which the nodes and the apiserver share; one that a client chose could hide its events",
		allow: func(d *compared) bool {
			if d.field != requestHeader+"Audit-Id" && d.field != answerHeader+"Audit-Id" {
				return false
			}
			return len(d.got) == 1 && uuid.Validate(d.got[0]) == nil && d.got[0] == d.have.arrived[0].Header.Get("Audit-Id")
		},
	},
	{
		id: "client addresses", ways: both,
		why: "X-Forwarded-For is the address of the client's connection, then of each node passed; what the client says of it is deleted",
		allow: func(d *compared) bool {
			if d.field != requestHeader+"X-Forwarded-For" {
				return removed("X-Forwarded-Host", "X-Forwarded-Proto", "X-Forwarded-Uri", "X-Real-Ip", "Forwarded")(d)
			}
			hops := map[way]int{local: 1, forwarded: 2}[d.way]
			if len(d.got) != 1 {
				return false
			}
			chain := strings.Split(d.got[0], ", ")
			return len(chain) == hops && !slices.ContainsFunc(chain, func(s string) bool {
				_, err := netip.ParseAddr(s)
				return err != nil
			})
		},
	},
	{
		id: "idempotency keys", ways: both,
		why:   "Go's HTTP client takes them as permission to send a request twice, and nothing may be written twice because of a node",
		allow: removed("Idempotency-Key", "X-Idempotency-Key"),
	},
	{
		id: "hop-by-hop headers", ways: both,
		why: "they, and those that Connection names, concern one connection (RFC 9110 section 7.6.1)",
		allow: func(d *compared) bool {
			for prefix, sent := range map[string][]fake.Field{requestHeader: d.c.request.fields, answerHeader: d.c.script.Header} {
				name, ok := strings.CutPrefix(d.field, prefix)
				if !ok {
					continue
				}
				// A server adds "Connection: close" to an answer as it sees fit.
				if prefix == answerHeader && name == "Connection" {
					return true
				}
				if name == "Te" && slices.Equal(d.got, []string{"trailers"}) && strings.Contains(strings.Join(d.direct, ","), "trailers") {
					return true // all that it may say by HTTP/2
				}
				return d.got == nil && (slices.Contains(hopByHop, name) || connectionNames(sent, name))
			}
			return false
		},
	},
	{
		id: "protocol towards the apiserver", ways: both,
		why: "a node has connections of its own to its apiserver, HTTP/2 or HTTP/1.1 whatever the client speaks. By HTTP/2 Go's server takes " +
			"Expect, which it has then obeyed, off the headers; by HTTP/1.1 it adds Cache-Control to Pragma: no-cache, and leaves " +
			"Content-Type off a 304",
		allow: func(d *compared) bool {
			switch d.field {
			case fieldProtocol:
				return true
			case requestHeader + "Expect":
				return d.c.request.expect && len(d.direct)+len(d.got) == 1 // there or not, but no other value
			case requestHeader + "Cache-Control":
				pragma := slices.ContainsFunc(d.c.request.fields, func(f fake.Field) bool { return strings.EqualFold(f.Name, "Pragma") })
				return pragma && d.direct == nil && slices.Equal(d.got, []string{"no-cache"})
			case answerHeader + "Content-Type":
				return d.have.answer.status == http.StatusNotModified && len(d.direct)+len(d.got) == 1
			}
			return false
		},
	},
	{
		id: "length of an empty body", ways: both,
		why: "Content-Length: 0 says no more than that there is no body, and comes or goes by Go's custom for the method; a chunked body " +
			"without a byte may become that",
		allow: func(d *compared) bool {
			plain := slices.Equal(d.got, []string{"0"}) || slices.Equal(d.got, []string{lengthNone})
			return d.field == fieldRequestLength && plain && d.c.request.body.Len() == 0
		},
	},
	{
		id: "unannounced request trailers", ways: both,
		why: "only trailers that the request's head announces are passed on; Go's HTTP/2 server, which a node's apiserver is, drops the " +
			"others itself",
		allow: func(d *compared) bool {
			return strings.HasPrefix(d.field, requestTrailer) && d.c.request.quiet && d.got == nil
		},
	},
	{
		id: "empty User-Agent", ways: both,
		why: "Go's HTTP client cannot send a User-Agent without a value; none is sent then, which says the same",
		allow: func(d *compared) bool {
			return d.field == requestHeader+"User-Agent" && slices.Equal(d.direct, []string{""}) && d.got == nil
		},
	},
	{
		id: "absolute form", ways: both,
		why: "a request-target with scheme and authority is meant for a proxy, which sends the rest of it (RFC 9112 section 3.2.2)",
		allow: func(d *compared) bool {
			scheme := "https://" + defaultHost
			return d.field == fieldTarget && len(d.direct) == 1 && len(d.got) == 1 && d.direct[0] == scheme+d.got[0]
		},
	},
	{
		id: "length of an answer", ways: both,
		why: "where the apiserver's handler does not set Content-Length, whether there is one depends on when the pieces are written; it " +
			"may come or go on the way, and is right if it is there",
		allow: func(d *compared) bool {
			said := slices.ContainsFunc(d.c.script.Header, func(f fake.Field) bool { return strings.EqualFold(f.Name, "Content-Length") })
			return d.field == fieldAnswerLength && !said
		},
	},
	{
		id: "answers that break off at once", ways: onA,
		why: "of an answer that breaks off within its first 32 KiB and 2 ms nothing has been passed on yet, so that a read can go to another " +
			"peer; if there is none, or it was a write, the client gets a Status, 503 or 504, instead of a broken answer",
		allow: func(d *compared) bool {
			if d.want.answer.end != broken || !strings.HasPrefix(d.field, "answer ") {
				return false
			}
			if d.c.request.method == http.MethodGet {
				return isStatus(503, "LocalUnavailable")(*d.have) == nil
			}
			return isStatus(504, "OutcomeUnknown")(*d.have) == nil
		},
	},
	{
		id: "Expect by HTTP/2", ways: both,
		why: "Go's HTTP/2 server hides Expect from its handler, so a node asks for the body with 100 Continue as soon as it sends the request " +
			"on, also when the apiserver then refuses it unread",
		allow: func(d *compared) bool {
			return d.field == fieldInformational && d.protocol == http2 && d.c.request.expect && d.direct == nil && slices.Equal(d.got, []string{"100"})
		},
	},
	{
		id: "no answer", ways: both,
		why: "an apiserver that ends the connection without an answer gives a client nothing; a node says so by a Status, 503 if nothing " +
			"was executed or nothing can have changed, 504 if that is not known. A read goes once more before, so it can arrive twice",
		allow: func(d *compared) bool {
			read := d.c.request.framing == bodyless && (d.c.request.method == http.MethodGet || d.c.request.method == http.MethodHead)
			return d.field == fieldArrived && read && slices.Equal(d.direct, []string{"1"}) && slices.Equal(d.got, []string{"2"})
		},
	},
	{
		id: "redirects to another host", ways: onA,
		why: "a client would follow with its credentials to wherever another machine sends it: 502, except for proxy subresources (CASES F-04)",
	},
	{
		id: "missing route", ways: both,
		why: "a 404 without a route for what the catalog lists, over a connection newer than the catalog, is that of another version: 503 " +
			"NotServed until the catalog is read again, within a second. To tell, up to 4 KiB of a 404 are read before it is passed on",
	},
	{
		id: "CONNECT", ways: onB,
		why: "it asks for a tunnel to a host of the client's choice, which neither a node nor an apiserver makes: 400",
	},
	{
		id: "unsendable targets", ways: both,
		why: "white space in a :path, which only HTTP/2 can carry; and two slashes at the begin together with a byte that Go writes as " +
			"percent encoding. No HTTP/1.1 client can send the first, nothing in Kubernetes the second: 400",
	},
	{
		id: "size of the head", ways: both,
		why: "front.maxHeaderBytes, 64 KiB by default, bounds what a stranger can make a node hold; kube-apiserver's limit is 1 MiB: 431",
	},
}

// removed allows that a header of the request is gone.
func removed(names ...string) func(d *compared) bool {
	return func(d *compared) bool {
		name, ok := strings.CutPrefix(d.field, requestHeader)
		return ok && d.got == nil && slices.Contains(names, name)
	}
}

// hopByHop are the headers of one connection.
var hopByHop = []string{"Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authenticate", "Te", "Trailer", "Transfer-Encoding", "Upgrade"}

// connectionNames reports whether a Connection header among sent names another header.
func connectionNames(sent []fake.Field, name string) bool {
	for _, f := range sent {
		if strings.EqualFold(f.Name, "Connection") {
			for token := range strings.SplitSeq(f.Value, ",") {
				if strings.EqualFold(strings.TrimSpace(token), name) {
					return true
				}
			}
		}
	}
	return false
}
