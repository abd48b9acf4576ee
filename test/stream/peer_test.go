package stream_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/protobuf/proto"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	mvpv1 "github.com/mvp-mesh/mvp-node/proto/mvp/v1"
)

// peer stands before the mesh port of node b with b's own certificate, and passes what node a calls on to it. It sees what b is sent,
// can answer in its place as no honest node would, and can retire connections.
type peer struct {
	listener net.Listener
	toB      *grpc.ClientConn
	tls      *tls.Config
	serving  sync.WaitGroup

	mu        sync.Mutex
	current   *handover
	servers   []*grpc.Server
	deadlines []time.Duration                  // that forwards came with; 0 is none
	forward   func(ss grpc.ServerStream) error // instead of b, if set
}

// handover is a listener that is given its connections.
type handover struct {
	net.Listener
	conns chan net.Conn
	done  chan struct{}
	close func()
}

// Accept implements net.Listener.
func (h *handover) Accept() (net.Conn, error) {
	select {
	case c := <-h.conns:
		return c, nil
	case <-h.done:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener; the real one stays open.
func (h *handover) Close() error {
	h.close()
	return nil
}

// meshTLS is the mesh identity of a node.
func (m *mesh) meshTLS(name string) authz.MeshTLS {
	cert, err := tls.LoadX509KeyPair(m.path("mesh-"+name+".crt"), m.path("mesh-"+name+".key"))
	m.must(err)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(m.meshCA.ca.CertPEM())
	return authz.MeshTLS{
		Certificate: func() *tls.Certificate { return &cert }, Roots: func() *x509.CertPool { return roots },
		Rules: authz.PeerRules{ClusterID: "test"},
	}
}

// newPeer puts a peer between a and b.
func newPeer(t *testing.T, m *mesh) *peer {
	t.Helper()
	l, err := net.Listen("tcp", m.ip("b")+":7446")
	m.must(err)
	p := &peer{listener: l, tls: m.meshTLS("b").Server("h2", authz.RoleNode, authz.RoleOperator)}
	p.toB, err = grpc.NewClient("passthrough:///"+m.ip("b")+":7444", grpc.WithTransportCredentials(credentials.NewTLS(m.meshTLS("a").Client("h2", "b"))),
		grpc.WithAuthority("test"), grpc.WithDefaultCallOptions(grpc.ForceCodec(rawCodec{}), grpc.MaxCallRecvMsgSize(16<<20)))
	m.must(err)
	p.rotate()
	p.serving.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			p.mu.Lock()
			h := p.current
			p.mu.Unlock()
			select {
			case h.conns <- c:
			case <-h.done:
				c.Close() // retired at this very moment; a dials again
			}
		}
	})
	to := l.Addr().String()
	m.meshRelay["b"].to.Store(&to)
	m.meshRelay["b"].cut(orderly) // what there was went around the peer
	t.Cleanup(func() {
		l.Close()
		p.mu.Lock()
		servers := p.servers
		p.mu.Unlock()
		for _, s := range servers {
			s.Stop()
		}
		p.toB.Close()
		p.serving.Wait()
	})
	return p
}

// rotate serves new connections by a new server and retires those of the old one: GOAWAY, and what runs goes on.
func (p *peer) rotate() {
	s := grpc.NewServer(grpc.Creds(credentials.NewTLS(p.tls)), grpc.ForceServerCodec(rawCodec{}), grpc.UnknownServiceHandler(p.pass),
		grpc.MaxRecvMsgSize(16<<20), grpc.WaitForHandlers(true))
	done := make(chan struct{})
	h := &handover{Listener: p.listener, conns: make(chan net.Conn), done: done, close: sync.OnceFunc(func() { close(done) })}
	p.serving.Go(func() { _ = s.Serve(h) })
	p.mu.Lock()
	var old *grpc.Server
	if n := len(p.servers); n > 0 {
		old = p.servers[n-1]
	}
	p.current = h
	p.servers = append(p.servers, s)
	p.mu.Unlock()
	if old != nil {
		p.serving.Go(old.GracefulStop)
	}
}

// answer has forwards answered by f; nil lets b answer.
func (p *peer) answer(f func(ss grpc.ServerStream) error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.forward = f
}

// pass is the handler of every call.
func (p *peer) pass(_ any, ss grpc.ServerStream) error {
	method, _ := grpc.MethodFromServerStream(ss)
	if method == mvpv1.ForwardService_Forward_FullMethodName {
		var left time.Duration
		if end, ok := ss.Context().Deadline(); ok {
			left = time.Until(end)
		}
		p.mu.Lock()
		p.deadlines = append(p.deadlines, left)
		forward := p.forward
		p.mu.Unlock()
		if forward != nil {
			return forward(ss)
		}
	}
	ctx, cancel := context.WithCancel(ss.Context())
	cs, err := p.toB.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method)
	if err != nil {
		cancel()
		return err
	}
	var up sync.WaitGroup
	defer up.Wait()
	defer cancel()
	up.Go(func() {
		for {
			var f []byte
			err := ss.RecvMsg(&f)
			if err == io.EOF {
				_ = cs.CloseSend()
				return
			}
			if err != nil || cs.SendMsg(&f) != nil {
				return
			}
		}
	})
	for {
		var f []byte
		err := cs.RecvMsg(&f)
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if err := ss.SendMsg(&f); err != nil {
			return err
		}
	}
}

// rawCodec hands messages through as they are, and encodes those of the protocol for who wants to read or write them.
type rawCodec struct{}

// Name implements encoding.Codec: it is what goes over the wire.
func (rawCodec) Name() string { return "proto" }

// Marshal implements encoding.Codec.
func (rawCodec) Marshal(v any) ([]byte, error) {
	switch v := v.(type) {
	case *[]byte:
		return *v, nil
	case proto.Message:
		return proto.Marshal(v)
	}
	return nil, fmt.Errorf("a %T", v)
}

// Unmarshal implements encoding.Codec.
func (rawCodec) Unmarshal(data []byte, v any) error {
	switch v := v.(type) {
	case *[]byte:
		*v = append([]byte(nil), data...)
		return nil
	case proto.Message:
		return proto.Unmarshal(data, v)
	}
	return errors.New("neither bytes nor a message")
}

// lastDeadline is what the last forward came with.
func (p *peer) lastDeadline() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.deadlines) == 0 {
		return -1
	}
	return p.deadlines[len(p.deadlines)-1]
}
