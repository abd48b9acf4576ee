package forward

import (
	"context"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"sync"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	mvpv1 "github.com/mvp-mesh/mvp-node/proto/mvp/v1"
)

// orderly is a stream that more than one goroutine may send on: the one that answers, the transport's that reads the request body and
// asks for it, and the transport's that meets an informational answer.
type orderly struct {
	stream
	mu sync.Mutex
}

// Send implements grpc.BidiStreamingServer.
func (o *orderly) Send(m *mvpv1.ForwardResponse) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.stream.Send(m)
}

func informational(code int, h http.Header) *mvpv1.ForwardResponse {
	return &mvpv1.ForwardResponse{Part: &mvpv1.ForwardResponse_Informational{
		Informational: &mvpv1.Informational{Status: int32(code), Headers: encodeHeader(h)},
	}}
}

// informer sends informational answers on while the answer itself is waited for.
type informer struct {
	stream stream
	mu     sync.Mutex
	over   bool // the answer is there: nothing may come before it any more
}

// watch returns a context with which a transport tells of informational answers.
func (i *informer) watch(ctx context.Context) context.Context {
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{Got1xxResponse: i.tell})
}

func (i *informer) tell(code int, h textproto.MIMEHeader) error {
	if code == http.StatusContinue {
		return nil // the apiserver wants the body; whoever reads it asks the ingress node
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.over {
		return nil
	}
	header := http.Header(h).Clone()
	authz.StripHopByHop(header)
	return i.stream.Send(informational(code, header))
}

func (i *informer) stop() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.over = true
}
