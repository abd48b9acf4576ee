package parity_test

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"

	"github.com/mvp-mesh/mvp-node/test/fake"
)

// generate makes n cases. The same seed gives the same cases, each for itself, whatever n.
func generate(seed uint64, n int) []*testCase {
	out := make([]*testCase, n)
	for i := range out {
		g := &generator{rand.New(rand.NewPCG(seed, uint64(i)))}
		out[i] = g.testCase(fmt.Sprintf("generated %04d", i))
	}
	return out
}

// generator draws from what clients and apiservers may send.
type generator struct{ *rand.Rand }

func (g *generator) one(of ...string) string { return of[g.IntN(len(of))] }

// in reports true in n of of.
func (g *generator) in(n, of int) bool { return g.IntN(of) < n }

// sizes are those of bodies around which something changes: buffers of net/http, frames, chunks of a forward.
var sizes = []int64{
	0, 1, 2, 511, 512, 513, 2047, 2048, 2049, 4095, 4096, 4097, 8192, 16383, 16384, 16385, 32767, 32768, 32769, 65535, 65536,
	65537, 100000,
}

func (g *generator) size() int64 {
	switch {
	case g.in(1, 120):
		return 3 << 20
	case g.in(1, 20):
		return g.Int64N(1 << 20)
	case g.in(1, 3):
		return g.Int64N(3000)
	}
	return sizes[g.IntN(len(sizes))]
}

