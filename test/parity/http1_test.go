package parity_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/mvp-mesh/mvp-node/test/fake"
)

// idleTime is how long a connection is kept for another request. A server closes one after 90 s, unseen by who writes to it.
const idleTime = 10 * time.Second

// client1 speaks HTTP/1.1 and writes every byte of a request itself. Answers are read by net/http, which hides nothing but the order of
// headers of different names.
type client1 struct {
	dial func() (net.Conn, error)
	conn net.Conn
	in   *bufio.Reader
	used time.Time // when the last exchange ended
}

func (c *client1) close() {
	if c.conn != nil {
		c.conn.Close()
		c.conn = nil
	}
}

func (c *client1) do(r *request, o observer) answer {
	if time.Since(c.used) > idleTime {
		c.close()
	}
	if c.conn == nil {
		conn, err := c.dial()
		if err != nil {
			return answer{end: unheard, why: err.Error()}
		}
		c.conn, c.in = conn, bufio.NewReaderSize(conn, 64<<10)
	}
	_ = c.conn.SetDeadline(time.Now().Add(r.limit())) // it is open
	up := &upload1{r: r, o: o, out: bufio.NewWriterSize(c.conn, 64<<10), wanted: make(chan struct{}), done: make(chan struct{})}
	if err := up.head(); err != nil {
		c.close()
		return answer{end: unheard, why: err.Error()}
	}
	go up.send()
	a, keep := c.receive(r, o, up)
	up.refuse()
	select {
	case <-up.done:
	default:
		keep = false // the answer came before the body was sent
	}
	if !keep || up.err != nil || r.expect {
		c.close() // which ends what is still being written
	}
	<-up.done
	c.used = time.Now()
	return a
}

// receive reads the answer and reports whether the connection is good for another request.
func (c *client1) receive(r *request, o observer, up *upload1) (a answer, keep bool) {
	for {
		resp, err := http.ReadResponse(c.in, &http.Request{Method: r.method})
		if err != nil {
			a.end, a.why = unheard, err.Error()
			return a, false
		}
		if resp.StatusCode < 200 {
			if resp.StatusCode == http.StatusContinue {
				up.ask()
			}
			a.informational = append(a.informational, describe(resp.StatusCode, resp.Header))
			continue
		}
		o.ClientHas(fake.AwaitHead)
		a.status, a.header = resp.StatusCode, resp.Header
		_, said := resp.Header["Content-Length"]
		switch {
		case said:
			a.length = resp.Header.Get("Content-Length")
		case noBodyFor(r.method, resp.StatusCode):
			a.length = lengthNone
		default:
			a.length = lengthUnknown
		}
		body := fake.NewDigester()
		buf := make([]byte, 32<<10)
		for {
			n, err := resp.Body.Read(buf)
			_, _ = body.Write(buf[:n])
			if n > 0 {
				o.ClientHas(body.Size())
			}
			if err == io.EOF {
				a.end = complete
				break
			}
			if err != nil {
				a.end, a.why = broken, err.Error()
				break
			}
		}
		a.body, a.trailer = body.Digest(), resp.Trailer
		return a, a.end == complete && !resp.Close
	}
}

// upload1 writes one request.
type upload1 struct {
	r   *request
	o   observer
	out *bufio.Writer

	once   sync.Once
	wanted chan struct{} // closed when the body may be sent, or never will be
	gone   bool          // set before wanted is closed: it never will
	done   chan struct{} // closed after err was set
	err    error
}

func (u *upload1) ask()    { u.once.Do(func() { close(u.wanted) }) }
func (u *upload1) refuse() { u.once.Do(func() { u.gone = true; close(u.wanted) }) }

func (u *upload1) head() error {
	r, version := u.r, u.r.version
	if version == "" {
		version = "HTTP/1.1"
	}
	fmt.Fprintf(u.out, "%s %s %s\r\nHost: %s\r\n", r.method, r.target, version, r.hostname())
	for _, f := range r.fields {
		fmt.Fprintf(u.out, "%s: %s\r\n", f.Name, f.Value)
	}
	if n := r.length(); n != "" {
		fmt.Fprintf(u.out, "Content-Length: %s\r\n", n)
	}
	if r.framing == unsaid {
		fmt.Fprint(u.out, "Transfer-Encoding: chunked\r\n")
	}
	if names := r.trailerNames(); names != "" {
		fmt.Fprintf(u.out, "Trailer: %s\r\n", names)
	}
	if r.expect {
		fmt.Fprint(u.out, "Expect: 100-continue\r\n")
	}
	fmt.Fprint(u.out, "\r\n")
	return u.out.Flush() // keeps the first error of the writes before
}

func (u *upload1) send() {
	defer close(u.done)
	if u.r.framing == bodyless {
		return
	}
	if u.r.expect {
		if <-u.wanted; u.gone {
			return
		}
	}
	chunked := u.r.framing == unsaid
	whole := u.r.pieces(func(p []byte) bool {
		if chunked {
			fmt.Fprintf(u.out, "%x\r\n", len(p))
		}
		_, u.err = u.out.Write(p)
		if chunked {
			_, u.err = u.out.WriteString("\r\n")
		}
		return u.err == nil
	}, func(sent int64) bool {
		u.err = u.out.Flush()
		return u.err == nil && u.o.AwaitUpload(sent)
	})
	if !whole {
		if u.err == nil {
			u.err = io.ErrShortWrite
		}
		return
	}
	if chunked {
		fmt.Fprint(u.out, "0\r\n")
		for _, f := range u.r.trailer {
			fmt.Fprintf(u.out, "%s: %s\r\n", f.Name, f.Value)
		}
		fmt.Fprint(u.out, "\r\n")
	}
	u.err = u.out.Flush()
}
