package front

import (
	"context"
	"errors"
	"net"
	"net/http"
	"runtime/debug"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/mvp-mesh/mvp-node/internal/authz"
	"github.com/mvp-mesh/mvp-node/internal/loopguard"
	"github.com/mvp-mesh/mvp-node/internal/reqctx"
	"github.com/mvp-mesh/mvp-node/internal/route"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/authentication/user"
)

// newChain is every step before the decision, in the order in which a request meets them. Each is a function from handler to
// handler; a step that answers does not call the next.
func (h *Handler) newChain() http.Handler {
	var next http.Handler = http.HandlerFunc(h.route)
	next = h.withDeadline(next)     // needs to know whether the request is long-running
	next = h.withAttributes(next)   // RequestInfo, and the affinity of this user
	next = h.withCleanHeaders(next) // what must not travel: credentials, hop-by-hop; after the authenticator has read them
	next = h.withUser(next)         // 401 or 503 end here
	next = h.withReadyz(next)       // the node's own readiness on the apiserver's /readyz; needs no credentials
	next = h.withoutForgeries(next) // identity headers and hop marks of clients; before anything could believe them
	next = h.withBoundBody(next)    // a body that does not come, also one that nobody wants to read
	next = h.withRecover(next)      // a panic is a 500 Status, an abort stays an abort
	next = h.withRecord(next)       // audit ID, metrics and log line: sees what all of the above did
	return next
}

// requestRecord is what one request looked like when it was over, for its metric sample and log line. It belongs to the
// request's goroutine.
type requestRecord struct {
	rc reqctx.Request
	// The selectors of a list, watch or deletecollection, for the review before a forward.
	fieldSelector, labelSelector string

	start   time.Time
	cause   route.Cause
	err     error
	served  Served
	gone    bool // the client went away
	aborted bool // the answer was cut off
	w       *responseWriter
	body    *clientBody // nil if the request has none, or came by HTTP/2
}

type recordKey struct{}

// record is the request's record; withRecord has put it there.
func record(r *http.Request) *requestRecord {
	return r.Context().Value(recordKey{}).(*requestRecord)
}

func (h *Handler) withRecord(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rec := &requestRecord{start: time.Now(), w: &responseWriter{ResponseWriter: w}}
		// A fresh ID for every request: one that a client chose could hide its events (CASES A-01).
		rec.rc.AuditID = uuid.NewString()
		rec.rc.IngressNode = h.NodeName
		if host, _, err := net.SplitHostPort(r.RemoteAddr); err == nil {
			rec.rc.ClientAddrs = []string{host}
		}
		ctx := context.WithValue(r.Context(), recordKey{}, rec)
		r = r.WithContext(reqctx.With(ctx, &rec.rc))
		h.metrics.inflight.Inc()
		defer func() {
			h.metrics.inflight.Dec()
			h.finish(r, rec)
		}()
		next.ServeHTTP(rec.w, r)
	})
}

// finish writes the metric sample and, for all that is not an ordinary local answer, one log line.
func (h *Handler) finish(r *http.Request, rec *requestRecord) {
	h.metrics.observe(rec, time.Since(rec.start))
	level := levelOf(rec)
	if !h.Logger.Enabled(r.Context(), level) {
		return
	}
	d := rec.rc.Decision
	args := []any{
		"audit_id", rec.rc.AuditID, "method", r.Method, "path", r.URL.Path, "code", rec.w.code(),
		"outcome", d.Outcome.String(), "reason", d.Reason.String(), "duration", time.Since(rec.start),
	}
	if rec.rc.User != nil {
		args = append(args, "user", rec.rc.User.Name)
	}
	if rec.served.Node != "" {
		args = append(args, "peer", rec.served.Node, "attempts", rec.served.Attempts)
	}
	if rec.cause != route.CauseNone {
		args = append(args, "cause", rec.cause.String())
	}
	if rec.aborted || rec.gone {
		args = append(args, "aborted", rec.aborted, "client_gone", rec.gone)
	}
	if f, ok := rec.err.(*Failure); rec.err != nil && !(ok && f.Err == nil) {
		args = append(args, "err", rec.err)
	}
	h.Logger.Log(r.Context(), level, "request", args...)
}

func (h *Handler) withRecover(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() {
			v := recover()
			if v == nil {
				return
			}
			if err, ok := v.(error); ok && errors.Is(err, http.ErrAbortHandler) {
				panic(http.ErrAbortHandler) // a body that was cut off must not end cleanly (CASES F-01)
			}
			h.metrics.panics.Inc()
			h.Logger.ErrorContext(r.Context(), "panic while serving a request", "panic", v, "stack", string(debug.Stack()))
			if record(r).w.status != 0 {
				panic(http.ErrAbortHandler) // the head is out: all that is left is to not let it look complete
			}
			writeStatus(w, r, &apierrors.NewInternalError(errors.New("mvp-node "+h.NodeName)).ErrStatus)
		}()
		next.ServeHTTP(w, r)
	})
}

// withoutForgeries deletes, on every path and before any branch, what a client could use to pass for somebody else or for a
// forwarded request.
func (h *Handler) withoutForgeries(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.HeaderNames.Strip(r.Header)
		loopguard.Strip(r.Header)
		next.ServeHTTP(w, r)
	})
}

