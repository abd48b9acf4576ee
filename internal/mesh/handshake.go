package mesh

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"sync/atomic"
	"syscall"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
)

// handshakes are TLS credentials that remember whether the last try to connect ended because one side does not accept the other.
// gRPC itself reports that as one more way of being unavailable, in words only.
type handshakes struct {
	credentials.TransportCredentials
	onFailure func(error)
	last      atomic.Pointer[error] // about trust; nil after anything else
	network   atomic.Pointer[error] // of the last dial or handshake that failed otherwise
}

func newHandshakes(cfg *tls.Config) *handshakes {
	return &handshakes{TransportCredentials: credentials.NewTLS(cfg), onFailure: func(error) {}}
}

// Clone implements credentials.TransportCredentials. The clone remembers in the same place.
func (h *handshakes) Clone() credentials.TransportCredentials { return h }

// ClientHandshake implements credentials.TransportCredentials.
func (h *handshakes) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	c, info, err := h.TransportCredentials.ClientHandshake(ctx, authority, raw)
	if err != nil {
		h.failed(err)
		return nil, nil, err
	}
	return &firstRead{Conn: c, h: h}, info, nil
}

// failed remembers an error if it is about trust, and forgets the last one if it is about the network.
func (h *handshakes) failed(err error) {
	var timeout net.Error
	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded),
		errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, net.ErrClosed), errors.Is(err, syscall.ECONNRESET),
		errors.Is(err, syscall.EPIPE), errors.As(err, &timeout) && timeout.Timeout():
		h.last.Store(nil)
		h.network.Store(&err)
	default:
		h.last.Store(&err)
		h.onFailure(err)
	}
}

// dialer forgets the last failure when not even a connection could be made: the reason is another one then.
func (h *handshakes) dialer(
	dial func(context.Context, string) (net.Conn, error),
) func(context.Context, string) (net.Conn, error) {
	return func(ctx context.Context, address string) (net.Conn, error) {
		c, err := dial(ctx, address)
		if err != nil {
			h.last.Store(nil)
			h.network.Store(&err)
		}
		return c, err
	}
}

// lastError says why there is no connection, as well as is known.
func (h *handshakes) lastError() error {
	if err := h.last.Load(); err != nil {
		return &HandshakeError{Err: *err, status: status.New(codes.Unavailable, "no trusted connection")}
	}
	if err := h.network.Load(); err != nil {
		return *err
	}
	return errors.New("the connection was closed before it was up")
}

// firstRead watches the first bytes from the server. In TLS 1.3 the client's handshake is over before the server has looked at the
// client's certificate, so that a refusal arrives only there.
type firstRead struct {
	net.Conn
	h    *handshakes
	seen bool // by gRPC's one reading goroutine
}

// Read implements net.Conn.
func (c *firstRead) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if !c.seen {
		c.seen = true
		var alert *net.OpError
		if errors.As(err, &alert) && alert.Op == "remote error" { // how crypto/tls names an alert of the other side
			c.h.failed(err)
		} else {
			c.h.last.Store(nil)
		}
	}
	return n, err
}

// explain marks the error of a call that could not begin because of a handshake.
func (h *handshakes) explain(err error) error {
	if status.Code(err) != codes.Unavailable {
		return err
	}
	if last := h.last.Load(); last != nil {
		return &HandshakeError{Err: *last, status: status.Convert(err)}
	}
	return err
}

// HandshakeError reports a call that could not be made because the two ends of the connection do not accept each other: a wrong
// name, a foreign CA, an expired certificate.
type HandshakeError struct {
	Err    error // of the handshake
	status *status.Status
}

// Error implements error.
func (e *HandshakeError) Error() string { return "tls handshake: " + e.Err.Error() }

// Unwrap gives the error of the handshake.
func (e *HandshakeError) Unwrap() error { return e.Err }

// GRPCStatus is what gRPC made of it.
func (e *HandshakeError) GRPCStatus() *status.Status { return e.status }

// HandshakeFailed implements what internal/forward looks for.
func (e *HandshakeError) HandshakeFailed() bool { return true }
