package parity_test

import (
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/mvp-mesh/mvp-node/test/fake"
)

// protocol is what a client speaks.
type protocol string

const (
	http1 protocol = "HTTP/1.1"
	http2 protocol = "HTTP/2"
)

// framing says how a request tells the length of its body.
type framing uint8

const (
	bodyless   framing = iota // no body and no word about one
	withLength                // Content-Length
	unsaid                    // HTTP/1.1: chunked; HTTP/2: no content-length
)

// request is a request as it is written on the wire: nothing is added to it, cleaned or put in another order.
type request struct {
	method, target string
	host           string       // defaultHost if empty
	fields         []fake.Field // without Host and what framing, expect and trailer say
	framing        framing
	body           fake.Body
	piece          int // bytes of one chunk or DATA frame at most, 0 for 16 KiB
	// halves sends the second half of the body only when the apiserver has the first.
	halves bool
	// expect asks for a 100 Continue and sends the body after it.
	expect  bool
	trailer []fake.Field
	// quiet does not announce the trailer.
	quiet   bool
	version string // HTTP/1.1 only: another version to claim
	// time bounds the exchange, 0 for usualTime.
	time time.Duration
}

// limit bounds the request with its answer, at the client.
func (r *request) limit() time.Duration {
	if r.time == 0 {
		return usualTime
	}
	return r.time
}

const (
	// usualTime is long for any machine, and shorter than the request timeout of a node: what hangs until that is a difference.
	usualTime    = 25 * time.Second
	defaultHost  = "kubernetes.default.svc:443"
	defaultPiece = 16 << 10
)

// length is the value of Content-Length, "" for none.
func (r *request) length() string {
	if r.framing != withLength {
		return ""
	}
	return strconv.FormatInt(r.body.Len(), 10)
}

func (r *request) hostname() string {
	if r.host == "" {
		return defaultHost
	}
	return r.host
}

// pieces calls write for each piece of the body until it fails, and reports whether it never did. half is called between the halves
// of a body that is sent in two, and stops the sending as well.
func (r *request) pieces(write func([]byte) bool, half func(sent int64) bool) bool {
	size := r.piece
	if size == 0 {
		size = defaultPiece
	}
	middle := int64(-1)
	if r.halves {
		middle = r.body.Len() / 2
	}
	buf, body, sent := make([]byte, size), r.body.Reader(), int64(0)
	for left := r.body.Len(); left > 0; left = r.body.Len() - sent {
		want := min(left, int64(size))
		if sent < middle {
			want = min(want, middle-sent)
		}
		n, err := body.Read(buf[:want])
		if err != nil || !write(buf[:n]) {
			return false
		}
		if sent += int64(n); sent == middle && !half(sent) {
			return false
		}
	}
	return true
}

// trailerNames is the value of the header that announces the trailer, "" for none.
func (r *request) trailerNames() string {
	var names []string
	for _, f := range r.trailer {
		if !r.quiet && !slices.Contains(names, f.Name) {
			names = append(names, f.Name)
		}
	}
	return strings.Join(names, ", ")
}

// How an answer ended.
const (
	complete = "complete"
	broken   = "broken"    // after its head
	unheard  = "no answer" // not even a head
)

// answer is what a client saw.
type answer struct {
	status        int
	informational []string // in order, each with its headers
	header        http.Header
	// length is the Content-Length, "unknown" for a body without one, "none" for an answer that has no body and says nothing.
	length  string
	body    fake.Digest
	trailer http.Header
	end     string
	why     string // the error behind an end, for people; not compared
}

const (
	lengthUnknown = "unknown"
	lengthNone    = "none"
)

// bodyless reports whether an answer of that status to that method has no body, whatever its headers say.
func noBodyFor(method string, status int) bool {
	return method == http.MethodHead || status == http.StatusNoContent || status == http.StatusNotModified || status < 200
}

// describe writes an informational answer in one line.
func describe(status int, h http.Header) string {
	parts := []string{strconv.Itoa(status)}
	for name, values := range h {
		parts = append(parts, name+"="+strings.Join(values, "|"))
	}
	slices.Sort(parts[1:])
	return strings.Join(parts, " ")
}

// observer is told of the progress of an exchange while it goes on.
type observer interface {
	// ClientHas is told that the client has the head of the answer (fake.AwaitHead) or n bytes of its body.
	ClientHas(n int64)
	// AwaitUpload blocks until the apiserver has n bytes of the request's body and reports whether it ever had.
	AwaitUpload(n int64) bool
}

// client sends one request at a time, over one connection as long as that is good for another.
type client interface {
	do(r *request, o observer) answer
	close()
}
