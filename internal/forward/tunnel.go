package forward

import (
	"context"
	"errors"
	"io"
	"net/http"

	"github.com/mvp-mesh/mvp-node/internal/duplex"
	mvpv1 "github.com/mvp-mesh/mvp-node/proto/mvp/v1"
	"google.golang.org/grpc"
)

// tunnel is a Forward stream after a 101, as a duplex.Conn. Either end makes one: chunks carry the bytes and say which of the two ends
// of a duplex.Conn was reached; that the stream itself ends is no such thing, and means that the other node gave up.
type tunnel struct {
	send  func(*mvpv1.Chunk) error
	recv  func() (*mvpv1.Chunk, error)
	close func() // ends the stream, if this end can

	out    mvpv1.Chunk // of the writing goroutine
	rest   []byte      // and all below: of the reading goroutine
	end    bool        // the other side sends no more
	closed bool        // the other side is gone
}

var errNoChunk = errors.New("something else than a chunk after a 101")

// newClientTunnel is the ingress node's end. It holds the place of its exchange until it is closed.
func newClientTunnel(x *exchange, s grpc.BidiStreamingClient[mvpv1.ForwardRequest, mvpv1.ForwardResponse]) *tunnel {
	return &tunnel{
		send: func(c *mvpv1.Chunk) error {
			return s.Send(&mvpv1.ForwardRequest{Part: &mvpv1.ForwardRequest_Chunk{Chunk: c}})
		},
		recv: func() (*mvpv1.Chunk, error) {
			msg, err := s.Recv()
			return msg.GetChunk(), err
		},
		close: x.finish,
	}
}

// newServerTunnel is the serving node's end. Only the return of the handler ends the stream.
func newServerTunnel(s stream) *tunnel {
	return &tunnel{
		send: func(c *mvpv1.Chunk) error {
			return s.Send(&mvpv1.ForwardResponse{Part: &mvpv1.ForwardResponse_Chunk{Chunk: c}})
		},
		recv: func() (*mvpv1.Chunk, error) {
			msg, err := s.Recv()
			return msg.GetChunk(), err
		},
		close: func() {},
	}
}

// Read implements duplex.Conn.
func (t *tunnel) Read(p []byte) (int, error) {
	for len(t.rest) == 0 {
		if t.end {
			return 0, io.EOF
		}
		if err := t.next(); err != nil {
			return 0, err
		}
	}
	n := copy(p, t.rest)
	t.rest = t.rest[n:]
	return n, nil
}

// WaitClosed implements duplex.Conn.
func (t *tunnel) WaitClosed() error {
	for !t.closed {
		if err := t.next(); err != nil {
			return err
		}
		t.rest = nil // after the end there is nothing to read
	}
	return nil
}

func (t *tunnel) next() error {
	c, err := t.recv()
	switch {
	case err == io.EOF:
		return io.ErrUnexpectedEOF
	case err != nil:
		return err
	case c == nil:
		return errNoChunk
	}
	t.rest = c.GetData()
	t.closed = c.GetClosed()
	t.end = t.end || t.closed || c.GetEnd()
	return nil
}

// Write implements duplex.Conn.
func (t *tunnel) Write(p []byte) (n int, err error) {
	for len(p) > 0 {
		piece := p[:min(len(p), chunkSize)]
		if err := t.write(piece, false, false); err != nil {
			return n, err
		}
		n, p = n+len(piece), p[len(piece):]
	}
	return n, nil
}

// CloseWrite implements duplex.Conn.
func (t *tunnel) CloseWrite() error { return t.write(nil, true, false) }

// FinishWrite implements duplex.Conn.
func (t *tunnel) FinishWrite() error { return t.write(nil, true, true) }

func (t *tunnel) write(data []byte, end, closed bool) error {
	t.out.Data, t.out.End, t.out.Closed = data, end, closed
	return t.send(&t.out)
}

// Abort implements duplex.Conn. On the serving node the error that the handler returns says it.
func (t *tunnel) Abort() (wait bool) {
	t.close()
	return false
}

// Close implements duplex.Conn.
func (t *tunnel) Close() error {
	t.close()
	return nil
}

// tunnel joins the ingress node's client with the apiserver until either is done. The goroutines of the splice end with the stream,
// which ends when the handler returns.
func (s *Server) tunnel(st stream, resp *http.Response) error {
	apiserver, ok := resp.Body.(duplex.Conn)
	if !ok {
		return internalBug.err(0, "body of a 101 is a %T", resp.Body)
	}
	head := &mvpv1.ForwardResponse{Part: &mvpv1.ForwardResponse_Head{Head: encodeResponse(resp)}}
	if err := st.Send(head); err != nil {
		apiserver.Close()
		return err
	}
	// When the ingress node gives up or this one stops, nothing is waited for.
	stop := context.AfterFunc(st.Context(), func() { apiserver.Close() })
	defer stop()
	if _, err := duplex.Splice(newServerTunnel(st), apiserver); err != nil {
		return s.failed(st.Context(), err, true)
	}
	return nil
}
