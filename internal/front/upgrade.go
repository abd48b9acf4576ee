package front

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/textproto"
	"strings"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/duplex"
	"github.com/mvp-mesh/mvp-node/internal/reqctx"
	"github.com/mvp-mesh/mvp-node/internal/route"
	"golang.org/x/net/http/httpguts"
)

// requestError is an error of the request itself, told to the client in general words.
type requestError string

// Error implements error.
func (e requestError) Error() string { return string(e) }

// BadRequest makes it a 400.
func (requestError) BadRequest() bool { return true }

const (
	// errTarget: only HTTP/2 can carry such a target at all, and no apiserver that speaks HTTP/1.1 could be sent it.
	errTarget      = requestError("white space or a control character in the request-target")
	errUpgradeBody = requestError("a body in a request that asks for an upgrade")
)

func sendableTarget(target string) bool {
	return strings.IndexFunc(target, func(r rune) bool { return r <= ' ' || r == 0x7f }) < 0
}

// upgradeOf returns the protocol that a client asks to switch to, "" if it asks for none, for several, or for one that is not passed
// on. The request is then an ordinary one, as RFC 9110 section 7.8 allows, and the apiserver says what is missing.
func upgradeOf(r *http.Request) string {
	if r.ProtoMajor != 1 || r.ProtoMinor < 1 || !httpguts.HeaderValuesContainsToken(r.Header["Connection"], "upgrade") {
		return ""
	}
	values := r.Header["Upgrade"]
	if len(values) != 1 {
		return ""
	}
	return reqctx.ParseUpgrade(textproto.TrimString(values[0]))
}

// maxRefusal bounds the body of an answer that refuses an upgrade (CASES S-03).
const maxRefusal = 1 << 20

// answerUpgrade writes the answer to a request for an upgrade. Only a 101 makes a tunnel of the client's connection; after any other
// answer it is closed, so that nothing that the client sent for the other protocol is taken for a request.
func (h *Handler) answerUpgrade(w http.ResponseWriter, r *http.Request, rc *reqctx.Request, resp *http.Response) {
	switch code := resp.StatusCode; {
	case code == http.StatusSwitchingProtocols:
		h.tunnel(w, r, rc, resp)
	case code < 400:
		resp.Body.Close()
		h.fail(w, r, &Failure{Cause: route.BadAnswer, Err: fmt.Errorf("status %d to a request for %s", code, rc.Upgrade)})
	default:
		// Nobody else bounds a request for an upgrade.
		timer := time.AfterFunc(h.RequestTimeout, func() { resp.Body.Close() })
		defer timer.Stop()
		if resp.ContentLength > maxRefusal {
			resp.ContentLength = -1
			resp.Header.Del("Content-Length")
		}
		resp.Body = &atMost{ReadCloser: resp.Body, left: maxRefusal}
		h.copyResponse(w, r, resp, false)
	}
}

// atMost is a body that fails after left bytes instead of ending: what is cut off must not look whole.
type atMost struct {
	io.ReadCloser
	left int
}

var errTooLong = errors.New("the body that refuses an upgrade is too long")

// Read implements io.Reader.
func (a *atMost) Read(p []byte) (int, error) {
	if a.left == 0 {
		if n, err := a.ReadCloser.Read(p[:1]); n == 0 {
			return 0, err
		}
		return 0, errTooLong
	}
	n, err := a.ReadCloser.Read(p[:min(len(p), a.left)])
	a.left -= n
	return n, err
}

// tunnel takes the client's connection over and joins it with the one on which the 101 came. It returns when both are over.
func (h *Handler) tunnel(w http.ResponseWriter, r *http.Request, rc *reqctx.Request, resp *http.Response) {
	far, ok := resp.Body.(duplex.Conn)
	if !ok {
		resp.Body.Close()
		h.fail(w, r, fmt.Errorf("body of a 101 is a %T", resp.Body))
		return
	}
	defer far.Close()
	conn, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		h.fail(w, r, fmt.Errorf("take the client's connection over: %w", err))
		return
	}
	defer conn.Close()
	rec := record(r)
	secure, ok := conn.(*tls.Conn)
	if !ok {
		rec.err = fmt.Errorf("the client's connection is a %T", conn)
		return
	}
	_ = conn.SetDeadline(time.Time{}) // of the request's head
	// Bytes that came with the head are the first of the other protocol.
	var early []byte
	if n := buffered.Reader.Buffered(); n > 0 {
		early, _ = buffered.Reader.Peek(n)
	}
	client := duplex.OverTLS(secure, io.MultiReader(bytes.NewReader(early), secure), h.StallTimeout)

	resp.Header["Connection"], resp.Header["Upgrade"] = []string{"Upgrade"}, []string{rc.Upgrade}
	var head bytes.Buffer
	_ = (&http.Response{StatusCode: resp.StatusCode, ProtoMajor: 1, ProtoMinor: 1, Header: resp.Header}).Write(&head) // to memory
	rec.w.status = resp.StatusCode
	if _, err := client.Write(head.Bytes()); err != nil {
		rec.gone, rec.err = true, err
		return
	}
	h.metrics.upgraded.Inc()
	defer h.metrics.upgraded.Dec()
	// The server's last word when it stops; nothing else ends the context of a connection that was taken over.
	stop := context.AfterFunc(r.Context(), func() {
		client.Close()
		far.Close()
	})
	defer stop()
	wait, err := duplex.Splice(client, far)
	wait()
	if err != nil {
		rec.aborted, rec.err = true, err
	}
}
