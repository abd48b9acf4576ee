package parity_test

import (
	"fmt"
	"time"

	"github.com/mvp-mesh/mvp-node/test/fake"
)

// streamCases are answers that come in pieces, with something before or after them.
func streamCases() []*testCase {
	large := int64(64 << 20)
	if raceDetector {
		large = 16 << 20
	}
	hints := fake.Informational{Code: 103, Header: fake.Fields("Link", "</style.css>; rel=preload", "Link", "</x>", "X-Hint", "1")}
	cases := []*testCase{
		{name: "early hints", request: get(widget), script: fake.Script{
			Informational: []fake.Informational{hints}, Status: 200, Header: fake.Fields("Content-Type", jsonType),
			Steps: []fake.Step{{Body: fake.Text("{}")}},
		}},
		{name: "several informational answers", request: sent("POST", widgets, "{}"), script: fake.Script{
			Informational: []fake.Informational{{Code: 102}, hints, {Code: 104, Header: fake.Fields("Upload-Offset", "2")}},
			Status:        201, Steps: []fake.Step{{Body: fake.Text("{}")}},
		}},
		{name: "early hints before a watch", request: get(widgets + "?watch=true"), script: fake.Script{
			Informational: []fake.Informational{hints}, Status: 200, Steps: []fake.Step{{Await: fake.AwaitHead}, {Body: fake.Text("{}\n"), Await: 3}},
		}},
		{name: "trailer", request: get(widget), script: fake.Script{
			Status: 200, Steps: []fake.Step{{Body: fake.Text("short")}},
			Trailer: fake.Fields("X-Sum", "1", "X-Sum", "2", "Grpc-Status", "0", "X-Empty", ""),
		}},
		{name: "trailer after a long body", request: get(widget), script: fake.Script{
			Status: 200, Steps: []fake.Step{{Body: fake.Body{Size: 200 << 10}}}, Trailer: fake.Fields("Grpc-Status", "0"),
		}},
		{name: "trailer after nothing", request: get(widget), script: fake.Script{Status: 200, Trailer: fake.Fields("Grpc-Status", "12")}},
		{name: "trailer after a flushed head", request: get(widgets + "?watch=1"), script: fake.Script{
			Status: 200, Steps: []fake.Step{{Await: fake.AwaitHead}, {Body: fake.Text("x"), Await: 1}},
			Trailer: fake.Fields("Grpc-Status", "0"),
		}},
		{name: "trailer that was not announced", request: get(widget), script: fake.Script{
			Status: 200, Steps: []fake.Step{{Body: fake.Text("x"), Flush: true}}, LateTrailer: fake.Fields("X-Late", "1", "X-Late", "2"),
		}},
		{name: "trailers announced and not", request: get(widget), script: fake.Script{
			Status: 200, Steps: []fake.Step{{Body: fake.Text("x"), Flush: true}},
			Trailer: fake.Fields("X-Sum", "1"), LateTrailer: fake.Fields("X-Late", "1"),
		}},
		{name: "F-07 an answer of 64 MiB", request: get(widgets), script: fake.Script{
			Status: 200, Header: fake.Fields("Content-Type", jsonType),
			Steps: []fake.Step{{Body: fake.Body{Size: 1000}, Await: 1000}, {Body: fake.Body{Size: large - 1000, Seed: 5}, Piece: 64 << 10}},
		}},
		{name: "an answer of 8 MiB, as announced", request: get(widgets), script: says(200, "", "Content-Length", fmt.Sprint(8<<20))},
	}
	for _, c := range cases[len(cases)-2:] {
		c.request.time = 2 * time.Minute // for a busy machine
	}
	cases[len(cases)-1].script.Steps = []fake.Step{{Body: fake.Body{Size: 8 << 20, Seed: 9}, Piece: 64 << 10}}
	for _, n := range sizes {
		body := fake.Body{Size: n, Seed: uint64(n)}
		cases = append(cases,
			&testCase{name: fmt.Sprintf("answer of %d bytes", n), request: get(widget), script: fake.Script{
				Status: 200, Header: fake.Fields("Content-Type", jsonType), Steps: []fake.Step{{Body: body}},
			}},
			&testCase{name: fmt.Sprintf("answer of %d bytes, as announced", n), request: get(widget), script: fake.Script{
				Status: 200, Header: fake.Fields("Content-Type", jsonType, "Content-Length", fmt.Sprint(n)), Steps: []fake.Step{{Body: body}},
			}},
		)
	}
	return cases
}

