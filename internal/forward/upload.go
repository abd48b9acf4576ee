package forward

import (
	"io"
	"net/http"
	"sync"
	"sync/atomic"

	mvpv1 "github.com/mvp-mesh/mvp-node/proto/mvp/v1"
	"golang.org/x/net/http/httpguts"
)

// chunks are buffers for one chunk. A message is encoded, and so copied, before Send returns, after which its buffer is free.
var chunks = sync.Pool{New: func() any { return new([chunkSize]byte) }}

// upload is the body of one request on the ingress node, through all attempts.
type upload struct {
	// small is the whole body if it fits a head; then any attempt can send it.
	small []byte
	// body is what remains to be streamed, nil if nothing does.
	body    io.ReadCloser
	getBody func() (io.ReadCloser, error)
	// started is set once reading from body began: what was read is gone, so there can be no other attempt unless getBody gives
	// the body again.
	started bool
	// waits is set if the client sends the body only when it is told that the apiserver wants it (Expect: 100-continue).
	waits bool
	// req is asked for the values of its trailers at the end of the body.
	req *http.Request
	// broken is the error of reading the body, by whichever goroutine met it.
	broken atomic.Pointer[error]
}

// newUpload reads a body that is known to be small, so that it travels in the head and survives a second attempt. It blocks for as
// long as the client takes to send it.
func newUpload(req *http.Request) (*upload, error) {
	u := &upload{getBody: req.GetBody, req: req}
	switch {
	case req.Body == nil || req.Body == http.NoBody || req.ContentLength == 0:
	case httpguts.HeaderValuesContainsToken(req.Header["Expect"], "100-continue"):
		u.body, u.waits = req.Body, true
	case req.ContentLength > 0 && req.ContentLength <= headBody:
		u.small = make([]byte, req.ContentLength)
		if _, err := io.ReadFull(req.Body, u.small); err != nil {
			if err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return nil, &RequestBodyError{Err: err}
		}
	default:
		u.body = req.Body
	}
	return u, nil
}

// rewind prepares for another attempt and reports whether there can be one.
func (u *upload) rewind() bool {
	if !u.started {
		return true
	}
	if u.getBody == nil || u.broken.Load() != nil {
		return false
	}
	body, err := u.getBody()
	if err != nil {
		return false
	}
	u.body, u.started = body, false
	return true
}

// sender is the sending half of a Forward stream.
type sender interface {
	Send(*mvpv1.ForwardRequest) error
	CloseSend() error
}

// pump streams the body in chunks until it ends or either side gives up, then the trailers that were announced under names. cancel
// ends the stream when the body cannot be read: the serving node must never take what came so far for the whole.
//
// After the stream is over it returns as soon as a Read that is under way does; that is when the client sends more or goes away.
func (u *upload) pump(body io.Reader, names []string, s sender, cancel func()) {
	buf := chunks.Get().(*[chunkSize]byte)
	defer chunks.Put(buf)
	chunk := &mvpv1.Chunk{}
	msg := &mvpv1.ForwardRequest{Part: &mvpv1.ForwardRequest_Chunk{Chunk: chunk}}
	for {
		n, err := body.Read(buf[:])
		if err != nil && err != io.EOF {
			u.broken.Store(&err)
			cancel()
			return
		}
		done := err == io.EOF
		chunk.Data, chunk.End = buf[:n], done && len(names) == 0
		if n > 0 || chunk.End {
			if s.Send(msg) != nil {
				return // the stream is over; its receiving half knows why
			}
		}
		if !done {
			continue
		}
		if len(names) > 0 {
			last := &mvpv1.Trailers{}
			for _, name := range names {
				if values := u.req.Trailer[name]; len(values) > 0 {
					last.Headers = append(last.Headers, &mvpv1.Header{Name: name, Values: values})
				}
			}
			if s.Send(&mvpv1.ForwardRequest{Part: &mvpv1.ForwardRequest_Trailers{Trailers: last}}) != nil {
				return
			}
		}
		_ = s.CloseSend() // never fails on a client stream
		return
	}
}
