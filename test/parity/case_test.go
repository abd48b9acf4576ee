package parity_test

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/mvp-mesh/mvp-node/test/fake"
)

// testCase is one request with the answer that the apiserver gives to it.
type testCase struct {
	name string
	// localOnly is for what names no resource: no peer is asked for it, and only direct and local are compared.
	localOnly bool
	only      protocol // "" for both
	cred      credential
	request   request
	script    fake.Script
	// instead are outcomes that differ as a whole from the direct one, as documented.
	instead []instead
}

// instead is an outcome that is expected on some ways instead of the direct one.
type instead struct {
	difference string // ID in the table of documented differences
	ways       []way
	check      func(outcome) error
}

func (c *testCase) protocols() []protocol {
	if c.only != "" {
		return []protocol{c.only}
	}
	return []protocol{http1, http2}
}

func (c *testCase) ways() []way {
	if c.localOnly {
		return []way{direct, local}
	}
	return []way{direct, local, forwarded}
}

func (c *testCase) insteadOn(v way) *instead {
	for i := range c.instead {
		if slices.Contains(c.instead[i].ways, v) {
			return &c.instead[i]
		}
	}
	return nil
}

// String is the case in short, for failures.
func (c *testCase) String() string {
	r := &c.request
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s %q", c.name, r.method, r.target)
	for _, f := range r.fields {
		fmt.Fprintf(&b, "\n    > %s: %.100q", f.Name, f.Value)
	}
	if r.framing != bodyless {
		fmt.Fprintf(&b, "\n    > %d bytes, framing %d, in pieces of %d, trailer %v", r.body.Len(), r.framing, r.piece, r.trailer)
	}
	fmt.Fprintf(&b, "\n    < %d", c.script.Status)
	for _, f := range c.script.Header {
		fmt.Fprintf(&b, "\n    < %s: %.100q", f.Name, f.Value)
	}
	for _, s := range c.script.Steps {
		fmt.Fprintf(&b, "\n    < %d bytes in pieces of %d, flush %t, await %d", s.Body.Len(), s.Piece, s.Flush, s.Await)
	}
	return b.String()
}

// outcome is all that there is to see of a request that went one way.
type outcome struct {
	answer   answer
	arrived  []fake.Request
	problems []string
}

// run sends the request one way.
func (c *testCase) run(cl *clients, v way, p protocol) outcome {
	r := c.request
	// By name and protocol, so that cases can run side by side.
	id := c.name + " " + string(p)
	r.fields = append([]fake.Field{{Name: fake.HeaderCase, Value: id}}, r.fields...)
	if c.cred == byToken {
		r.fields = append(r.fields, fake.Field{Name: "Authorization", Value: "Bearer " + token})
	}
	ex := cl.world.servers["b"].Begin(id, c.script)
	var o outcome
	o.answer = cl.get(v, p, c.cred).do(&r, ex)
	o.arrived, o.problems = ex.Finish()
	return o
}

// Names of what is compared, beside "answer header X" and the like.
const (
	fieldArrived       = "request arrivals"
	fieldMethod        = "request method"
	fieldTarget        = "request target"
	fieldHost          = "request host"
	fieldProtocol      = "request protocol"
	fieldRequestLength = "request length"
	fieldRequestBody   = "request body"
	fieldBodyError     = "request body error"
	requestHeader      = "request header "
	requestTrailer     = "request trailer "
	fieldStatus        = "answer status"
	fieldInformational = "answer informational"
	fieldAnswerLength  = "answer length"
	fieldAnswerBody    = "answer body"
	fieldEnd           = "answer end"
	answerHeader       = "answer header "
	answerTrailer      = "answer trailer "
	fieldProblems      = "problems"
)

// facts writes an outcome as named lists of values, which is what is compared.
func (o *outcome) facts(readAll bool) map[string][]string {
	f := map[string][]string{
		fieldArrived: {strconv.Itoa(len(o.arrived))}, fieldProblems: o.problems,
		fieldStatus: {strconv.Itoa(o.answer.status)}, fieldInformational: o.answer.informational,
		fieldAnswerLength: {o.answer.length}, fieldAnswerBody: {o.answer.body.String()}, fieldEnd: {o.answer.end},
	}
	add(f, answerHeader, o.answer.header, "Content-Length")
	add(f, answerTrailer, o.answer.trailer, "")
	if _, ok := f[answerHeader+"Date"]; ok {
		f[answerHeader+"Date"] = []string{"(a date)"}
	}
	if len(o.arrived) == 0 {
		return f
	}
	r := &o.arrived[0]
	f[fieldMethod], f[fieldTarget], f[fieldHost], f[fieldProtocol] = []string{r.Method}, []string{r.Target}, []string{r.Host}, []string{r.Proto}
	switch n := r.Header["Content-Length"]; {
	case len(n) > 0:
		f[fieldRequestLength] = n
	case r.ContentLength < 0:
		f[fieldRequestLength] = []string{lengthUnknown}
	default:
		f[fieldRequestLength] = []string{lengthNone}
	}
	if readAll {
		f[fieldRequestBody], f[fieldBodyError] = []string{r.Body.String()}, []string{r.BodyError}
		add(f, requestTrailer, r.Trailer, "")
	}
	add(f, requestHeader, r.Header, "Content-Length")
	return f
}

func add(f map[string][]string, prefix string, h http.Header, but string) {
	for name, values := range h {
		if name != but {
			f[prefix+name] = values
		}
	}
}

// difference is one fact that is not the same as direct.
type difference struct {
	field       string
	direct, got []string // nil if there is none
}

// differences compares by field, in order of the names. The numbers of fields and differences are for the count.
func differences(want, got map[string][]string) (out []difference, fields int) {
	names := maps.Clone(want)
	maps.Copy(names, got)
	for _, name := range slices.Sorted(maps.Keys(names)) {
		w, inWant := want[name]
		g, inGot := got[name]
		if inWant != inGot || !slices.Equal(w, g) {
			out = append(out, difference{name, w, g})
		}
	}
	return out, len(names)
}
