package upstream

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	"github.com/mvp-mesh/mvp-node/internal/reqctx"
)

// Options configure a Transport. Start from DefaultOptions.
type Options struct {
	// URL is the local apiserver's, https://host:port, without path. Required.
	URL *url.URL
	// Certificate returns the front-proxy client certificate, by which the apiserver believes the identity headers. Required. It
	// is asked for every request and must be cheap; while nothing changed it returns the same pointer. When it returns another
	// certificate, connections made with the old one take no new requests: the apiserver checks the certificate's dates on
	// each request, so an old connection would start to answer 401.
	Certificate func() *tls.Certificate
	// Roots returns the CAs that may have signed the apiserver's serving certificate. Required; the rules of Certificate hold.
	Roots func() *x509.CertPool
	// ServerName is checked in the serving certificate and sent as SNI; empty means the host of URL.
	ServerName string
	// OnOutdated is called, on the request's goroutine, when the apiserver has no route for what its catalog says it serves; it is
	// to have the catalog read again and must not block. May be nil.
	OnOutdated func()
	// HeaderNames are those that the apiserver is configured with.
	HeaderNames authz.HeaderNames

	// HTTP1 restricts the connections to HTTP/1.1, one request at a time each. By default the apiserver chooses, and chooses
	// HTTP/2 unless that was switched off.
	HTTP1 bool
	// Connections is how many HTTP/2 connections are kept. More than one spreads the work of framing and encryption over cores;
	// whatever the number, another is opened when all are at the server's limit of streams (100 at a kube-apiserver).
	Connections int
	// ReadConnections is how many HTTP/1.1 connections are opened, as they are needed, for short reads (get and list of
	// resources, discovery), beside those for everything else. HTTP/1.1 costs both ends about a quarter less CPU for a small answer, and
	// its one weakness, that an answer missing on a reused connection does not tell whether the request was processed, does no
	// harm to a read: it goes again, once, another way. Reads above the number share the HTTP/2 connections. 0 switches this off.
	ReadConnections int
	// DialTimeout bounds the TCP connect, TLSTimeout the handshake after it.
	DialTimeout, TLSTimeout time.Duration
	// PingAfter is the silence after which an HTTP/2 connection is asked for a sign of life, PingTimeout how long that may take.
	// Their sum is the time in which a dead connection is found (CASES E-01: 20 s). It also bounds how long written bytes may
	// stay unacknowledged by TCP.
	PingAfter, PingTimeout time.Duration
	// IdleHTTP1 is how long an unused HTTP/1.1 connection is trusted. Shorter than the apiserver's own 90 s, so that a request
	// does not meet a connection that is being closed.
	IdleHTTP1 time.Duration
	// StallTimeout bounds how long the apiserver may leave bytes of an upgraded connection (exec, port-forward) unread.
	StallTimeout time.Duration

	// Logger and Registerer are required.
	Logger     *slog.Logger
	Registerer prometheus.Registerer
}

// DefaultOptions gives every default; the required fields are left empty.
func DefaultOptions() Options {
	return Options{
		HeaderNames:     authz.DefaultHeaderNames(),
		Connections:     2,
		ReadConnections: 64,
		DialTimeout:     3 * time.Second,
		TLSTimeout:      3 * time.Second,
		PingAfter:       15 * time.Second,
		PingTimeout:     5 * time.Second,
		IdleHTTP1:       60 * time.Second,
		StallTimeout:    5 * time.Minute,
	}
}

// Validate reports everything that is wrong with the options.
func (o Options) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf("upstream: "+format, args...)) }
	switch {
	case o.URL == nil:
		bad("URL is missing")
	case o.URL.Scheme != "https" || o.URL.Hostname() == "" || o.URL.User != nil || o.URL.Path != "" && o.URL.Path != "/" || o.URL.RawQuery != "":
		bad("URL %q is not https://host:port", o.URL.Redacted())
	}
	if o.Certificate == nil {
		bad("Certificate is missing")
	}
	if o.Roots == nil {
		bad("Roots is missing")
	}
	if len(o.HeaderNames.User) == 0 || len(o.HeaderNames.Group) == 0 {
		bad("HeaderNames has no name for the user or none for groups")
	}
	if o.Connections < 1 {
		bad("Connections is %d, at least 1 is needed", o.Connections)
	}
	if o.ReadConnections < 0 {
		bad("ReadConnections is %d, it cannot be negative", o.ReadConnections)
	}
	for name, d := range map[string]time.Duration{"DialTimeout": o.DialTimeout, "TLSTimeout": o.TLSTimeout, "PingAfter": o.PingAfter, "PingTimeout": o.PingTimeout, "IdleHTTP1": o.IdleHTTP1, "StallTimeout": o.StallTimeout} {
		if d <= 0 {
			bad("%s is %s, it must be positive", name, d)
		}
	}
	if o.Logger == nil || o.Registerer == nil {
		bad("Logger or Registerer is missing")
	}
	return errors.Join(errs...)
}

