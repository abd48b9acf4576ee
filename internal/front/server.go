package front

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/duplex"
)

// ServerOptions are the settings of the HTTPS port.
type ServerOptions struct {
	// TLS has the serving certificate and the names of acceptable client CAs. Client certificates are asked for, not
	// required; the authenticator verifies them.
	TLS *tls.Config
	// MaxHeaderBytes bounds a request's head; kube-apiserver's own limit is 1 MiB.
	MaxHeaderBytes int
	// MaxConcurrentStreams bounds the streams of one HTTP/2 connection.
	MaxConcurrentStreams int
	Logger               *slog.Logger
}

// Server is the HTTPS port of a node.
type Server struct {
	http     *http.Server
	listener net.Listener
	// running counts the requests in the handler, connections that were taken over for another protocol included: net/http waits
	// neither for those nor, when it closes, for any.
	running atomic.Int64
	cut     context.CancelFunc // ends the context of every request
}

// NewServer prepares to serve handler on a listener, which it then owns. It starts nothing.
func NewServer(l net.Listener, handler http.Handler, o ServerOptions) *Server {
	t := o.TLS.Clone()
	t.NextProtos = []string{"h2", "http/1.1"}
	t.ClientAuth = tls.RequestClientCert
	base, cut := context.WithCancel(context.Background())
	s := &Server{
		listener: l,
		cut:      cut,
		http: &http.Server{
			TLSConfig:   t,
			BaseContext: func(net.Listener) context.Context { return base },
			ErrorLog:    slog.NewLogLogger(o.Logger.Handler(), slog.LevelDebug), // handshake noise of scanners
			// Slow heads are cut; bodies and answers may take their time (logs, watches, uploads).
			ReadHeaderTimeout: 10 * time.Second,
			IdleTimeout:       90 * time.Second,
			MaxHeaderBytes:    o.MaxHeaderBytes,
			// The sizes and times of RELIABILITY section 2; the pings find a client that vanished within 20 s (CASES E-01).
			HTTP2: &http.HTTP2Config{
				MaxConcurrentStreams:          o.MaxConcurrentStreams,
				MaxReadFrameSize:              256 << 10,
				MaxReceiveBufferPerStream:     256 << 10,
				MaxReceiveBufferPerConnection: 25 << 20,
				SendPingTimeout:               15 * time.Second,
				PingTimeout:                   5 * time.Second,
				WriteByteTimeout:              time.Minute, // a suspended client may come back; the apiserver has no limit at all
			},
			DisableGeneralOptionsHandler: true, // OPTIONS * is the apiserver's to answer
		},
	}
	s.http.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.running.Add(1)
		defer s.running.Add(-1)
		handler.ServeHTTP(w, r)
	})
	return s
}

// Addr is the address that the port is bound to.
func (s *Server) Addr() net.Addr { return s.listener.Addr() }

// Serve accepts connections until Shutdown or Close; then it returns nil. Any other end of the listener is an error.
func (s *Server) Serve() error {
	err := s.http.ServeTLS(duplex.Listen(s.listener), "", "")
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return fmt.Errorf("serve front on %s: %w", s.listener.Addr(), err)
}

// Shutdown stops accepting, lets running requests end until ctx is over, then cuts what is left. It returns when no request is in the
// handler any more.
func (s *Server) Shutdown(ctx context.Context) error {
	err := s.http.Shutdown(ctx)
	if err == nil {
		err = s.idle(ctx)
	}
	err = errors.Join(err, s.Close())
	// What was cut has only to notice it.
	return errors.Join(err, s.idle(context.WithoutCancel(ctx)))
}

// idlePoll is how often idle looks; net/http's own Shutdown polls as well.
const idlePoll = 10 * time.Millisecond

// idle waits until no request is in the handler.
func (s *Server) idle(ctx context.Context) error {
	tick := time.NewTicker(idlePoll)
	defer tick.Stop()
	for s.running.Load() > 0 {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// Close cuts everything at once.
func (s *Server) Close() error {
	s.cut()
	return s.http.Close()
}
