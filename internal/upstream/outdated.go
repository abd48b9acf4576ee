package upstream

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net/http"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/mvp-mesh/mvp-node/internal/reqctx"
	"github.com/mvp-mesh/mvp-node/internal/route"
)

// ErrNotServed reports that the apiserver does not serve what its catalog says: the catalog is that of another process.
var ErrNotServed = errors.New("the apiserver does not serve what its catalog says")

// outdated reports whether a 404 proves nothing but that the catalog is old. A request comes here because the catalog says that the
// apiserver serves it; between the start of another version and the next reading of its discovery that may be wrong, and the 404
// would mislead (DESIGN.md rule 1). A connection does not outlive its process, so one that was open before the last reading began
// leads to the process that was read, and its 404 is the truth: a path that no version serves ("namespaces/x/nodes") stays a 404.
//
// The body of resp is read in part and put back.
func (t *Transport) outdated(c *conn, rc *reqctx.Request, resp *http.Response) bool {
	if resp.StatusCode != http.StatusNotFound || rc.CatalogRead.IsZero() || !rc.Attributes.Resource {
		return false
	}
	// By the catalog: the ingress decided so, or the serving node has checked it. Every other 404 is asked for as it is.
	if rc.Hop == 0 && rc.Decision.Reason != route.ServedLocally {
		return false
	}
	if c.opened.Before(rc.CatalogRead) {
		return false
	}
	return routeMissing(resp)
}

// maxStatus bounds what is read of a 404. The Status of a missing route has some 200 bytes.
const maxStatus = 4 << 10

// routeMissing tells the 404 of a path that the apiserver has no route for from that of an object that is not there: the first is
// plain text, or a Status without details of an object (k8s.io/apiserver pkg/endpoints and go-restful's own; v1.35 to v1.37).
func routeMissing(resp *http.Response) bool {
	if resp.Header.Get("Content-Encoding") != "" {
		return false // not for so few bytes
	}
	head, err := io.ReadAll(io.LimitReader(resp.Body, maxStatus+1))
	resp.Body = &putBack{io.MultiReader(bytes.NewReader(head), after(resp.Body, err)), resp.Body}
	if err != nil || len(head) > maxStatus {
		return false
	}
	mediaType, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	if err != nil {
		return false
	}
	switch mediaType {
	case "text/plain":
		return strings.EqualFold(strings.TrimSpace(strings.ReplaceAll(string(head), ":", "")), "404 page not found")
	case "application/json":
		var s metav1.Status
		return json.Unmarshal(head, &s) == nil && s.Kind == "Status" && namesNothing(&s)
	case "application/vnd.kubernetes.protobuf":
		var u runtime.Unknown
		var s metav1.Status
		raw, ok := bytes.CutPrefix(head, []byte("k8s\x00"))
		return ok && u.Unmarshal(raw) == nil && u.Kind == "Status" && s.Unmarshal(u.Raw) == nil && namesNothing(&s)
	}
	return false
}

func namesNothing(s *metav1.Status) bool {
	return s.Reason == metav1.StatusReasonNotFound && (s.Details == nil || s.Details.Kind == "" && s.Details.Name == "")
}

// putBack is a body whose beginning was read before.
type putBack struct {
	io.Reader
	io.Closer
}

// after is the rest of a body, or the error that ended it.
func after(rest io.Reader, err error) io.Reader {
	if err == nil {
		return rest
	}
	return failing{err}
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

// refuseOutdated takes an answer back that proves the catalog to be old.
func (t *Transport) refuseOutdated(resp *http.Response) *Error {
	resp.Body.Close()
	if t.onOutdated != nil {
		t.onOutdated()
	}
	return &Error{Op: OpOutdated, Err: ErrNotServed}
}
