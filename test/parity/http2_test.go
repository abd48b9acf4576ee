package parity_test

import (
	"bufio"
	"bytes"
	"fmt"
	"maps"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	xhttp2 "golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/mvp-mesh/mvp-node/test/fake"
)

// client2 speaks HTTP/2 in frames of its own, so that a :path is sent as it is and nothing is sent again.
type client2 struct {
	dial func() (net.Conn, error)
	conn *conn2
	used time.Time // when the last exchange ended
}

func (c *client2) close() {
	if c.conn != nil {
		c.conn.close()
		c.conn = nil
	}
}

func (c *client2) do(r *request, o observer) answer {
	if c.conn != nil && (c.conn.spent() || time.Since(c.used) > idleTime) {
		c.close()
	}
	if c.conn == nil {
		raw, err := c.dial()
		if err == nil {
			c.conn, err = newConn2(raw)
		}
		if err != nil {
			return answer{end: unheard, why: err.Error()}
		}
	}
	defer func() { c.used = time.Now() }()
	return c.conn.do(r, o)
}

// window is how much of a body the server may send ahead, for a stream and for the connection.
const window = 4 << 20

// conn2 is a connection with one stream at a time. One goroutine reads it until close.
type conn2 struct {
	raw  net.Conn
	read chan struct{} // closed when the reading goroutine has ended

	out    sync.Mutex // serializes writes, with their header compression
	buffer *bufio.Writer
	framer *xhttp2.Framer
	block  bytes.Buffer
	encode *hpack.Encoder

	mu       sync.Mutex
	changed  *sync.Cond
	last     error // set when nothing more is read
	leaving  bool  // the server accepts no new streams
	credit   int64 // bytes that may be sent on the connection
	initial  int64 // on a new stream
	maxFrame int64
	nextID   uint32
	stream   *stream2
}

// stream2 is guarded by its connection's lock.
type stream2 struct {
	id      uint32
	method  string
	o       observer
	credit  int64
	wanted  bool // 100 Continue came
	hasHead bool
	over    bool // the server sends nothing more
	answer  answer
	body    *fake.Digester
}

func newConn2(raw net.Conn) (*conn2, error) {
	c := &conn2{
		raw: raw, read: make(chan struct{}), buffer: bufio.NewWriterSize(raw, 64<<10),
		credit: 65535, initial: 65535, maxFrame: 16 << 10, nextID: 1, // as RFC 9113 has it until SETTINGS come
	}
	c.changed = sync.NewCond(&c.mu)
	c.framer = xhttp2.NewFramer(c.buffer, bufio.NewReaderSize(raw, 64<<10))
	c.framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	c.framer.SetMaxReadFrameSize(1 << 20)
	c.encode = hpack.NewEncoder(&c.block)
	_ = raw.SetWriteDeadline(time.Now().Add(usualTime)) // it is open
	_, err := c.buffer.WriteString(xhttp2.ClientPreface)
	if err == nil {
		err = c.write(func() error {
			err := c.framer.WriteSettings(
				xhttp2.Setting{ID: xhttp2.SettingEnablePush, Val: 0}, xhttp2.Setting{ID: xhttp2.SettingInitialWindowSize, Val: window},
			)
			if err != nil {
				return err
			}
			return c.framer.WriteWindowUpdate(0, window)
		})
	}
	if err != nil {
		raw.Close()
		return nil, err
	}
	go c.loop()
	return c, nil
}

func (c *conn2) close() {
	c.raw.Close()
	<-c.read
}

// spent reports whether there can be no other request.
func (c *conn2) spent() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.leaving || c.last != nil
}

// write runs f, which writes frames, and flushes them.
func (c *conn2) write(f func() error) error {
	c.out.Lock()
	defer c.out.Unlock()
	if err := f(); err != nil {
		return err
	}
	return c.buffer.Flush()
}

