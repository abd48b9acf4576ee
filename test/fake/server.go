package fake

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
)

// HeaderCase names the case that a request belongs to.
const HeaderCase = "X-Case"

// frontProxyName is the common name by which the apiserver knows a front proxy, as --requestheader-allowed-names.
const frontProxyName = "front-proxy-client"

// User is somebody whom the apiserver knows.
type User struct {
	Name, UID string
	Groups    []string
	Extra     map[string][]string
}

// Options say what apiserver to play.
type Options struct {
	Name        string
	Version     string // as /version says it
	Certificate tls.Certificate
	ClientCAs   *x509.CertPool // of clients and of front proxies
	// Serves lists the resources, or resource/subresource, of each group/version. All have every verb.
	Serves map[string][]string
	// Tokens are the bearer tokens that a TokenReview accepts.
	Tokens map[string]User
}

// Server is a fake kube-apiserver with HTTP/1.1 and HTTP/2. Make it with Start.
type Server struct {
	o    Options
	http *httptest.Server
	hold chan struct{} // closed to end open watches

	mu    sync.Mutex
	cases map[string]*Exchange
	stray []string
}

// Start binds a port of 127.0.0.1 and serves until Close.
func Start(o Options) *Server {
	s := &Server{o: o, hold: make(chan struct{}), cases: map[string]*Exchange{}}
	s.http = httptest.NewUnstartedServer(s)
	s.http.EnableHTTP2 = true
	s.http.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	s.http.TLS = &tls.Config{Certificates: []tls.Certificate{o.Certificate}, ClientAuth: tls.VerifyClientCertIfGiven, ClientCAs: o.ClientCAs}
	s.http.StartTLS()
	return s
}

// Close ends everything.
func (s *Server) Close() {
	close(s.hold)
	s.http.CloseClientConnections()
	s.http.Close()
}

// URL is https://host:port.
func (s *Server) URL() string { return s.http.URL }

// Addr is host:port.
func (s *Server) Addr() string { return s.http.Listener.Addr().String() }

// Begin lets requests of a case be answered by a script until the exchange's Finish. A case has one exchange at a time.
func (s *Server) Begin(id string, script Script) *Exchange {
	e := &Exchange{server: s, id: id, script: script, changed: make(chan struct{}), client: nothing}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cases[id] != nil {
		panic("fake: case " + id + " runs already")
	}
	s.cases[id] = e
	return e
}

func (s *Server) forget(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.cases, id)
}

// Stray lists requests of cases that were not under way: sent to the wrong apiserver, or twice.
func (s *Server) Stray() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.stray)
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if ids := r.Header[HeaderCase]; len(ids) > 0 {
		s.mu.Lock()
		e := s.cases[ids[0]]
		if e == nil {
			s.stray = append(s.stray, fmt.Sprintf("%s: %s %s of case %q", s.o.Name, r.Method, r.RequestURI, ids))
		}
		s.mu.Unlock()
		if e == nil {
			w.WriteHeader(http.StatusTeapot)
			return
		}
		e.serve(w, r)
		return
	}
	s.api(w, r)
}

// api is what nodes ask for themselves.
func (s *Server) api(w http.ResponseWriter, r *http.Request) {
	switch path := r.URL.Path; {
	case path == "/readyz" || path == "/livez":
		fmt.Fprint(w, "ok")
	case path == "/version":
		reply(w, http.StatusOK, map[string]string{"gitVersion": s.o.Version})
	case path == "/api" || path == "/apis":
		s.discovery(w, r)
	case strings.HasSuffix(path, "/tokenreviews"):
		s.tokenReview(w, r)
	case strings.HasSuffix(path, "/subjectaccessreviews"):
		s.accessReview(w, r)
	case strings.HasSuffix(path, "/selfsubjectreviews"):
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusCreated)
		writeReview(w, s.identity(r))
	case strings.HasSuffix(path, "/apiservices"), strings.HasSuffix(path, "/customresourcedefinitions"):
		s.watched(w, r)
	default:
		w.Header().Set("X-Content-Type-Options", "nosniff")
		http.Error(w, "404 page not found", http.StatusNotFound)
	}
}
