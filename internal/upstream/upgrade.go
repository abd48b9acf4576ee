package upstream

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	"github.com/mvp-mesh/mvp-node/internal/duplex"
	"github.com/mvp-mesh/mvp-node/internal/reqctx"
)

// upgrade sends a request that asks for another protocol over a connection that was opened for it, speaks HTTP/1.1 only, and serves
// nothing else afterwards, whatever the answer: what could still come over it belongs to this client (CASES S-03, S-04).
func (t *Transport) upgrade(out *http.Request, rc *reqctx.Request) (*http.Response, *Error) {
	c, err := t.fresh.open(out.Context())
	if err != nil {
		return nil, &Error{Op: OpConnect, Err: err}
	}
	if !c.reserve() {
		c.cc.Close()
		return nil, &Error{Op: OpConnect, Err: errors.New("a new connection was closed at once")}
	}
	if !t.identified(out, rc) {
		c.cc.Close()
		return nil, &Error{Op: OpIdentity, Err: authz.ErrNoUser}
	}
	out.Body, out.ContentLength = http.NoBody, 0 // nobody sends one; front refuses it
	before := c.written()
	resp, err := c.cc.RoundTrip(out)
	if err != nil {
		c.cc.Close()
		return nil, &Error{Op: OpSend, Sent: c.mayHaveSent(before, err), Err: err}
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		resp.Body = &onceBody{resp.Body, c}
		return resp, nil
	}
	got := resp.Header["Upgrade"]
	rest, ok := resp.Body.(io.Reader)
	if len(got) != 1 || !strings.EqualFold(got[0], rc.Upgrade) || !ok {
		c.raw.Close()
		return nil, &Error{Op: OpUpgrade, Sent: true, Err: fmt.Errorf("%w: %q instead of %q", ErrUpgrade, got, rc.Upgrade)}
	}
	resp.Body = &upgraded{TLS: duplex.OverTLS(c.tls, rest, t.stall), conn: c}
	return resp, nil
}

// onceBody is the body of a refused upgrade. The connection ends with it.
type onceBody struct {
	io.ReadCloser
	conn *conn
}

// Close implements io.Closer.
func (b *onceBody) Close() error { return errors.Join(b.ReadCloser.Close(), b.conn.raw.Close()) }

// upgraded is a connection after a 101. net/http has let go of it, and keeps a goroutine that ends when it is closed there too.
type upgraded struct {
	*duplex.TLS
	conn *conn
}

// Close implements duplex.Conn.
func (u *upgraded) Close() error {
	err := u.TLS.Close()
	_ = u.conn.cc.Close()
	return err
}
