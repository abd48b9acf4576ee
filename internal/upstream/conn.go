package upstream

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/duplex"
)

// conn is one connection to the apiserver.
type conn struct {
	cc    *http.ClientConn
	h2    bool
	raw   *rawConn
	tls   *tls.Conn
	cert  *tls.Certificate // presented
	roots *x509.CertPool   // that verified the server
	used  atomic.Bool      // by a request
	// opened is when the dial began: a connection leads to the process that was listening at some time after it.
	opened time.Time

	// HTTP/2 only: settled is closed when the server's SETTINGS were certainly read. Until then net/http takes the limit of
	// streams for 100, and would let requests above a lower one wait for others to end, which watches do not. So a new
	// connection gets one request, the trial, whose response tells.
	settled   chan struct{}
	isSettled atomic.Bool
	trial     atomic.Bool // the one request was given

	// HTTP/1.1 only; guarded by pool.mu.
	isIdle bool      // in pool.idle
	since  time.Time // of being there
}

func (c *conn) protocol() string {
	if c.h2 {
		return "h2"
	}
	return "h1"
}

// settle is called with the first response, or when so much time passed that SETTINGS, a server's first frame, have come.
func (c *conn) settle() {
	if !c.isSettled.Swap(true) {
		close(c.settled)
	}
}

// reserve takes a place for one request, if there is one.
func (c *conn) reserve() bool {
	if c.h2 && !c.isSettled.Load() && c.trial.Swap(true) {
		return false
	}
	return c.cc.Reserve() == nil
}

// written is the number of bytes written on an HTTP/1.1 connection, which carries one request at a time; on HTTP/2 it says
// nothing about a single request.
func (c *conn) written() int64 { return c.raw.written.Load() }

// mayHaveSent reports whether the server may have processed the request that failed with err after before bytes were written.
func (c *conn) mayHaveSent(before int64, err error) bool {
	if c.h2 {
		return !unprocessed(err)
	}
	// net/http waits for its writing goroutine before it reports an error, so the count is final.
	return c.written() != before
}

// current reports whether the connection was made with the credentials that are in force.
func (c *conn) current(cert *tls.Certificate, roots *x509.CertPool) bool {
	return (c.cert == cert || sameCertificate(c.cert, cert)) && (c.roots == roots || c.roots.Equal(roots))
}

func sameCertificate(a, b *tls.Certificate) bool {
	return a != nil && b != nil && len(a.Certificate) > 0 && len(b.Certificate) > 0 && bytes.Equal(a.Certificate[0], b.Certificate[0])
}

// rawConn is the TCP connection below TLS.
type rawConn struct {
	*duplex.Socket
	written atomic.Int64
	ended   atomic.Bool // Close was called
	closed  func()      // called once, after the first Close
}

func (r *rawConn) Write(p []byte) (int, error) {
	n, err := r.Socket.Write(p)
	r.written.Add(int64(n))
	return n, err
}

func (r *rawConn) Close() error {
	err := r.Socket.Close()
	if !r.ended.Swap(true) {
		r.closed()
	}
	return err
}

// errNoCertificate is reported instead of a connection on which the apiserver would ignore the identity headers.
var errNoCertificate = errors.New("there is no front-proxy client certificate")

// expectWait is how long a body waits for a 100 Continue. Authentication, authorization and queueing come before it in an apiserver.
const expectWait = 5 * time.Second

// streamBuffer is enough for full speed on one host, where an answer to a window update takes less than a millisecond.
const streamBuffer = 256 << 10

// settleTime is long for an apiserver on the same machine and short for a client that waits behind a slow trial.
const settleTime = 100 * time.Millisecond

// dialer opens connections.
type dialer struct {
	o         Options
	addr      string
	transport *http.Transport // used for NewClientConn only, never for RoundTrip
	tcp       net.Dialer
}

type dialKey struct{}

