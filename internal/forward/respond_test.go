package forward

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	mvpv1 "github.com/mvp-mesh/mvp-node/proto/mvp/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
)

// sink is a stream that writes down what is sent and when.
type sink struct {
	grpc.ServerStream
	start time.Time
	parts []string
}

func (s *sink) Context() context.Context             { return context.Background() }
func (s *sink) Recv() (*mvpv1.ForwardRequest, error) { return nil, io.EOF }
func (s *sink) note(kind string, data []byte, end bool) {
	s.parts = append(s.parts, s.line(kind, data, end))
}
func (s *sink) line(kind string, d []byte, end bool) string {
	if len(d) > 8 {
		d = fmt.Appendf(nil, "%d bytes", len(d))
	}
	return fmt.Sprintf("%v %s %q %v", time.Since(s.start), kind, d, end)
}

func (s *sink) Send(m *mvpv1.ForwardResponse) error {
	switch {
	case m.GetHead() != nil:
		s.note("head", m.GetHead().GetBody(), m.GetHead().GetEnd())
	case m.GetChunk() != nil:
		s.note("chunk", m.GetChunk().GetData(), m.GetChunk().GetEnd())
	case m.GetTrailers() != nil:
		s.note("trailers", nil, true)
	}
	return nil
}

// piece is a part of a body that comes after a pause.
type piece struct {
	after time.Duration
	data  string
}

type pieces struct {
	rest []piece
	err  error // at the end
}

func (p *pieces) Read(b []byte) (int, error) {
	if len(p.rest) == 0 {
		return 0, p.err
	}
	time.Sleep(p.rest[0].after) // fake time
	p.rest[0].after = 0
	n := copy(b, p.rest[0].data)
	if p.rest[0].data = p.rest[0].data[n:]; p.rest[0].data == "" {
		p.rest = p.rest[1:]
	}
	return n, nil
}

// When the parts of an answer are sent: together if its body is there at once, and never held back for longer than coalesceWait.
func TestRespond(t *testing.T) {
	big := strings.Repeat("x", headBody)
	for _, tc := range []struct {
		name    string
		length  int64
		long    bool
		body    []piece
		err     error
		trailer http.Header
		want    []string
		fails   bool
	}{
		{name: "empty", want: []string{`0s head "" true`}},
		{name: "small", length: 2, body: []piece{{0, "ab"}}, want: []string{`0s head "ab" true`}},
		{name: "small, length unknown", length: -1, body: []piece{{0, "ab"}}, want: []string{`0s head "ab" true`}},
		{name: "in pieces, fast", length: -1, body: []piece{{time.Millisecond, "ab"}, {time.Millisecond / 2, "cd"}}, want: []string{`1.5ms head "abcd" true`}},
		{
			name: "in pieces, slow", length: -1, body: []piece{{time.Millisecond, "ab"}, {5 * time.Millisecond, "cd"}, {time.Second, "ef"}},
			want: []string{`2ms head "ab" false`, `6ms chunk "cd" false`, `1.006s chunk "ef" false`, `1.006s chunk "" true`},
		},
		{name: "late", length: 2, body: []piece{{time.Minute, "ab"}}, want: []string{`2ms head "" false`, `1m0s chunk "ab" false`, `1m0s chunk "" true`}},
		{name: "a full head", length: -1, body: []piece{{0, big}}, want: []string{`0s head "24576 bytes" false`, `0s chunk "" true`}},
		{name: "more than a head", length: -1, body: []piece{{0, big + "ab"}}, want: []string{`0s head "24576 bytes" false`, `0s chunk "ab" false`, `0s chunk "" true`}},
		{name: "quiet watch", length: -1, long: true, body: []piece{{time.Hour, "ab"}}, want: []string{`0s head "" false`, `1h0m0s chunk "ab" false`, `1h0m0s chunk "" true`}},
		{name: "refused watch", length: 2, long: true, body: []piece{{0, "no"}}, want: []string{`0s head "no" true`}},
		{
			name: "trailers", length: -1, body: []piece{{0, "ab"}}, trailer: http.Header{"X-T": {"1"}},
			want: []string{`0s head "ab" false`, `0s trailers "" true`},
		},
		{name: "empty with trailers", length: -1, trailer: http.Header{"X-T": {"1"}}, want: []string{`0s head "" false`, `0s trailers "" true`}},
		{name: "cut before anything was sent", length: -1, body: []piece{{0, "ab"}}, err: io.ErrUnexpectedEOF, fails: true},
		{
			name: "cut later", length: -1, body: []piece{{0, "ab"}, {time.Second, "cd"}}, err: io.ErrUnexpectedEOF, fails: true,
			want: []string{`2ms head "ab" false`, `1s chunk "cd" false`},
		},
		{name: "cut watch", length: -1, long: true, body: []piece{{0, "ab"}}, err: io.ErrUnexpectedEOF, fails: true, want: []string{`0s head "" false`, `0s chunk "ab" false`}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				if tc.err == nil {
					tc.err = io.EOF
				}
				s := &sink{start: time.Now()}
				resp := &http.Response{
					StatusCode: 200, Header: http.Header{}, ContentLength: tc.length, Trailer: tc.trailer,
					Body: io.NopCloser(&pieces{tc.body, tc.err}),
				}
				err := (&Server{}).respond(s, resp, tc.long)
				if (err != nil) != tc.fails {
					t.Errorf("error %v", err)
				}
				if fe, ok := forwardError(status.Convert(err)); tc.fails && (!ok || !fe.GetDispatched()) {
					t.Errorf("error %v", err)
				}
				if d := cmp.Diff(tc.want, s.parts); d != "" {
					t.Errorf("sent (-want +got):\n%s", d)
				}
				sent := len(s.parts)
				time.Sleep(time.Second)
				if len(s.parts) != sent {
					t.Errorf("after the end: %v", s.parts[sent:])
				}
			})
		})
	}
}