// uploadCases are bodies of requests.
func uploadCases() []*testCase {
	up := func(f framing, size int64) request {
		return request{method: "POST", target: widgets, framing: f, body: fake.Body{Size: size, Seed: 3},
			fields: fake.Fields("Content-Type", protoType)}
	}
	with := func(r request, change func(*request)) request {
		change(&r)
		return r
	}
	created := fake.Script{Status: 201, Header: fake.Fields("Content-Type", jsonType), Steps: []fake.Step{{Body: fake.Text("{}")}}}
	refused := created
	refused.Status, refused.Read = 413, fake.ReadNothing
	halfRead := refused
	halfRead.Read = 100000
	sum := func(r *request) { r.trailer = fake.Fields("X-Sum", "1", "X-Sum", "2", "X-Empty", "") }
	const most = 2969567 // 2.9 MiB and a little
	cases := []*testCase{
		{name: "F-07 2.9 MiB sent", request: up(withLength, most), script: created},
		{name: "F-07 2.9 MiB sent in chunks", request: up(unsaid, most), script: created},
		{name: "the second half waits", request: with(up(unsaid, 200), func(r *request) { r.halves = true }), script: created},
		{name: "the second half waits, of a known length", request: with(up(withLength, 300000), func(r *request) { r.halves = true }),
			script: created},
		{name: "chunks of one byte", request: with(up(unsaid, 300), func(r *request) { r.piece = 1 }), script: created},
		{name: "a body with a get", request: with(up(withLength, 10), func(r *request) { r.method = "GET" }), script: created},
		{name: "an empty body", request: up(withLength, 0), script: created},
		{name: "an empty body in chunks", request: up(unsaid, 0), script: created},
		{name: "an empty body with a get", request: with(up(withLength, 0), func(r *request) { r.method = "GET" }), script: created},
		{name: "nothing about a body", request: with(up(bodyless, 0), func(r *request) {}), script: created},
		{name: "trailer sent", request: with(up(unsaid, 1000), sum), script: created},
		{name: "trailer sent after a long body", request: with(up(unsaid, 200000), sum), script: created},
		{name: "trailer sent after nothing", request: with(up(unsaid, 0), sum), script: created},
		{name: "trailer sent to the local server alone", localOnly: true, request: with(up(unsaid, 10), func(r *request) { sum(r); r.target = "/" }), script: created},
		{name: "trailer sent without announcement", request: with(up(unsaid, 10), func(r *request) { sum(r); r.quiet = true }),
			script: created},
		{name: "a forged identity as trailer", request: with(up(unsaid, 10), func(r *request) {
			r.trailer = fake.Fields("X-Sum", "1", "X-Remote-User", "admin", "X-Remote-Group", "system:masters")
		}), script: created},
		{name: "expect, accepted", request: with(up(withLength, 1000), func(r *request) { r.expect = true }), script: created},
		{name: "expect, accepted, a long body", request: with(up(withLength, most), func(r *request) { r.expect = true }), script: created},
		{name: "expect, accepted, in chunks with a trailer", request: with(up(unsaid, 5000), func(r *request) { r.expect = true; sum(r) }),
			script: created},
		{name: "expect, refused", request: with(up(withLength, 1000), func(r *request) { r.expect = true }), script: refused},
		{name: "expect, refused, a long body", request: with(up(withLength, most), func(r *request) { r.expect = true }), script: refused},
		{name: "expect, refused, in chunks", request: with(up(unsaid, most), func(r *request) { r.expect = true }), script: refused},
		{name: "early 413", request: up(withLength, most), script: refused},
		{name: "early 413, in chunks", request: up(unsaid, most), script: refused},
		{name: "early 413 to a short body", request: up(withLength, 1000), script: refused},
		{name: "413 after a part", request: up(withLength, most), script: halfRead},
	}
	for _, n := range sizes {
		cases = append(cases,
			&testCase{name: fmt.Sprintf("%d bytes sent", n), request: up(withLength, n), script: created},
			&testCase{name: fmt.Sprintf("%d bytes sent in chunks", n), request: up(unsaid, n), script: created},
		)
	}
	return cases
}

// brokenCases are answers that break off.
func brokenCases() []*testCase {
	var cases []*testCase
	for _, method := range []string{"GET", "POST"} {
		for _, size := range []int64{0, 100, 40 << 10, 3 << 20} {
			r := request{method: method, target: widgets}
			s := fake.Script{Status: 200, Header: fake.Fields("Content-Type", jsonType),
				Steps: []fake.Step{{Body: fake.Body{Size: size}, Flush: true}}, Abort: true}
			cases = append(cases, &testCase{name: fmt.Sprintf("F-01 broken after %d bytes, to %s", size, method), request: r, script: s})
			s.Header = append(s.Header, fake.Field{Name: "Content-Length", Value: fmt.Sprint(size + 1)})
			cases = append(cases, &testCase{name: fmt.Sprintf("F-01 broken after %d of %d bytes, to %s", size, size+1, method), request: r,
				script: s})
			s.Abort = false
			cases = append(cases, &testCase{name: fmt.Sprintf("F-01 %d of %d bytes, to %s", size, size+1, method), request: r, script: s})
		}
	}
	// The client has what came before the break, and long after.
	late := fake.Script{Status: 200, Steps: []fake.Step{{Await: fake.AwaitHead}, {Body: fake.Body{Size: 500}, Await: 500}}, Abort: true}
	cases = append(cases,
		&testCase{name: "F-01 a watch that breaks off", request: get(widgets + "?watch=true"), script: late},
		&testCase{name: "F-01 a list that breaks off later", request: get(widgets), script: late},
		&testCase{name: "F-01 the answer to a write that breaks off later", request: sent("POST", widgets, "{}"), script: late},
		&testCase{
			name: "no answer to a read", request: get(widget), script: fake.Script{Abort: true},
			instead: []instead{{"no answer", both, arrivals(1, 2, isStatus(503, "LocalUnavailable"))}},
		},
		&testCase{
			name: "no answer to a write", request: sent("POST", widgets, "{}"), script: fake.Script{Abort: true},
			instead: []instead{{"no answer", both, arrivals(1, 1, isStatus(504, "OutcomeUnknown"))}},
		},
	)
	return cases
}
