package front

import (
	"errors"
	"io"
	"net/http"
	"sync/atomic"
)

// clientBody is the body of a request by HTTP/1.1, of which net/http throws away the rest before it writes the head of an answer. A
// transport that still reads it would then send on a body with a hole, and with an end.
type clientBody struct {
	io.ReadCloser
	begun, ended, stopped atomic.Bool
}

var errAnswered = errors.New("the request was answered before the end of its body")

// Read implements io.Reader.
func (b *clientBody) Read(p []byte) (int, error) {
	if b.stopped.Load() {
		return 0, errAnswered
	}
	b.begun.Store(true)
	n, err := b.ReadCloser.Read(p)
	if err == io.EOF {
		b.ended.Store(true)
	}
	return n, err
}

// Close implements io.Closer. net/http closes its own body when the request is over, and reads the rest of it then: here that would mean
// to wait for a client that waits to be asked for it.
func (b *clientBody) Close() error {
	b.stopped.Store(true)
	return nil
}

// beforeHead is called before the head of an answer is written. If the body is not at its end by then, an answer that may take its time
// goes out beside it, and the connection ends with it; any other ends the reading of the body. A nil clientBody needs neither.
func (b *clientBody) beforeHead(rc *http.ResponseController, answer http.Header, live bool) {
	switch {
	case b == nil || b.ended.Load():
	case live && b.begun.Load() && rc.EnableFullDuplex() == nil:
		answer.Set("Connection", "close") // nobody can tell where the next request begins until the body is over
	default:
		b.stopped.Store(true)
	}
}
