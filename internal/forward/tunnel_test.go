package forward_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/mvp-mesh/mvp-node/internal/duplex"
	"github.com/mvp-mesh/mvp-node/internal/forward"
	"github.com/mvp-mesh/mvp-node/internal/reqctx"
	"github.com/mvp-mesh/mvp-node/internal/route"
	mvpv1 "github.com/mvp-mesh/mvp-node/proto/mvp/v1"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

// wire is one end of a duplex.Conn in memory; the other end is its peer.
type wire struct {
	net.Conn
	peer *wire
	mu   sync.Mutex
	gone chan struct{} // closed when this end has closed altogether
	err  error         // how it ended
	once sync.Once
}

// newWire returns the apiserver's program's end and the one that upstream would return.
func newWire() (program, conn *wire) {
	program, conn = &wire{gone: make(chan struct{})}, &wire{gone: make(chan struct{})}
	l, err := net.Listen("tcp", "127.0.0.1:0") // net.Pipe has no half-close
	if err != nil {
		panic(err)
	}
	defer l.Close()
	accepted := make(chan net.Conn)
	go func() {
		c, _ := l.Accept()
		accepted <- c
	}()
	if program.Conn, err = net.Dial("tcp", l.Addr().String()); err != nil {
		panic(err)
	}
	conn.Conn = <-accepted
	program.peer, conn.peer = conn, program
	return program, conn
}

func (w *wire) CloseWrite() error { return w.Conn.(*net.TCPConn).CloseWrite() }

func (w *wire) finish(err error) {
	w.once.Do(func() {
		w.mu.Lock()
		w.err = err
		w.mu.Unlock()
		close(w.gone)
	})
}

func (w *wire) WaitClosed() error {
	select {
	case <-w.peer.gone:
		w.peer.mu.Lock()
		defer w.peer.mu.Unlock()
		return w.peer.err
	case <-w.gone:
		return net.ErrClosed
	}
}

func (w *wire) FinishWrite() error {
	w.finish(nil)
	return nil
}

func (w *wire) Abort() bool {
	w.finish(errors.New("aborted"))
	return false
}

func (w *wire) Close() error {
	w.finish(errors.New("closed without a word"))
	return w.Conn.Close()
}

// tunnelled is a client's end of an upgrade through a mesh, and the end of the program behind the apiserver.
func tunnelled(t *testing.T) (client duplex.Conn, program *wire, registry *client) {
	t.Helper()
	w := newWorld(t)
	program, conn := newWire()
	t.Cleanup(func() { program.Close() })
	b := w.serve("b", roundTripper(func(r *http.Request) (*http.Response, error) {
		rc, _ := reqctx.From(r.Context())
		if rc.Upgrade != reqctx.UpgradeSPDY || !rc.LongRunning || r.Body != http.NoBody {
			t.Errorf("upgrade %q, long-running %v, body %T", rc.Upgrade, rc.LongRunning, r.Body)
		}
		return &http.Response{StatusCode: 101, Body: conn, ContentLength: -1,
			Header: http.Header{"Connection": {"Upgrade"}, "Upgrade": {"SPDY/3.1"}, "X-Stream-Protocol-Version": {"v4"}}}, nil
	}))
	c := w.client("a")
	req := newRequest(t, "POST", listPath, nil, func(rc *reqctx.Request) { rc.Upgrade, rc.LongRunning = reqctx.UpgradeSPDY, true })
	resp, _, err := c.RoundTrip(req, []*route.Member{b.member})
	if err != nil {
		t.Fatal(err)
	}
	want := http.Header{"Connection": {"Upgrade"}, "Upgrade": {"SPDY/3.1"}, "X-Stream-Protocol-Version": {"v4"}}
	if d := cmp.Diff(want, resp.Header); d != "" || resp.StatusCode != 101 {
		t.Errorf("status %d, headers (-want +got):\n%s", resp.StatusCode, d)
	}
	client, ok := resp.Body.(duplex.Conn)
	if !ok {
		t.Fatalf("body of a 101 is a %T", resp.Body)
	}
	t.Cleanup(func() { client.Close() })
	return client, program, c
}

