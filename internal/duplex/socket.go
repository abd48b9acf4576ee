package duplex

import (
	"errors"
	"io"
	"net"
	"sync/atomic"
)

// Socket is a TCP connection below TLS that remembers how it ended. crypto/tls gives io.EOF for a close_notify and for the end of TCP
// between two records alike, and the kernel reports a reset only to the first who asks: when that is a Write, a Read under way sees
// nothing but the end.
type Socket struct {
	net.Conn
	ended atomic.Bool
}

// NewSocket wraps a connection.
func NewSocket(c net.Conn) *Socket { return &Socket{Conn: c} }

// Read implements io.Reader.
func (s *Socket) Read(p []byte) (int, error) {
	n, err := s.Conn.Read(p)
	if err == io.EOF {
		s.ended.Store(true)
	}
	return n, err
}

// Ended reports whether a Read came to the end of the connection.
func (s *Socket) Ended() bool { return s.ended.Load() }

// CloseWrite ends our half of the connection.
func (s *Socket) CloseWrite() error {
	if c, ok := s.Conn.(interface{ CloseWrite() error }); ok {
		return c.CloseWrite()
	}
	return errors.ErrUnsupported
}

// SetLinger is that of net.TCPConn.
func (s *Socket) SetLinger(seconds int) error {
	if c, ok := s.Conn.(interface{ SetLinger(int) error }); ok {
		return c.SetLinger(seconds)
	}
	return errors.ErrUnsupported
}

// Listen makes every connection of l a Socket.
func Listen(l net.Listener) net.Listener { return listener{l} }

type listener struct{ net.Listener }

// Accept implements net.Listener.
func (l listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return NewSocket(c), nil
}
