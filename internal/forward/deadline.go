package forward

import (
	mvpv1 "github.com/mvp-mesh/mvp-node/proto/mvp/v1"
	"google.golang.org/grpc"
)

// RequireDeadline is the interceptor that holds a Forward to its deadline class: a short request without a gRPC deadline is
// refused, because nothing would ever end it. It sees the head pass through RecvMsg, so the handler knows nothing of deadlines.
// Streams of other services pass untouched. The ingress side's counterpart is in internal/mesh, which gives every call on a
// connection for short requests a deadline.
func RequireDeadline() grpc.StreamServerInterceptor {
	return func(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		if info.FullMethod != mvpv1.ForwardService_Forward_FullMethodName {
			return handler(srv, ss)
		}
		return handler(srv, &deadlineStream{ServerStream: ss})
	}
}

type deadlineStream struct {
	grpc.ServerStream
	checked bool // by RecvMsg, which has one caller at a time
}

// RecvMsg implements grpc.ServerStream.
func (s *deadlineStream) RecvMsg(m any) error {
	if err := s.ServerStream.RecvMsg(m); err != nil || s.checked {
		return err
	}
	s.checked = true
	req, ok := m.(*mvpv1.ForwardRequest)
	if !ok || req.GetHead() == nil {
		return nil // the handler refuses it by name
	}
	switch class := req.GetHead().GetDeadlineClass(); class {
	case mvpv1.DeadlineClass_DEADLINE_CLASS_SHORT:
		if _, ok := s.Context().Deadline(); !ok {
			return noDeadline.err(0, "a short request without a deadline")
		}
	case mvpv1.DeadlineClass_DEADLINE_CLASS_LONG_RUNNING, mvpv1.DeadlineClass_DEADLINE_CLASS_UPGRADE:
	case mvpv1.DeadlineClass_DEADLINE_CLASS_UNSPECIFIED:
		return malformed.err(0, "no deadline class")
	default:
		return unsupported.err(0, "deadline class %v", class)
	}
	return nil
}