// Transport sends requests to the local apiserver. Safe for concurrent use; made by New, ended by Close.
type Transport struct {
	url     *url.URL
	names   authz.HeaderNames
	userKey string // canonical name of the header that carries the user
	pool    *pool
	reads   *pool // HTTP/1.1, for short reads; nil if switched off
	fresh   *pool // HTTP/1.1, for upgrades; its connections are used once
	metrics *metrics

	stall      time.Duration
	onOutdated func()
}

// New makes a Transport. It opens no connection: the apiserver need not be up.
func New(o Options) (*Transport, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	u := &url.URL{Scheme: o.URL.Scheme, Host: o.URL.Host}
	if u.Port() == "" {
		u.Host = net.JoinHostPort(u.Hostname(), "443")
	}
	if o.ServerName == "" {
		o.ServerName = u.Hostname()
	}
	m, err := newMetrics(o.Registerer)
	if err != nil {
		return nil, fmt.Errorf("upstream: metrics: %w", err)
	}
	t := &Transport{
		url:     u,
		names:   o.HeaderNames,
		userKey: http.CanonicalHeaderKey(o.HeaderNames.User[0]),
		pool:    newPool(o, u.Host, m),
		metrics: m,

		stall:      o.StallTimeout,
		onOutdated: o.OnOutdated,
	}
	h1 := o
	h1.HTTP1 = true
	t.fresh = newPool(h1, u.Host, m)
	if o.ReadConnections > 0 && !o.HTTP1 {
		t.reads = newPool(h1, u.Host, m)
	}
	return t, nil
}

// Close ends all connections, with the requests on them, and waits for dials to end. RoundTrip fails afterwards.
func (t *Transport) Close() {
	t.pool.close()
	t.fresh.close()
	if t.reads != nil {
		t.reads.close()
	}
}

// maxMoves bounds how often a request is moved from one connection to another. Connections that an apiserver closes while it
// shuts down go away together; one more than the usual number of them is enough.
const maxMoves = 3

// RoundTrip sends req to the local apiserver as the user of its context (reqctx) and returns the apiserver's answer as it is:
// redirects are not followed, compressed bodies not opened. req and its header are left unchanged; req may be a request that an
// http.Server received. A request whose body is untouched and that certainly was not processed is tried on another connection,
// and so is, once, a read whose reused connection ended without an answer; no other is.
//
// A request for an upgrade (reqctx) goes over a connection of its own. If the answer is a 101 to what was asked for, its body is a
// duplex.Conn, which lives on when the request's context ends. Any other answer is returned as it is.
// Errors are *Error. As with every RoundTripper the body of req is closed, and the caller closes that of the response.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := t.roundTrip(req)
	if err != nil {
		if req.Body != nil {
			req.Body.Close()
		}
		sent := "false"
		if err.Sent {
			sent = "true"
		}
		t.metrics.errors.WithLabelValues(err.Op, sent).Inc()
		return nil, err
	}
	resp.Request = req
	return resp, nil
}

