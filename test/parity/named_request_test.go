package parity_test

import (
	"fmt"
	"strings"

	"github.com/mvp-mesh/mvp-node/test/fake"
)

// identityCases are about who the client is, and who it says it is.
func identityCases() []*testCase {
	who := fake.Script{Status: 201, Header: fake.Fields("Content-Type", jsonType), WhoAmI: true}
	forged := fake.Fields(
		"X-Remote-User", "admin", "x-remote-user", "root", "X-Remote-Group", "system:masters", "X-REMOTE-GROUP", "dev",
		"X-Remote-Uid", "0",
		"X-Remote-Extra-a", "b", "x-remote-extra-scopes.example%2fa%20b", "all", "X_Remote_User", "admin", "X-Remote-Other", "c",
		"X-Kubernetes-Peer-Proxied", "true", "X-Kubernetes-Apiserver-Rerouted", "true", "Audit-Id", "mine",
	)
	var cases []*testCase
	for name, cred := range map[string]credential{"certificate": byCertificate, "token": byToken, "nothing": byNothing} {
		cases = append(cases,
			&testCase{name: "I-05 who am I, by " + name, cred: cred, request: sent("POST", widgets, "{}"), script: who},
			&testCase{name: "I-05 who am I on a path that names no resource, by " + name, cred: cred, localOnly: true, request: get("/version"), script: who},
			// An apiserver does not believe these from a client either: only a front proxy's certificate makes it read them.
			&testCase{name: "I-02 forged identity, by " + name, cred: cred, request: request{method: "POST", target: widgets, fields: forged},
				script: who},
		)
	}
	headers := func(name string, only protocol, nameValue ...string) {
		cases = append(cases, &testCase{name: name, only: only, request: get(widget, nameValue...), script: ok("{}")})
	}
	headers("I-06 impersonation", "", "Impersonate-User", "jane@example.com", "Impersonate-Group", "dev", "Impersonate-Group", "ops",
		"Impersonate-Uid", "1", "Impersonate-Extra-Scopes.example%2fa", "b", "Impersonate-Something", "new")
	headers("I-01 Connection names identity headers", http1, "Connection", "foo, X-Remote-User, X-Remote-Group, Impersonate-User, Authorization",
		"Foo", "bar", "X-Remote-User", "admin", "Impersonate-User", "joe", "Authorization", "Basic eDp5")
	headers("other credentials", "", "Authorization", "Basic eDp5", "Cookie", "a=b", "Cookie", "c=d", "Proxy-Authorization", "Basic eDp5")
	headers("idempotency keys", "", "Idempotency-Key", "k", "X-Idempotency-Key", "k")
	headers("claims about where it comes from", "", "X-Forwarded-For", "6.6.6.6, 7.7.7.7", "X-Forwarded-Host", "h", "X-Forwarded-Proto", "http",
		"X-Forwarded-Uri", "/", "X-Real-Ip", "6.6.6.6", "Forwarded", "for=6.6.6.6", "Via", "1.1 lb")
	return cases
}

// targetCases are request-targets (CASES R-06).
func targetCases() []*testCase {
	var cases []*testCase
	here := func(targets ...string) {
		for _, t := range targets {
			cases = append(cases, &testCase{name: fmt.Sprintf("R-06 local %q", t), localOnly: true, request: get(t),
				script: says(404, "404 page not found")})
		}
	}
	there := func(targets ...string) {
		for _, t := range targets {
			cases = append(cases, &testCase{name: fmt.Sprintf("R-06 %q", t), request: get(t), script: ok("{}")})
		}
	}
	here("//version", "//api/v1/pods", "///", "/api//v1/pods", "/apis/../api/v1/secrets", "/apis/./x", "/..", "/version/", "/version?", "/healthz?verbose",
		"/api/v1/namespaces/a%2fb/services", "/api/v1/namespaces/%2E%2e/services", "/%61pi/v1/pods%2F", "/a?b?c", "/a|b",
		"/a%7Cb", "/?", "/a#b")
	const proxy = "/api/v1/namespaces/n/services/s:80/proxy"
	there(proxy, proxy+"/", proxy+"//a/", proxy+"/a/../b/.", proxy+"/a%2Fb?c=%2f", proxy+"/a|b;c?d|e", "/api/v1/nodes/n1:10250/proxy/metrics?x=y&x=y",
		widgets+"/", widgets+"?", widgets+"?a=1&a=2&b=&=c&&;d", widgets+"?x=%zz", widgets+"?x=caf\xe9", widgets+"/n%41%7e%7E|;+,:@=&$!*'()",
		widgets+"/caf\xe9", widgets+"/%63af%C3%a9%20", widgets+"/\"<>\\^`{}[]", widgets+"/a#b", widgets+"?"+strings.Repeat("x=y&", 2000), "/api/v1/services",
		"/%61pis/parity.example.com/v1/widgets", "/apis/parity.example.com/v1/widg%65ts")

	absolute := "https://" + defaultHost
	cases = append(cases,
		&testCase{name: "absolute form", only: http1, request: get(absolute + widget + "?x=%7c"), script: ok("{}")},
		&testCase{name: "absolute form, local", only: http1, localOnly: true, request: get(absolute + "//version"), script: ok("{}")},
		&testCase{name: "options of everything", only: http1, localOnly: true, request: request{method: "OPTIONS", target: "*"},
			script: ok("")},
		&testCase{
			name: "a tunnel", only: http1, localOnly: true, request: request{method: "CONNECT", target: "kubernetes.default.svc:443"},
			script:  says(405, "no"),
			instead: []instead{{"CONNECT", onB, arrivals(0, 0, isStatus(400, ""))}},
		},
		&testCase{
			name: "a space in a path", only: http2, request: get(widgets + "/a b"), script: ok("{}"),
			instead: []instead{{"unsendable targets", both, arrivals(0, 0, isStatus(400, ""))}},
		},
		&testCase{
			name: "a space in a query", only: http2, localOnly: true, request: get("/version?a b"), script: ok("{}"),
			instead: []instead{{"unsendable targets", both, arrivals(0, 0, isStatus(400, ""))}},
		},
		&testCase{
			name: "two slashes and a byte that is not written as it is", localOnly: true, request: get("//version|x"), script: ok("{}"),
			instead: []instead{{"unsendable targets", both, arrivals(0, 0, isStatus(400, ""))}},
		},
		&testCase{
			name: "a missing route", request: get(widget),
			script: fake.Script{
				Status: 404, Header: fake.Fields("Content-Type", "text/plain; charset=utf-8", "X-Content-Type-Options", "nosniff"),
				Steps: []fake.Step{{Body: fake.Text("404 page not found\n")}},
			},
			// The true 404 where the connection is older than the catalog.
			instead: []instead{{"missing route", both, anyOf(isStatus(503, "NotServed"), func(o outcome) error {
				if o.answer.status != 404 || o.answer.body.Head != "404 page not found\n" {
					return fmt.Errorf("status %d, %s", o.answer.status, o.answer.body)
				}
				return nil
			})}},
		},
	)
	return cases
}

