package forward

import (
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	mvpv1 "github.com/mvp-mesh/mvp-node/proto/mvp/v1"
)

// coalesceWait is how long the head of an answer may wait for its body, so that both travel in one message. It is longer than an
// apiserver needs from the head to the end of a small object, and far shorter than anything a person or a watch would notice.
const coalesceWait = 2 * time.Millisecond

// respond sends an answer. What may pause (a watch, a log) gets its head out at once and each piece as it comes (CASES S-01, S-02).
// Any other answer is small more often than not, and kube-apiserver does not say how long it will be: its head waits for the first
// chunk of the body, or the end, or coalesceWait, whichever comes first.
//
// The error is the gRPC status to end the stream with. A body that breaks off is an error, so that the ingress node can never take
// it for complete; if nothing was sent before, a read may still be answered by another peer.
func (s *Server) respond(st stream, resp *http.Response, longRunning bool) error {
	w := &writer{stream: st, head: encodeResponse(resp)}
	buf := chunks.Get().(*[chunkSize]byte)
	defer chunks.Put(buf)

	var n int
	var rerr error
	small := resp.ContentLength >= 0 && resp.ContentLength <= headBody
	if !longRunning || small {
		n, rerr = w.first(resp.Body, buf[:headBody])
	} else if err := w.send(nil, false); err != nil {
		return err
	}
	for {
		if rerr != nil && rerr != io.EOF {
			return s.failed(st.Context(), fmt.Errorf("answer body: %w", rerr), true)
		}
		done := rerr == io.EOF
		end := done && len(resp.Trailer) == 0
		if n > 0 || end || done && !w.begun {
			if err := w.send(buf[:n], end); err != nil {
				return err
			}
		}
		if done {
			break
		}
		n, rerr = resp.Body.Read(buf[:])
	}
	if len(resp.Trailer) > 0 {
		return st.Send(&mvpv1.ForwardResponse{Part: &mvpv1.ForwardResponse_Trailers{
			Trailers: &mvpv1.Trailers{Headers: encodeHeader(resp.Trailer)},
		}})
	}
	return nil
}

// encodeResponse writes everything about an answer but its body.
func encodeResponse(resp *http.Response) *mvpv1.ResponseHead {
	authz.StripHopByHop(resp.Header)
	return &mvpv1.ResponseHead{
		Status:        int32(resp.StatusCode),
		Headers:       encodeHeader(resp.Header),
		ContentLength: resp.ContentLength,
		TrailerNames:  trailerNames(resp.Trailer),
	}
}

func trailerNames(h http.Header) []string {
	if len(h) == 0 {
		return nil
	}
	out := make([]string, 0, len(h))
	for name := range h {
		out = append(out, name)
	}
	return out
}

// writer sends the parts of an answer in order: the head with the first bytes, then chunks.
type writer struct {
	stream stream
	head   *mvpv1.ResponseHead
	begun  bool // the head was sent
	chunk  mvpv1.Chunk
}

func (w *writer) send(data []byte, end bool) error {
	if !w.begun {
		w.begun = true
		w.head.Body, w.head.End = data, end
		return w.stream.Send(&mvpv1.ForwardResponse{Part: &mvpv1.ForwardResponse_Head{Head: w.head}})
	}
	w.chunk.Data, w.chunk.End = data, end
	return w.stream.Send(&mvpv1.ForwardResponse{Part: &mvpv1.ForwardResponse_Chunk{Chunk: &w.chunk}})
}

// first reads until buf is full or the body ends, and returns what is still to be sent. If that takes longer than coalesceWait,
// the head is sent meanwhile with what was read, and the rest is returned as soon as it is read.
//
// The body's Read cannot be interrupted, so the sending is done by the timer's goroutine, under a lock; Read fills only the part
// of buf that the timer does not look at.
func (w *writer) first(body io.Reader, buf []byte) (rest int, err error) {
	var mu sync.Mutex
	var n int        // bytes read
	var sent bool    // by the timer; its error is found by the next send on the stream
	var stopped bool // nobody needs the timer any more
	timer := time.AfterFunc(coalesceWait, func() {
		mu.Lock()
		defer mu.Unlock()
		if !stopped {
			sent, stopped = true, true
			_ = w.send(buf[:n:n], false)
			n = 0
		}
	})
	defer timer.Stop()
	read := 0 // offset in buf, known to this goroutine only
	for {
		m, err := body.Read(buf[read:])
		mu.Lock()
		if sent {
			// What came before is on its way; this piece goes to the front of buf, where the caller looks for it.
			copy(buf, buf[read:read+m])
			mu.Unlock()
			return m, err
		}
		read += m
		n = read
		if err != nil || read == len(buf) {
			stopped = true
			mu.Unlock()
			return read, err
		}
		mu.Unlock()
	}
}