// CASES S-06, S-07: bytes pass as they are, a half-close is one, and the program's end reaches the client as what it is.
func TestTunnel(t *testing.T) {
	client, program, c := tunnelled(t)
	big := strings.Repeat("0123456789abcdef", 16<<10) // eight chunks
	go func() {
		_, _ = io.WriteString(client, big)
		_ = client.CloseWrite()
	}()
	within(t, 5*time.Second, "all that the client said, and its half-close", func() {
		if got, err := io.ReadAll(program); string(got) != big || err != nil {
			t.Errorf("program got %d bytes, %v", len(got), err)
		}
	})
	if g := value(c.registry, "mvp_forward_inflight", "long"); g != 1 {
		t.Errorf("%v requests in flight, want 1", g)
	}
	go func() {
		_, _ = io.WriteString(program, big)
		_ = program.CloseWrite()
		_ = program.FinishWrite()
	}()
	within(t, 5*time.Second, "the answer, and the program's end", func() {
		if got, err := io.ReadAll(client); string(got) != big || err != nil {
			t.Errorf("client got %d bytes, %v", len(got), err)
		}
		if err := client.WaitClosed(); err != nil {
			t.Error(err)
		}
	})
	client.Close()
	waitFor(t, func() bool { return value(c.registry, "mvp_forward_inflight", "long") == 0 })
}

// CASES S-07: the client's end reaches the program after all of its bytes; the client's failure as a failure.
func TestTunnelClientEnds(t *testing.T) {
	client, program, _ := tunnelled(t)
	_, _ = io.WriteString(client, "last words")
	_ = client.CloseWrite()
	_ = client.FinishWrite()
	within(t, time.Second, "the end at the program", func() {
		if got, err := io.ReadAll(program); string(got) != "last words" || err != nil {
			t.Errorf("program got %q, %v", got, err)
		}
		if err := program.WaitClosed(); err != nil {
			t.Error(err)
		}
	})

	client, program, _ = tunnelled(t)
	client.Close()
	within(t, time.Second, "the failure at the program", func() {
		_, _ = io.ReadAll(program)
		if err := program.WaitClosed(); err == nil {
			t.Error("a client that broke off passed for one that closed")
		}
	})
}

// A program that breaks off is a failure at the client, after what it had said.
func TestTunnelProgramBreaksOff(t *testing.T) {
	client, program, _ := tunnelled(t)
	_, _ = io.WriteString(program, "half")
	got := make([]byte, 4)
	if _, err := io.ReadFull(client, got); err != nil {
		t.Fatal(err)
	}
	_ = program.Conn.(*net.TCPConn).SetLinger(0)
	program.Close()
	within(t, time.Second, "the failure at the client", func() {
		if _, err := client.Read(got); err == nil || err == io.EOF {
			t.Errorf("client read %v", err)
		}
	})
}

// Informational answers come before the answer, in order, with their headers; a 100 is the ingress node's own affair.
func TestInformationalAnswers(t *testing.T) {
	w := newWorld(t)
	b := w.serve("b", upstreamTo(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		rw.Header().Set("Link", "</a>")
		rw.WriteHeader(http.StatusEarlyHints)
		rw.Header().Set("Link", "</b>")
		rw.WriteHeader(http.StatusProcessing)
		rw.Header().Del("Link")
		_, _ = io.WriteString(rw, "done")
	})))
	c := w.client("a")
	req := newRequest(t, "POST", listPath, strings.NewReader("x"))
	var got []string
	req = req.WithContext(httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
		got = append(got, http.StatusText(code)+" "+h.Get("Link"))
		return nil
	}}))
	resp, _, err := c.RoundTrip(req, []*route.Member{b.member})
	if err != nil {
		t.Fatal(err)
	}
	if body := readAll(t, resp); body != "done" || resp.Header.Get("Link") != "" {
		t.Errorf("%q, Link %q", body, resp.Header.Get("Link"))
	}
	if want := []string{"Early Hints </a>", "Processing </b>"}; !slices.Equal(got, want) {
		t.Errorf("informational answers %v, want %v", got, want)
	}
}

