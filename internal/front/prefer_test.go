package front

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/mvp-mesh/mvp-node/internal/catalog"
	"github.com/mvp-mesh/mvp-node/internal/route"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/apiserver/pkg/authorization/authorizer"
)

// preferring is a front whose policy prefers b, which serves the same pods with a newer apiserver.
func preferring(t *testing.T) *world {
	w := newWorld(t, true)
	w.prefer = route.PreferNewest
	pods := testCatalog(t, catalog.GV{Version: "v1"}, "pods", allVerbs...)
	w.setView(
		route.Member{Name: "a", State: route.Ready, Mode: route.Enabled, ServerVersion: "v1.35.4", Catalog: pods},
		route.Member{Name: "b", State: route.Ready, Mode: route.Enabled, ServerVersion: "v1.36.3", Address: "b:1", Catalog: pods},
	)
	return w
}

// CASES U-03: what both serve goes to the preferred version, documents too, and is counted as moved by policy.
func TestPreferredVersionIsAsked(t *testing.T) {
	w := preferring(t)
	var asked []authorizer.Attributes
	w.allow = func(a authorizer.Attributes) (authorizer.Decision, string, error) {
		asked = append(asked, a)
		return authorizer.DecisionAllow, "", nil
	}
	for _, path := range []string{podsPath, "/version", "/apis", "/openapi/v2"} {
		if _, body := w.do("GET", path, nil); !strings.Contains(body, `"b"`) {
			t.Errorf("GET %s: %s, want b's answer", path, body)
		}
	}
	if last := asked[len(asked)-1]; last.IsResourceRequest() || last.GetVerb() != "get" || last.GetPath() != "/openapi/v2" {
		t.Errorf("review of a document: %+v, want a question about its path", last)
	}
	if _, body := w.do("GET", "/livez", nil); !strings.Contains(body, "local") {
		t.Errorf("/livez: %s, want the local answer", body)
	}
	if got := testutil.ToFloat64(mustHandler(t, w).metrics.requests.WithLabelValues("Forward", "Preferred", "200")); got != 4 {
		t.Errorf("requests moved by policy: %v, want 4", got)
	}
}

// CASES U-03: no new point of failure. What certainly was not executed, and any read, is done locally with its body whole; a write of
// unknown outcome is not.
func TestPreferenceIsNoReasonToFail(t *testing.T) {
	w := preferring(t)
	fail := &Failure{Cause: route.NoPeerAvailable, NotSent: true, Err: errors.New("connection refused")}
	w.forward = func(*http.Request) (*http.Response, Served, error) { return nil, Served{Node: "b", Attempts: 1}, fail }
	w.local = func(r *http.Request) (*http.Response, error) {
		body, err := io.ReadAll(r.Body)
		return answered(200, "local:"+string(body)), err
	}
	post := func(size int) string {
		t.Helper()
		resp, err := w.client.Post(w.server.URL+podsPath, "application/json", bytes.NewReader(make([]byte, size)))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, _ := io.ReadAll(resp.Body)
		return string(body)
	}
	if _, body := w.do("GET", podsPath, nil); body != "local:" {
		t.Errorf("read: %s", body)
	}
	for _, size := range []int{0, 1, spareSize, spareSize + 1, 1 << 20} {
		if got := post(size); len(got) != len("local:")+size {
			t.Errorf("write of %d bytes: answer of %d bytes, want a local one that has them all", size, len(got))
		}
	}
	// A body of which something was taken is gone.
	w.forward = func(r *http.Request) (*http.Response, Served, error) {
		_, _ = r.Body.Read(make([]byte, 1))
		return nil, Served{}, fail
	}
	if got := post(spareSize); len(got) != len("local:")+spareSize {
		t.Errorf("small body, kept: %.80s", got)
	}
	if got := post(1 << 20); !strings.Contains(got, "NoPeerAvailable") {
		t.Errorf("large body, begun: %.80s, want 503 NoPeerAvailable", got)
	}
	// Unknown outcome.
	fail = &Failure{Cause: route.OutcomeUnknown, Err: errors.New("connection lost")}
	if got := post(1); !strings.Contains(got, "OutcomeUnknown") {
		t.Errorf("write of unknown outcome: %.80s, want 504 OutcomeUnknown", got)
	}
	if _, body := w.do("GET", podsPath, nil); body != "local:" {
		t.Errorf("read that may have been executed: %s", body)
	}
	if got := testutil.ToFloat64(mustHandler(t, w).metrics.requests.WithLabelValues("Local", "ServedLocally", "200")); got == 0 {
		t.Error("what was done locally after all is not counted as local")
	}
}

func mustHandler(t *testing.T, w *world) *Handler {
	t.Helper()
	h, ok := w.server.Config.Handler.(*Handler)
	if !ok {
		t.Fatalf("the server's handler is a %T", w.server.Config.Handler)
	}
	return h
}