func (c *conn2) do(r *request, o observer) answer {
	_ = c.raw.SetWriteDeadline(time.Now().Add(r.limit())) // it is open
	timer := time.AfterFunc(r.limit(), func() { c.raw.Close() })
	defer timer.Stop()

	c.mu.Lock()
	s := &stream2{id: c.nextID, method: r.method, o: o, credit: c.initial, body: fake.NewDigester()}
	c.nextID += 2
	c.stream = s
	c.mu.Unlock()

	if err := c.write(func() error { return c.head(r, s.id) }); err != nil {
		c.raw.Close()
	} else if r.framing != bodyless {
		c.upload(r, s)
	}
	c.mu.Lock()
	for !s.over && c.last == nil {
		c.changed.Wait()
	}
	c.stream = nil
	a := s.answer
	if !s.over {
		a.why = c.last.Error()
	}
	over := s.over
	c.mu.Unlock()

	a.body = s.body.Digest()
	switch {
	case !s.hasHead:
		a.end = unheard
	case !over, a.why != "":
		a.end = broken
	case a.length != lengthUnknown && a.length != lengthNone && !noBodyFor(r.method, a.status) && a.length != strconv.FormatInt(a.body.Size, 10):
		a.end, a.why = broken, "another length than announced"
	default:
		a.end = complete
	}
	return a
}

// head writes the HEADERS frame, with as many CONTINUATION frames as it takes.
func (c *conn2) head(r *request, id uint32) error {
	c.block.Reset()
	field := func(name, value string) {
		_ = c.encode.WriteField(hpack.HeaderField{Name: name, Value: value}) // to memory
	}
	field(":method", r.method)
	field(":scheme", "https")
	field(":authority", r.hostname())
	field(":path", r.target)
	for _, f := range r.fields {
		field(strings.ToLower(f.Name), f.Value)
	}
	if n := r.length(); n != "" {
		field("content-length", n)
	}
	if names := r.trailerNames(); names != "" {
		field("trailer", names)
	}
	if r.expect {
		field("expect", "100-continue")
	}
	return c.headers(id, r.framing == bodyless)
}

// headers writes what is in block.
func (c *conn2) headers(id uint32, end bool) error {
	block := c.block.Bytes()
	first := block[:min(len(block), 16<<10)]
	rest := block[len(first):]
	err := c.framer.WriteHeaders(xhttp2.HeadersFrameParam{StreamID: id, BlockFragment: first, EndStream: end, EndHeaders: len(rest) == 0})
	for err == nil && len(rest) > 0 {
		piece := rest[:min(len(rest), 16<<10)]
		rest = rest[len(piece):]
		err = c.framer.WriteContinuation(id, len(rest) == 0, piece)
	}
	return err
}

// upload sends the body and the trailer until the server wants no more.
func (c *conn2) upload(r *request, s *stream2) {
	if r.expect && !c.await(s, func() bool { return s.wanted || s.hasHead }) {
		return
	}
	if r.expect && !s.asked(c) {
		c.giveUp(s) // refused: nothing is sent
		return
	}
	end := len(r.trailer) == 0
	sent := int64(0)
	whole := r.pieces(func(p []byte) bool {
		for len(p) > 0 {
			n := c.take(s, int64(len(p)))
			if n == 0 {
				return false
			}
			sent += n
			last := end && sent == r.body.Len()
			if c.write(func() error { return c.framer.WriteData(s.id, last, p[:n]) }) != nil {
				return false
			}
			p = p[n:]
		}
		return true
	}, s.o.AwaitUpload)
	switch {
	case !whole:
		c.giveUp(s)
	case end && r.body.Len() == 0:
		_ = c.write(func() error { return c.framer.WriteData(s.id, true, nil) }) // the reading side tells if it fails
	case !end:
		_ = c.write(func() error {
			c.block.Reset()
			for _, f := range r.trailer {
				_ = c.encode.WriteField(hpack.HeaderField{Name: strings.ToLower(f.Name), Value: f.Value}) // to memory
			}
			return c.headers(s.id, true)
		})
	}
}

func (s *stream2) asked(c *conn2) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return s.wanted
}

// giveUp lets the answer come to its end, then ends the stream, whose request was not sent whole.
func (c *conn2) giveUp(s *stream2) {
	c.await(s, func() bool { return s.over })
	_ = c.write(func() error { return c.framer.WriteRSTStream(s.id, xhttp2.ErrCodeNo) }) // it may be over altogether
}

// await blocks until a condition, asked under the lock, holds; false if it cannot come true any more.
func (c *conn2) await(s *stream2, condition func() bool) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for !condition() {
		if s.over || c.last != nil {
			return false
		}
		c.changed.Wait()
	}
	return true
}