// A client that waits to be asked for its body is asked when the apiserver wants it, and not when it does not.
func TestExpectContinue(t *testing.T) {
	for _, refuse := range []bool{false, true} {
		w := newWorld(t)
		b := w.serve("b", roundTripper(func(r *http.Request) (*http.Response, error) {
			if r.Header.Get("Expect") != "100-continue" {
				t.Errorf("Expect is %q", r.Header.Get("Expect"))
			}
			if refuse {
				return answer(r, 413, "too large"), nil
			}
			body, err := io.ReadAll(r.Body)
			return answer(r, 201, string(body)), err
		}))
		c := w.client("a")
		asked := make(chan struct{})
		body := &atStart{strings.NewReader("payload"), sync.OnceFunc(func() { close(asked) })}
		req := newRequest(t, "POST", listPath, body)
		req.ContentLength = 7
		req.Header.Set("Expect", "100-continue")
		resp, _, err := c.RoundTrip(req, []*route.Member{b.member})
		if err != nil {
			t.Fatal(err)
		}
		got := readAll(t, resp)
		select {
		case <-asked:
			if refuse || got != "payload" {
				t.Errorf("refuse %v: body was read, answer %q", refuse, got)
			}
		default:
			if !refuse {
				t.Error("body was not read")
			}
		}
	}
}

// atStart calls a function before the first Read.
type atStart struct {
	io.Reader
	f func()
}

func (a *atStart) Read(p []byte) (int, error) {
	a.f()
	return a.Reader.Read(p)
}

// Trailers of a request follow its body.
func TestRequestTrailers(t *testing.T) {
	w := newWorld(t)
	b := w.serve("b", roundTripper(func(r *http.Request) (*http.Response, error) {
		body, err := io.ReadAll(r.Body)
		if err != nil || string(body) != "payload" {
			t.Errorf("body %q, %v", body, err)
		}
		if d := cmp.Diff(http.Header{"X-Sum": {"1", "2"}}, r.Trailer); d != "" {
			t.Errorf("trailers (-want +got):\n%s", d)
		}
		return answer(r, 200, ""), nil
	}))
	c := w.client("a")
	req := newRequest(t, "POST", listPath, strings.NewReader("payload"))
	req.ContentLength = -1
	req.Trailer = http.Header{"X-Sum": {"1", "2"}, "X-Remote-User": {"root"}}
	resp, _, err := c.RoundTrip(req, []*route.Member{b.member})
	if err != nil {
		t.Fatal(err)
	}
	readAll(t, resp)
}

// CASES S-03: a peer that sends bytes before the 101, or a second protocol's 101 to an ordinary request, is refused.
func TestIngressRefusesTunnelsThatAreNone(t *testing.T) {
	for name, first := range map[string]*mvpv1.ForwardResponse{
		"bytes first":          {Part: &mvpv1.ForwardResponse_Chunk{Chunk: &mvpv1.Chunk{Data: []byte("raw")}}},
		"a 101 nobody wanted":  {Part: &mvpv1.ForwardResponse_Head{Head: &mvpv1.ResponseHead{Status: 101}}},
		"a 101 as information": {Part: &mvpv1.ForwardResponse_Informational{Informational: &mvpv1.Informational{Status: 101}}},
		"200 as information":   {Part: &mvpv1.ForwardResponse_Informational{Informational: &mvpv1.Informational{Status: 200}}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			c := w.client("a", func(o *forward.ClientOptions) { o.Conns = scripted{first} })
			_, _, err := c.RoundTrip(newRequest(t, "GET", getPath, nil), []*route.Member{{Name: "b", Address: "b:1"}})
			wantError(t, err, route.PeerRefused, true)
		})
	}
}

// scripted is a peer that answers everything with one message.
type scripted struct{ first *mvpv1.ForwardResponse }

func (s scripted) Conn(*route.Member, bool) (grpc.ClientConnInterface, error) { return s, nil }

func (s scripted) Invoke(context.Context, string, any, any, ...grpc.CallOption) error {
	return errors.ErrUnsupported
}

func (s scripted) NewStream(context.Context, *grpc.StreamDesc, string, ...grpc.CallOption) (grpc.ClientStream, error) {
	return &scriptedStream{first: s.first}, nil
}

type scriptedStream struct {
	grpc.ClientStream
	first *mvpv1.ForwardResponse
}

func (s *scriptedStream) SendMsg(any) error { return nil }
func (s *scriptedStream) CloseSend() error  { return nil }

func (s *scriptedStream) RecvMsg(m any) error {
	if s.first == nil {
		return io.EOF
	}
	proto.Merge(m.(proto.Message), s.first)
	s.first = nil
	return nil
}