// headerCases are about headers of requests.
func headerCases() []*testCase {
	var cases []*testCase
	headers := func(name string, only protocol, nameValue ...string) {
		cases = append(cases, &testCase{name: name, only: only, request: get(widget, nameValue...), script: ok("{}")})
	}
	headers("no header at all", "")
	headers("empty values", "", "X-Empty", "", "Accept", "", "User-Agent", "", "X-Empty", "")
	headers("values in order", "", "X-Many", "3", "X-Many", "1", "x-many", "2, 4", "X-MANY", "1")
	headers("accept in several lines", "", "Accept", "application/json;as=Table;v=v1;g=meta.k8s.io", "Accept", "application/json;q=0.5 , */*;q=0.1")
	headers("bytes that are no text", "", "X-Bytes", "caf\xe9 \xff\xfe", "X-Text", "café", "X-Tab", "a\tb")
	headers("8 KiB in one value", "", "X-Long", strings.Repeat("long, ", 8<<10/6)+".")
	headers("hop by hop", http1, "Connection", "keep-alive, X-Hop", "Connection", "x-other-hop", "X-Hop", "1", "X-Other-Hop", "2", "Keep-Alive", "timeout=5",
		"Proxy-Connection", "keep-alive", "Te", "gzip, trailers", "X-End", "e")
	headers("trailers are welcome", "", "Te", "trailers")
	headers("te without trailers", http1, "Te", "deflate;q=0.5")
	headers("upgrade, not asked for", http1, "Upgrade", "h2c")
	headers("the connection ends", http1, "Connection", "close")
	headers("subprotocols without an upgrade", "", "Sec-Websocket-Protocol", "v4.channel.k8s.io,v5.channel.k8s.io", "Sec-Websocket-Protocol", "base64.binary.k8s.io")
	headers("pragma", "", "Pragma", "no-cache")
	headers("pragma and cache control", "", "Pragma", "no-cache", "Cache-Control", "max-age=0")
	headers("an expectation that nobody knows", http1, "Expect", "miracles")
	headers("a name that is none", http1, "X Odd", "1")
	headers("a value that is none", http1, "X-Odd", "a\x01b")
	headers("two lengths", http1, "Content-Length", "4", "Content-Length", "5")

	many := make([]string, 0, 600)
	for i := range 300 {
		many = append(many, fmt.Sprintf("X-Header-%d", i%250), fmt.Sprint(i))
	}
	headers("300 headers", "", many...)
	headers("60 KiB of headers", "", "X-1", strings.Repeat("x", 20<<10), "X-2", strings.Repeat("y", 20<<10), "X-3", strings.Repeat("z", 20<<10))
	cases = append(cases, &testCase{
		name: "100 KiB of headers", request: get(widget, "X-1", strings.Repeat("x", 50<<10), "X-2", strings.Repeat("y", 50<<10)),
		script:  ok("{}"),
		instead: []instead{{"size of the head", both, isText(431)}},
	})
	for _, host := range []string{"kubernetes", "10.96.0.1:443", "[::1]", "x_y", "UPPER.example.com:6443"} {
		r := get(widget)
		r.host = host
		cases = append(cases, &testCase{name: "host " + host, request: r, script: ok("{}")})
	}
	old := get(widget)
	old.version = "HTTP/1.0"
	cases = append(cases,
		&testCase{name: "HTTP/1.0", only: http1, request: old, script: ok("{}")},
		&testCase{name: "HTTP/1.0, a long answer", only: http1, request: old,
			script: fake.Script{Status: 200, Steps: []fake.Step{{Body: fake.Body{Size: 100 << 10}}}}},
	)
	return cases
}
