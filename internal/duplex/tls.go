package duplex

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"sync/atomic"
	"time"
)

// TLS is a Conn over a TLS connection. TLS can say both ends that a Conn has: a close_notify alert says that no more bytes come, and
// the end of the TCP connection below it that its owner is gone. Programs that close do both; those that half-close only the first.
type TLS struct {
	conn  *tls.Conn
	r     io.Reader
	stall time.Duration
	// armed is the write deadline in force. Owned by the writer.
	armed time.Time
	lost  atomic.Bool // a Write failed
	told  atomic.Bool // CloseWrite or Abort was called
	ended atomic.Bool // Close was called
}

// OverTLS makes a Conn of an established TLS connection over a Socket, which it then owns. r reads from it, if something was read
// ahead of it already; nil means conn itself. stall bounds how long a Write may make no progress; 0 means no bound.
func OverTLS(conn *tls.Conn, r io.Reader, stall time.Duration) *TLS {
	if r == nil {
		r = conn
	}
	return &TLS{conn: conn, r: r, stall: stall}
}

// Read implements Conn. The end of the TCP connection between two TLS records counts as an orderly end, as it does for crypto/tls:
// many programs close without a close_notify. After a failed Write it does not: then it is what is left to see of a reset.
func (t *TLS) Read(p []byte) (int, error) {
	n, err := t.r.Read(p)
	if err == io.EOF && t.lost.Load() {
		if s, ok := t.conn.NetConn().(interface{ Ended() bool }); ok && s.Ended() {
			return n, io.ErrUnexpectedEOF
		}
	}
	return n, err
}

// Write implements Conn.
func (t *TLS) Write(p []byte) (int, error) {
	t.arm()
	n, err := t.conn.Write(p)
	if err != nil {
		t.lost.Store(true)
	}
	return n, err
}

// arm moves the write deadline when a quarter of the limit is used up, not with each small write.
func (t *TLS) arm() {
	if t.stall <= 0 {
		return
	}
	if now := time.Now(); t.armed.Sub(now) < t.stall*3/4 {
		t.armed = now.Add(t.stall)
		_ = t.conn.SetWriteDeadline(t.armed) // fails only on a closed connection, which Write then reports
	}
}

// CloseWrite implements Conn.
func (t *TLS) CloseWrite() error {
	t.told.Store(true)
	t.arm()
	return t.conn.CloseWrite()
}

// WaitClosed implements Conn. What comes after a close_notify is no data, so the TCP connection is watched itself. A reset is as good
// an end as any by then: a kernel sends one for a program that closes without having read everything.
func (t *TLS) WaitClosed() error {
	raw := t.conn.NetConn()
	var ignored [64]byte
	var err error
	for err == nil {
		_, err = raw.Read(ignored[:])
	}
	if errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}

// FinishWrite implements Conn: the end of our half of the TCP connection.
func (t *TLS) FinishWrite() error {
	raw, ok := t.conn.NetConn().(interface{ CloseWrite() error })
	if !ok {
		return t.Close() // cannot be said otherwise; nothing of ours is lost by it
	}
	return raw.CloseWrite()
}

// beginOfRecord is the type byte of a TLS record (application data) whose rest never comes.
var beginOfRecord = []byte{23}

// Abort implements Conn. Many programs, crypto/tls among them, take the end of the TCP connection between two records for an orderly
// one, close_notify or not. So, unless CloseWrite was called, it is made to come within a record: after all that was written, and
// unlike a reset without destroying what is still on its way. If even one byte has no room, it is a reset.
func (t *TLS) Abort() (wait bool) {
	if t.told.Swap(true) {
		return true
	}
	raw := t.conn.NetConn()
	_ = raw.SetWriteDeadline(time.Now().Add(10 * time.Millisecond)) // also ends a Write under way, in the middle of a record
	if _, err := raw.Write(beginOfRecord); err != nil {
		if tcp, ok := raw.(interface{ SetLinger(int) error }); ok {
			_ = tcp.SetLinger(0)
		}
		t.Close()
		return false
	}
	_ = t.FinishWrite()
	return true
}

// Close implements Conn.
func (t *TLS) Close() error {
	if t.ended.Swap(true) {
		return net.ErrClosed
	}
	t.Abort()
	return t.conn.NetConn().Close()
}
