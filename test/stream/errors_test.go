package stream_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// protobufMagic begins every object that kube-apiserver writes as protobuf; an Unknown with the object follows.
var protobufMagic = []byte{0x6b, 0x38, 0x73, 0x00}

// statusOf decodes an answer that must be a Status in the media type that it says.
func statusOf(t *testing.T, a answer) metav1.Status {
	t.Helper()
	var s metav1.Status
	media, _, err := mime.ParseMediaType(a.header.Get("Content-Type"))
	switch {
	case err != nil:
		t.Errorf("Content-Type %q: %v", a.header.Get("Content-Type"), err)
	case media == "application/json":
		if err := json.Unmarshal(a.body, &s); err != nil {
			t.Errorf("%v in %q", err, a.body)
		}
		if s.Kind != "Status" || s.APIVersion != "v1" {
			t.Errorf("not a Status: %s", a.body)
		}
	case media == "application/vnd.kubernetes.protobuf":
		var u runtime.Unknown
		rest, ok := bytes.CutPrefix(a.body, protobufMagic)
		if err := u.Unmarshal(rest); err != nil || !ok || u.Kind != "Status" || u.APIVersion != "v1" {
			t.Errorf("not a Status in protobuf: %v, %+v", err, u.TypeMeta)
		}
		if err := s.Unmarshal(u.Raw); err != nil {
			t.Error(err)
		}
	default:
		t.Errorf("an error in media type %s: %.200q", media, a.body)
	}
	return s
}

// ownStatus checks that an answer is a complete Status of mvp-node's own, and returns its cause.
func ownStatus(t *testing.T, a answer) string {
	t.Helper()
	s := statusOf(t, a)
	if int(s.Code) != a.code || s.Reason == "" || s.Status != metav1.StatusFailure || s.Message == "" {
		t.Errorf("code %d, Status %+v", a.code, s)
	}
	if s.Details == nil || len(s.Details.Causes) != 1 || s.Details.Causes[0].Message != "mvp-node" {
		t.Errorf("nothing says that mvp-node made this: %+v", s)
		return ""
	}
	cause := string(s.Details.Causes[0].Type)
	retry, _ := strconv.Atoi(a.header.Get("Retry-After"))
	if int(s.Details.RetryAfterSeconds) != retry {
		t.Errorf("Retry-After %q, retryAfterSeconds %d", a.header.Get("Retry-After"), s.Details.RetryAfterSeconds)
	}
	if unknown := cause == "OutcomeUnknown" || cause == "BadAnswer"; unknown != (retry == 0) {
		t.Errorf("Retry-After %d with cause %s", retry, cause)
	}
	for _, secret := range []string{"127.", "x509", "certificate", "refused", "EOF", ":7444", ":7445"} {
		if bytes.Contains(a.body, []byte(secret)) {
			t.Errorf("the client is told %q: %q", secret, a.body)
		}
	}
	return cause
}

const tableAccept = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"

// TestF02ErrorsAreStatuses: CASES F-02.
func TestF02ErrorsAreStatuses(t *testing.T) {
	t.Parallel()
	m := newMesh(t, setup{})
	// Both hops are dead: the mesh port of b for the forwarded path, its apiserver for the local one.
	m.meshRelay["b"].down(reset)
	m.apiRelay["b"].down(reset)
	m.eachWay(t, func(t *testing.T, w way) {
		c := w.client(t)
		for _, tc := range []struct{ accept, media string }{
			{"application/vnd.kubernetes.protobuf", "application/vnd.kubernetes.protobuf"},
			{"application/vnd.kubernetes.protobuf,application/json", "application/vnd.kubernetes.protobuf"},
			{"application/json", "application/json"},
			{tableAccept, "application/json"},
			{"text/html", "application/json"}, // nothing that we have
			{"", "application/json"},
		} {
			for _, method := range []string{"GET", "POST", "DELETE"} {
				h := http.Header{}
				if tc.accept != "" {
					h.Set("Accept", tc.accept)
				}
				a := w.send(t, c, method, "/api/v1/namespaces/f02/pods", strings.NewReader("{}"), h)
				if cause := ownStatus(t, a); a.code != 503 || cause != "NoPeerAvailable" && cause != "LocalUnavailable" {
					t.Errorf("%s with Accept %q: %d, cause %s", method, tc.accept, a.code, cause)
				}
				if media, _, _ := mime.ParseMediaType(a.header.Get("Content-Type")); media != tc.media {
					t.Errorf("%s with Accept %q is answered in %s", method, tc.accept, media)
				}
				if n, _ := strconv.Atoi(a.header.Get("Retry-After")); n < 1 {
					t.Errorf("Retry-After %q", a.header.Get("Retry-After"))
				}
			}
		}
		if n := len(m.servers["b"].seen("f02")); n != 0 {
			t.Errorf("%d requests came through", n)
		}
	})
}

