package mesh

import (
	"context"
	"log/slog"
	"runtime/debug"
	"time"

	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/recovery"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// chain lists what every call passes, in reading order. Unary and stream calls pass the same.
func (s *Server) chain() []grpc.ServerOption {
	onPanic := recovery.WithRecoveryHandlerContext(s.onPanic)
	unary := []grpc.UnaryServerInterceptor{
		recovery.UnaryServerInterceptor(onPanic), // outermost, so that a bug in any of the others ends one call and no more
		s.observeUnary,                           // counts and logs refusals too
		s.admitUnary,                             // who calls, and may they
		s.boundUnary,                             // a deadline where the caller gave none
	}
	stream := []grpc.StreamServerInterceptor{
		recovery.StreamServerInterceptor(onPanic),
		s.observeStream,
		s.admitStream,
	}
	stream = append(stream, s.o.StreamInterceptors...) // of the registered services, such as forward's deadline rule
	return []grpc.ServerOption{grpc.ChainUnaryInterceptor(unary...), grpc.ChainStreamInterceptor(stream...)}
}

// onPanic keeps the stack here; the caller learns only that there was a bug.
func (s *Server) onPanic(ctx context.Context, p any) error {
	s.metrics.panics.Inc()
	method, _ := grpc.Method(ctx)
	s.o.Logger.ErrorContext(ctx, "panic", "method", method, "panic", p, "stack", string(debug.Stack()))
	return status.Error(codes.Internal, "internal error")
}

func (s *Server) observeUnary(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	done := s.observe(ctx, info.FullMethod)
	defer done(codes.Internal) // a panic passes by here
	resp, err := next(ctx, req)
	done(status.Code(err))
	return resp, err
}

func (s *Server) observeStream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	done := s.observe(ss.Context(), info.FullMethod)
	defer done(codes.Internal)
	err := next(srv, ss)
	done(status.Code(err))
	return err
}

// observe counts a call and writes its line; what it returns is called at the end, and only the first call counts.
func (s *Server) observe(ctx context.Context, method string) func(codes.Code) {
	m := s.metrics.of(method)
	m.inflight.Inc()
	start := time.Now()
	ended := false
	return func(code codes.Code) {
		if ended {
			return
		}
		ended = true
		m.inflight.Dec()
		s.metrics.handled(method, code)
		if s.o.Logger.Enabled(ctx, slog.LevelDebug) {
			peer, _ := peerOf(ctx, s.o.TLS)
			s.o.Logger.DebugContext(ctx, "call", "method", method, "peer", peer.Name, "code", code.String(), "took", time.Since(start))
		}
	}
}

func (s *Server) admitUnary(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	p, err := mayCall(ctx, s.o.TLS, info.FullMethod)
	if err != nil {
		return nil, err
	}
	return next(context.WithValue(ctx, peerKey{}, p), req)
}

func (s *Server) admitStream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	p, err := mayCall(ss.Context(), s.o.TLS, info.FullMethod)
	if err != nil {
		return err
	}
	return next(srv, &streamWithContext{ss, context.WithValue(ss.Context(), peerKey{}, p)})
}

type streamWithContext struct {
	grpc.ServerStream
	ctx context.Context
}

// Context implements grpc.ServerStream.
func (s *streamWithContext) Context() context.Context { return s.ctx }

func (s *Server) boundUnary(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	if _, ok := ctx.Deadline(); ok {
		return next(ctx, req)
	}
	ctx, cancel := context.WithTimeout(ctx, unaryTimeout)
	defer cancel()
	return next(ctx, req)
}
