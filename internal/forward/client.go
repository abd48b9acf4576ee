package forward

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	"github.com/mvp-mesh/mvp-node/internal/loopguard"
	"github.com/mvp-mesh/mvp-node/internal/reqctx"
	"github.com/mvp-mesh/mvp-node/internal/route"
	mvpv1 "github.com/mvp-mesh/mvp-node/proto/mvp/v1"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc"
)

// maxAttempts is the first candidate and at most one other (DESIGN.md rule 3).
const maxAttempts = 2

// Conns gives connections to peers. Conn is called once for each attempt, on the request's goroutine, and must not block: a
// connection that is not up yet is waited for by the call that is made on it. long tells that the call has no deadline.
type Conns interface {
	Conn(member *route.Member, long bool) (grpc.ClientConnInterface, error)
}

// ClientOptions are the parts and settings of a Client. All are required unless said otherwise.
type ClientOptions struct {
	// Name is the name of this node, as in its certificate.
	Name string
	// ClusterID is sent with each request and compared by the peer.
	ClusterID string
	Conns     Conns
	// HeaderNames are stripped from every request, besides the names that are always stripped.
	HeaderNames authz.HeaderNames
	// Limits of what is asked of one peer; zero means DefaultLimits.
	Limits Limits
	// OnNotServed is told the name of a peer that no longer serves what its catalog said, and its current generation. It is
	// called on the request's goroutine and must not block. May be nil.
	OnNotServed func(peer string, generation uint64)
	Logger      *slog.Logger
	Registerer  prometheus.Registerer
}

// Served says who answered, or who was asked last if nobody did.
type Served struct {
	Node          string
	ServerVersion string // of the node's apiserver, as the view had it
	Attempts      int    // 0 if nobody was asked
}

// Client sends requests to peers. It is safe for concurrent use.
type Client struct {
	o       ClientOptions
	limiter *limiter
	budget  *budget
	metrics *clientMetrics
	uploads sync.WaitGroup
}

