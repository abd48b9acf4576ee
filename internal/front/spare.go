package front

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"sync/atomic"

	"github.com/mvp-mesh/mvp-node/internal/reqctx"
)

// mayStay reports whether a request that policy sent to a peer, and that failed there with err, may be done by the local apiserver:
// no apiserver saw it, or it is a read of which nothing came back; and there is somebody left who waits.
func (h *Handler) mayStay(r *http.Request, rc *reqctx.Request, err error) bool {
	f, ok := errors.AsType[*Failure](err)
	return ok && (f.NotSent || rc.Attributes.ReadOnly()) && r.Context().Err() == nil
}

// spareSize is the largest body that is kept for a second way.
const spareSize = 32 << 10

// spareBody is the body of a request that may have to go another way than the first one tried.
type spareBody struct {
	kept []byte // the whole body, if it is small
	io.ReadCloser
	read atomic.Bool // something was taken from ReadCloser, by whichever goroutine
}

// keepBody prepares the body of r for restore. It reads a small one to its end.
func keepBody(r *http.Request) (*spareBody, error) {
	s := &spareBody{ReadCloser: r.Body}
	switch {
	case r.Body == nil || r.Body == http.NoBody || r.ContentLength == 0:
	case r.ContentLength > 0 && r.ContentLength <= spareSize && r.Header.Get("Expect") == "":
		s.kept = make([]byte, r.ContentLength)
		if _, err := io.ReadFull(r.Body, s.kept); err != nil {
			return nil, err
		}
		s.restore(r)
	default:
		r.Body = s
	}
	return s, nil
}

// Read implements io.Reader.
func (s *spareBody) Read(p []byte) (int, error) {
	s.read.Store(true)
	return s.ReadCloser.Read(p)
}

// Close does nothing: net/http closes the body of a request that it serves.
func (s *spareBody) Close() error { return nil }

// restore gives r its body back from the beginning and reports whether it could.
func (s *spareBody) restore(r *http.Request) bool {
	if s.kept != nil {
		r.Body = io.NopCloser(bytes.NewReader(s.kept))
		return true
	}
	return !s.read.Load()
}