func newDialer(o Options, addr string) *dialer {
	d := &dialer{
		o:    o,
		addr: addr,
		tcp: net.Dialer{
			Timeout: o.DialTimeout,
			// Three probes within PingTimeout after PingAfter of silence.
			KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: o.PingAfter, Interval: max(o.PingTimeout/3, time.Second), Count: 3},
			Control:         userTimeout(o.PingAfter + o.PingTimeout),
		},
	}
	d.transport = &http.Transport{
		DialTLSContext:     d.dialTLS,
		DisableCompression: true,
		ForceAttemptHTTP2:  !o.HTTP1,
		// A request that asks first sends its body when the apiserver says so, or after this time, as RFC 9110 section 10.1.1 wants.
		ExpectContinueTimeout: expectWait,
		HTTP2: &http.HTTP2Config{
			SendPingTimeout:  o.PingAfter,
			PingTimeout:      o.PingTimeout,
			WriteByteTimeout: o.PingAfter + o.PingTimeout,
			// What may wait here for one slow client (CASES S-09: at most 1 MiB in each node); net/http's own limit is 4 MiB. The
			// connection's is that of all its streams, so that no stream can take it from the others.
			MaxReceiveBufferPerStream:     streamBuffer,
			MaxReceiveBufferPerConnection: 128 * streamBuffer,
		},
	}
	return d
}

// open returns a new connection. closed is called once, when it has ended.
func (d *dialer) open(ctx context.Context, closed func(*conn)) (*conn, error) {
	c := &conn{cert: d.o.Certificate(), roots: d.o.Roots(), opened: time.Now()}
	if c.cert == nil || len(c.cert.Certificate) == 0 {
		return nil, errNoCertificate
	}
	if c.roots == nil {
		// A nil pool would mean the system's CAs to crypto/tls.
		return nil, errors.New("there are no CAs to verify the apiserver by")
	}
	c.raw = &rawConn{closed: func() { closed(c) }}
	cc, err := d.transport.NewClientConn(context.WithValue(ctx, dialKey{}, c), "https", d.addr)
	if err != nil {
		if ctx.Err() == nil && errors.Is(err, context.DeadlineExceeded) {
			// One of our own limits. Both net and crypto/tls report it as they report the end of the request's time, which callers
			// take for a reason to give up; an apiserver that cannot be reached is one to ask another.
			return nil, errors.New(err.Error())
		}
		return nil, err
	}
	c.cc = cc
	if c.h2 {
		c.settled = make(chan struct{})
		time.AfterFunc(settleTime, c.settle)
	}
	return c, nil
}

// dialTLS is the transport's hook: it connects the conn that open put into the context.
func (d *dialer) dialTLS(ctx context.Context, network, addr string) (net.Conn, error) {
	c, ok := ctx.Value(dialKey{}).(*conn)
	if !ok {
		return nil, errors.New("upstream: dial outside of open")
	}
	tcp, err := d.tcp.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	c.raw.Socket = duplex.NewSocket(tcp)
	protos := []string{"h2", "http/1.1"}
	if d.o.HTTP1 {
		protos = protos[1:]
	}
	tc := tls.Client(c.raw, &tls.Config{
		MinVersion: tls.VersionTLS12,
		ServerName: d.o.ServerName,
		RootCAs:    c.roots,
		NextProtos: protos,
		// Always this one: with Certificates, crypto/tls would send none to a server whose list of CAs does not name its issuer,
		// and the requests would count as anonymous.
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return c.cert, nil },
	})
	ctx, cancel := context.WithTimeout(ctx, d.o.TLSTimeout)
	defer cancel()
	if err := tc.HandshakeContext(ctx); err != nil {
		tcp.Close()
		return nil, fmt.Errorf("TLS with %s: %w", addr, err)
	}
	c.tls, c.h2 = tc, tc.ConnectionState().NegotiatedProtocol == "h2"
	return tc, nil
}
