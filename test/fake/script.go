package fake

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/textproto"
	"slices"
	"sync"
	"time"
)

// Field is one header line. The order of fields of one name is kept.
type Field struct{ Name, Value string }

// Fields makes fields of names and values in turn.
func Fields(nameValue ...string) []Field {
	out := make([]Field, 0, len(nameValue)/2)
	for i := 0; i+1 < len(nameValue); i += 2 {
		out = append(out, Field{nameValue[i], nameValue[i+1]})
	}
	return out
}

// Informational is an answer before the answer (1xx).
type Informational struct {
	Code   int
	Header []Field
}

// Reading says how much of the request's body is read before the answer.
type Reading int64

// ReadAll reads to the end, ReadNothing not at all; a positive Reading is a number of bytes, and the rest is left alone.
const (
	ReadAll     Reading = 0
	ReadNothing Reading = -1
)

// Step is a part of an answer's body.
type Step struct {
	Body  Body
	Piece int // bytes of one Write, 0 for 8 KiB
	Flush bool
	// Await, if positive, stops here until the client has that many bytes of the body; AwaitHead until it has the head. A client that
	// does not get them in time is a problem of the exchange.
	Await int64
}

// AwaitHead is a Step.Await for the head alone.
const AwaitHead = -1

// Script is how a request is answered.
type Script struct {
	Informational []Informational
	Read          Reading
	Status        int
	Header        []Field
	// NoContentType answers without one; net/http would guess it from the body.
	NoContentType bool
	Steps         []Step
	Trailer       []Field // announced
	LateTrailer   []Field // sent without having been announced
	// Abort breaks the answer off after the last step. With Status 0 there is no head either.
	Abort bool
	// EchoAuditID answers with the Audit-Id of the request, as kube-apiserver does.
	EchoAuditID bool
	// WhoAmI answers with who the client is to this apiserver, as a SelfSubjectReview.
	WhoAmI bool
}

// Request is a request as it arrived.
type Request struct {
	Method, Target, Proto, Host string
	Header                      http.Header
	// ContentLength is -1 if it was not said, which with HTTP/1.1 means chunked.
	ContentLength int64
	Body          Digest // of what the script read
	// BodyError is why reading ended before the body did, "" if it did not.
	BodyError string
	Trailer   http.Header
}

// patience bounds every wait of a script for its client, and of a test for a script.
const patience = 10 * time.Second

// Exchange is one playing of a script, from Begin to Finish. Methods may be called by any goroutine.
type Exchange struct {
	server *Server
	id     string
	script Script

	mu       sync.Mutex
	changed  chan struct{} // closed and replaced at each change of what follows
	active   int           // handlers that run
	arrived  []Request
	problems []string
	client   int64 // bytes of the answer's body that the client has; AwaitHead for the head alone, less for nothing
	received int64 // bytes of the request's body that have arrived
}

const nothing = AwaitHead - 1

// change runs f under the lock and wakes whoever waits.
func (e *Exchange) change(f func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	f()
	close(e.changed)
	e.changed = make(chan struct{})
}

// until waits for a condition, which is asked under the lock; done may be nil. It reports whether the condition came true.
func (e *Exchange) until(done <-chan struct{}, condition func() bool) bool {
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for {
		e.mu.Lock()
		met, changed := condition(), e.changed
		e.mu.Unlock()
		if met {
			return true
		}
		select {
		case <-changed:
		case <-done:
			return false
		case <-timer.C:
			return false
		}
	}
}

// ClientHas is told by the client that it has the head of the answer (AwaitHead) or n bytes of its body.
func (e *Exchange) ClientHas(n int64) {
	e.change(func() { e.client = max(e.client, n) })
}

// AwaitUpload waits until n bytes of the request's body have reached the apiserver, and reports whether they have.
func (e *Exchange) AwaitUpload(n int64) bool {
	return e.until(nil, func() bool { return e.received >= n })
}

