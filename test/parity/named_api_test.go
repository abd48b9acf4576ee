package parity_test

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/mvp-mesh/mvp-node/test/fake"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

const (
	widgets   = "/apis/parity.example.com/v1/namespaces/ns/widgets"
	widget    = widgets + "/web-0"
	jsonType  = "application/json"
	protoType = "application/vnd.kubernetes.protobuf"
)

// namedCases are the cases that have a name, by what they are about.
func namedCases() []*testCase {
	return slices.Concat(verbCases(), answerCases(), identityCases(), targetCases(), headerCases(), streamCases(), uploadCases(), brokenCases())
}

// ok is an answer of 200 with a body.
func ok(body string) fake.Script { return says(200, body) }

// says is an answer of kube-apiserver's kind.
func says(status int, body string, nameValue ...string) fake.Script {
	return fake.Script{
		Status: status, EchoAuditID: true,
		Header: append(fake.Fields("Content-Type", jsonType, "Cache-Control", "no-cache, private"), fake.Fields(nameValue...)...),
		Steps:  []fake.Step{{Body: fake.Text(body)}},
	}
}

func get(target string, nameValue ...string) request {
	return request{method: "GET", target: target, fields: fake.Fields(nameValue...)}
}

// sent is a request with a JSON body.
func sent(method, target, body string, nameValue ...string) request {
	return request{
		method: method, target: target, framing: withLength, body: fake.Text(body),
		fields: append(fake.Fields("Content-Type", jsonType, "Accept", jsonType), fake.Fields(nameValue...)...),
	}
}

// isStatus checks an answer that mvp-node makes itself: a Status with the code and, unless it is "", the cause.
func isStatus(code int, cause string) func(outcome) error {
	return func(o outcome) error {
		if o.answer.status != code || o.answer.end != complete {
			return fmt.Errorf("status %d, %s", o.answer.status, o.answer.end)
		}
		s, err := decodeStatus(o.answer.body.Head)
		if err != nil {
			return fmt.Errorf("no Status: %s: %w", o.answer.body, err)
		}
		if int(s.Code) != code {
			return fmt.Errorf("code %d in the Status of a %d", s.Code, code)
		}
		if cause != "" && (s.Details == nil || len(s.Details.Causes) != 1 || string(s.Details.Causes[0].Type) != cause) {
			return fmt.Errorf("details %v, want cause %s", s.Details, cause)
		}
		return nil
	}
}

// decodeStatus reads a Status in JSON or protobuf. Digests keep the beginning of a body only, which is more than a Status of ours has.
func decodeStatus(body string) (*metav1.Status, error) {
	s := &metav1.Status{}
	if raw, ok := strings.CutPrefix(body, "k8s\x00"); ok {
		var u runtime.Unknown
		if err := u.Unmarshal([]byte(raw)); err != nil {
			return nil, err
		}
		s.Kind = u.Kind
		if err := s.Unmarshal(u.Raw); err != nil {
			return nil, err
		}
	} else if err := json.Unmarshal([]byte(body), s); err != nil {
		return nil, err
	}
	if s.Kind != "Status" {
		return nil, fmt.Errorf("kind %q", s.Kind)
	}
	return s, nil
}

// isText checks an answer of net/http itself.
func isText(code int) func(outcome) error {
	return func(o outcome) error {
		if o.answer.status != code || len(o.arrived) != 0 {
			return fmt.Errorf("status %d, %d requests at the apiserver", o.answer.status, len(o.arrived))
		}
		return nil
	}
}