// withReadyz answers /readyz itself while the node must not be sent traffic; otherwise the apiserver's own answer follows. The
// other health paths are always the apiserver's.
func (h *Handler) withReadyz(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/readyz" {
			if err := h.Ready(); err != nil {
				w.Header().Set("Content-Type", "text/plain; charset=utf-8")
				w.Header().Set("X-Content-Type-Options", "nosniff")
				w.WriteHeader(http.StatusServiceUnavailable)
				// Why is told on the admin port; strangers learn no more than from an apiserver.
				_, _ = w.Write([]byte("[-]mvp-node failed: reason withheld\nreadyz check failed\n"))
				return
			}
		}
		next.ServeHTTP(w, r)
	})
}

func (h *Handler) withUser(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		resp, ok, err := h.Authenticator.AuthenticateRequest(r)
		rec := record(r)
		if err != nil || !ok {
			rec.err = err
			if err != nil && backendFailed(err) {
				h.fail(w, r, &Failure{Cause: route.AuthnUnavailable, Err: err})
				return
			}
			closeHTTP2(w, r)
			writeStatus(w, r, &apierrors.NewUnauthorized("Unauthorized").ErrStatus)
			return
		}
		if resp.User.GetName() == user.Anonymous {
			closeHTTP2(w, r)
		}
		rec.rc.User = userOf(resp.User)
		next.ServeHTTP(w, r)
	})
}

// closeHTTP2 lets a client without an identity have one request per HTTP/2 connection, as kube-apiserver does: streams are too
// cheap to open and reset for strangers to keep (CASES I-10).
func closeHTTP2(w http.ResponseWriter, r *http.Request) {
	if r.ProtoMajor == 2 {
		w.Header().Set("Connection", "close")
	}
}

// withCleanHeaders deletes what concerns this connection or proves the client's identity. Neither travels further, to the
// apiserver or to a peer. What a client wants to switch its connection to is kept as a fact, and only if it can be had.
func (h *Handler) withCleanHeaders(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if rc := &record(r).rc; rc.Upgrade == "" {
			rc.Upgrade = upgradeOf(r)
		}
		if !sendableTarget(r.RequestURI) {
			h.fail(w, r, errTarget)
			return
		}
		authz.StripHopByHop(r.Header)
		authz.StripCredentials(r.Header)
		authz.StripForwarding(r.Header)
		authz.StripReplayKeys(r.Header)
		next.ServeHTTP(w, r)
	})
}

func (h *Handler) withAttributes(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rec := record(r)
		rc, res := &rec.rc, h.Resolver.resolve(r)
		rc.Attributes, rc.Namespace, rc.Name, rc.LongRunning = res.Attributes, res.Namespace, res.Name, res.LongRunning || rc.Upgrade != ""
		rec.fieldSelector, rec.labelSelector = res.FieldSelector, res.LabelSelector
		rc.Attributes.Affinity = Affinity(rc.User.Name, rc.Attributes.Key)
		next.ServeHTTP(w, r)
	})
}

// deadlineSlack is what a request gets beyond its own time limit, so that the apiserver, which counts the same time, is the one
// to say that it is over: its answer is better than ours.
const deadlineSlack = time.Second

func (h *Handler) withDeadline(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if record(r).rc.LongRunning {
			boundBody(w, r, time.Time{})
			next.ServeHTTP(w, r)
			return
		}
		limit := requestTimeout(r, h.RequestTimeout) + deadlineSlack
		ctx, cancel := context.WithTimeout(r.Context(), limit)
		defer cancel()
		boundBody(w, r, time.Now().Add(limit+deadlineSlack))
		next.ServeHTTP(w, r.WithContext(ctx))
	})
}

// withBoundBody bounds how long a client may take to send its body, whatever becomes of the request: net/http reads what is left of
// a body before it sends the answer, a 401 too. withDeadline sets the bound anew when it knows more.
func (h *Handler) withBoundBody(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		boundBody(w, r, time.Now().Add(h.RequestTimeout+2*deadlineSlack))
		if r.ProtoMajor == 1 && r.Body != nil && r.ContentLength != 0 {
			b := &clientBody{ReadCloser: r.Body}
			record(r).body, r.Body = b, b
		}
		next.ServeHTTP(w, r)
	})
}

// boundBody ends reading of the body at a time; the zero time is never. A Read under way heeds no context, and closing the body waits
// for it. For a request with a deadline the bound lies behind that, so that what the client is told is that its time is over.
func boundBody(w http.ResponseWriter, r *http.Request, end time.Time) {
	if r.Body == nil || r.Body == http.NoBody {
		return
	}
	_ = http.NewResponseController(w).SetReadDeadline(end) // net/http can, for both protocols, and resets it for the next request
}

// requestTimeout is the configured limit, or the client's ?timeout= when that is shorter. What does not parse is for the
// apiserver to refuse.
func requestTimeout(r *http.Request, limit time.Duration) time.Duration {
	if !strings.Contains(r.URL.RawQuery, "timeout=") {
		return limit // spares parsing the query of nearly every request
	}
	if d, err := time.ParseDuration(r.URL.Query().Get("timeout")); err == nil && d > 0 && d < limit {
		return d
	}
	return limit
}
