package front

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	"github.com/mvp-mesh/mvp-node/internal/reqctx"
	"github.com/mvp-mesh/mvp-node/internal/route"
	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
)

// Views gives the current view of the mesh. It is asked once per request, on the request's goroutine, and must not block.
type Views interface {
	View() *route.View
}

// Served says who answered a forwarded request.
type Served struct {
	Node          string
	ServerVersion string
	// Attempts is 1, or 2 when the first candidate could not be reached.
	Attempts int
}

// Forwarder sends a request to one of the candidates, best first. It is called on the request's goroutine and may block until
// the answer's head is there or the request's context ends. It takes over r.Body. Errors other than the context's are *Failure.
type Forwarder interface {
	Forward(r *http.Request, candidates []*route.Member) (*http.Response, Served, error)
}

// Options are the parts and settings of a Handler. All are required unless said otherwise.
type Options struct {
	NodeName string
	Views    Views
	Policy   func() route.Policy // asked per request, must not block
	// CatalogRead is when the last complete reading of the local catalog began. It must not be ahead of Views. May be nil.
	CatalogRead   func() time.Time
	Resolver      *Resolver
	Local         http.RoundTripper // to the local apiserver, under the identity in reqctx
	Forwarder     Forwarder
	Authenticator authenticator.Request
	Authorizer    authorizer.UnconditionalAuthorizer
	HeaderNames   authz.HeaderNames
	// Ready is nil while the node may be sent traffic; otherwise it says what keeps it from being ready. Shown on /readyz.
	Ready func() error
	// RequestTimeout bounds every request that is not long-running, and is kube-apiserver's --request-timeout.
	RequestTimeout time.Duration
	// StallTimeout bounds how long a client may take none of the bytes that are there for it, before its stream alone is reset.
	StallTimeout time.Duration
	Logger       *slog.Logger
	Registerer   prometheus.Registerer
}

// Handler answers what clients send. Make it with New.
type Handler struct {
	Options
	metrics *metrics
	chain   http.Handler
}

// New connects the parts. It starts nothing.
func New(o Options) (*Handler, error) {
	for name, missing := range map[string]bool{
		"NodeName": o.NodeName == "", "Views": o.Views == nil, "Policy": o.Policy == nil, "Resolver": o.Resolver == nil,
		"Local": o.Local == nil, "Forwarder": o.Forwarder == nil, "Authenticator": o.Authenticator == nil,
		"Authorizer": o.Authorizer == nil, "Ready": o.Ready == nil, "Logger": o.Logger == nil, "Registerer": o.Registerer == nil,
		"RequestTimeout": o.RequestTimeout <= 0, "StallTimeout": o.StallTimeout <= 0,
	} {
		if missing {
			return nil, fmt.Errorf("front: option %s is required", name)
		}
	}
	h := &Handler{Options: o, metrics: newMetrics(o.Registerer)}
	h.chain = h.newChain()
	return h, nil
}

// ServeHTTP implements http.Handler.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) { h.chain.ServeHTTP(w, r) }

// route is the end of the chain: one decision, one exhaustive switch, one answer.
func (h *Handler) route(w http.ResponseWriter, r *http.Request) {
	rc, _ := reqctx.From(r.Context())
	if h.CatalogRead != nil {
		rc.CatalogRead = h.CatalogRead() // before the view: see reqctx
	}
	rc.Decision = route.Decide(rc.Attributes, h.Views.View(), h.Policy())
	if rc.Upgrade != "" {
		// Whatever the answer, but for a 101: what a client sends after it could be meant for the other protocol.
		w.Header().Set("Connection", "close")
		if r.ContentLength != 0 {
			h.fail(w, r, errUpgradeBody)
			return
		}
	}
	var resp *http.Response
	var err error
	news := newInformer(w)
	r = r.WithContext(news.watch(r.Context()))
	switch d := rc.Decision; d.Outcome {
	case route.Local:
		resp, err = h.local(r, rc)
	case route.Forward:
		if !h.mayLeave(w, r, rc) {
			return
		}
		resp, err = h.forward(r, rc)
	case route.Unavailable:
		err = &Failure{Cause: d.Cause}
	default:
		panic(fmt.Sprintf("front: decision without outcome: %+v", d))
	}
	news.stop()
	switch {
	case err != nil:
		h.fail(w, r, err)
	case rc.Upgrade != "":
		h.answerUpgrade(w, r, rc, resp)
	case rc.Decision.Outcome == route.Forward && leadsAway(rc, resp):
		resp.Body.Close()
		h.fail(w, r, &Failure{Cause: route.BadAnswer, Err: fmt.Errorf("status %d with Location %q", resp.StatusCode, resp.Header["Location"])})
	default:
		h.copyResponse(w, r, resp, rc.LongRunning)
	}
}

