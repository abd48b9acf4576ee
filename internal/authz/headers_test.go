package authz

import (
	"errors"
	"net/http"
	"net/textproto"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var customNames = HeaderNames{
	User: []string{"X-Proxy-User", "X_Other-User"}, UID: []string{"X-Proxy-UID"}, Group: []string{"X-Proxy-Group"},
	ExtraPrefix: []string{"X-Proxy-Note-", "X_Note-"},
}

func TestStrip(t *testing.T) {
	tests := map[string]struct {
		names HeaderNames
		gone  []string
		stays []string
	}{
		"default": {
			DefaultHeaderNames(),
			[]string{
				"X-Remote-User", "x-remote-user", "X-REMOTE-USER", "X_Remote_User", "X-Remote_User", "x_remote-user", "X-Remote-Group",
				"X-Remote-Uid", "X-Remote-Extra-Scopes", "X-Remote-Extra-", "X-Remote-Anything", "X-Remote-",
			},
			[]string{"X-Remote", "X-Remotes-User", "Remote-User", "Xx-Remote-User", "Accept", "Impersonate-User", "X-Proxy-User", ""},
		},
		"custom": {
			customNames,
			[]string{
				"X-Proxy-User", "x_proxy_user", "X-Other_User", "X_OTHER-USER", "X-Proxy-Uid", "X-Proxy-Group", "X-Proxy-Note-A", "x_proxy_note-",
				"X-Note-A", "X_Note_A", "X-Remote-User", "X-Remote-Extra-A",
			},
			[]string{"X-Proxy-Users", "X-Proxy-Use", "X-Proxy-Note", "X-Proxy", "X-Notes"},
		},
		"none": {HeaderNames{}, []string{"X-Remote-User"}, []string{"X-Proxy-User"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			h := make(http.Header)
			for _, n := range append(test.gone, test.stays...) {
				h[n] = []string{"x", "y"}
			}
			test.names.Strip(h)
			for _, n := range test.gone {
				if _, ok := h[n]; ok {
					t.Errorf("%q is still there", n)
				}
			}
			for _, n := range test.stays {
				if len(h[n]) != 2 {
					t.Errorf("%q was stripped", n)
				}
			}
		})
	}
}

// byAllocation is IsIdentity as it would be written without a thought for its cost.
func byAllocation(n HeaderNames, name string) bool {
	norm := func(s string) string { return strings.ToLower(strings.ReplaceAll(s, "_", "-")) }
	if strings.HasPrefix(norm(name), "x-remote-") {
		return true
	}
	for _, list := range [][]string{n.User, n.UID, n.Group} {
		for _, want := range list {
			if norm(name) == norm(want) {
				return true
			}
		}
	}
	for _, p := range n.ExtraPrefix {
		if strings.HasPrefix(norm(name), norm(p)) {
			return true
		}
	}
	return false
}

func FuzzIsIdentity(f *testing.F) {
	for _, s := range []string{"X-Remote-User", "x_remote_extra_a", "X-Proxy-Note-", "X_NOTE-", "X-Proxy-UID", "Accept", "", "X-Remote", "x-proxy-user\x00"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, name string) {
		for i := range len(name) {
			if name[i] >= 0x80 {
				return // no field name; strings.ToLower knows letters that fold to ASCII ones
			}
		}
		for _, n := range []HeaderNames{DefaultHeaderNames(), customNames, {}} {
			if got, want := n.IsIdentity(name), byAllocation(n, name); got != want {
				t.Errorf("IsIdentity(%q) is %v, want %v", name, got, want)
			}
		}
	})
}

func TestIsIdentityAllocatesNothing(t *testing.T) {
	n := DefaultHeaderNames()
	names := []string{"Accept", "X-Remote-User", "x_remote_group", "User-Agent", "X-Request-Id", "X-Remote-Extra-Scopes"}
	if got := testing.AllocsPerRun(100, func() {
		for _, name := range names {
			n.IsIdentity(name)
		}
	}); got != 0 {
		t.Errorf("%v allocations", got)
	}
}