// NewClient connects the parts. It starts nothing.
func NewClient(o ClientOptions) (*Client, error) {
	if o.Limits == (Limits{}) {
		o.Limits = DefaultLimits()
	}
	var errs []error
	for _, r := range []struct {
		name    string
		missing bool
	}{
		{"Name", o.Name == ""}, {"ClusterID", o.ClusterID == ""}, {"Conns", o.Conns == nil}, {"Logger", o.Logger == nil},
		{"Registerer", o.Registerer == nil}, {"HeaderNames", len(o.HeaderNames.User) == 0},
		{"Limits", o.Limits.Short <= 0 || o.Limits.Long <= 0 || o.Limits.Wait < 0},
	} {
		if r.missing {
			errs = append(errs, fmt.Errorf("forward: client option %s is missing or not positive", r.name))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	o.Logger = o.Logger.With("component", "forward")
	return &Client{o: o, limiter: newLimiter(o.Limits), budget: newBudget(time.Now()), metrics: newClientMetrics(o.Registerer)}, nil
}

// Close waits for the goroutines that stream request bodies. It ends them only by waiting: call it when no request is under way
// any more, after the HTTP server has stopped.
func (c *Client) Close() { c.uploads.Wait() }

// RoundTrip sends a request to the first candidate that can be asked, and to one other only if the write-safety rule allows it
// (RELIABILITY section 3): when it is certain that no apiserver saw the request, or when it is a read of which nothing was
// returned and the retry budget allows it; and only if the body can be sent from its beginning.
//
// reqctx.From(req.Context()) must give the user, audit ID, addresses, hop, attributes and class. The body is read but not closed:
// the HTTP server that made it closes it. The answer's head is there when RoundTrip returns; its body must be closed, ends with
// io.EOF only if it is complete, and fills Trailer by then. The body of a 101 is a duplex.Conn. Informational answers are handed to
// the httptrace of the context.
//
// Errors are the context's own if the client went away, *RequestBodyError if the body could not be read, and *Error otherwise,
// except for requests that no caller may make (without a user), which are neither.
func (c *Client) RoundTrip(req *http.Request, candidates []*route.Member) (*http.Response, Served, error) {
	var served Served
	ctx := req.Context()
	rc, ok := reqctx.From(ctx)
	if !ok || rc.User == nil || rc.User.Name == "" {
		return nil, served, fmt.Errorf("forward: %w", authz.ErrNoUser)
	}
	hop, err := loopguard.Next(rc.Hop)
	if err != nil {
		return nil, served, c.fail(&Error{Cause: route.LoopDetected, Err: err})
	}
	up, err := newUpload(req)
	if err != nil {
		return nil, served, firstOf(gone(ctx), err)
	}
	head := newHead(req, rc, hop, &c.o)
	head.Body, head.End = up.small, up.body == nil
	readOnly := rc.Attributes.ReadOnly()

	c.budget.requests.Add(1)
	var failed *Error
	for _, m := range candidates {
		if m.Address == "" {
			continue // nothing to try: does not count as an attempt
		}
		if served.Attempts == maxAttempts || served.Attempts > 0 && !(mayRetry(failed, readOnly) && up.rewind() && c.affordable(failed)) {
			break
		}
		if err := gone(ctx); err != nil {
			return nil, served, err
		}
		served = Served{Node: m.Name, ServerVersion: m.ServerVersion, Attempts: served.Attempts + 1}
		head.CatalogGeneration = m.Generation
		resp, e := c.attempt(req, rc, m, head, up, readOnly)
		c.metrics.attempt(m.Name, e)
		if e == nil {
			return resp, served, nil
		}
		if err := gone(ctx); err != nil {
			return nil, served, err
		}
		if broken := up.broken.Load(); broken != nil {
			return nil, served, &RequestBodyError{Dispatched: e.Dispatched, Err: *broken}
		}
		if e.Cause == route.NotServed && c.o.OnNotServed != nil {
			c.o.OnNotServed(m.Name, e.Generation)
		}
		failed = worse(failed, e)
	}
	if failed == nil {
		failed = &Error{Cause: route.NoPeerAvailable, Err: errors.New("no candidate has an address")}
	}
	return nil, served, c.fail(failed)
}

func (c *Client) fail(e *Error) *Error {
	c.metrics.failed.WithLabelValues(e.Cause.String()).Inc()
	return e
}

// gone is the context's error if the client went away. A deadline is not that: it is a failure with a cause.
func gone(ctx context.Context) error {
	if err := ctx.Err(); errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

func firstOf(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// mayRetry holds the rows S0 to S2 of RELIABILITY section 3.
func mayRetry(e *Error, readOnly bool) bool {
	return elsewhere[e.Cause] && (!e.Dispatched || readOnly)
}

// affordable asks the retry budget about a second attempt at something that a peer may have worked on already.
func (c *Client) affordable(failed *Error) bool {
	if !failed.Dispatched || c.budget.take(time.Now()) {
		return true
	}
	c.metrics.unaffordable.Inc()
	return false
}

// worse chooses what to report of two failed attempts. NotServed is only the truth if every peer said so, and any other reason
// tells the operator more. That an apiserver may have seen the request is never lost.
func worse(before, now *Error) *Error {
	if before == nil {
		return now
	}
	dispatched := before.Dispatched || now.Dispatched
	out := *now
	if now.Cause == route.NotServed && before.Cause != route.NotServed {
		out = *before
	}
	out.Dispatched = dispatched
	return &out
}

// attempt sends the request to one peer and waits for the head of the answer.
func (c *Client) attempt(
	req *http.Request, rc *reqctx.Request, m *route.Member, head *mvpv1.RequestHead, up *upload, readOnly bool,
) (*http.Response, *Error) {
	ctx := req.Context()
	if err := ctx.Err(); err != nil {
		return nil, &Error{Cause: route.DeadlineBeforeDispatch, Peer: m.Name, Err: err}
	}
	place, busy := c.limiter.acquire(ctx, m.Name, rc.LongRunning)
	if busy != nil {
		return nil, busy
	}
	sctx, cancel := context.WithCancel(ctx)
	x := &exchange{cancel: cancel, place: place, inflight: c.metrics.inflight(rc.LongRunning)}
	x.inflight.Inc()
	handedOver := false
	fail := func(err error) (*http.Response, *Error) {
		x.finish()
		return nil, fromStatus(err, m.Name, handedOver, readOnly)
	}

	conn, err := c.o.Conns.Conn(m, rc.LongRunning)
	if err != nil {
		x.finish()
		return nil, &Error{Cause: route.NoPeerAvailable, Peer: m.Name, Err: err}
	}
	stream, err := mvpv1.NewForwardServiceClient(conn).Forward(sctx)
	if err != nil {
		return fail(err)
	}
	if err := stream.Send(&mvpv1.ForwardRequest{Part: &mvpv1.ForwardRequest_Head{Head: head}}); err != nil {
		if err == io.EOF { // the stream is over; why is told by its receiving half
			_, err = stream.Recv()
		}
		if err == nil {
			err = errors.New("an answer before the question")
		}
		return fail(err)
	}
	handedOver = true
	switch {
	case rc.Upgrade != "": // the other protocol's bytes may follow
	case head.End:
		_ = stream.CloseSend() // never fails on a client stream
	case up.waits: // for the serving node to ask
	default:
		c.startUpload(up, head, stream, cancel)
	}

	first, err := c.answerHead(ctx, stream, func() {
		if up.waits && !up.started {
			c.startUpload(up, head, stream, cancel)
		}
	})
	if err != nil {
		return fail(err)
	}
	resp, err := decodeResponse(first, req, rc.Upgrade)
	if err != nil {
		return fail(err)
	}
	if resp.StatusCode == http.StatusSwitchingProtocols {
		resp.Body = newClientTunnel(x, stream)
	} else {
		resp.Body = newDownload(ctx, x, stream, first, resp, m.Name)
	}
	return resp, nil
}

func (c *Client) startUpload(up *upload, head *mvpv1.RequestHead, s sender, cancel func()) {
	up.started = true
	body, names := up.body, head.GetHttp().GetTrailerNames()
	c.uploads.Go(func() { up.pump(body, names, s, cancel) })
}

// answerHead waits for the head of the answer. What comes before it is handed to the httptrace of ctx, as net/http's own transports do,
// but for the 100, by which the serving node asks for the body.
func (c *Client) answerHead(ctx context.Context, s receiver, wanted func()) (*mvpv1.ResponseHead, error) {
	for {
		msg, err := s.Recv()
		if err == io.EOF {
			return nil, errors.New("the stream ended without an answer")
		}
		if err != nil {
			return nil, err
		}
		info := msg.GetInformational()
		if info == nil {
			return msg.GetHead(), nil
		}
		code := int(info.GetStatus())
		switch {
		case code == http.StatusContinue:
			wanted()
			continue
		case code <= http.StatusSwitchingProtocols || code > 199:
			return nil, fmt.Errorf("informational answer with status %d", code)
		}
		header, err := decodeHeader(info.GetHeaders())
		if err != nil {
			return nil, err
		}
		if trace := httptrace.ContextClientTrace(ctx); trace != nil && trace.Got1xxResponse != nil {
			if err := trace.Got1xxResponse(code, textproto.MIMEHeader(header)); err != nil {
				return nil, err
			}
		}
	}
}

// exchange is what one attempt holds until it is over.
type exchange struct {
	cancel   context.CancelFunc // ends the stream
	place    *semaphore.Weighted
	inflight prometheus.Gauge
	done     atomic.Bool
}

// finish ends the stream and gives back what it held. It may be called often and by any goroutine.
func (x *exchange) finish() {
	if x.done.CompareAndSwap(false, true) {
		x.cancel()
		x.place.Release(1)
		x.inflight.Dec()
	}
}
