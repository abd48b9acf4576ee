package forward

import (
	"errors"
	"fmt"

	"github.com/mvp-mesh/mvp-node/internal/route"
	mvpv1 "github.com/mvp-mesh/mvp-node/proto/mvp/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Error says why a request could not be forwarded, or why its answer broke off.
type Error struct {
	// Cause is what the client is told. It already follows the rule of write safety: a write that may have been executed is
	// OutcomeUnknown, whatever went wrong.
	Cause route.Cause
	// Dispatched reports whether any apiserver may have seen the request. False is certain, true is not.
	Dispatched bool
	// Peer is the node that was asked last; empty if none was.
	Peer string
	// Generation is the peer's current catalog generation with NotServed, else 0.
	Generation uint64
	// Err is what happened, for logs. It may name addresses and is not for clients.
	Err error
}

// Error implements error.
func (e *Error) Error() string {
	s := "forward"
	if e.Peer != "" {
		s += " to " + e.Peer
	}
	s += ": " + e.Cause.String()
	if e.Dispatched {
		s += " after dispatch"
	}
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// Unwrap gives the error behind.
func (e *Error) Unwrap() error { return e.Err }

// RequestBodyError reports that the request's own body could not be read: the client went away, sent less than it announced, or
// more than is allowed. It is no failure of a peer.
type RequestBodyError struct {
	// Dispatched reports whether an apiserver may have seen the beginning of the request.
	Dispatched bool
	Err        error
}

// Error implements error.
func (e *RequestBodyError) Error() string { return "read request body: " + e.Err.Error() }

// Unwrap gives the error of the body's reader.
func (e *RequestBodyError) Unwrap() error { return e.Err }

// refusal is a reason for which a serving node ends a Forward without a complete answer.
type refusal uint8

const (
	malformed      refusal = iota + 1 // the stream is not what the protocol says
	noDeadline                        // a short request without a deadline
	unsupported                       // a deadline class that this node does not know
	foreignCluster                    // head of another cluster
	wrongIngress                      // the head names another node than the certificate
	looped                            // forwarded more than once, or never
	denied                            // the peer may not assert this user
	notReady                          // this node drains, or its apiserver is down
	otherReading                      // the request means something else to this node than to the ingress node
	notServed                         // the local apiserver does not serve it
	expired                           // the deadline was over before the apiserver was asked
	unreachable                       // the local apiserver got no byte of it
	broken                            // the local apiserver may have got it, and gave no complete answer
	tooLate                           // the local apiserver may have got it, and the deadline was over first
	bodyBroken                        // the rest of the request body did not arrive
	badAnswer                         // the local apiserver answered, in a way that must not reach the client
	internalBug                       // this node has a bug; nothing was sent
	endOfRefusals
)

// row is one line of the table between what happened on the serving node, the gRPC status on the wire and what the ingress node
// makes of it.
type row struct {
	code       codes.Code
	cause      route.Cause
	dispatched bool
}

// rows is the one table. dispatched=false is a promise to the ingress node, which may then send even a write elsewhere.
var rows = map[refusal]row{
	malformed:      {codes.InvalidArgument, route.PeerRefused, false},
	noDeadline:     {codes.InvalidArgument, route.PeerRefused, false},
	unsupported:    {codes.Unimplemented, route.PeerRefused, false},
	foreignCluster: {codes.PermissionDenied, route.PeerRefused, false},
	wrongIngress:   {codes.PermissionDenied, route.PeerRefused, false},
	looped:         {codes.FailedPrecondition, route.LoopDetected, false},
	denied:         {codes.PermissionDenied, route.AssertionDenied, false},
	notReady:       {codes.Unavailable, route.LocalUnavailable, false},
	otherReading:   {codes.InvalidArgument, route.PeerRefused, false},
	notServed:      {codes.FailedPrecondition, route.NotServed, false},
	expired:        {codes.DeadlineExceeded, route.DeadlineBeforeDispatch, false},
	unreachable:    {codes.Unavailable, route.LocalUnavailable, false},
	broken:         {codes.Unavailable, route.LocalUnavailable, true},
	tooLate:        {codes.DeadlineExceeded, route.OutcomeUnknown, true},
	bodyBroken:     {codes.InvalidArgument, route.PeerRefused, true},
	badAnswer:      {codes.FailedPrecondition, route.BadAnswer, true},
	internalBug:    {codes.Internal, route.PeerRefused, false},
}

// bare tells what a gRPC status without a ForwardError means once the head was handed to the connection. Such a status comes from
// gRPC itself or from an interceptor. Codes that are not listed mean PeerRefused and, to be safe, dispatched.
var bare = map[codes.Code]row{
	// Interceptors and gRPC's own dispatch answer these before the handler runs; the handler itself always adds a detail.
	codes.Unauthenticated:  {codes.Unauthenticated, route.PeerRefused, false},
	codes.PermissionDenied: {codes.PermissionDenied, route.PeerRefused, false},
	codes.Unimplemented:    {codes.Unimplemented, route.PeerRefused, false},
	// The connection broke, or the peer stopped.
	codes.Unavailable: {codes.Unavailable, route.NoPeerAvailable, true},
	codes.Canceled:    {codes.Canceled, route.NoPeerAvailable, true},
	// Our own deadline: the same number of seconds is an apiserver's own reason for a 504.
	codes.DeadlineExceeded: {codes.DeadlineExceeded, route.OutcomeUnknown, true},
}

// elsewhere lists the causes of a refusal that another peer may not have. The others are about the request itself, or about a
// decision that must not be shopped around.
var elsewhere = map[route.Cause]bool{
	route.NoPeerAvailable:  true,
	route.PeerTLS:          true,
	route.PeerBusy:         true,
	route.PeerRefused:      true,
	route.NotServed:        true,
	route.LocalUnavailable: true,
}

// err makes the gRPC status of a refusal. The text goes to the ingress node's log, never to a client.
func (r refusal) err(generation uint64, format string, args ...any) error {
	t := rows[r]
	st := status.New(t.code, fmt.Sprintf(format, args...))
	detailed, err := st.WithDetails(&mvpv1.ForwardError{
		Cause:             t.cause.String(),
		Dispatched:        t.dispatched,
		CatalogGeneration: generation,
	})
	if err != nil {
		return st.Err() // only for code OK, which no row has
	}
	return detailed.Err()
}

// sendable are the causes that a serving node may name; any other is one that it cannot know about.
var sendable = func() map[route.Cause]bool {
	m := make(map[route.Cause]bool)
	for _, r := range rows {
		m[r.cause] = true
	}
	return m
}()

// fromStatus reads the error that ended a Forward. handedOver tells whether the head was given to the connection: before that, no
// server can have acted on it, whatever the status says. readOnly is the verb's.
func fromStatus(err error, peer string, handedOver, readOnly bool) *Error {
	e := &Error{Peer: peer, Err: err}
	st, _ := status.FromError(err)
	detail, ok := forwardError(st)
	switch {
	case ok:
		e.Cause, e.Dispatched, e.Generation = route.ParseCause(detail.Cause), detail.Dispatched, detail.CatalogGeneration
		if !sendable[e.Cause] {
			e.Cause = route.PeerRefused
		}
	default:
		r, known := bare[st.Code()]
		if !known {
			r = row{cause: route.PeerRefused, dispatched: true}
		}
		e.Cause, e.Dispatched = r.cause, r.dispatched
		if h, ok := errors.AsType[handshakeError](err); ok && h.HandshakeFailed() {
			e.Cause = route.PeerTLS
		}
	}
	if !handedOver {
		e.Dispatched = false
	}
	switch {
	case !e.Dispatched && e.Cause == route.OutcomeUnknown:
		e.Cause = route.DeadlineBeforeDispatch
	case e.Dispatched && e.Cause == route.BadAnswer: // answered: its outcome is as known as it can be
	case e.Dispatched && e.Cause == route.DeadlineBeforeDispatch, e.Dispatched && !readOnly:
		e.Cause = route.OutcomeUnknown
	}
	return e
}

// handshakeError is what errors of Conns implement that come from a TLS handshake, so that a wrong certificate is not mistaken
// for a dead peer.
type handshakeError interface {
	error
	HandshakeFailed() bool
}

func forwardError(st *status.Status) (*mvpv1.ForwardError, bool) {
	for _, d := range st.Details() {
		if fe, ok := d.(*mvpv1.ForwardError); ok {
			return fe, true
		}
	}
	return nil, false
}
