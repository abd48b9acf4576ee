// Package reqctx carries what the filters of front, or the head of a forward, found out about one request down to the code that
// sends it on. All of it hangs on a single context value, so that reading any of it costs one lookup.
//
// It carries request-scoped facts only: never dependencies, never routing keys. It starts no goroutines.
package reqctx

import (
	"context"
	"strings"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	"github.com/mvp-mesh/mvp-node/internal/loopguard"
	"github.com/mvp-mesh/mvp-node/internal/route"
)

// Request is what is known about one request. Whoever enters a request (front's chain, forward's server) makes it, fills it and
// owns it; after the request is handed on, nobody writes to it.
type Request struct {
	// User is who the ingress node authenticated. Nil until then; nothing leaves the node while it is nil.
	User *authz.User
	// AuditID is made fresh by the ingress node and the same on every hop and in the apiserver's own audit event.
	AuditID string
	// ClientAddrs is the client's TCP address followed by the nodes the request passed, without ports; it becomes
	// X-Forwarded-For towards the apiserver.
	ClientAddrs []string
	// IngressNode is the name of the node that the client's request arrived at.
	IngressNode string
	// Hop counts the forwards behind the request.
	Hop loopguard.Hop
	// Attributes, Namespace, Name and LongRunning are what RequestInfo says.
	Attributes  route.Attributes
	Namespace   string
	Name        string
	LongRunning bool
	// Upgrade is the protocol that the client asks to switch to, UpgradeWebSocket or UpgradeSPDY; "" if it does not. Such a request is
	// always LongRunning.
	Upgrade string
	// CatalogRead is when the last complete reading of the local apiserver's discovery began, asked before the catalog was looked
	// at: what the request relies on is of that time or newer. Zero if nobody can tell.
	CatalogRead time.Time
	// Decision is what route.Decide said; the zero value on a serving node, which decides nothing.
	Decision route.Decision
}

// The protocols that an apiserver can be asked to switch to. No other is passed on: what nobody knows could be anything (h2c, for
// one, would let a client write requests past all checks).
const (
	UpgradeWebSocket = "websocket"
	UpgradeSPDY      = "SPDY/3.1"
)

// ParseUpgrade returns the protocol that the value of an Upgrade header names, "" if it is none that is passed on. Names are compared
// without regard to case (RFC 9110 section 7.8).
func ParseUpgrade(value string) string {
	for _, known := range [...]string{UpgradeWebSocket, UpgradeSPDY} {
		if strings.EqualFold(value, known) {
			return known
		}
	}
	return ""
}

type key struct{}

// With returns a context that carries r.
func With(ctx context.Context, r *Request) context.Context { return context.WithValue(ctx, key{}, r) }

// From returns the Request of the context; ok is false if there is none.
func From(ctx context.Context) (r *Request, ok bool) {
	r, ok = ctx.Value(key{}).(*Request)
	return r, ok
}
