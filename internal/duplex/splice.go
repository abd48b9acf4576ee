package duplex

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"
)

// Conn is one end of a connection without a protocol that we know. Read is called by one goroutine at a time, and so are Write,
// CloseWrite and FinishWrite; Close by any.
type Conn interface {
	// Read ends with io.EOF when the other side sends no more, though it may still read. Any other error is a failure.
	io.Reader
	io.Writer
	// CloseWrite says that no more bytes come, and nothing else: the other side may go on sending.
	CloseWrite() error
	// WaitClosed blocks, after Read gave io.EOF, until the other side has closed altogether, so that nobody reads what is written;
	// then it returns nil. It returns an error if the connection failed, or Close was called.
	WaitClosed() error
	// FinishWrite says that this side has closed altogether. It comes after CloseWrite. What was written is still delivered.
	FinishWrite() error
	// Abort says that there is no more because something failed, so that the other side cannot take it for an orderly end. What was
	// written comes before that. It may be called while Write runs, which then fails. wait tells that Close would be too early for what
	// is still on its way.
	Abort() (wait bool)
	// Close ends the connection at once and gives back what it holds; without FinishWrite or Abort before it, it aborts. Read, Write
	// and WaitClosed under way return.
	io.Closer
}

// linger is how long a side that was told of the end may take to close for its part. Nothing is lost when it is over: what was written
// is in the kernel's or the peer's hands by then.
const linger = time.Minute

// abortLinger is the same for a side that was told of a failure: there is less to wait for, and somebody may want to know.
const abortLinger = time.Second

// event is what happened to one side of a Splice.
type event struct {
	conn Conn
	what happening
	err  error
}

type happening uint8

const (
	closed happening = iota + 1 // by the other side, after all its bytes were handed on
	failed                      // reading from it, or it takes nothing
	deaf                        // writing to it failed at once; it may still have something to say
)

// Splice copies between a and b until both are over, and closes both. The error is nil if the end was orderly: both directions came
// to their end, or one side closed and the other got all of its bytes and was told.
//
// The caller calls wait before it lets go of what a and b are made of: the copying goroutines may still be on their way out.
func Splice(a, b Conn) (wait func(), err error) {
	// Room for all there can be: for each side one of what writing to it met, and one of what reading from it did.
	events := make(chan event, 4)
	var copying sync.WaitGroup
	copying.Go(func() { pass(a, b, events) })
	copying.Go(func() { pass(b, a, events) })
	err = join(a, b, events)
	a.Close()
	b.Close()
	return copying.Wait, err
}

// join decides from what happens what is to happen. It returns when both sides can be closed.
func join(a, b Conn, events <-chan event) error {
	var over <-chan time.Time // when the rest is waited for no longer
	var ended int             // sides that closed
	var failure error         // that the other side was told of
	for {
		var e event
		select {
		case e = <-events:
		case <-over:
			if ended == 0 && failure == nil {
				return errors.New("nothing can be written, and the other side does not close")
			}
			return failure // told, and it takes its time
		}
		other := a
		if e.conn == a {
			other = b
		}
		switch e.what {
		case deaf:
			// Its last words may be on their way; after them it is over.
			if over == nil {
				over = time.After(linger)
			}
		case failed:
			if ended > 0 || failure != nil {
				return failure // it was told; how it goes is its own affair
			}
			failure = e.err
			if !other.Abort() {
				return failure
			}
			over = time.After(abortLinger)
		case closed:
			ended++
			if ended == 2 || failure != nil || other.FinishWrite() != nil {
				return failure // both are over, or the other is gone
			}
			over = time.After(linger)
		}
	}
}

// bufferSize is one read: what fits into one message of a Forward.
const bufferSize = 31 << 10

var buffers = sync.Pool{New: func() any { return new([bufferSize]byte) }}

// pass hands on what comes from one side to the other. When that takes no more, the rest is read and thrown away: unread bytes would
// turn the closing of a TCP connection into a reset, which may destroy what is still on its way to the one who sent them.
func pass(from, to Conn, events chan<- event) {
	buf := buffers.Get().(*[bufferSize]byte)
	defer buffers.Put(buf)
	lost := false
	for {
		n, err := from.Read(buf[:])
		if n > 0 && !lost {
			if _, werr := to.Write(buf[:n]); werr != nil {
				lost = true
				if errors.Is(werr, os.ErrDeadlineExceeded) {
					events <- event{to, failed, fmt.Errorf("stalled: %w", werr)} // it is there, and takes nothing
				} else {
					events <- event{to, deaf, nil}
				}
			}
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			events <- event{from, failed, fmt.Errorf("read: %w", err)}
			return
		}
	}
	if !lost && to.CloseWrite() != nil {
		events <- event{to, deaf, nil}
	}
	if err := from.WaitClosed(); err != nil {
		events <- event{from, failed, fmt.Errorf("wait for the other side to close: %w", err)}
		return
	}
	events <- event{from, closed, nil}
}
