package front

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"
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
}

// NewServer prepares to serve handler on a listener, which it then owns. It starts nothing.
func NewServer(l net.Listener, handler http.Handler, o ServerOptions) *Server {
	t := o.TLS.Clone()
	t.NextProtos = []string{"h2", "http/1.1"}
	t.ClientAuth = tls.RequestClientCert
	return &Server{
		listener: l,
		http: &http.Server{
			Handler:   handler,
			TLSConfig: t,
			ErrorLog:  slog.NewLogLogger(o.Logger.Handler(), slog.LevelDebug), // handshake noise of scanners
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
}

// Addr is the address that the port is bound to.
func (s *Server) Addr() net.Addr { return s.listener.Addr() }

// Serve accepts connections until Shutdown or Close; then it returns nil. Any other end of the listener is an error.
func (s *Server) Serve() error {
	err := s.http.ServeTLS(s.listener, "", "")
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return fmt.Errorf("serve front on %s: %w", s.listener.Addr(), err)
}

// Shutdown stops accepting, lets running requests end until ctx is over, then cuts what is left.
func (s *Server) Shutdown(ctx context.Context) error {
	if err := s.http.Shutdown(ctx); err != nil {
		return errors.Join(err, s.http.Close())
	}
	return nil
}

// Close cuts everything at once.
func (s *Server) Close() error { return s.http.Close() }