// anyOf checks that one of several checks passes.
func anyOf(checks ...func(outcome) error) func(outcome) error {
	return func(o outcome) error {
		var errs []error
		for _, check := range checks {
			err := check(o)
			if err == nil {
				return nil
			}
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	}
}

// arrivals adds a check of how often the apiserver got the request.
func arrivals(least, most int, check func(outcome) error) func(outcome) error {
	return func(o outcome) error {
		if n := len(o.arrived); n < least || n > most {
			return fmt.Errorf("arrived %d times, want %d to %d", n, least, most)
		}
		return check(o)
	}
}

func zipped(s string) []byte {
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	_, _ = w.Write([]byte(s)) // to memory
	_ = w.Close()
	return b.Bytes()
}

// verbCases are every verb of the API, and every way to write it.
func verbCases() []*testCase {
	const object = `{"kind":"Widget","apiVersion":"parity.example.com/v1","metadata":{"name":"web-0"}}`
	cases := []*testCase{
		{name: "get", request: get(widget, "Accept", jsonType), script: ok(object)},
		{name: "get as protobuf", request: get(widget, "Accept", protoType+","+jsonType), script: fake.Script{
			Status: 200, Header: fake.Fields("Content-Type", protoType),
			Steps: []fake.Step{{Body: fake.Body{Literal: append([]byte("k8s\x00"), 0, 1, 2, 0xff)}}},
		}},
		{name: "get as table", request: get(widgets, "Accept", "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"),
			script: ok(`{"kind":"Table"}`)},
		{name: "head", request: request{method: "HEAD", target: widget}, script: ok(object)},
		{name: "head with a length", request: request{method: "HEAD", target: widget}, script: says(200, "", "Content-Length", "123456")},
		{name: "list", request: get(widgets + "?limit=500&continue=abc"), script: ok(`{"kind":"WidgetList","items":[]}`)},
		{name: "list of all namespaces", request: get("/apis/parity.example.com/v1/widgets?resourceVersion=0"),
			script: ok(`{"kind":"WidgetList"}`)},
		{name: "list of one by a field", request: get(widgets + "?fieldSelector=metadata.name%3Dweb-0"),
			script: ok(`{"kind":"WidgetList"}`)},
		{name: "create", request: sent("POST", widgets, object), script: says(201, object, "Location", "/elsewhere")},
		{name: "create, dry run", request: sent("POST", widgets+"?dryRun=All&fieldValidation=Strict", object), script: says(201, object)},
		{name: "create of a subresource", request: sent("POST", widget+"/eviction", `{"kind":"Eviction"}`),
			script: says(201, `{"kind":"Status"}`)},
		{name: "update", request: sent("PUT", widget, object), script: ok(object)},
		{name: "update of a status", request: sent("PUT", widget+"/status", object), script: ok(object)},
		{name: "delete", request: request{method: "DELETE", target: widget + "?propagationPolicy=Foreground"},
			script: ok(`{"kind":"Status"}`)},
		{name: "delete with options", request: sent("DELETE", widget, `{"kind":"DeleteOptions","preconditions":{"uid":"x"}}`),
			script: ok(`{"kind":"Status"}`)},
		{name: "delete of a collection", request: request{method: "DELETE", target: widgets + "?labelSelector=a%3Db"},
			script: ok(`{"kind":"WidgetList"}`)},
		{name: "options", request: request{method: "OPTIONS", target: widget}, script: says(405, `{"kind":"Status"}`, "Allow", "GET, PUT")},
		{name: "a method of no verb", request: request{method: "PROPFIND", target: widget}, script: says(405, `{"kind":"Status"}`)},
		{name: "a method in small letters", request: request{method: "get", target: widget}, script: says(405, `{"kind":"Status"}`)},
		{name: "log", request: get(widget + "/log?container=c&tailLines=10"), script: fake.Script{
			Status: 200, Header: fake.Fields("Content-Type", "text/plain"), Steps: []fake.Step{{Body: fake.Text("one\ntwo\n")}},
		}},
		{name: "server-side apply", request: request{
			method: "PATCH", target: widget + "?fieldManager=kubectl&force=true", framing: withLength, body: fake.Text("kind: Widget\n"),
			fields: fake.Fields("Content-Type", "application/apply-patch+yaml"),
		}, script: says(201, object)},
		{name: "create by name, generated", request: sent("POST", widgets, `{"metadata":{"generateName":"w-"}}`), script: says(201, object)},
	}
	for _, t := range []string{
		"application/json-patch+json", "application/merge-patch+json", "application/strategic-merge-patch+json", "application/apply-patch+cbor",
	} {
		cases = append(cases, &testCase{name: "patch of " + t, request: request{
			method: "PATCH", target: widget, framing: withLength, body: fake.Text(`[]`),
			fields: fake.Fields("Content-Type", t, "Accept", "application/cbor"),
		}, script: ok(object)})
	}
	// A watch, its events flushed one by one: each must be there before the next is sent.
	for name, target := range map[string]string{
		"watch": widgets + "?watch=true&allowWatchBookmarks=true", "watch by its old path": "/apis/parity.example.com/v1/watch/namespaces/ns/widgets",
		"watch of one by its old path": "/apis/parity.example.com/v1/watch/namespaces/ns/widgets/web-0", "follow a log": widget + "/log?follow=true",
	} {
		cases = append(cases, &testCase{name: name, request: get(target, "Accept-Encoding", "gzip"), script: fake.Script{
			Status: 200, Header: fake.Fields("Content-Type", "application/json;stream=watch"),
			Steps: []fake.Step{
				{Await: fake.AwaitHead},
				{Body: fake.Body{Size: 200}, Await: 200},
				{Body: fake.Body{Size: 1}, Await: 201},
				{Body: fake.Body{Size: 100 << 10}, Await: 201 + 100<<10},
				{Body: fake.Body{Size: 200, Seed: 7}},
			},
		}})
	}
	return cases
}

// answerCases are answers that something on the way could change.
func answerCases() []*testCase {
	const list = `{"kind":"WidgetList","items":[]}`
	failure := func(code int) string { return fmt.Sprintf(`{"kind":"Status","status":"Failure","code":%d}`, code) }
	cases := []*testCase{
		{name: "F-03 not modified", request: get(widgets, "If-None-Match", `"v1"`), script: fake.Script{
			Status: 304, Header: fake.Fields("Etag", `"v1"`, "Vary", "Accept", "Cache-Control", "public"),
		}},
		{name: "F-03 not modified, of OpenAPI", localOnly: true, request: get("/openapi/v2", "If-None-Match", `"v1"`), script: fake.Script{
			Status: 304, Header: fake.Fields("Etag", `"v1"`),
		}},
		{name: "F-03 not modified, with a content type", request: get(widgets, "If-None-Match", `"v1"`), script: fake.Script{
			Status: 304, Header: fake.Fields("Etag", `"v1"`, "Content-Type", jsonType),
		}},
		{name: "no content", request: request{method: "DELETE", target: widget}, script: fake.Script{Status: 204}},
		{name: "no content type for no content", request: get(widget),
			script: fake.Script{Status: 200, Header: fake.Fields("Content-Length", "0")}},
		{name: "no content type", request: get(widget), script: fake.Script{Status: 200, NoContentType: true,
			Steps: []fake.Step{{Body: fake.Text("<html>")}}}},
		{name: "no content type, and a length", request: get(widget), script: fake.Script{
			Status: 200, NoContentType: true, Header: fake.Fields("Content-Length", "6"), Steps: []fake.Step{{Body: fake.Text("<html>")}},
		}},
		{name: "head flushed before its content", request: get(widget), script: fake.Script{
			Status: 200, Header: fake.Fields("Content-Length", "6"), Steps: []fake.Step{{Flush: true}, {Body: fake.Text("<html>")}},
		}},
		{name: "F-05 unsupported media type", request: request{
			method: "PUT", target: widget + "/status", framing: withLength, body: fake.Body{Literal: []byte("k8s\x00\xff\xfe")},
			fields: fake.Fields("Content-Type", protoType+"; version=1", "Accept", protoType+";q=1.0 , application/json ; q=0.5"),
		}, script: says(415, failure(415))},
		{name: "F-05 not acceptable", request: get(widgets, "Accept", "application/cbor"), script: says(406, failure(406))},
		{name: "F-06 too large a resource version", request: get(widgets + "?resourceVersion=999"),
			script: says(504, failure(504), "Retry-After", "1")},
		{name: "F-06 gone", request: get(widgets + "?continue=old"), script: says(410, failure(410))},
		{name: "too many requests", request: sent("POST", widgets, "{}"), script: says(429, failure(429), "Retry-After", "7")},
		{name: "unavailable, to a write", request: sent("PUT", widget, "{}"), script: says(503, failure(503))},
		{name: "an object that is not there", request: get(widget), script: says(404,
			`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","details":{"name":"web-0","kind":"widgets"},"code":404}`)},
		{name: "deprecation warnings", request: get(widgets), script: says(200, list, "Warning", `299 - "v1 is deprecated"`, "Warning", `299 - "really, \"v1\""`)},
		{name: "compressed", request: get(widgets, "Accept-Encoding", "gzip"), script: fake.Script{
			Status: 200, Header: fake.Fields("Content-Type", jsonType, "Content-Encoding", "gzip", "Vary", "Accept-Encoding"),
			Steps: []fake.Step{{Body: fake.Body{Literal: zipped(list)}}},
		}},
		{name: "compressed, not asked for", request: get(widgets), script: fake.Script{
			Status: 200, Header: fake.Fields("Content-Type", jsonType, "Content-Encoding", "gzip"),
			Steps: []fake.Step{{Body: fake.Body{Literal: zipped(list)}}},
		}},
		{name: "asked for compression, not given", request: get(widgets, "Accept-Encoding", "gzip, br"), script: ok(list)},
		{name: "F-04 redirect by path", request: get(widget), script: says(307, "", "Location", "/apis/parity.example.com/v1/other?x=%2f")},
		{name: "F-04 redirect without a place", request: get(widget), script: says(302, "moved")},
		{name: "F-04 multiple choices", request: get(widget), script: says(300, "[]")},
		{name: "redirect of the local server", localOnly: true, request: get("/logs"),
			script: says(301, "", "Location", "https://elsewhere.example.com/logs/")},
		{name: "a status above 599", request: get("/api/v1/namespaces/ns/services/s:80/proxy/"), script: says(799, "odd backend")},
		{name: "hop-by-hop headers in the answer", request: get(widget),
			script: says(407, "", "Proxy-Authenticate", "Basic", "Keep-Alive", "timeout=5", "X-End", "e")},
		{name: "an answer of two lengths", request: get(widget), script: says(200, "four", "Content-Length", "4", "X-Length", "4")},
	}
	for _, code := range []int{301, 302, 307, 308} {
		for where, location := range map[string]string{"another host": "https://attacker.example/x", "another host, by the same scheme": "//attacker.example/x"} {
			cases = append(cases, &testCase{
				name: fmt.Sprintf("F-04 redirect %d to %s", code, where), request: get(widget), script: says(code, "", "Location", location),
				instead: []instead{{"redirects to another host", onA, isStatus(502, "")}},
			})
		}
		cases = append(cases, &testCase{
			name:    fmt.Sprintf("F-04 redirect %d of a backend", code),
			request: get("/api/v1/namespaces/ns/services/https:s:443/proxy/path"),
			script:  says(code, "", "Location", "https://elsewhere.example/x"),
		})
	}
	return cases
}
