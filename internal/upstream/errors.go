package upstream

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/net/http2"

	"github.com/mvp-mesh/mvp-node/internal/authz"
)

// Steps of sending a request, as Error.Op and the metrics label name them.
const (
	OpIdentity = "identity" // there is no user, or one that a header cannot carry
	OpTarget   = "target"   // the request-target cannot be sent unchanged
	OpBody     = "body"     // the request's body could not be read, and nothing was sent
	OpConnect  = "connect"  // no connection to the local apiserver
	OpSend     = "send"     // the request was handed to a connection
	OpOutdated = "outdated" // the apiserver has no route for what its catalog says it serves
	OpUpgrade  = "upgrade"  // the answer to a request for an upgrade cannot be passed on
)

// Ops lists the steps, for the pre-created label sets of metrics and for tests that visit each.
func Ops() []string {
	return []string{OpIdentity, OpTarget, OpBody, OpConnect, OpSend, OpOutdated, OpUpgrade}
}

// ErrTarget reports a request-target that Go's client would write in another form than the client did.
var ErrTarget = errors.New("request-target cannot be sent unchanged")

// ErrIdentity reports a user that would not arrive as it is: HTTP trims white space around header values and forbids control
// characters in them. It is a kind of authz.ErrNoUser: there is no user that could be written.
var ErrIdentity = fmt.Errorf("user cannot be written as headers without a change: %w", authz.ErrNoUser)

// ErrUpgrade reports an apiserver that switched to a protocol nobody asked for.
var ErrUpgrade = errors.New("the apiserver switched to another protocol than it was asked for")

// ErrClosed reports that Close was called.
var ErrClosed = errors.New("upstream transport is closed")

// Error is what RoundTrip returns instead of a response.
type Error struct {
	Op string // one of Ops
	// Sent is false only if it is certain that the apiserver did not process the request: no byte of it left, or the apiserver
	// itself said so (HTTP/2 GOAWAY, REFUSED_STREAM, no such route). True means that the outcome is unknown.
	Sent bool
	Err  error
}

// Error implements error.
func (e *Error) Error() string {
	if e.Sent {
		return fmt.Sprintf("local apiserver: %s, outcome unknown: %v", e.Op, e.Err)
	}
	return fmt.Sprintf("local apiserver: %s, nothing executed: %v", e.Op, e.Err)
}

// Unwrap gives the cause: ErrIdentity, a *net.OpError and so on. It is a context error only when the request's own context ended.
func (e *Error) Unwrap() error { return e.Err }

// NotSent reports that the apiserver certainly did not process the request, so that it may go elsewhere whatever its method. Its
// body may have been read.
func (e *Error) NotSent() bool { return !e.Sent }

// NotServed reports that the apiserver does not serve what its catalog says. It did not execute the request.
func (e *Error) NotServed() bool { return e.Op == OpOutdated }

// BodyBroken reports that the request's own body could not be read; that the request's time was over is no such thing.
func (e *Error) BodyBroken() bool {
	return e.Op == OpBody && !errors.Is(e.Err, context.DeadlineExceeded) && !errors.Is(e.Err, context.Canceled)
}

// BadAnswer reports that the apiserver answered, and that the answer may not reach the client.
func (e *Error) BadAnswer() bool { return e.Op == OpUpgrade }

// BadRequest reports that the request itself is at fault: no apiserver could be sent it as it is.
func (e *Error) BadRequest() bool { return e.Op == OpTarget }

// Errors of net/http's HTTP/2 client that say that a stream was not processed. The values are not exported, in no form; if a
// later Go words them differently, requests are reported as sent, which is the safe side, and TestUnprocessedTexts fails.
const (
	textUnusable       = "http2: client conn not usable"
	textNotEstablished = "http2: client conn could not be established"
	textGoAway         = "http2: Transport received Server's graceful shutdown GOAWAY"
)

// unprocessed reports whether err proves that the server did not process the request of one HTTP/2 stream.
func unprocessed(err error) bool {
	// net/http's own copy of the type converts itself into this one.
	var se http2.StreamError
	if errors.As(err, &se) {
		return se.Code == http2.ErrCodeRefusedStream
	}
	switch err.Error() {
	case textUnusable, textNotEstablished, textGoAway:
		return true
	}
	return false
}