// TestF03NotModified: CASES F-03.
func TestF03NotModified(t *testing.T) {
	t.Parallel()
	m := newMesh(t, setup{})
	const etag = `"A1B2"`
	conditional := func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("ETag", etag)
		w.Header().Set("Vary", "Accept")
		if r.Header.Get("If-None-Match") == etag {
			w.WriteHeader(http.StatusNotModified)
			return
		}
		fmt.Fprint(w, "the document")
	}
	for _, s := range m.servers {
		s.on("/openapi/v2", conditional)
		s.on("f03", conditional)
	}
	m.eachWay(t, func(t *testing.T, w way) {
		c := w.client(t)
		// Documents are answered by the node's own apiserver; the pods are the ones that are forwarded.
		for _, target := range []string{"/openapi/v2", "/api/v1/namespaces/f03/pods"} {
			for range 3 { // on the same connection: a body that is not there must not shift the next answer
				a := w.send(t, c, "GET", target, nil, http.Header{"If-None-Match": {etag}})
				if a.code != 304 || a.header.Get("Etag") != etag || a.header.Get("Vary") != "Accept" || len(a.body) != 0 || a.header.Get("Location") != "" {
					t.Errorf("%s: %d, %v, body %q", target, a.code, a.header, a.body)
				}
				a = w.send(t, c, "GET", target, nil, http.Header{"If-None-Match": {`"old"`}})
				if a.code != 200 || string(a.body) != "the document" || a.header.Get("Etag") != etag {
					t.Errorf("%s: %d, %q", target, a.code, a.body)
				}
			}
		}
	})
}

// TestF04Redirects: CASES F-04.
func TestF04Redirects(t *testing.T) {
	t.Parallel()
	m := newMesh(t, setup{})
	api := m.servers["b"]
	followed := 0
	api.on("elsewhere", func(http.ResponseWriter, *http.Request) { followed++ })
	const (
		passes  = "passes"
		refused = "refused where forwarded"
	)
	pods := "/api/v1/namespaces/f04/pods"
	for i, tc := range []struct{ target, location, want string }{
		{pods, "/api/v1/namespaces/elsewhere/pods?a=b", passes},
		{pods, "elsewhere", passes},
		{pods, "?continue=elsewhere", passes},
		{pods, "", passes},
		{pods, "https://attacker.example/", refused},
		{pods, "http:/elsewhere", refused},
		{pods, "//attacker.example/elsewhere", refused},
		{pods, "https://user@attacker.example", refused},
		{pods, "javascript:alert(1)", refused},
		{pods, "https://%zz/", refused}, // what nobody can read is nobody's path
		{pods + "/p/proxy/x", "https://backend.example/login", passes},
		{"/api/v1/namespaces/f04/services/s/proxy/", "http://backend.example/", passes},
		{"/api/v1/nodes/f04/proxy/", "https://backend.example/", passes},
	} {
		for _, code := range []int{301, 302, 303, 307, 308} {
			api.on("f04", func(w http.ResponseWriter, _ *http.Request) {
				if tc.location != "" {
					w.Header().Set("Location", tc.location)
				}
				w.WriteHeader(code)
				fmt.Fprint(w, "moved")
			})
			m.eachWay(t, func(t *testing.T, w way) {
				if w.h2 != (code%2 == 0) {
					return // each form and each code with both protocols, not each of the products
				}
				if strings.Contains(tc.location, "%zz") && w.path() == "local" {
					return // passes, and this client refuses to read it
				}
				key := fmt.Sprintf("?case=%d-%d-%s", i, code, w)
				a := w.send(t, w.client(t), "GET", tc.target+key, nil, http.Header{"Accept": {"application/json"}})
				switch {
				case tc.want == refused && w.path() == "forwarded":
					if cause := ownStatus(t, a); a.code != 502 || cause != "BadAnswer" || a.header.Get("Location") != "" {
						t.Errorf("%d to %q: %d, cause %s, Location %q", code, tc.location, a.code, cause, a.header["Location"])
					}
				case a.code != code || a.header.Get("Location") != tc.location || string(a.body) != "moved":
					t.Errorf("%d to %q: %d, Location %q, body %q", code, tc.location, a.code, a.header["Location"], a.body)
				}
				if n := len(api.seen(key)); n != 1 {
					t.Errorf("%d requests arrived", n)
				}
			})
		}
	}
	if followed > 0 || len(api.seen("elsewhere/")) > 0 {
		t.Error("a redirect was followed")
	}
}

