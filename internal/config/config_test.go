package config

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	"github.com/mvp-mesh/mvp-node/internal/route"
)

// minimal is the shortest file that Parse accepts. Tests replace parts of it; its line numbers are in their expectations.
const minimal = `apiVersion: config.mvp-node.io/v1alpha1
kind: NodeConfiguration
clusterID: demo
name: cp-a
front:
  address: 127.0.0.11:6443
  tls: {certFile: front.crt, keyFile: front.key}
  authentication:
    clientCAFile: /pki/client-ca.crt
apiserver:
  url: https://127.0.0.11:7443
  caFile: ca.crt
  kubeconfig: node.kubeconfig
  frontProxy: {certFile: proxy.crt, keyFile: proxy.key, caFile: proxy-ca.crt}
mesh:
  address: 127.0.0.11:7444
  tls: {certFile: mesh.crt, keyFile: mesh.key, caFile: mesh-ca.crt}
gossip:
  address: 127.0.0.11:7946
`

func TestParseMinimal(t *testing.T) {
	got, err := Parse([]byte(minimal), "/etc/mvp-node/node.yaml")
	if err != nil {
		t.Fatal(err)
	}
	want := &Config{
		APIVersion: APIVersion, Kind: Kind, ClusterID: "demo", Name: "cp-a", Mode: route.Enabled,
		Front: Front{
			Address: "127.0.0.11:6443",
			TLS:     KeyPair{"/etc/mvp-node/front.crt", "/etc/mvp-node/front.key"},
			Authentication: Authentication{
				ClientCAFile: "/pki/client-ca.crt", Anonymous: true, TokenCacheTTL: 10 * time.Second,
			},
			RequestTimeout: time.Minute, StallTimeout: 5 * time.Minute, MaxHeaderBytes: 65536, MaxConcurrentStreams: 100,
		},
		APIServer: APIServer{
			URL: "https://127.0.0.11:7443", CAFile: "/etc/mvp-node/ca.crt", Kubeconfig: "/etc/mvp-node/node.kubeconfig",
			FrontProxy: VerifiedKeyPair{"/etc/mvp-node/proxy.crt", "/etc/mvp-node/proxy.key", "/etc/mvp-node/proxy-ca.crt"},
			RequestHeaders: RequestHeaders{
				User: []string{"X-Remote-User"}, UID: []string{"X-Remote-Uid"}, Group: []string{"X-Remote-Group"},
				ExtraPrefixes: []string{"X-Remote-Extra-"},
			},
		},
		Mesh: Mesh{
			Address: "127.0.0.11:7444", AdvertiseAddress: "127.0.0.11:7444",
			TLS: VerifiedKeyPair{"/etc/mvp-node/mesh.crt", "/etc/mvp-node/mesh.key", "/etc/mvp-node/mesh-ca.crt"},
		},
		Gossip:   Gossip{Address: "127.0.0.11:7946", AdvertiseAddress: "127.0.0.11:7946"},
		Routing:  Routing{LocalOutage: true},
		View:     View{StaleGrace: 5 * time.Minute, UnknownCatalogHold: time.Minute},
		Admin:    Admin{Address: "127.0.0.1:9444"},
		Logging:  Logging{Level: "info", Format: "text"},
		Shutdown: Shutdown{Delay: 5 * time.Second, DrainTimeout: 30 * time.Second},
	}
	if diff := cmp.Diff(want, got, cmpopts.IgnoreUnexported(Config{})); diff != "" {
		t.Error(diff)
	}
}

// The example is what operators start from: it must be right, and must show every field there is, so that a new field cannot be
// added without being described.
func TestExample(t *testing.T) {
	file := filepath.Join("..", "..", "deploy", "node.example.yaml")
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	c, err := Parse(data, file)
	if err != nil {
		t.Fatal(err)
	}
	lines := bytes.Split(data, []byte("\n"))
	for _, path := range paths(reflect.TypeFor[Config](), "") {
		n, ok := c.src.lines[path]
		if !ok {
			t.Errorf("%s does not show the field %s", file, path)
			continue
		}
		own := bytes.Contains(lines[n-1], []byte("#"))
		above := n >= 2 && bytes.HasPrefix(bytes.TrimSpace(lines[n-2]), []byte("#"))
		if !own && !above {
			t.Errorf("%s:%d: the field %s has no comment beside or above it", file, n, path)
		}
	}
}

func paths(typ reflect.Type, path string) []string {
	var out []string
	for f := range typ.Fields() {
		if !f.IsExported() {
			continue
		}
		p := join(path, f.Tag.Get("yaml"))
		out = append(out, p)
		if f.Type.Kind() == reflect.Struct {
			out = append(out, paths(f.Type, p)...)
		}
	}
	return out
}

