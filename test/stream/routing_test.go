package stream_test

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestR06Paths: CASES R-06. What arrives at an apiserver is the request-target as the client wrote it, at the apiserver that this very
// string names, and no redirect is the node's own.
func TestR06Paths(t *testing.T) {
	t.Parallel()
	m := newMesh(t, setup{})
	for name, s := range m.servers {
		s.on("/", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("From", name)
			w.WriteHeader(http.StatusTeapot) // an answer that no proxy makes of itself
		})
	}
	for _, tc := range []struct {
		target string
		far    bool // forwarded by a
	}{
		{"/api/v1/namespaces/n/pods", true},
		{"/api/v1/namespaces/n/pods/", true},
		{"/api/v1/namespaces/n/pods?", true},
		{"/api/v1/namespaces/n/pods?limit=1&&x=%2f;a", true},
		{"/api/v1/namespaces/n/pods/p%20q", true},
		{"/api/v1/namespaces/n/pods/p|q", true},
		{"/api/v1/namespaces/n/pods/%70", true},
		{"/api/v1/namespaces/n/pods/p;v=1", true},
		{"/api/v1/namespaces/n/services/s/proxy", true},
		{"/api/v1/namespaces/n/services/s/proxy/", true},
		{"/api/v1/namespaces/n/pods/p/proxy//a/", true},
		{"/api/v1/namespaces/n/pods/p/proxy/../a", true},
		{"/api/v1/namespaces/n/pods/p/proxy/a%2Fb/./c?d=%20", true},
		{"/api/v1/namespaces/n/services/https:s:443/proxy/x//", true},
		{"/api/v1/nodes/n/proxy/stats/", true},
		{"//version", false},
		{"//api/v1/pods", false},
		{"//api/v1/namespaces/n/pods", false},
		{"/api//v1/namespaces/n/pods", false},
		{"/api/v1/namespaces/n//pods", false},
		{"/apis/../api/v1/secrets", false},
		{"/apis/../api/v1/namespaces/n/pods", false},
		{"/api/v1/./namespaces/n/pods", false},
		{"/api/v1/namespaces/n/pods/..", false},
		{"/api/v1/namespaces/n%2Fpods", false},
		{"/api/v1/%2e%2e/v1/namespaces/n/pods", false},
		{"/api/v1/namespaces/n/configmaps/", false},
		{"/version/", false},
		{"/", false},
	} {
		m.eachWay(t, func(t *testing.T, w way) {
			want := "a"
			if tc.far || w.node == "b" {
				want = "b"
			}
			before := map[string]int{}
			for name, s := range m.servers {
				before[name] = len(s.seen(""))
			}
			// By a client that writes the target as it is told, in both protocols.
			var code int
			var from string
			if w.h2 {
				req := w.request(t, "GET", "/", nil, nil)
				req.URL.Path, req.URL.RawPath = "", ""
				path, query, has := strings.Cut(tc.target, "?")
				req.URL.Opaque = path
				if strings.HasPrefix(path, "//") {
					// net/http takes an opaque "//..." for an authority, so for this one the path has to do.
					req.URL.Opaque, req.URL.Path = "", path
				}
				req.URL.RawQuery, req.URL.ForceQuery = query, has && query == ""
				resp, err := w.client(t).Do(req)
				if err != nil {
					t.Fatal(err)
				}
				resp.Body.Close()
				code, from = resp.StatusCode, resp.Header.Get("From")
			} else {
				_, resp := w.ask(t, "GET", tc.target, "")
				code, from = resp.StatusCode, resp.Header.Get("From")
			}
			if code == http.StatusBadRequest && !tc.far {
				return // refused is as good as passed on unread
			}
			if code != http.StatusTeapot || from != want {
				t.Errorf("%s: %d from %q, want %q", tc.target, code, from, want)
				return
			}
			for name, s := range m.servers {
				var got []string
				for _, r := range s.seen("")[before[name]:] {
					got = append(got, r.target)
				}
				var expected []string
				if name == want {
					expected = []string{tc.target}
				}
				if d := cmp.Diff(expected, got); d != "" {
					t.Errorf("targets at apiserver %s (-sent +arrived):\n%s", name, d)
				}
			}
		})
	}
}

// connects are requests that run something though their method may be that of a read.
var connects = []struct{ method, target string }{
	{"GET", "/api/v1/namespaces/%s/pods/p/exec?command=id"},
	{"POST", "/api/v1/namespaces/%s/pods/p/exec?command=id"},
	{"GET", "/api/v1/namespaces/%s/pods/p/attach"},
	{"GET", "/api/v1/namespaces/%s/pods/p/portforward?ports=80"},
	{"GET", "/api/v1/namespaces/%s/pods/p/proxy/delete-everything"},
	{"GET", "/api/v1/namespaces/%s/services/s/proxy/"},
}