func (h *Handler) local(r *http.Request, rc *reqctx.Request) (*http.Response, error) {
	resp, err := h.Local.RoundTrip(r)
	if err != nil {
		return nil, h.localFailure(rc, err)
	}
	return resp, nil
}

func (h *Handler) forward(r *http.Request, rc *reqctx.Request) (*http.Response, error) {
	preferred := rc.Decision.Reason == route.Preferred
	var spare *spareBody
	if preferred {
		var err error
		if spare, err = keepBody(r); err != nil {
			return nil, &BodyError{Err: err}
		}
	}
	resp, served, err := h.Forwarder.Forward(r, rc.Decision.Candidates)
	if err != nil && preferred && h.mayStay(r, rc, err) && spare.restore(r) {
		// A preference is no reason to fail: what could not be done there is done here (CASES U-03).
		rc.Decision = route.Decision{Outcome: route.Local, Reason: route.ServedLocally}
		return h.local(r, rc)
	}
	record(r).served = served
	return resp, err
}

// leadsAway reports whether an answer would send the client, with its credentials, to another host. What a proxy subresource answers
// is its backend's, and the apiserver has made of it what it thinks right (CASES F-04).
func leadsAway(rc *reqctx.Request, resp *http.Response) bool {
	if resp.StatusCode < 300 || resp.StatusCode > 399 || resp.StatusCode == http.StatusNotModified || rc.Attributes.Key.Subresource == "proxy" {
		return false
	}
	for _, location := range resp.Header["Location"] {
		// Browsers read a backslash as a slash.
		if u, err := url.Parse(strings.ReplaceAll(location, "\\", "/")); err != nil || u.Scheme != "" || u.Host != "" {
			return true
		}
	}
	return false
}

// mayLeave asks the local apiserver whether the user may do this before anything leaves the node. If not, it has answered. While
// the local apiserver is away it cannot be asked; with policy localOutage the serving one then judges alone, by the same RBAC from
// the same etcd, because otherwise the upgrade of one apiserver would take away what only the others serve.
func (h *Handler) mayLeave(w http.ResponseWriter, r *http.Request, rc *reqctx.Request) bool {
	if rc.Decision.Reason == route.LocalOutage || h.Policy().LocalOutage && h.Views.View().Self().State == route.LocalDown {
		return true
	}
	attrs := authorizer.AttributesRecord{
		User:            reviewedUser(r, rc.User),
		Verb:            rc.Attributes.Verb.String(),
		Namespace:       rc.Namespace,
		APIGroup:        rc.Attributes.Key.Group,
		APIVersion:      rc.Attributes.Key.Version,
		Resource:        rc.Attributes.Key.Resource,
		Subresource:     rc.Attributes.Key.Subresource,
		Name:            rc.Name,
		ResourceRequest: rc.Attributes.Resource,
		Path:            r.URL.Path,
	}
	if !rc.Attributes.Resource {
		attrs.Verb = strings.ToLower(r.Method) // as RequestInfo has it for paths that name no resource
	}
	addSelectors(&attrs, record(r))
	verdict, reason, err := h.Authorizer.Authorize(r.Context(), attrs)
	if verdict == authorizer.DecisionAllow {
		return true
	}
	if err != nil {
		if h.Policy().LocalOutage && r.Context().Err() == nil {
			return true // it went away a moment ago, and the probe has not seen it yet
		}
		h.fail(w, r, &Failure{Cause: route.LocalUnavailable, Err: fmt.Errorf("subject access review: %w", err)})
		return false
	}
	s := responsewriters.ForbiddenStatusError(attrs, reason).ErrStatus
	writeStatus(w, r, &s)
	return false
}

