package forward

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"

	mvpv1 "github.com/mvp-mesh/mvp-node/proto/mvp/v1"
	"golang.org/x/net/http/httpguts"
)

// attachBody gives req the body that a head announces. The result is nil when nothing is streamed.
func attachBody(req *http.Request, st stream, h *mvpv1.RequestHead) *arrival {
	switch {
	case !h.GetEnd():
		a := &arrival{stream: st, rest: h.GetBody(), received: int64(len(h.GetBody())), length: req.ContentLength, req: req}
		a.ask = httpguts.HeaderValuesContainsToken(req.Header["Expect"], "100-continue")
		if names := h.GetHttp().GetTrailerNames(); len(names) > 0 {
			req.Trailer = make(http.Header, len(names))
			for _, name := range names {
				req.Trailer[http.CanonicalHeaderKey(name)] = nil
			}
		}
		req.Body = a
		return a
	case len(h.GetBody()) == 0:
		req.Body, req.ContentLength = http.NoBody, 0
	default:
		req.Body = io.NopCloser(bytes.NewReader(h.GetBody()))
	}
	return nil
}

// arrival is a request body that comes in chunks. Read takes them off the stream as the apiserver's transport asks, so that a slow
// apiserver slows down the client. It ends with io.EOF only after the ingress node said that nothing follows.
//
// The transport reads on a goroutine of its own, which may still be reading when the answer is complete and the handler returns;
// gRPC then ends that Read with an error, because the stream is over.
type arrival struct {
	stream   stream
	rest     []byte
	end      bool
	received int64
	length   int64         // announced, -1 if unknown
	req      *http.Request // whose trailers are filled at the end
	ask      bool          // the client waits to be asked for the body, which has not been done

	mu  sync.Mutex // guards err, which the handler asks for while Read may run
	err error
}

// Read implements io.Reader. It is called by one goroutine at a time.
func (a *arrival) Read(p []byte) (int, error) {
	for len(a.rest) == 0 {
		if a.end {
			return 0, io.EOF
		}
		if err := a.failure(); err != nil {
			return 0, err
		}
		if err := a.next(); err != nil {
			a.mu.Lock()
			a.err = err
			a.mu.Unlock()
			return 0, err
		}
	}
	n := copy(p, a.rest)
	a.rest = a.rest[n:]
	return n, nil
}

func (a *arrival) next() error {
	if a.ask {
		// The transport reads when the apiserver said 100 Continue, or was silent for too long.
		a.ask = false
		if err := a.stream.Send(informational(http.StatusContinue, nil)); err != nil {
			return err
		}
	}
	msg, err := a.stream.Recv()
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	if err != nil {
		return err
	}
	switch c := msg.GetChunk(); {
	case c != nil:
		a.rest, a.end = c.GetData(), c.GetEnd()
	case msg.GetTrailers() != nil:
		values, err := decodeHeader(msg.GetTrailers().GetHeaders())
		if err != nil {
			return err
		}
		for name := range a.req.Trailer {
			a.req.Trailer[name] = values[name]
		}
		a.end = true
	default:
		return errors.New("a second head, where a chunk was expected")
	}
	a.received += int64(len(a.rest))
	if a.length >= 0 && (a.received > a.length || a.end && a.received < a.length) {
		return fmt.Errorf("%d body bytes, %d announced", a.received, a.length)
	}
	return nil
}

// failure is the error that ended reading, nil if none did. A nil arrival never fails.
func (a *arrival) failure() error {
	if a == nil {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.err
}

// Close implements io.Closer. The stream ends with the handler, not here.
func (a *arrival) Close() error { return nil }