// What YAML writes, Parse reads back to the same; so "config view" may be used as a configuration.
func TestYAMLRoundTrip(t *testing.T) {
	text := minimal + `
mode: ObserveOnly
expectedMembers: [cp-b, cp-a]
logging: {level: debug}
view: {staleGrace: 90s}
routing: {prefer: newest}
`
	first, err := Parse([]byte(text), "/etc/mvp-node/node.yaml")
	if err != nil {
		t.Fatal(err)
	}
	out, err := first.YAML()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"mode: ObserveOnly\n", "staleGrace: 1m30s\n", "prefer: newest\n", "certFile: /etc/mvp-node/front.crt\n"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	second, err := Parse(out, "/elsewhere/node.yaml")
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if diff := cmp.Diff(first, second, cmpopts.IgnoreUnexported(Config{}), cmpopts.EquateEmpty()); diff != "" {
		t.Error(diff)
	}
}

func TestConversions(t *testing.T) {
	text := strings.Replace(minimal, "gossip:", `  allowedNames: [cp-a, cp-b]
  dnsNames: {a.example: cp-a}
  deniedGroups: ["system:masters"]
  deniedUsers: [mallory]
gossip:`, 1) + "mode: Disabled\nrouting: {localOutage: false}\nlogging: {level: warn}\n"
	c, err := Parse([]byte(text), "node.yaml")
	if err != nil {
		t.Fatal(err)
	}
	rules := authz.PeerRules{
		ClusterID: "demo", AllowedNames: []string{"cp-a", "cp-b"}, DNSNames: map[string]string{"a.example": "cp-a"},
	}
	if diff := cmp.Diff(rules, c.PeerRules()); diff != "" {
		t.Error(diff)
	}
	denied := authz.AssertPolicy{DeniedGroups: []string{"system:masters"}, DeniedUsers: []string{"mallory"}}
	if diff := cmp.Diff(denied, c.AssertPolicy()); diff != "" {
		t.Error(diff)
	}
	if got, want := c.Policy(), (route.Policy{Mode: route.Disabled}); got != want {
		t.Errorf("Policy() = %v, want %v", got, want)
	}
	if diff := cmp.Diff(authz.DefaultHeaderNames(), c.APIServer.RequestHeaders.HeaderNames()); diff != "" {
		t.Error(diff)
	}
	if got := c.Logging.SlogLevel(); got != slog.LevelWarn {
		t.Errorf("SlogLevel() = %v", got)
	}
	for level, want := range map[string]slog.Level{"debug": slog.LevelDebug, "info": slog.LevelInfo, "error": slog.LevelError} {
		if got := (Logging{Level: level}).SlogLevel(); got != want {
			t.Errorf("SlogLevel of %s = %v", level, got)
		}
	}
}

func TestLoadMissingFile(t *testing.T) {
	_, err := Load(filepath.Join(t.TempDir(), "node.yaml"))
	if !errors.Is(err, os.ErrNotExist) {
		t.Errorf("err = %v, want os.ErrNotExist", err)
	}
}

func TestLoadTooLarge(t *testing.T) {
	file := filepath.Join(t.TempDir(), "node.yaml")
	if err := os.WriteFile(file, bytes.Repeat([]byte("#"), maxFile+1), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := Load(file)
	if want := "configuration file " + file + " is larger than 1048576 bytes"; err == nil || err.Error() != want {
		t.Errorf("err = %v, want %s", err, want)
	}
}

// FuzzParse holds Parse to: no panic; problems in order of lines; a file that is accepted is accepted again when written out.
func FuzzParse(f *testing.F) {
	f.Add([]byte(minimal))
	f.Add([]byte("a: &x [*x]\n<<: *x\n? [k]\n: v\n"))
	f.Add([]byte("front: {address: 1, tls: []}\nmesh:\n---\n..."))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := Parse(data, "node.yaml")
		if err != nil {
			var bad *Error
			if !errors.As(err, &bad) || len(bad.Problems) == 0 {
				t.Fatalf("error of type %T: %v", err, err)
			}
			for i, p := range bad.Problems {
				if p.Message == "" || i > 0 && p.Line < bad.Problems[i-1].Line {
					t.Fatalf("problem %d: %v", i, bad)
				}
			}
			return
		}
		out, err := c.YAML()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Parse(out, "node.yaml"); err != nil {
			t.Fatalf("written out: %v\n%s", err, out)
		}
	})
}