// addSelectors makes the selectors part of the question, as kube-apiserver does: a kubelet may list only what is on its own node.
// One that cannot be read narrows nothing; the serving apiserver refuses it.
func addSelectors(attrs *authorizer.AttributesRecord, rec *requestRecord) {
	if rec.fieldSelector != "" {
		selector, err := fields.ParseSelector(rec.fieldSelector)
		if err == nil {
			attrs.FieldSelectorRequirements = selector.Requirements()
		}
		attrs.FieldSelectorParsingErr = err
	}
	if rec.labelSelector != "" {
		selector, err := labels.Parse(rec.labelSelector)
		if err == nil {
			attrs.LabelSelectorRequirements, _ = selector.Requirements()
		}
		attrs.LabelSelectorParsingErr = err
	}
}

// localFailure says what it means that the local apiserver gave no answer.
func (h *Handler) localFailure(rc *reqctx.Request, err error) error {
	if errors.Is(err, authz.ErrNoUser) {
		return err // a bug of ours: nothing was sent, and 500 must say so
	}
	if isBadRequest(err) {
		return err
	}
	if e, ok := errors.AsType[interface {
		error
		NotServed() bool
	}](err); ok && e.NotServed() {
		return &Failure{Cause: route.NotServed, Err: err}
	}
	notSent, ok := errors.AsType[interface {
		error
		NotSent() bool
	}](err)
	if e, ok := errors.AsType[interface {
		error
		BodyBroken() bool
	}](err); ok && e.BodyBroken() {
		return &BodyError{Err: err}
	}
	if e, ok := errors.AsType[interface {
		error
		BadAnswer() bool
	}](err); ok && e.BadAnswer() {
		return &Failure{Cause: route.BadAnswer, Err: err}
	}
	sent := !ok || !notSent.NotSent()
	overdue := errors.Is(err, context.DeadlineExceeded)
	switch {
	case sent && (overdue || !rc.Attributes.ReadOnly()):
		return &Failure{Cause: route.OutcomeUnknown, Err: err}
	case overdue:
		return &Failure{Cause: route.DeadlineBeforeDispatch, Err: err}
	}
	return &Failure{Cause: route.LocalUnavailable, Err: err}
}

// isBadRequest reports whether the request itself is at fault, so that it would fail at every apiserver and at every try.
func isBadRequest(err error) bool {
	e, ok := errors.AsType[interface {
		error
		BadRequest() bool
	}](err)
	return ok && e.BadRequest()
}

// fail answers with the Status of an error. A client that is gone gets nothing, and the connection is not reused: an empty 200
// must never be what is left of a failure.
func (h *Handler) fail(w http.ResponseWriter, r *http.Request, err error) {
	rec := record(r)
	rec.err = err
	rec.body.beforeHead(http.NewResponseController(w), w.Header(), false)
	if errors.Is(r.Context().Err(), context.Canceled) {
		rec.gone = true
		panic(http.ErrAbortHandler)
	}
	if _, ok := errors.AsType[*BodyError](err); ok {
		writeStatus(w, r, &apierrors.NewBadRequest("the request's body broke off or could not be read").ErrStatus)
		return
	}
	if isBadRequest(err) {
		writeStatus(w, r, &apierrors.NewBadRequest("the request cannot be passed on as it is").ErrStatus)
		return
	}
	f, ok := errors.AsType[*Failure](err)
	if !ok {
		h.Logger.ErrorContext(r.Context(), "request failed inside the node", "audit_id", rec.rc.AuditID, "err", err)
		writeStatus(w, r, &metav1.Status{
			Status: metav1.StatusFailure, Code: http.StatusInternalServerError, Reason: metav1.StatusReasonInternalError,
			Message: fmt.Sprintf("mvp-node %s: internal error, nothing was sent on", h.NodeName),
			Details: &metav1.StatusDetails{Causes: []metav1.StatusCause{{Type: metav1.CauseTypeUnexpectedServerResponse, Message: "mvp-node"}}},
		})
		return
	}
	rec.cause = f.Cause
	writeStatus(w, r, statusOf(f.Cause, h.NodeName))
}
