package forward

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	mvpv1 "github.com/mvp-mesh/mvp-node/proto/mvp/v1"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/net/http/httpguts"
	"golang.org/x/sync/semaphore"
	"google.golang.org/protobuf/proto"
)

func marshal(t testing.TB, m proto.Message) []byte {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// FuzzRequestHead holds decodeHead to what the rest of the serving node relies on, whatever a peer sends.
func FuzzRequestHead(f *testing.F) {
	f.Add(marshal(f, &mvpv1.RequestHead{}))
	f.Add(marshal(f, &mvpv1.RequestHead{
		ClusterId: "demo", Hop: 1,
		Identity: &mvpv1.Identity{User: "jane", Extra: []*mvpv1.Extra{{Key: "k", Values: []string{"v"}}, {Key: "k"}}},
		Audit:    &mvpv1.AuditContext{AuditId: "x", SourceIps: []string{"192.0.2.1", "::1"}, IngressNode: "a"},
		Http: &mvpv1.HttpRequest{
			Method: "POST", Target: "/api/v1/pods?x=%zz|#", Host: "h:1", ContentLength: 3,
			Headers: []*mvpv1.Header{
				{Name: "x-remote-USER", Values: []string{"admin"}}, {Name: "X_Remote_Group", Values: []string{"g"}},
				{Name: "connection", Values: []string{"accept, x-named"}}, {Name: "Accept", Values: []string{"*/*"}},
				{Name: "ACCEPT", Values: []string{"b"}}, {Name: "X-Kubernetes-Peer-Proxied", Values: []string{"true"}},
				{Name: "Sec-WebSocket-Protocol", Values: []string{"base64url.bearer.authorization.k8s.io.x"}},
			},
		},
		Body: []byte("abc"), End: true,
	}))
	f.Add(marshal(f, &mvpv1.RequestHead{
		ClusterId: "demo", Hop: 1, Identity: &mvpv1.Identity{User: "jane"}, DeadlineClass: mvpv1.DeadlineClass_DEADLINE_CLASS_UPGRADE,
		Audit: &mvpv1.AuditContext{AuditId: "x", SourceIps: []string{"192.0.2.1"}, IngressNode: "a"},
		Http:  &mvpv1.HttpRequest{Method: "GET", Target: "/api/v1/namespaces/n/pods/p/exec", Upgrade: "websocket", TrailerNames: []string{"X-T"}},
		End:   true,
	}))
	names := authz.DefaultHeaderNames()
	f.Fuzz(func(t *testing.T, data []byte) {
		h := &mvpv1.RequestHead{}
		if proto.Unmarshal(data, h) != nil {
			return
		}
		in, err := decodeHead(h, names)
		if err != nil {
			if in != nil {
				t.Fatal("both a head and an error")
			}
			return
		}
		if !strings.HasPrefix(in.head.GetHttp().GetTarget(), "/") || in.url == nil || in.user == nil || in.length < -1 {
			t.Fatalf("accepted %+v", in)
		}
		if up := in.head.GetHttp().GetUpgrade(); up != "" && (up != "websocket" && up != "SPDY/3.1" || in.length != 0 || len(in.head.GetBody()) > 0) {
			t.Fatalf("upgrade to %q with a body of %d", up, in.length)
		}
		if strings.ContainsAny(in.head.GetHttp().GetTarget(), " \r\n\x00") {
			t.Fatalf("target %q would not survive a request line", in.head.GetHttp().GetTarget())
		}
		for name, values := range in.header {
			if name != http.CanonicalHeaderKey(name) || staysHere(name, names) || !httpguts.ValidHeaderFieldName(name) {
				t.Fatalf("header %q passed", name)
			}
			for _, v := range values {
				if !httpguts.ValidHeaderFieldValue(v) || name == authz.WebSocketProtocol && strings.Contains(v, "base64url.bearer.authorization.k8s.io.") {
					t.Fatalf("value %q of %q passed", v, name)
				}
			}
		}
		// What was accepted is accepted again and means the same: nothing depends on where it was decoded.
		again, err := decodeHead(proto.CloneOf(h), names)
		if err != nil || len(again.header) != len(in.header) {
			t.Fatalf("second decoding: %v", err)
		}
	})
}

// script is a stream of parts, each a serialised ForwardResponse with its length in front.
type script struct{ data []byte }

func (s *script) Recv() (*mvpv1.ForwardResponse, error) {
	if len(s.data) == 0 {
		return nil, io.EOF
	}
	n := min(int(s.data[0]), len(s.data)-1)
	m := &mvpv1.ForwardResponse{}
	err := proto.Unmarshal(s.data[1:1+n], m)
	s.data = s.data[1+n:]
	return m, err
}

// FuzzTunnel holds either end of a tunnel to the promise that an end is one only if the other side said so.
func FuzzTunnel(f *testing.F) {
	seed := func(chunks ...*mvpv1.Chunk) {
		var b []byte
		for _, c := range chunks {
			p := marshal(f, &mvpv1.ForwardResponse{Part: &mvpv1.ForwardResponse_Chunk{Chunk: c}})
			b = append(append(b, byte(len(p))), p...)
		}
		f.Add(b)
	}
	seed(&mvpv1.Chunk{Data: []byte("ab")}, &mvpv1.Chunk{Data: []byte("cd"), End: true}, &mvpv1.Chunk{Closed: true})
	seed(&mvpv1.Chunk{Data: []byte("ab"), Closed: true}, &mvpv1.Chunk{Data: []byte("cd")})
	seed(&mvpv1.Chunk{Data: []byte("ab")})
	f.Fuzz(func(t *testing.T, data []byte) {
		s := &script{data}
		tun := &tunnel{recv: func() (*mvpv1.Chunk, error) {
			m, err := s.Recv()
			return m.GetChunk(), err
		}}
		got, err := io.ReadAll(tun)
		ended := err == nil
		closed := ended && tun.WaitClosed() == nil

		var body []byte
		wantEnd, wantClosed := false, false
		for rest := (&script{data}); !wantClosed; {
			m, err := rest.Recv()
			if err != nil || m.GetChunk() == nil {
				break
			}
			if !wantEnd {
				body = append(body, m.GetChunk().GetData()...)
			}
			wantClosed = m.GetChunk().GetClosed()
			wantEnd = wantEnd || wantClosed || m.GetChunk().GetEnd()
		}
		if ended != wantEnd || closed != wantClosed || string(got) != string(body) {
			t.Fatalf("%q, end %v, closed %v; want %q, %v, %v", got, ended, closed, body, wantEnd, wantClosed)
		}
	})
}

// FuzzAnswer holds the ingress end to the promise that a body ends with io.EOF only if the serving node said so.
func FuzzAnswer(f *testing.F) {
	seed := func(ms ...*mvpv1.ForwardResponse) {
		var b []byte
		for _, m := range ms {
			p := marshal(f, m)
			b = append(append(b, byte(len(p))), p...)
		}
		f.Add(b)
	}
	head := func(h *mvpv1.ResponseHead) *mvpv1.ForwardResponse {
		return &mvpv1.ForwardResponse{Part: &mvpv1.ForwardResponse_Head{Head: h}}
	}
	chunk := func(s string, end bool) *mvpv1.ForwardResponse {
		return &mvpv1.ForwardResponse{Part: &mvpv1.ForwardResponse_Chunk{Chunk: &mvpv1.Chunk{Data: []byte(s), End: end}}}
	}
	trailers := &mvpv1.ForwardResponse{Part: &mvpv1.ForwardResponse_Trailers{Trailers: &mvpv1.Trailers{
		Headers: []*mvpv1.Header{{Name: "x-t", Values: []string{"1"}}},
	}}}
	seed(head(&mvpv1.ResponseHead{Status: 200, ContentLength: -1, Body: []byte("ab"), End: true}))
	seed(head(&mvpv1.ResponseHead{Status: 200, ContentLength: 4}), chunk("ab", false), chunk("cd", true))
	seed(head(&mvpv1.ResponseHead{Status: 200, ContentLength: -1, TrailerNames: []string{"X-T"}}), chunk("ab", false), trailers)
	seed(head(&mvpv1.ResponseHead{Status: 200, ContentLength: -1}), chunk("ab", false))
	seed(chunk("ab", false))
	seed(informational(100, nil), informational(103, http.Header{"Link": {"</a>"}}), head(&mvpv1.ResponseHead{Status: 204, End: true}))
	seed(head(&mvpv1.ResponseHead{Status: 101}), chunk("raw", false))
	f.Fuzz(func(t *testing.T, data []byte) {
		s := &script{data}
		first, err := (&Client{}).answerHead(context.Background(), s, func() {})
		if err != nil {
			return
		}
		afterHead := s.data
		req := &http.Request{Method: "GET"}
		resp, err := decodeResponse(first, req, "")
		if err != nil {
			if switched, err := decodeResponse(first, req, "websocket"); err == nil && switched.StatusCode != http.StatusSwitchingProtocols {
				t.Fatalf("status %d is an answer to a request for an upgrade only", switched.StatusCode)
			}
			return
		}
		if resp.StatusCode < 200 {
			t.Fatalf("status %d as the answer", resp.StatusCode)
		}
		x := &exchange{cancel: func() {}, place: semaphore.NewWeighted(1), inflight: prometheus.NewGauge(prometheus.GaugeOpts{Name: "x"})}
		if !x.place.TryAcquire(1) {
			t.Fatal("no place")
		}
		d := newDownload(context.Background(), x, s, first, resp, "b")
		resp.Body = d
		got, err := io.ReadAll(resp.Body)
		complete := err == nil

		// What should have happened, worked out plainly.
		wantEnd, body := first.GetEnd(), append([]byte(nil), first.GetBody()...)
		for rest := (&script{afterHead}); !wantEnd; {
			m, err := rest.Recv()
			if err != nil {
				break
			}
			if tr := m.GetTrailers(); tr != nil {
				_, bad := decodeHeader(tr.GetHeaders())
				wantEnd = bad == nil
				break
			}
			c := m.GetChunk()
			if c == nil {
				break
			}
			body, wantEnd = append(body, c.GetData()...), c.GetEnd()
		}
		if n := resp.ContentLength; n >= 0 && n != int64(len(body)) && resp.StatusCode != http.StatusNotModified {
			wantEnd = false
		}
		if complete != wantEnd {
			t.Fatalf("complete %v, want %v (err %v)", complete, wantEnd, err)
		}
		if string(got) != string(body) {
			t.Fatalf("body %q, want %q", got, body)
		}
		if !x.done.Load() {
			t.Fatal("the place was not given back")
		}
	})
}

// FuzzCleanRequest holds both ways of cleaning headers, in place and while encoding, to the same result.
func FuzzCleanRequest(f *testing.F) {
	f.Add("Connection", "x-named, close", "X-Named", "1", "X_remote-User", "a")
	f.Add("Authorization", "Bearer x", "X-Remote-User", "admin", "Accept", "*/*")
	f.Add("Authorization", "Bearer x", "Sec-WebSocket-Protocol", "base64url.bearer.authorization.k8s.io.x, v4", "Accept", "*/*")
	f.Fuzz(func(t *testing.T, n1, v1, n2, v2, n3, v3 string) {
		h := http.Header{}
		for _, p := range [][2]string{{n1, v1}, {n2, v2}, {n3, v3}} {
			if httpguts.ValidHeaderFieldName(p[0]) && httpguts.ValidHeaderFieldValue(p[1]) {
				h.Add(p[0], p[1])
			}
		}
		names := authz.DefaultHeaderNames()
		encoded, err := decodeHeader(encodeRequestHeader(h, names))
		if err != nil {
			t.Fatal(err)
		}
		cleaned := h.Clone()
		cleanRequest(cleaned, names)
		if len(encoded) != len(cleaned) {
			t.Fatalf("encoded %v, cleaned %v", encoded, cleaned)
		}
		for name := range cleaned {
			if len(encoded[name]) != len(cleaned[name]) || staysHere(name, names) {
				t.Fatalf("encoded %v, cleaned %v", encoded, cleaned)
			}
		}
	})
}
