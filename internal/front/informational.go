package front

import (
	"context"
	"maps"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"sync"

	"github.com/mvp-mesh/mvp-node/internal/authz"
)

// informer passes informational answers (1xx) to the client while the answer is waited for. A transport may tell of them on a
// goroutine of its own, and late.
type informer struct {
	mu   sync.Mutex
	w    http.ResponseWriter
	over bool
}

func newInformer(w http.ResponseWriter) *informer { return &informer{w: w} }

// watch returns a context with which a transport tells of informational answers.
func (i *informer) watch(ctx context.Context) context.Context {
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{Got1xxResponse: i.tell})
}

func (i *informer) tell(code int, h textproto.MIMEHeader) error {
	if code == http.StatusContinue {
		return nil // net/http says that to the client when its body is read
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.over {
		return nil
	}
	header := i.w.Header()
	kept := maps.Clone(header)
	clear(header)
	maps.Copy(header, http.Header(h))
	authz.StripHopByHop(header)
	i.w.WriteHeader(code)
	clear(header)
	maps.Copy(header, kept)
	return nil
}

// stop comes before the answer is written.
func (i *informer) stop() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.over = true
}