// Finish ends the exchange when no handler works on it any more. It returns the requests that arrived, in order of their end, and what
// went wrong while they were answered.
func (e *Exchange) Finish() ([]Request, []string) {
	if !e.until(nil, func() bool { return e.active == 0 }) {
		e.change(func() { e.problems = append(e.problems, "the request still runs at the apiserver") })
	}
	e.server.forget(e.id)
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.arrived, e.problems
}

func (e *Exchange) problem(format string, args ...any) {
	e.change(func() { e.problems = append(e.problems, fmt.Sprintf(format, args...)) })
}

// serve plays the script.
func (e *Exchange) serve(w http.ResponseWriter, r *http.Request) {
	e.change(func() { e.active++ })
	rec := Request{
		Method: r.Method, Target: r.RequestURI, Proto: r.Proto, Host: r.Host, Header: r.Header.Clone(), ContentLength: r.ContentLength,
	}
	body := NewDigester()
	defer func() {
		rec.Body, rec.Trailer = body.Digest(), r.Trailer.Clone()
		e.change(func() {
			e.active--
			e.arrived = append(e.arrived, rec)
		})
	}()
	s := &e.script
	for _, i := range s.Informational {
		set(w.Header(), i.Header)
		w.WriteHeader(i.Code)
		clear(w.Header())
	}
	if s.Read != ReadNothing {
		rec.BodyError = e.read(r.Body, s.Read, body)
	}
	if s.Status == 0 && s.Abort {
		panic(http.ErrAbortHandler)
	}
	h := w.Header()
	set(h, s.Header)
	if s.NoContentType {
		h["Content-Type"] = nil
	}
	if s.EchoAuditID {
		h["Audit-Id"] = r.Header["Audit-Id"]
	}
	for i, f := range s.Trailer {
		if !slices.ContainsFunc(s.Trailer[:i], func(before Field) bool { return before.Name == f.Name }) {
			h.Add("Trailer", f.Name)
		}
	}
	w.WriteHeader(s.Status)
	if s.WhoAmI {
		writeReview(w, e.server.identity(r))
	}
	for _, step := range s.Steps {
		if err := e.step(w, r, step); err != nil {
			return // the client is gone; the client's side says so
		}
	}
	if s.Abort {
		_ = http.NewResponseController(w).Flush() // what was written before is to be seen
		panic(http.ErrAbortHandler)
	}
	set(h, s.Trailer)
	for _, f := range s.LateTrailer {
		h.Add(http.TrailerPrefix+textproto.CanonicalMIMEHeaderKey(f.Name), f.Value)
	}
}

func set(h http.Header, fields []Field) {
	for _, f := range fields {
		name := textproto.CanonicalMIMEHeaderKey(f.Name)
		h[name] = append(h[name], f.Value)
	}
}

// read takes as much of a body as the script wants and says why it ended early.
func (e *Exchange) read(body io.Reader, want Reading, into *Digester) string {
	if want > 0 {
		body = io.LimitReader(body, int64(want))
	}
	buf := make([]byte, 32<<10)
	for {
		n, err := body.Read(buf)
		_, _ = into.Write(buf[:n])
		if n > 0 {
			e.change(func() { e.received = into.Size() })
		}
		switch {
		case errors.Is(err, io.EOF):
			return ""
		case err != nil:
			return err.Error()
		}
	}
}

func (e *Exchange) step(w http.ResponseWriter, r *http.Request, s Step) error {
	piece := s.Piece
	if piece == 0 {
		piece = 8 << 10
	}
	if s.Body.Len() > 0 {
		if _, err := io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{s.Body.Reader()}, make([]byte, piece)); err != nil {
			return err
		}
	}
	if s.Flush || s.Await != 0 {
		if err := http.NewResponseController(w).Flush(); err != nil {
			return err
		}
	}
	if s.Await != 0 && !e.until(r.Context().Done(), func() bool { return e.client >= s.Await }) {
		e.mu.Lock()
		has := e.client
		e.mu.Unlock()
		e.problem("the answer waited in vain for the client to have %d bytes of what was flushed (-1: the head); it had %d", s.Await, has)
	}
	return nil
}