// TestR08ConnectIsNeverRetried: CASES R-08. A connect subresource is a write whatever its method. When the hop behind the node dies
// while it runs, the client is told that the outcome is unknown, and it has run once, though another node could serve it as well.
func TestR08ConnectIsNeverRetried(t *testing.T) {
	t.Parallel()
	m := newMesh(t, setup{names: "abc"})
	arrivals := func(key string) int { return len(m.servers["b"].seen(key)) + len(m.servers["c"].seen(key)) }
	for _, hop := range []string{"mesh", "apiserver"} {
		for name, s := range m.servers {
			relays := m.meshRelay
			if hop == "apiserver" {
				relays = m.apiRelay
			}
			s.on("r08", func(_ http.ResponseWriter, r *http.Request) {
				if strings.Contains(r.RequestURI, "again") && arrivals(r.Header.Get("Key")) > 1 {
					return // the second try of a read is answered
				}
				relays[name].cut(reset)
				s.linger(r)
			})
		}
		t.Run(hop, func(t *testing.T) {
			m.eachPath(t, func(t *testing.T, w way) {
				if hop == "mesh" && w.path() == "local" {
					return
				}
				if w.path() == "forwarded" {
					// That a read is tried again shows that a write could have been.
					key := "r08read-" + hop
					a := w.send(t, w.client(t), "GET", "/api/v1/namespaces/"+key+"/pods/again", nil, http.Header{"Key": {key}})
					if n := arrivals(key); a.code != 200 || n != 2 {
						t.Errorf("a read: %d after %d arrivals", a.code, n)
					}
				}
				for i, tc := range connects {
					for _, upgrade := range []string{"", webSocketUpgrade, "Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\n"} {
						key := fmt.Sprintf("r08-%s-%s-%d-%d", hop, w.path(), i, len(upgrade))
						_, resp := w.ask(t, tc.method, fmt.Sprintf(tc.target, key), upgrade+"Accept: application/json\r\nContent-Length: 0\r\n")
						body, _ := io.ReadAll(resp.Body)
						cause := ownStatus(t, answer{resp.StatusCode, resp.Header, body})
						if resp.StatusCode != 504 || cause != "OutcomeUnknown" {
							t.Errorf("%s %s, upgrade %.30q: %d, cause %s", tc.method, tc.target, upgrade, resp.StatusCode, cause)
						}
						if n := arrivals(key); n != 1 {
							t.Errorf("%s %s, upgrade %.30q: arrived %d times", tc.method, tc.target, upgrade, n)
						}
					}
				}
			})
		})
	}
}

// TestR08ServerDecides: CASES R-08. The method of an exec arrives as it is, the review before a forward asks what the apiserver of old
// asks (verb by method, with the subresource), and the serving apiserver's refusal is passed on.
func TestR08ServerDecides(t *testing.T) {
	t.Parallel()
	m := newMesh(t, setup{})
	const refusal = `{"kind":"Status","apiVersion":"v1","status":"Failure","message":"no create for you","reason":"Forbidden","code":403}`
	m.servers["b"].on("r08", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusForbidden)
		_, _ = io.WriteString(w, refusal)
	})
	m.eachPath(t, func(t *testing.T, w way) {
		for _, tc := range []struct{ method, upgrade, verb string }{
			{"GET", "", "get"}, {"GET", webSocketUpgrade, "get"}, {"POST", "", "create"},
			{"POST", "Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: v4.channel.k8s.io\r\n", "create"},
		} {
			key := fmt.Sprintf("r08-%s-%s-%d", w.path(), tc.method, len(tc.upgrade))
			_, resp := w.ask(t, tc.method, "/api/v1/namespaces/"+key+"/pods/p/exec?command=id", tc.upgrade+"Content-Length: 0\r\n")
			body, err := io.ReadAll(resp.Body)
			if err != nil || resp.StatusCode != 403 || string(body) != refusal {
				t.Errorf("%s: %d %q, %v", key, resp.StatusCode, body, err)
			}
			got := m.servers["b"].seen(key)
			if len(got) != 1 || got[0].method != tc.method {
				t.Fatalf("%s: %d arrivals", key, len(got))
			}
			if w.path() == "local" {
				continue
			}
			var review map[string]any
			m.servers["a"].mu.Lock()
			for _, spec := range m.servers["a"].reviews {
				if attrs, _ := spec["resourceAttributes"].(map[string]any); attrs["namespace"] == key {
					review = attrs
				}
			}
			m.servers["a"].mu.Unlock()
			want := map[string]any{"namespace": key, "verb": tc.verb, "version": "v1", "resource": "pods", "subresource": "exec", "name": "p"}
			if d := cmp.Diff(want, review); d != "" {
				t.Errorf("review (-want +got):\n%s", d)
			}
		}
	})
}