func (g *generator) testCase(name string) *testCase {
	c := &testCase{name: name}
	r := &c.request
	if g.in(1, 6) {
		c.localOnly, r.target = true, g.otherPath()
	} else {
		r.target = g.resourcePath()
	}
	r.target += g.query()
	r.method = g.one("GET", "GET", "GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "DELETE", "OPTIONS")
	if g.in(1, 10) {
		r.host = g.one("kubernetes", "10.96.0.1", "[fd00::1]:443", "k8s.example.com:6443", "a_b")
	}
	if g.in(1, 25) {
		c.cred = byToken
	}
	r.fields = g.requestFields()
	switch r.method {
	case "POST", "PUT", "PATCH":
		g.upload(r, 9, 10)
	case "DELETE":
		g.upload(r, 1, 2)
	default:
		g.upload(r, 1, 20)
	}
	g.answer(c)
	return c
}

// segment is an object's name: what Kubernetes allows, or what a path may hold beyond that.
func (g *generator) segment() string {
	if g.in(1, 2) {
		return g.one("w", "web-0", "kube-root-ca.crt", "system:node:n1", "a.b.c", "0")
	}
	parts := []string{
		"a", "b", "Z", "9", "-", "_", "~", ".", "..", "%41", "%7e", "%7E", "%c3%a9", "%C3%A9", "%20", "%25", "%3f", "%23", "%7C",
		"|", ";", "+", ",",
		":", "@", "=", "&", "$", "!", "*", "'", "(", ")", "[", "]", "{", "}", "<", ">", "\"", "\\", "^", "`", "\xe9", "\xff", "é", "#",
	}
	var b strings.Builder
	b.WriteByte('n') // never a dot segment
	for range 1 + g.IntN(5) {
		b.WriteString(parts[g.IntN(len(parts))])
	}
	b.WriteByte('x')
	return b.String()
}

// resourcePath names something that only b serves, without empty or dot segments or encoded slashes.
func (g *generator) resourcePath() string {
	if g.in(1, 12) {
		rest := g.one("", "/", "/a//b/", "/a/../b", "/a%2fb", "/a|b", "/"+g.segment())
		return g.one("/api/v1/namespaces/ns/services/https:s:443/proxy", "/api/v1/nodes/n1/proxy") + rest
	}
	const gv = "/apis/parity.example.com/v1/"
	resource := g.one("widgets", "widgets", "gadgets")
	p := gv + resource
	switch {
	case g.in(1, 10):
		p = gv + "watch/namespaces/" + g.segment() + "/" + resource
	case g.in(1, 12):
		p = "/api/v1/namespaces/" + g.segment() + "/services/" + g.segment() + g.one("", "/status")
	case g.in(1, 3):
		p = gv + "namespaces/" + g.segment() + "/" + resource
	}
	if resource == "widgets" && strings.HasPrefix(p, gv+"namespaces") && g.in(3, 4) {
		p += "/" + g.segment() + g.one("", "", "", "/status", "/scale", "/log", "/eviction")
	} else if strings.HasPrefix(p, gv+"namespaces") && g.in(1, 2) {
		p += "/" + g.segment()
	}
	if g.in(1, 12) {
		p += "/"
	}
	return p
}

// otherPath names no resource, or not clearly.
func (g *generator) otherPath() string {
	return g.one(
		"/", "//", "///", "/version", "//version", "/version/", "/healthz", "/livez/ping", "/metrics", "/api", "/api/", "/apis",
		"/apis/", "//apis",
		"/openapi/v2", "/openapi/v3/apis/apps/v1", "/.well-known/openid-configuration", "/openid/v1/jwks", "/logs/", "/favicon.ico",
		"//api/v1/pods", "/api//v1/pods", "/api/v1/pods//", "/apis/../api/v1/secrets", "/api/v1/./pods", "/./version", "/..",
		"/.", "/a/b/..",
		"/api/v1/namespaces/n%2fm/pods", "/api/v1/namespaces/n/pods/p%2F", "/api/v1/namespaces/%2e%2e/pods",
		"/apis/parity.example.com%2fv1/widgets",
		"/apis/parity.example.com", "/apis/parity.example.com/v1", "/apis/parity.example.com/v1/", "/apis/parity.example.com/v1//widgets",
		"/%41", "/\xff\xfe", "/a|b;c+d", "/%E4%BD%A0", "/"+g.segment(), "/"+g.segment()+"/"+g.segment(),
	)
}

func (g *generator) query() string {
	if g.in(1, 2) {
		return ""
	}
	if g.in(1, 12) {
		return "?"
	}
	n := 1 + g.IntN(4)
	out := make([]string, n)
	for i := range out {
		out[i] = g.one(
			"limit=500", "resourceVersion=0", "resourceVersionMatch=NotOlderThan", "labelSelector=a%3Db%2Cc+in+%28d%2Ce%29",
			"labelSelector=%21%21",
			"fieldSelector=metadata.name%3Dweb-0", "fieldSelector=spec.nodeName=n1,status.phase!=Failed", "watch=false",
			"watch=true", "watch=1",
			"allowWatchBookmarks=true", "timeoutSeconds=300", "timeout=30s", "dryRun=All", "fieldManager=kubectl-client-side-apply",
			"fieldManager=x%2Fy", "fieldValidation=Strict", "force=true", "pretty", "pretty=true",
			"continue=eyJ2IjoibWV0YS5rOHMuaW8", "a=1&a=2&a=1",
			"b=", "=c", "&&", ";", "a;b", "%zz", "%", "x=%c3%a9", "x=%C3%A9", "x=é", "x=\xff", "x=a+b", "x=a%20b", "x=a|b",
			"x=\"<>\\^`{}", "x=#y", "?",
			"x=a/b?c", "propagationPolicy=Background", "gracePeriodSeconds=0", "follow=true", "path=/a/../b", "container=c&container=d",
		)
	}
	return "?" + strings.Join(out, "&")
}

// upload gives a request a body in n of of cases.
func (g *generator) upload(r *request, n, of int) {
	if !g.in(n, of) {
		return
	}
	r.framing = withLength
	if g.in(1, 3) {
		r.framing = unsaid
	}
	r.body = fake.Body{Size: g.size(), Seed: g.Uint64()}
	if g.in(1, 2) {
		r.piece = 1 + g.IntN(32<<10)
		if r.body.Size < 2000 {
			r.piece = 1 + g.IntN(200)
		}
	}
	// A body that travels in the head of a forward arrives whole or not at all.
	r.halves = g.in(1, 6) && (r.framing == unsaid && r.body.Size > 1 || r.body.Size > 64<<10)
	r.expect = r.body.Size > 0 && g.in(1, 10)
	if r.framing == unsaid && g.in(1, 4) {
		r.trailer = fake.Fields("X-Checksum", strconv.FormatUint(g.Uint64(), 16))
		if g.in(1, 3) {
			r.trailer = append(r.trailer, fake.Fields("X-Checksum", "again", "X-Empty", "")...)
		}
		r.quiet = g.in(1, 5)
	}
	if g.in(5, 6) {
		r.fields = append(r.fields, fake.Field{Name: "Content-Type", Value: g.one(
			"application/json", "application/json; charset=utf-8", "application/yaml", "application/vnd.kubernetes.protobuf",
			"application/cbor", "application/cbor-seq", "application/apply-patch+yaml", "application/apply-patch+cbor",
			"application/json-patch+json",
			"application/merge-patch+json", "application/strategic-merge-patch+json;charset=UTF-8",
			`multipart/form-data; boundary="a b"`, "text/plain",
		)})
	}
	if g.in(1, 15) {
		r.fields = append(r.fields, fake.Field{Name: "Content-Encoding", Value: "gzip"})
	}
}

// requestFields draws headers. Connection may only be in HTTP/1.1, so what it would name is not drawn here but in named cases.
func (g *generator) requestFields() []fake.Field {
	var out []fake.Field
	put := func(name, value string) { out = append(out, fake.Field{Name: g.spell(name), Value: value}) }
	if g.in(9, 10) {
		put("User-Agent", g.one("kubectl/v1.36.0 (linux/amd64) kubernetes/0000000", "", "curl/8.5.0", "Go-http-client/1.1"))
	}
	for range g.IntN(3) {
		put("Accept", g.one(
			"application/json", "*/*", "application/vnd.kubernetes.protobuf,application/json", "application/cbor, application/json;q=0.9",
			"application/json;as=Table;v=v1;g=meta.k8s.io,application/json",
			"application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1",
			"application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList", "", "text/html;q=0.1", "application/json;stream=watch",
		))
	}
	if g.in(2, 3) {
		put("Accept-Encoding", g.one("gzip", "gzip, deflate, br", "identity", "", "gzip;q=1.0, *;q=0"))
	}
	for range g.IntN(7) {
		name, value, _ := strings.Cut(g.one(
			"If-None-Match: \"abc\"", "If-None-Match: W/\"x\", \"y\"", "If-Match: *",
			"If-Modified-Since: Tue, 01 Dec 2020 00:00:00 GMT", "Range: bytes=0-99",
			"Cache-Control: no-cache", "Pragma: no-cache", "Kubectl-Command: kubectl get", "Kubectl-Session: 2d1b2d9e",
			"Origin: https://ui.example.com",
			"Referer: https://ui.example.com/?a=b", "Traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
			"Tracestate: a=1,b=2",
			"Via: 1.1 lb", "Warning: 299 - \"odd\"", "Accept-Language: de, en;q=0.5", "Dnt: 1", "Priority: u=1", "Max-Forwards: 5",
			"From: a@example.com",
			"X-Odd: a\tb", "X-Odd: caf\xe9", "X-Odd: é", "X-Odd: ", "X-Odd: one", "X-Odd: two, three",
			"X-Odd: \"quoted, \\\"text\\\"\"", "X_Under: score",
			"X-0: 0", "X!#$%&'*+.^`|~: all of them", "Sec-Fetch-Mode: cors", "Sec-Websocket-Protocol: v4.channel.k8s.io",
			"Impersonate-User: joe",
			"Impersonate-Group: one", "Impersonate-Group: two", "Impersonate-Extra-Scopes.example%2fa: b", "Impersonate-Something: new",
			"Content-Language: en", "Content-Md5: Q2hlY2sgSW50ZWdyaXR5IQ==", "X-Requested-With: XMLHttpRequest", "X-Amzn-Trace-Id: Root=1-5",
		), ": ")
		put(name, value)
	}
	if g.in(1, 15) {
		put("X-Long", strings.Repeat(g.one("long ", "l", "\xe9"), 1+g.IntN(8000)/5)+".")
	}
	// What does not pass, as documented.
	if g.in(1, 6) {
		for range 1 + g.IntN(3) {
			name, value, _ := strings.Cut(g.one(
				"X-Remote-User: root", "X-Remote-Group: system:masters", "X-Remote-Extra-a: b", "X_Remote_User: root",
				"X-Remote-Uid: 0", "X-Remote-Other: x",
				"X-Kubernetes-Peer-Proxied: true", "X-Kubernetes-Apiserver-Rerouted: true", "Audit-Id: mine",
				"X-Forwarded-For: 6.6.6.6", "Forwarded: for=6.6.6.6",
				"X-Forwarded-Proto: http", "X-Forwarded-Host: h", "X-Real-Ip: 6.6.6.6", "X-Forwarded-Uri: /", "Cookie: a=b; c=d",
				"Idempotency-Key: k",
				"X-Idempotency-Key: k", "Te: trailers",
			), ": ")
			put(name, value)
		}
	}
	g.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out
}

// spell writes a header name in some case; readers do not care.
func (g *generator) spell(name string) string {
	switch g.IntN(6) {
	case 0:
		return strings.ToLower(name)
	case 1:
		return strings.ToUpper(name)
	}
	return name
}

// statuses of answers.
var statuses = []int{
	200, 200, 200, 200, 200, 201, 202, 203, 204, 206, 300, 301, 302, 303, 304, 307, 308, 400, 401, 402, 403, 404, 405, 406,
	409, 410, 411, 412, 413, 414,
	415, 416, 422, 424, 428, 429, 431, 451, 500, 501, 502, 503, 504, 505, 507, 511, 599,
}

// answer draws what the apiserver does.
func (g *generator) answer(c *testCase) {
	s := &c.script
	s.Status = statuses[g.IntN(len(statuses))]
	s.EchoAuditID = g.in(1, 3)
	put := func(name, value string) { s.Header = append(s.Header, fake.Field{Name: name, Value: value}) }
	if g.in(4, 5) {
		put("Content-Type", g.one("application/json", "application/vnd.kubernetes.protobuf", "application/json;stream=watch", "text/plain; charset=utf-8",
			"application/cbor", "application/vnd.kubernetes.protobuf;stream=watch", "application/yaml", ""))
	} else {
		s.NoContentType = g.in(1, 3)
	}
	switch s.Status {
	case 301, 302, 303, 307, 308:
		put("Location", g.one("/", "/api/v1/other?x=y", "other", "../up", "?only=query", "/a%2fb", "#f"))
	case 401:
		put("Www-Authenticate", `Basic realm="kubernetes-master"`)
	case 405:
		put("Allow", "GET, HEAD")
	case 429, 503:
		put("Retry-After", g.one("1", "30", "Tue, 01 Dec 2026 00:00:00 GMT"))
	}
	for range g.IntN(6) {
		name, value, _ := strings.Cut(g.one(
			"Warning: 299 - \"extensions/v1beta1 is deprecated\"", "Warning: 299 - \"unknown field \\\"spec.x\\\"\"",
			"Set-Cookie: a=b; Path=/; HttpOnly",
			"Set-Cookie: c=d, e", "Vary: Accept", "Vary: Accept-Encoding, Origin", "Etag: \"abc\"", "Etag: W/\"x\"",
			"Cache-Control: no-cache, private",
			"X-Kubernetes-Pf-Flowschema-Uid: 8e0a", "X-Kubernetes-Pf-Prioritylevel-Uid: 9f1b", "X-Content-Type-Options: nosniff",
			"X-Odd: one", "X-Odd: two",
			"X-Odd: ", "X-Odd: caf\xe9", "Last-Modified: Tue, 01 Dec 2020 00:00:00 GMT", "Content-Encoding: gzip",
			"Content-Disposition: attachment",
			"Strict-Transport-Security: max-age=31536000", "Access-Control-Allow-Origin: *", "Server: backend", "Via: 1.1 x",
			"Link: </next>; rel=next",
			"Content-Location: /elsewhere", "Expires: 0", "Age: 5", "Accept-Ranges: bytes", "X-From-Cache: 1", "Alt-Svc: clear",
			"X_Under: score",
		), ": ")
		put(name, value)
	}
	if g.in(1, 20) {
		put("X-Long", strings.Repeat("long ", g.IntN(1600))+".")
	}
	// Go's HTTP/2 server says no 100 Continue after another informational answer.
	if !c.request.expect && g.in(1, 12) {
		s.Informational = append(s.Informational, fake.Informational{Code: 103, Header: fake.Fields("Link", "</a>; rel=preload", "Link", "</b>")})
		if g.in(1, 3) {
			s.Informational = append(s.Informational, fake.Informational{Code: []int{102, 199}[g.IntN(2)]})
		}
	}
	if s.Status == http.StatusNoContent || s.Status == http.StatusNotModified {
		return
	}
	total := g.size()
	said := g.in(1, 2)
	if said {
		put("Content-Length", strconv.FormatInt(total, 10))
	}
	if c.request.method == "HEAD" && g.in(1, 2) {
		return // kube-apiserver writes bodies for HEAD as well, which net/http swallows
	}
	pieces := int64(1)
	if g.in(1, 2) {
		pieces += g.Int64N(5)
	}
	for i := range pieces {
		size := total / pieces
		if i == pieces-1 {
			size = total - size*(pieces-1)
		}
		step := fake.Step{Body: fake.Body{Size: size, Seed: g.Uint64()}, Piece: 1 + g.IntN(40000), Flush: g.in(1, 3)}
		if size < 2000 {
			step.Piece = 1 + g.IntN(200)
		}
		s.Steps = append(s.Steps, step)
	}
	if said {
		return
	}
	// A 404 may have to be read before it is passed on: see "missing route".
	if c.request.method != "HEAD" && s.Status != http.StatusNotFound && g.in(1, 5) {
		// What is flushed of an answer of unknown length must come at once.
		s.Steps = append([]fake.Step{{Await: fake.AwaitHead}}, s.Steps...)
		if first := &s.Steps[1]; first.Body.Size > 0 && first.Body.Size < total {
			first.Flush, first.Await = true, first.Body.Size
		}
	}
	if c.request.method != "HEAD" && g.in(1, 6) {
		s.Trailer = fake.Fields("X-Sum", "1", "X-Sum", "2", "Grpc-Status", "0")
	}
	s.Abort = c.request.method != "HEAD" && total > 0 && g.in(1, 12)
}