func (t *Transport) roundTrip(req *http.Request) (*http.Response, *Error) {
	rc, ok := reqctx.From(req.Context())
	if !ok {
		return nil, &Error{Op: OpIdentity, Err: authz.ErrNoUser}
	}
	out, err := t.outgoing(req, rc)
	if err != nil {
		return nil, err.(*Error)
	}
	if rc.Upgrade != "" {
		return t.upgrade(out, rc)
	}
	// A server's request says 0 when it has none, though over HTTP/2 it comes with a Body; a client's would mean that it does not know.
	hasBody := req.Body != nil && req.Body != http.NoBody && req.ContentLength != 0
	if !hasBody {
		out.Body = http.NoBody
	}
	shortRead := !hasBody && !rc.LongRunning && rc.Attributes.ReadOnly()
	small, err := bodyInHand(req)
	if err != nil {
		if ctxErr := req.Context().Err(); ctxErr != nil {
			err = ctxErr
		}
		return nil, &Error{Op: OpBody, Err: err}
	}
	for moves := 0; ; moves++ {
		var b *body
		if small != nil {
			out.Body = io.NopCloser(bytes.NewReader(small))
		} else if hasBody {
			b = &body{rc: req.Body, trailer: out.Trailer, from: req}
			out.Body = b
		}
		c, err := t.acquire(req.Context(), shortRead)
		if err != nil {
			return nil, &Error{Op: OpConnect, Err: err}
		}
		if !t.identified(out, rc) {
			c.cc.Release()
			return nil, &Error{Op: OpIdentity, Err: authz.ErrNoUser}
		}
		before, reused := c.written(), c.used.Swap(true)
		resp, err := c.cc.RoundTrip(out)
		if err == nil {
			if c.h2 && !c.isSettled.Load() {
				c.settle()
			}
			if b != nil {
				b.release()
			}
			if t.outdated(c, rc, resp) {
				return nil, t.refuseOutdated(resp)
			}
			return resp, nil
		}
		sent := c.mayHaveSent(before, err)
		// The usual end of an idle HTTP/1.1 connection, seen too late.
		again := shortRead && reused && !c.h2
		if sent && !again || moves == maxMoves || b.touched() || req.Context().Err() != nil {
			return nil, &Error{Op: OpSend, Sent: sent, Err: err}
		}
		if sent {
			shortRead = false // by HTTP/2, and not a third time
		}
		t.metrics.moved.Inc()
	}
}

// maxSmallBody bounds the bodies that are read before they are sent. An apiserver may refuse a request by GOAWAY after part of its body
// went out (kube-apiserver's --goaway-chance does so all the time); most bodies are small, and with them the request can be moved.
const maxSmallBody = 32 << 10

// bodyInHand reads a body that is known to be small; nil if it is not, or if the client waits to be asked for it.
func bodyInHand(req *http.Request) ([]byte, error) {
	if req.Body == nil || req.ContentLength <= 0 || req.ContentLength > maxSmallBody || len(req.Header["Expect"]) > 0 {
		return nil, nil
	}
	b := make([]byte, req.ContentLength)
	if _, err := io.ReadFull(req.Body, b); err != nil {
		return nil, err
	}
	req.Body.Close() // as every RoundTripper does when it has read it
	return b, nil
}

// acquire returns a connection with a place for one request.
func (t *Transport) acquire(ctx context.Context, shortRead bool) (*conn, error) {
	if shortRead && t.reads != nil {
		if c := t.reads.take(); c != nil {
			return c, nil
		}
		if t.reads.size() < t.reads.limit {
			return t.reads.acquire(ctx)
		}
	}
	return t.pool.acquire(ctx)
}

// body stands before the request's body while it may still be needed on another connection: net/http closes a body on every
// error, also when it did not read from it.
type body struct {
	rc io.ReadCloser
	// trailer gets its values from those of the request from at the end of rc; nil if none are announced.
	trailer http.Header
	from    *http.Request

	mu       sync.Mutex
	read     bool // Read was called
	closed   bool // Close was called
	released bool // a response came, so Close means it
}

func (b *body) Read(p []byte) (int, error) {
	b.mu.Lock()
	if b.closed {
		b.mu.Unlock()
		return 0, http.ErrBodyReadAfterClose
	}
	b.read = true
	b.mu.Unlock()
	n, err := b.rc.Read(p)
	if err == io.EOF {
		for name := range b.trailer {
			b.trailer[name] = b.from.Trailer[name]
		}
	}
	return n, err
}

func (b *body) Close() error {
	b.mu.Lock()
	first := !b.closed
	b.closed = true
	pass := first && b.released
	b.mu.Unlock()
	if pass {
		return b.rc.Close()
	}
	return nil
}

// release lets Close through from now on.
func (b *body) release() {
	b.mu.Lock()
	b.released = true
	pass := b.closed
	b.mu.Unlock()
	if pass {
		b.rc.Close()
	}
}

// touched reports whether the body cannot be sent by another body any more. A request without one never is.
func (b *body) touched() bool {
	if b == nil {
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.read
}