// TestF05MediaTypes: CASES F-05.
func TestF05MediaTypes(t *testing.T) {
	t.Parallel()
	m := newMesh(t, setup{})
	api := m.servers["b"]
	body := append([]byte("k8s\x00\x0a\x00\xff\xfe"), bytes.Repeat([]byte{0, 0xff, '\r', '\n'}, 100)...)
	status := []byte(`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"UnsupportedMediaType","code":415 , "spaces":"stay"}` + "\n")
	m.eachWay(t, func(t *testing.T, w way) {
		c := w.client(t)
		for _, tc := range []struct {
			code                int
			contentType, accept string
		}{
			{415, "application/vnd.kubernetes.protobuf", "application/vnd.kubernetes.protobuf,application/json"},
			{415, "application/cbor", "application/cbor"},
			{415, `application/json; charset="UTF-8"; x=y`, tableAccept},
			{406, "application/json", "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"},
			{406, "application/apply-patch+yaml", "application/json; q=0.9 , */*;q=0.1"},
		} {
			var got []byte
			api.on("f05", func(w http.ResponseWriter, r *http.Request) {
				buf := new(bytes.Buffer)
				_, _ = buf.ReadFrom(r.Body)
				got = buf.Bytes()
				w.Header().Set("Content-Type", `application/json; odd="yes"`)
				w.WriteHeader(tc.code)
				_, _ = w.Write(status)
			})
			key := fmt.Sprintf("?case=%s-%d-%d", w, tc.code, len(tc.contentType))
			a := w.send(t, c, "PUT", "/api/v1/nodes/f05/status"+key, bytes.NewReader(body),
				http.Header{"Content-Type": {tc.contentType}, "Accept": {tc.accept}})
			if a.code != tc.code || a.header.Get("Content-Type") != `application/json; odd="yes"` || !bytes.Equal(a.body, status) || a.header.Get("Retry-After") != "" {
				t.Errorf("%s: %d %v %q", tc.contentType, a.code, a.header, a.body)
			}
			arrived := api.seen(key)
			if len(arrived) != 1 {
				t.Fatalf("%d requests arrived", len(arrived))
			}
			if h := arrived[0].header; h.Get("Content-Type") != tc.contentType || h.Get("Accept") != tc.accept || len(h["Accept"]) != 1 {
				t.Errorf("sent %q and %q, arrived %q and %q", tc.contentType, tc.accept, h["Content-Type"], h["Accept"])
			}
			if !bytes.Equal(got, body) {
				t.Errorf("the body arrived changed: %q", got)
			}
		}
	})
	// A client's fault is no failure of the peer: it is asked again at once.
	api.on("f05", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(415) })
	w := way{m, "a", true}
	c := w.client(t)
	for range 200 {
		w.send(t, c, "PUT", "/api/v1/nodes/f05/status?case=many", nil, nil)
	}
	api.on("f05", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "fine") })
	if a := w.send(t, c, "GET", "/api/v1/nodes/f05/status?case=after", nil, nil); a.code != 200 {
		t.Errorf("after many refusals: %d %s", a.code, a.body)
	}
	if n := len(api.seen("case=many")); n != 200 {
		t.Errorf("%d of 200 requests arrived", n)
	}
}
