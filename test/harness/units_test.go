//go:build linux

package harness

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/mvp-mesh/mvp-node/internal/config"
)

func TestKeyHashesAllThatDecides(t *testing.T) {
	write := func(t *testing.T, goMod, goSum string) string {
		t.Helper()
		dir := t.TempDir()
		for name, content := range map[string]string{"go.mod": goMod, "go.sum": goSum} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		return dir
	}
	key := func(target target) string {
		t.Helper()
		key, err := target.key(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return key
	}
	base := target{name: "x", version: "v1", moduleDir: write(t, "mod", "sum"), pkg: "p", ldflags: "-s"}
	for _, test := range []struct {
		name   string
		change func(*target)
		same   bool
	}{
		{"same files elsewhere", func(x *target) { x.moduleDir = write(t, "mod", "sum") }, true},
		{"words for people", func(x *target) { x.usually = "long" }, true},
		{"go.mod", func(x *target) { x.moduleDir = write(t, "mod2", "sum") }, false},
		{"go.sum", func(x *target) { x.moduleDir = write(t, "mod", "sum2") }, false},
		{"a byte moved", func(x *target) { x.moduleDir = write(t, "mods", "um") }, false},
		{"flags", func(x *target) { x.ldflags = "-w" }, false},
		{"package", func(x *target) { x.pkg = "q" }, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			changed := base
			test.change(&changed)
			if same := key(changed) == key(base); same != test.same {
				t.Errorf("same key: %v, want %v", same, test.same)
			}
		})
	}
}

func TestKubernetesTarget(t *testing.T) {
	b := &Binaries{Root: "/src"}
	got := b.kubernetes("kube-apiserver", V137, "")
	if got.base() != "kube-apiserver-v1.37.2" || got.moduleDir != "/src/test/kube/v1.37" {
		t.Errorf("got %+v", got)
	}
	for _, want := range []string{"gitVersion=v1.37.2", "gitMajor=1", "gitMinor=37"} {
		if !strings.Contains(got.ldflags, want) {
			t.Errorf("link flags %q have no %q", got.ldflags, want)
		}
	}
}

