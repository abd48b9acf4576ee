package front

import (
	"fmt"
	"math/rand/v2"
	"net/http"

	"github.com/mvp-mesh/mvp-node/internal/route"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
)

// Failure is an error made by mvp-node that has a cause. Forwarder returns it; everything else that fails is turned into one.
type Failure struct {
	Cause route.Cause
	// NotSent is set by a Forwarder when it is certain that no apiserver saw the request.
	NotSent bool
	// Err is for logs. It is not shown to clients: it may name addresses and certificates.
	Err error
}

// Error implements error.
func (f *Failure) Error() string {
	if f.Err == nil {
		return f.Cause.String()
	}
	return f.Cause.String() + ": " + f.Err.Error()
}

// Unwrap gives the error behind.
func (f *Failure) Unwrap() error { return f.Err }

// BodyError reports that the client's own body could not be read to its end. It is nobody's failure but the client's.
type BodyError struct{ Err error }

// Error implements error.
func (e *BodyError) Error() string { return "read request body: " + e.Err.Error() }

// Unwrap gives the error behind.
func (e *BodyError) Unwrap() error { return e.Err }

// answer is a row of the table from causes to what a client sees.
type answer struct {
	code    int32
	reason  metav1.StatusReason
	message string
	// retry states "this was not executed": client-go sends any verb again when it sees Retry-After (DESIGN.md rule 3).
	retry bool
}

// statusReasonBadGateway goes with 502, for which Kubernetes has no reason of its own.
const statusReasonBadGateway metav1.StatusReason = "BadGateway"

// answers is the one table from causes to a Status (RELIABILITY section 6).
var answers = map[route.Cause]answer{
	route.ViewIncomplete:         {503, metav1.StatusReasonServiceUnavailable, "no known member of the mesh serves this, and not every member's resources are known yet", true},
	route.NoPeerAvailable:        {503, metav1.StatusReasonServiceUnavailable, "the kube-apiservers that serve this cannot be reached now", true},
	route.PeerTLS:                {503, metav1.StatusReasonServiceUnavailable, "no trusted connection to the node that serves this", true},
	route.BreakerOpen:            {503, metav1.StatusReasonServiceUnavailable, "the nodes that serve this failed too often and are given a pause", true},
	route.PeerRefused:            {503, metav1.StatusReasonServiceUnavailable, "the node that serves this refused the request", true},
	route.NotServed:              {503, metav1.StatusReasonServiceUnavailable, "what is known of the kube-apiserver that served this is outdated; it is being read again", true},
	route.LoopDetected:           {503, metav1.StatusReasonServiceUnavailable, "the request was forwarded already and is not served here", true},
	route.LocalUnavailable:       {503, metav1.StatusReasonServiceUnavailable, "the local kube-apiserver is not available", true},
	route.AuthnUnavailable:       {503, metav1.StatusReasonServiceUnavailable, "credentials cannot be checked now", true},
	route.PeerBusy:               {429, metav1.StatusReasonTooManyRequests, "the node that serves this has too many requests", true},
	route.UserShare:              {429, metav1.StatusReasonTooManyRequests, "too many requests of one user", true},
	route.DeadlineBeforeDispatch: {504, metav1.StatusReasonTimeout, "the request's time was over before it was sent on", true},
	route.OutcomeUnknown:         {504, metav1.StatusReasonTimeout, "the request was sent on and no answer came: it may or may not have been executed", false},
	route.BadAnswer:              {502, statusReasonBadGateway, "the kube-apiserver gave an answer that is not passed on: a redirect to another host, or no switch to the protocol that was asked for", false},
	route.AssertionDenied:        {403, metav1.StatusReasonForbidden, "the serving node does not accept this user from another node", false},
}

// statusOf writes a cause as a Status that names mvp-node and the node as its source.
func statusOf(cause route.Cause, node string) *metav1.Status {
	a, ok := answers[cause]
	if !ok {
		a = answer{500, metav1.StatusReasonInternalError, "internal error", false}
	}
	s := &metav1.Status{
		Status:  metav1.StatusFailure,
		Code:    a.code,
		Reason:  a.reason,
		Message: fmt.Sprintf("mvp-node %s: %s", node, a.message),
		Details: &metav1.StatusDetails{
			Causes: []metav1.StatusCause{{
				Type:    metav1.CauseType(cause.String()),
				Message: "mvp-node",
			}},
		},
	}
	if a.retry {
		// Spread, so that clients turned away together do not come back together.
		s.Details.RetryAfterSeconds = 1 + rand.Int32N(3)
	}
	return s
}

// codecs encode a Status as JSON, YAML or protobuf, whichever the client accepts; JSON if none of them.
var codecs = func() serializer.CodecFactory {
	scheme := runtime.NewScheme()
	metav1.AddToGroupVersion(scheme, schema.GroupVersion{Version: "v1"})
	scheme.AddUnversionedTypes(schema.GroupVersion{Version: "v1"}, &metav1.Status{})
	return serializer.NewCodecFactory(scheme)
}()

// writeStatus answers with a Status. With Details.RetryAfterSeconds it also sets the Retry-After header.
func writeStatus(w http.ResponseWriter, r *http.Request, s *metav1.Status) int {
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("Cache-Control", "no-cache, private") // as kube-apiserver answers
	return responsewriters.ErrorNegotiated(&apierrors.StatusError{ErrStatus: *s}, codecs, schema.GroupVersion{Version: "v1"}, w, r)
}