func TestSet(t *testing.T) {
	u := &User{Name: "alice", UID: "42", Groups: []string{"a,b", "c"}, Extra: map[string][]string{
		"authentication.kubernetes.io/credential-id": {"1", "2"}, "scopes.example/a b": {"x"}, "50%": {"y"}, "Upper": {"z"},
	}}
	h := http.Header{"Accept": {"x"}}
	if err := DefaultHeaderNames().Set(h, u); err != nil {
		t.Fatal(err)
	}
	want := http.Header{
		"Accept":         {"x"},
		"X-Remote-User":  {"alice"},
		"X-Remote-Uid":   {"42"},
		"X-Remote-Group": {"a,b", "c"},
	}
	for k, v := range map[string][]string{
		"X-Remote-Extra-authentication.kubernetes.io%2Fcredential-id": {"1", "2"},
		"X-Remote-Extra-scopes.example%2Fa%20b":                       {"x"},
		"X-Remote-Extra-50%25":                                        {"y"},
		"X-Remote-Extra-upper":                                        {"z"},
	} {
		want[textproto.CanonicalMIMEHeaderKey(k)] = v
	}
	if d := cmp.Diff(want, h); d != "" {
		t.Error(d)
	}
	// The caller's slices are not shared: what is sent does not change with them.
	u.Groups[0] = "system:masters"
	if h["X-Remote-Group"][0] != "a,b" {
		t.Error("groups on the request follow the caller's slice")
	}

	for name, u := range map[string]*User{"nil": nil, "no name": {Groups: []string{"a"}}} {
		h := make(http.Header)
		if err := DefaultHeaderNames().Set(h, u); !errors.Is(err, ErrNoUser) || len(h) != 0 {
			t.Errorf("%s: %v, header %v", name, err, h)
		}
	}
	if err := (HeaderNames{}).Set(make(http.Header), u); !errors.Is(err, ErrNoUser) {
		t.Errorf("without a header name for the user: %v", err)
	}
}

func TestStripHopByHop(t *testing.T) {
	h := http.Header{
		"Connection": {"close, X-Remote-User ,,foo", "impersonate-user, Impersonate-Extra-A, IMPERSONATE_GROUP"},
		"Foo":        {"1"}, "X-Remote-User": {"u"}, "Keep-Alive": {"1"}, "Te": {"trailers"}, "Upgrade": {"spdy/3.1"}, "Transfer-Encoding": {"chunked"},
		"Trailer": {"X"}, "Proxy-Connection": {"x"}, "Accept": {"a"},
		"Impersonate-User": {"bob"}, "Impersonate-Extra-A": {"b"}, "Impersonate_group": {"c"},
	}
	StripHopByHop(h)
	// Impersonate-* stays: without it the request would run as its sender, which a kube-apiserver would not let it.
	want := http.Header{"Accept": {"a"}, "Impersonate-User": {"bob"}, "Impersonate-Extra-A": {"b"}, "Impersonate_group": {"c"}}
	if d := cmp.Diff(want, h); d != "" {
		t.Error(d)
	}
}

// StopsHere and the functions that it stands for agree on every name that either knows.
func TestStopsHere(t *testing.T) {
	names := []string{"Accept", "Host", "X-Custom", "Content-Length"}
	for _, list := range [][]string{hopByHop, credentials, forwarding, replayKeys} {
		names = append(names, list...)
	}
	for _, name := range names {
		if c := http.CanonicalHeaderKey(name); c != name {
			t.Errorf("%q is listed, its canonical form is %q", name, c)
		}
		h := http.Header{name: {"x"}}
		StripHopByHop(h)
		StripCredentials(h)
		StripForwarding(h)
		StripReplayKeys(h)
		if gone := len(h) == 0; gone != StopsHere(name) {
			t.Errorf("StopsHere(%q) is %v, the functions delete it: %v", name, StopsHere(name), gone)
		}
	}
}