// Every version has its module, and that module builds the release the constant names.
func TestVersionsHaveModules(t *testing.T) {
	b, err := FindBinaries(nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, version := range []string{V135, V136, V137} {
		dir := b.kubernetes("kube-apiserver", version, "").moduleDir
		data, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err != nil {
			t.Error(err)
		} else if !strings.Contains(string(data), "require k8s.io/kubernetes "+version+"\n") {
			t.Errorf("%s does not require k8s.io/kubernetes %s", dir, version)
		}
	}
	data, err := os.ReadFile(filepath.Join(b.Root, "test", "kube", "etcd", "go.mod"))
	if err != nil || !strings.Contains(string(data), "go.etcd.io/etcd/server/v3 "+etcdVersion+"\n") {
		t.Errorf("test/kube/etcd does not require etcd %s (%v)", etcdVersion, err)
	}
	if _, err := b.APIServer(t.Context(), "v1.1.1"); err == nil || !strings.Contains(err.Error(), "v1.1.1") {
		t.Errorf("unknown version: %v", err)
	}
}

func TestReadyMadeProgramsComeFirst(t *testing.T) {
	dir := t.TempDir()
	b := &Binaries{Root: "/nowhere", CacheDir: "/nowhere", ReadyDir: dir}
	for _, name := range []string{"etcd-" + etcdVersion, "kube-apiserver-" + V136, "mvp-node"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if path, err := b.Etcd(t.Context()); err != nil || path != filepath.Join(dir, "etcd-"+etcdVersion) {
		t.Errorf("etcd: %s, %v", path, err)
	}
	if path, err := b.APIServer(t.Context(), V136); err != nil || path != filepath.Join(dir, "kube-apiserver-"+V136) {
		t.Errorf("kube-apiserver: %s, %v", path, err)
	}
	own := filepath.Join(t.TempDir(), "mvp-node")
	for range 2 { // placing replaces what is there
		if err := b.Node(t.Context(), own); err != nil {
			t.Fatal(err)
		}
	}
	if data, err := os.ReadFile(own); err != nil || string(data) != "mvp-node" {
		t.Errorf("mvp-node: %q, %v", data, err)
	}
}

func TestToolPackage(t *testing.T) {
	goMod := filepath.Join(t.TempDir(), "go.mod")
	if err := os.WriteFile(goMod, []byte(`module x

tool (
	example.com/one/cmd/grpcurl
	example.com/lint/v2
)

tool example.com/single

require (
	example.com/other v1.0.0
)
`), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"grpcurl": "example.com/one/cmd/grpcurl",
		"lint":    "example.com/lint/v2",
		"single":  "example.com/single",
		"other":   "",
	} {
		got, err := toolPackage(goMod, name)
		if got != want || (err != nil) != (want == "") {
			t.Errorf("%s: got %q, %v, want %q", name, got, err, want)
		}
	}
}

func TestLockFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "new", "lock")
	unlock, err := lockFile(t.Context(), path, func() { t.Error("busy at first") })
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tryLockFile(path); !errors.Is(err, syscall.EWOULDBLOCK) {
		t.Errorf("second lock: %v, want EWOULDBLOCK", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	if _, err := lockFile(ctx, path, cancel); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want Canceled", err)
	}
	// Whoever is told to wait gets the lock once it is free.
	waited, err := lockFile(t.Context(), path, unlock)
	if err != nil {
		t.Fatal(err)
	}
	waited()
}

func TestSubnetsAreApart(t *testing.T) {
	a, err := leaseSubnet()
	if err != nil {
		t.Fatal(err)
	}
	defer a.release()
	b, err := leaseSubnet()
	if err != nil {
		t.Fatal(err)
	}
	defer b.release()
	if a.prefix == b.prefix {
		t.Errorf("both got %s", a.prefix)
	}
	for _, prefix := range []string{"10.0.0", "127.0", "127.0.0.1", "", "x"} {
		if _, err := fixedSubnet(prefix); err == nil {
			t.Errorf("%q was accepted", prefix)
		}
	}
	if fixed, err := fixedSubnet("127.0.0"); err != nil || fixed.ip(11) != "127.0.0.11" {
		t.Errorf("127.0.0: %v, %v", fixed, err)
	}
}

func TestFreePort(t *testing.T) {
	s, err := leaseSubnet()
	if err != nil {
		t.Fatal(err)
	}
	defer s.release()
	chosen, err := freePort(s.ip(11), 0)
	if err != nil {
		t.Fatal(err)
	}
	if port, err := freePort(s.ip(11), chosen); err != nil || port != chosen {
		t.Errorf("got %d, %v, want the preferred one, %d", port, err, chosen)
	}
	listener, err := net.Listen("tcp", net.JoinHostPort(s.ip(11), strconv.Itoa(chosen)))
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	if port, err := freePort(s.ip(11), chosen); err != nil || port == chosen || port == 0 {
		t.Errorf("got %d, %v, want another one", port, err)
	}
}

func TestPKI(t *testing.T) {
	p, err := NewPKI(t.TempDir(), "demo")
	if err != nil {
		t.Fatal(err)
	}
	masters, err := p.AdminCert()
	if err != nil {
		t.Fatal(err)
	}
	again, err := p.AdminCert()
	if err != nil || again != masters {
		t.Errorf("second request: %v, %v, want %v", again, err, masters)
	}
	other, err := p.UserCert("admin", "others")
	if err != nil || other == masters {
		t.Errorf("other groups: %v, %v", other, err)
	}
	for name, issue := range map[string]func() (CertFiles, error){
		"serving":     func() (CertFiles, error) { return p.ServingCert("cp-a", "127.0.0.11", "cp-a") },
		"mesh":        func() (CertFiles, error) { return p.MeshCert("cp-a", "127.0.0.11") },
		"operator":    func() (CertFiles, error) { return p.OperatorCert("alice") },
		"front proxy": p.FrontProxyCert,
	} {
		if _, err := issue(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestKubeconfig(t *testing.T) {
	var got map[string]any
	data := kubeconfig("https://127.0.0.11:6443", "/ca", Credential{Cert: CertFiles{"/crt", "/key"}, Token: "secret"})
	if err := yaml.Unmarshal(data, &got); err != nil {
		t.Fatal(err)
	}
	want := map[string]any{
		"apiVersion": "v1", "kind": "Config", "current-context": "default",
		"clusters": []any{map[string]any{"name": "default", "cluster": map[string]any{
			"server": "https://127.0.0.11:6443", "certificate-authority": "/ca"}}},
		"users": []any{map[string]any{"name": "default", "user": map[string]any{
			"client-certificate": "/crt", "client-key": "/key", "token": "secret"}}},
		"contexts": []any{map[string]any{"name": "default", "context": map[string]any{
			"cluster": "default", "user": "default"}}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("kubeconfig (-want +got):\n%s", diff)
	}
}

func TestOverlay(t *testing.T) {
	base := map[string]any{
		"mode":  "Enabled",
		"view":  map[string]any{"staleGrace": "5m", "unknownCatalogHold": "1m"},
		"seeds": []string{"a", "b"},
		"admin": map[string]any{"address": "x"},
	}
	got, err := overlay(base, map[string]any{
		"mode":  "Disabled",
		"view":  map[string]any{"staleGrace": "1s"},
		"seeds": []string{"c"},
		"admin": nil,
		"new":   map[string]any{"a": 1},
	})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]any{
		"mode":  "Disabled",
		"view":  map[string]any{"staleGrace": "1s", "unknownCatalogHold": "1m"},
		"seeds": []any{"c"},
		"new":   map[string]any{"a": 1.0},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("overlay (-want +got):\n%s", diff)
	}
	if base["mode"] != "Enabled" || base["view"].(map[string]any)["staleGrace"] != "5m" {
		t.Errorf("base was changed: %v", base)
	}
	if same, err := overlay(base, nil); err != nil || same["mode"] != "Enabled" {
		t.Errorf("without an overlay: %v, %v", same, err)
	}
}

// readyMade returns Binaries of programs that exist and do nothing.
func readyMade(t *testing.T) *Binaries {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{
		"etcd-" + etcdVersion, "kube-apiserver-" + V135, "kube-apiserver-" + V136, "kubectl-" + kubectlVersion, "mvp-node",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return &Binaries{ReadyDir: dir}
}

// What the harness writes is what a node reads.
func TestNodeConfiguration(t *testing.T) {
	c, err := NewCluster(t.Context(), Options{
		Binaries: readyMade(t),
		Nodes:    true,
		Hosts: []HostOptions{
			{Name: "cp-a", Version: V135},
			{Name: "cp-b", Version: V136, NodeOverlay: map[string]any{"mode": "ObserveOnly"}},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	for _, host := range c.Hosts {
		if err := host.Node.writeConfig(); err != nil {
			t.Fatal(err)
		}
		got, err := config.Load(host.Node.ConfigFile())
		if err != nil {
			t.Errorf("%s: %v", host.Name, err)
			continue
		}
		if got.Name != host.Name || "https://"+got.Front.Address != host.Node.URL() || got.APIServer.URL != host.APIServer.URL() {
			t.Errorf("%s: got %+v", host.Name, got)
		}
		if diff := cmp.Diff([]string{"cp-a", "cp-b"}, got.ExpectedMembers); diff != "" {
			t.Errorf("%s: expected members (-want +got):\n%s", host.Name, diff)
		}
		want := []string{c.Hosts[0].Node.GossipAddress(), c.Hosts[1].Node.GossipAddress()}
		if diff := cmp.Diff(want, got.Gossip.Seeds); diff != "" {
			t.Errorf("%s: seeds (-want +got):\n%s", host.Name, diff)
		}
	}
	if got, err := config.Load(c.Host("cp-b").Node.ConfigFile()); err != nil || got.Mode.String() != "ObserveOnly" {
		t.Errorf("overlay: %v", err)
	}
}

// A cluster that cannot be prepared leaves nothing behind.
func TestNewClusterCleansUp(t *testing.T) {
	temp := t.TempDir()
	t.Setenv("TMPDIR", temp)
	b := readyMade(t)
	twice := HostOptions{Name: "cp-a", Version: V136}
	for want, o := range map[string]Options{
		"no hosts":                {Binaries: b},
		"two hosts are called":    {Binaries: b, Hosts: []HostOptions{twice, twice}},
		"not the first three":     {Binaries: b, Hosts: []HostOptions{twice}, Subnet: "10.0.0"},
		"cluster ID":              {Binaries: b, Hosts: []HostOptions{twice}, ID: "De mo"},
		"there is no module for ": {Binaries: b, Hosts: []HostOptions{{Name: "cp-a", Version: "v0"}}},
	} {
		if _, err := NewCluster(t.Context(), o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error with %q", err, want)
		}
	}
	left, err := filepath.Glob(filepath.Join(temp, "mvp-cluster-*"))
	if err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}