// take waits for credit and returns how much of n may be sent, 0 if the server wants no more.
func (c *conn2) take(s *stream2, n int64) int64 {
	if !c.await(s, func() bool { return s.over || c.credit > 0 && s.credit > 0 }) {
		return 0
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.over {
		return 0
	}
	n = min(n, c.credit, s.credit, c.maxFrame)
	c.credit -= n
	s.credit -= n
	return n
}

// loop reads frames until the connection ends.
func (c *conn2) loop() {
	defer close(c.read)
	for {
		f, err := c.framer.ReadFrame()
		if se, ok := err.(xhttp2.StreamError); ok {
			err = fmt.Errorf("malformed answer: %w", se)
		}
		if err == nil {
			err = c.frame(f)
		}
		if err != nil {
			c.mu.Lock()
			c.last = err
			c.changed.Broadcast()
			c.mu.Unlock()
			c.raw.Close()
			return
		}
	}
}

// frame acts on one frame.
func (c *conn2) frame(f xhttp2.Frame) error {
	switch f := f.(type) {
	case *xhttp2.SettingsFrame:
		if f.IsAck() {
			return nil
		}
		c.mu.Lock()
		if v, ok := f.Value(xhttp2.SettingInitialWindowSize); ok {
			if c.stream != nil {
				c.stream.credit += int64(v) - c.initial
			}
			c.initial = int64(v)
		}
		c.changed.Broadcast()
		c.mu.Unlock()
		return c.write(c.framer.WriteSettingsAck)
	case *xhttp2.PingFrame:
		if f.IsAck() {
			return nil
		}
		return c.write(func() error { return c.framer.WritePing(true, f.Data) })
	case *xhttp2.DataFrame:
		return c.data(f)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	defer c.changed.Broadcast()
	s := c.stream
	mine := s != nil && f.Header().StreamID == s.id
	switch f := f.(type) {
	case *xhttp2.GoAwayFrame:
		c.leaving = true
	case *xhttp2.WindowUpdateFrame:
		if f.StreamID == 0 {
			c.credit += int64(f.Increment)
		} else if mine {
			s.credit += int64(f.Increment)
		}
	case *xhttp2.RSTStreamFrame:
		if mine && !s.over {
			s.over, s.answer.why = true, "reset: "+f.ErrCode.String()
		}
	case *xhttp2.MetaHeadersFrame:
		if mine {
			s.headers(f)
		}
	}
	return nil
}

func (s *stream2) headers(f *xhttp2.MetaHeadersFrame) {
	h := make(http.Header)
	for _, field := range f.RegularFields() {
		name := http.CanonicalHeaderKey(field.Name)
		h[name] = append(h[name], field.Value)
	}
	a := &s.answer
	if s.hasHead {
		if a.trailer == nil {
			a.trailer = http.Header{}
		}
		maps.Copy(a.trailer, h)
		s.over = true
		return
	}
	status, err := strconv.Atoi(f.PseudoValue("status"))
	if err != nil {
		s.over, a.why = true, "no status"
		return
	}
	if status < 200 {
		s.wanted = s.wanted || status == http.StatusContinue
		a.informational = append(a.informational, describe(status, h))
		return
	}
	s.hasHead, s.over = true, f.StreamEnded()
	for _, v := range h["Trailer"] { // as net/http's HTTP/1.1 client has it: a name without a value
		for name := range strings.SplitSeq(v, ",") {
			if a.trailer == nil {
				a.trailer = http.Header{}
			}
			a.trailer[http.CanonicalHeaderKey(strings.TrimSpace(name))] = nil
		}
	}
	delete(h, "Trailer")
	a.status, a.header, a.length = status, h, lengthUnknown
	if v, ok := h["Content-Length"]; ok {
		a.length = v[0]
	} else if noBodyFor(s.method, status) {
		a.length = lengthNone
	}
	s.o.ClientHas(fake.AwaitHead)
}

func (c *conn2) data(f *xhttp2.DataFrame) error {
	n := f.Header().Length
	c.mu.Lock()
	s := c.stream
	mine := s != nil && f.StreamID == s.id
	if mine {
		_, _ = s.body.Write(f.Data())
		if len(f.Data()) > 0 {
			s.o.ClientHas(s.body.Size())
		}
		s.over = s.over || f.StreamEnded()
		c.changed.Broadcast()
	}
	more := mine && !s.over
	c.mu.Unlock()
	if n == 0 {
		return nil
	}
	return c.write(func() error {
		if err := c.framer.WriteWindowUpdate(0, n); err != nil || !more {
			return err
		}
		return c.framer.WriteWindowUpdate(f.StreamID, n)
	})
}
