package forward

import (
	"errors"
	"fmt"
	"testing"

	"github.com/mvp-mesh/mvp-node/internal/route"
	mvpv1 "github.com/mvp-mesh/mvp-node/proto/mvp/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Every row of the table: what the serving node says is what the ingress node hears, within the rule of write safety.
func TestErrorTable(t *testing.T) {
	for r := refusal(1); r < endOfRefusals; r++ {
		want, ok := rows[r]
		if !ok {
			t.Errorf("refusal %d has no row", r)
			continue
		}
		if want.code == codes.OK || want.cause == route.CauseNone {
			t.Errorf("refusal %d: row %+v", r, want)
		}
		err := r.err(5, "because of %d", r)
		if status.Code(err) != want.code {
			t.Errorf("refusal %d: code %v, want %v", r, status.Code(err), want.code)
		}
		for _, readOnly := range []bool{true, false} {
			got := fromStatus(err, "b", true, readOnly)
			cause := want.cause
			if want.dispatched && !readOnly && r != badAnswer { // an answer is an outcome
				cause = route.OutcomeUnknown
			}
			if got.Cause != cause || got.Dispatched != want.dispatched || got.Generation != 5 || got.Peer != "b" {
				t.Errorf("refusal %d, readOnly %v: heard %+v, want cause %v dispatched %v", r, readOnly, got, cause, want.dispatched)
			}
			if mayRetry(got, readOnly) && got.Dispatched && !readOnly {
				t.Errorf("refusal %d: a dispatched write may be retried", r)
			}
		}
	}
	if len(rows) != int(endOfRefusals)-1 {
		t.Errorf("%d rows for %d refusals", len(rows), endOfRefusals-1)
	}
}

type tlsError struct{ error }

func (tlsError) HandshakeFailed() bool { return true }
func (e tlsError) GRPCStatus() *status.Status {
	return status.New(codes.Unavailable, e.Error())
}

// A status without a detail: from gRPC itself, from an interceptor, or from a program that is no mvp-node.
func TestBareStatus(t *testing.T) {
	type heard struct {
		cause      route.Cause
		dispatched bool
	}
	refused := map[bool]heard{true: {route.PeerRefused, true}, false: {route.OutcomeUnknown, true}} // by readOnly
	want := map[codes.Code]map[bool]heard{
		codes.Unavailable:      {true: {route.NoPeerAvailable, true}, false: {route.OutcomeUnknown, true}},
		codes.Canceled:         {true: {route.NoPeerAvailable, true}, false: {route.OutcomeUnknown, true}},
		codes.DeadlineExceeded: {true: {route.OutcomeUnknown, true}, false: {route.OutcomeUnknown, true}},
		codes.Unauthenticated:  {true: {route.PeerRefused, false}, false: {route.PeerRefused, false}},
		codes.PermissionDenied: {true: {route.PeerRefused, false}, false: {route.PeerRefused, false}},
		codes.Unimplemented:    {true: {route.PeerRefused, false}, false: {route.PeerRefused, false}},
	}
	for code := codes.Canceled; code <= codes.Unauthenticated; code++ {
		for _, readOnly := range []bool{true, false} {
			w, ok := want[code][readOnly]
			if !ok {
				w = refused[readOnly]
			}
			if e := fromStatus(status.Error(code, "x"), "b", true, readOnly); (heard{e.Cause, e.Dispatched}) != w {
				t.Errorf("%v readOnly %v: %v %v, want %+v", code, readOnly, e.Cause, e.Dispatched, w)
			}
			// Before the head was handed over nothing can have happened, and no outcome is unknown.
			e := fromStatus(status.Error(code, "x"), "b", false, readOnly)
			if e.Dispatched || e.Cause == route.OutcomeUnknown {
				t.Errorf("%v before the head: %v", code, e)
			}
		}
	}
	if e := fromStatus(status.Error(codes.DeadlineExceeded, "x"), "b", false, false); e.Cause != route.DeadlineBeforeDispatch {
		t.Errorf("deadline before the head: %v", e)
	}
	if e := fromStatus(fmt.Errorf("wrapped: %w", tlsError{errors.New("bad certificate")}), "b", false, false); e.Cause != route.PeerTLS {
		t.Errorf("handshake: %v", e)
	}
	if e := fromStatus(errors.New("no status"), "b", true, true); e.Cause != route.PeerRefused || !e.Dispatched {
		t.Errorf("plain error: %v", e)
	}
}

// A cause that no serving node can know about, or that does not exist, is not believed.
func TestForeignCauses(t *testing.T) {
	for _, c := range route.Causes() {
		err := (&fake{cause: c.String()}).err(t)
		got := fromStatus(err, "b", true, true)
		if want := c; sendable[c] && got.Cause != want || !sendable[c] && got.Cause != route.PeerRefused {
			t.Errorf("%v is heard as %v", c, got.Cause)
		}
	}
	if got := fromStatus((&fake{cause: "Nonsense"}).err(t), "b", true, true); got.Cause != route.PeerRefused {
		t.Errorf("heard %v", got.Cause)
	}
}

// The rule of write safety by itself, whatever the cause says: every cause, dispatched or not, read or write.
func TestMayRetry(t *testing.T) {
	for _, c := range route.Causes() {
		for _, dispatched := range []bool{true, false} {
			for _, readOnly := range []bool{true, false} {
				got := mayRetry(&Error{Cause: c, Dispatched: dispatched}, readOnly)
				if want := elsewhere[c] && (!dispatched || readOnly); got != want {
					t.Errorf("%v dispatched %v readOnly %v: %v", c, dispatched, readOnly, got)
				}
			}
		}
	}
}

// An answer's hop-by-hop headers end here too, if the serving node forgot them.
func TestAnswerHeadersAreCleaned(t *testing.T) {
	resp, err := decodeResponse(&mvpv1.ResponseHead{Status: 200, Headers: []*mvpv1.Header{
		{Name: "connection", Values: []string{"x-named"}}, {Name: "X-Named", Values: []string{"1"}}, {Name: "Keep-Alive", Values: []string{"2"}},
		{Name: "Etag", Values: []string{"3"}},
	}}, nil, "")
	if err != nil || len(resp.Header) != 1 || resp.Header.Get("Etag") != "3" {
		t.Errorf("headers %v, %v", resp.Header, err)
	}
	for _, h := range []*mvpv1.ResponseHead{
		nil, {}, {Status: 101}, {Status: 1000}, {Status: 200, ContentLength: -2},
		{Status: 200, Headers: []*mvpv1.Header{{Name: "X", Values: []string{"a\r\nb"}}}},
	} {
		if _, err := decodeResponse(h, nil, ""); err == nil {
			t.Errorf("accepted %v", h)
		}
	}
}

type fake struct{ cause string }

func (f *fake) err(t *testing.T) error {
	t.Helper()
	st, err := status.New(codes.Unavailable, "x").WithDetails(&mvpv1.ForwardError{Cause: f.cause, Dispatched: f.cause == "OutcomeUnknown"})
	if err != nil {
		t.Fatal(err)
	}
	return st.Err()
}
