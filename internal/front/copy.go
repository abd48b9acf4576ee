package front

import (
	"io"
	"net/http"
	"slices"
	"sync"

	"github.com/mvp-mesh/mvp-node/internal/authz"
)

// bufferSize is one read of a body: a Forward chunk, or two TLS records.
const bufferSize = 32 << 10

var buffers = sync.Pool{New: func() any { b := make([]byte, bufferSize); return &b }}

// copyResponse writes an answer to the client as it arrives. If the body breaks off, the client's connection (HTTP/1.1) or
// stream (HTTP/2) is broken as well: it panics with http.ErrAbortHandler, which net/http understands.
func (h *Handler) copyResponse(w http.ResponseWriter, r *http.Request, resp *http.Response, longRunning bool) {
	defer resp.Body.Close()
	dst := w.Header()
	authz.StripHopByHop(resp.Header)
	for name, values := range resp.Header {
		dst[name] = values
	}
	if _, ok := resp.Header["Content-Type"]; !ok {
		dst["Content-Type"] = nil // net/http would guess one
	}
	// Trailers must be announced before the head is written; their values are known after the body.
	announced := len(resp.Trailer) > 0
	for name := range resp.Trailer {
		dst.Add("Trailer", name)
	}
	if announced && r.ProtoMajor == 1 && r.Method != http.MethodHead {
		dst.Del("Content-Length") // of an answer by HTTP/2, which can have both
	}
	// Of unknown length is what may pause: a watch, a log, a list that is written in pieces. Its head goes out at once, and
	// each piece as it comes; an answer of known length is complete soon and is left to net/http's buffer.
	live := longRunning || resp.ContentLength < 0
	rc := http.NewResponseController(w)
	record(r).body.beforeHead(rc, dst, live)
	w.WriteHeader(resp.StatusCode)
	watch := stallWatch{rc: rc, limit: h.StallTimeout}
	defer watch.stop()
	if live {
		if watch.during(rc.Flush) != nil {
			h.abort(r, nil)
		}
	}
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	write := func(p []byte) error {
		if _, err := w.Write(p); err != nil {
			return err
		}
		if live {
			return rc.Flush()
		}
		return nil
	}
	for {
		n, rerr := resp.Body.Read(*buf)
		if n > 0 {
			var werr error
			if live || rerr == nil {
				werr = watch.during(func() error { return write((*buf)[:n]) })
			} else {
				werr = write((*buf)[:n]) // all there is: it holds nothing but the client's own stream
			}
			if werr != nil {
				record(r).gone = true
				h.abort(r, werr)
			}
		}
		if rerr == io.EOF {
			break
		}
		if rerr != nil {
			_ = watch.during(rc.Flush) // what the apiserver did say
			h.abort(r, rerr)
		}
	}
	for name, values := range resp.Trailer {
		if !announced || !slices.Contains(dst["Trailer"], name) {
			name = http.TrailerPrefix + name
		}
		dst[name] = values
	}
}

// abort ends a request whose head is out in a way that no client can take for a complete answer.
func (h *Handler) abort(r *http.Request, err error) {
	rec := record(r)
	rec.aborted, rec.err = true, err
	if r.Context().Err() != nil {
		rec.gone = true
	}
	panic(http.ErrAbortHandler)
}

// responseWriter remembers the status code and how much was written.
type responseWriter struct {
	http.ResponseWriter
	status  int
	written int64
}

// WriteHeader implements http.ResponseWriter.
func (w *responseWriter) WriteHeader(code int) {
	if w.status == 0 && (code >= 200 || code == http.StatusSwitchingProtocols) {
		w.status = code
	}
	w.ResponseWriter.WriteHeader(code)
}

// Write implements io.Writer.
func (w *responseWriter) Write(p []byte) (int, error) {
	if w.status == 0 {
		w.status = http.StatusOK
	}
	n, err := w.ResponseWriter.Write(p)
	w.written += int64(n)
	return n, err
}

// Unwrap lets http.ResponseController reach the connection.
func (w *responseWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// code is the status that the client saw; 0 if it saw none.
func (w *responseWriter) code() int { return w.status }
