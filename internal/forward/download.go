package forward

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	"github.com/mvp-mesh/mvp-node/internal/route"
	mvpv1 "github.com/mvp-mesh/mvp-node/proto/mvp/v1"
)

// decodeResponse makes an answer of its head, without the body. upgrade is what the request asks to switch to, "" if nothing.
func decodeResponse(h *mvpv1.ResponseHead, req *http.Request, upgrade string) (*http.Response, error) {
	if h == nil {
		return nil, errors.New("the answer does not begin with a head")
	}
	code := int(h.GetStatus())
	switched := code == http.StatusSwitchingProtocols && upgrade != ""
	if !switched && (code < 200 || code > 999) {
		return nil, fmt.Errorf("status %d in an answer", code)
	}
	if n := h.GetContentLength(); n < -1 {
		return nil, fmt.Errorf("content length %d in an answer", n)
	}
	header, err := decodeHeader(h.GetHeaders())
	if err != nil {
		return nil, err
	}
	authz.StripHopByHop(header)
	if switched { // to what, the serving node has compared
		header["Upgrade"], header["Connection"] = []string{upgrade}, []string{"Upgrade"}
	}
	resp := &http.Response{
		Status:        strconv.Itoa(code) + " " + http.StatusText(code),
		StatusCode:    code,
		Proto:         "HTTP/1.1",
		ProtoMajor:    1,
		ProtoMinor:    1,
		Header:        header,
		ContentLength: h.GetContentLength(),
		Request:       req,
	}
	if names := h.GetTrailerNames(); len(names) > 0 {
		resp.Trailer = make(http.Header, len(names))
		for _, n := range names {
			resp.Trailer[http.CanonicalHeaderKey(n)] = nil
		}
	}
	return resp, nil
}

// receiver is the receiving half of a Forward stream.
type receiver interface {
	Recv() (*mvpv1.ForwardResponse, error)
}

// download is the body of an answer. Read takes messages off the stream as they are asked for, so that a slow client slows down
// the apiserver and nothing piles up in between. It ends with io.EOF only after the serving node said that nothing follows.
type download struct {
	exchange *exchange
	ctx      context.Context // of the client's request
	stream   receiver
	peer     string
	resp     *http.Response
	rest     []byte // of the message read last
	end      bool   // the serving node said that nothing follows rest
	received int64
	err      error // sticky
}

func newDownload(
	ctx context.Context, x *exchange, s receiver, h *mvpv1.ResponseHead, resp *http.Response, peer string,
) *download {
	return &download{
		exchange: x, ctx: ctx, stream: s, peer: peer, resp: resp,
		rest: h.GetBody(), end: h.GetEnd(), received: int64(len(h.GetBody())),
	}
}

// Read implements io.Reader. It is called by one goroutine at a time.
func (d *download) Read(p []byte) (int, error) {
	for len(d.rest) == 0 {
		if d.err == nil {
			d.next()
		}
		if d.err != nil {
			return 0, d.err
		}
	}
	n := copy(p, d.rest)
	d.rest = d.rest[n:]
	if len(d.rest) == 0 && d.end {
		d.next() // the end comes with the last bytes: most callers then need no other Read
	}
	if len(d.rest) == 0 && d.err == io.EOF {
		return n, io.EOF
	}
	return n, nil
}

// next takes one message, or the end of the stream, and sets rest or err.
func (d *download) next() {
	if d.end {
		d.complete()
		return
	}
	msg, err := d.stream.Recv()
	switch {
	case err == io.EOF:
		d.fail(io.ErrUnexpectedEOF)
	case err != nil:
		d.fail(d.why(err))
	case msg.GetChunk() != nil:
		c := msg.GetChunk()
		d.rest, d.end = c.GetData(), c.GetEnd()
		d.received += int64(len(d.rest))
	case msg.GetTrailers() != nil:
		h, err := decodeHeader(msg.GetTrailers().GetHeaders())
		if err != nil {
			d.fail(&Error{Cause: route.PeerRefused, Dispatched: true, Peer: d.peer, Err: fmt.Errorf("trailers: %w", err)})
			return
		}
		if d.resp.Trailer == nil {
			d.resp.Trailer = h
		}
		for name, values := range h {
			d.resp.Trailer[name] = values
		}
		d.end = true
	default:
		d.fail(&Error{Cause: route.PeerRefused, Dispatched: true, Peer: d.peer, Err: errors.New("an answer's second head")})
	}
}

// complete is reached after the last byte. The status that follows is usually here already; taking it off the stream lets gRPC
// close the stream without a reset. Whatever it says, the answer is whole.
func (d *download) complete() {
	if want := d.resp.ContentLength; want >= 0 && d.received != want && d.hasBody() {
		d.fail(fmt.Errorf("%d of %d bytes: %w", d.received, want, io.ErrUnexpectedEOF))
		return
	}
	_, _ = d.stream.Recv()
	d.fail(io.EOF)
}

// hasBody is false for answers whose Content-Length tells of a body that is not sent.
func (d *download) hasBody() bool {
	return d.resp.Request.Method != http.MethodHead && d.resp.StatusCode != http.StatusNotModified
}

func (d *download) fail(err error) {
	d.err = err
	d.exchange.finish()
}

// why is never io.EOF.
func (d *download) why(err error) error {
	if gone := gone(d.ctx); gone != nil {
		return gone
	}
	// The answer has begun, so whatever the cause, nothing may be appended or replayed (S3); the caller breaks off.
	return fromStatus(err, d.peer, true, true)
}

// Close ends the stream, and with it the request at the peer's apiserver if it still runs. It may be called while Read runs.
func (d *download) Close() error {
	d.exchange.finish()
	return nil
}
