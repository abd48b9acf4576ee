//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/mvp-mesh/mvp-node/test/harness"
)

func writeFile(t *testing.T, name, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestBadConfiguration: everything that is wrong with a file is reported at once, each with its line and field; the exit code is
// 2, and nothing was started.
func TestBadConfiguration(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	program := filepath.Join(t.TempDir(), "mvp-node")
	if err := testBinaries(t).Node(ctx, program); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	certs := func(args ...string) {
		t.Helper()
		r, err := harness.Run(ctx, harness.ProcessSpec{Name: "certs", Path: program, Args: append([]string{"certs"}, args...)}, nil)
		if err != nil || r.ExitCode != 0 {
			t.Fatalf("mvp-node certs %q: %v, exit code %d\n%s%s", args, err, r.ExitCode, r.Stdout, r.Stderr)
		}
	}
	certs("init", "--cluster", "one", "--dir", dir)
	certs("issue", "--cluster", "one", "--dir", dir, "--name", "cp-a")
	certs("issue", "--cluster", "one", "--dir", dir, "--name", "cp-b")
	at := func(name string) string { return filepath.Join(dir, name) }
	config := `apiVersion: config.mvp-node.io/v1alpha1
kind: NodeConfiguration
name: cp-a
fronnt: {}
front:
  address: 127.0.0.1:16443
  tls: {certFile: ` + at("cp-a.crt") + `, keyFile: ` + at("cp-b.key") + `}
  authentication:
    clientCAFile: ` + at("mesh-ca.crt") + `
  requestTimeout: soon
  maxHeaderBytes: many
apiserver:
  url: https://127.0.0.1:17443
  caFile: ` + at("mesh-ca.crt") + `
  kubeconfig: ` + at("none.kubeconfig") + `
  frontProxy: {certFile: ` + at("cp-a.crt") + `, keyFile: ` + at("cp-a.key") + `, caFile: ` + at("mesh-ca.crt") + `}
mesh:
  address: 127.0.0.1:16443
  tls: {certFile: ` + at("cp-a.crt") + `, keyFile: ` + at("cp-a.key") + `, caFile: ` + at("mesh-ca.crt") + `}
gossip:
  address: 127.0.0.1:17946
  seeds: ["127.0.0.1:17946"]
admin: {address: 127.0.0.1:17947}
`
	file := writeFile(t, "node.yaml", config)
	r, err := harness.Run(ctx, harness.ProcessSpec{Name: "serve", Path: program, Args: []string{"serve", "--config", file}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("exit code %d\n%s", r.ExitCode, r.Stderr)
	if r.ExitCode != 2 || r.Stdout != "" {
		t.Errorf("exit code %d, standard output %q, want 2 and nothing", r.ExitCode, r.Stdout)
	}
	for what, want := range map[string]string{
		"unknown field":        `:4: fronnt: `,
		"certificate pair":     `:7: front\.tls`,
		"wrong type, duration": `:10: front\.requestTimeout: `,
		"wrong type, number":   `:11: front\.maxHeaderBytes: `,
		"missing file":         `:15: apiserver\.kubeconfig: `,
		"port clash":           `:(6|18): (front|mesh)\.address: .*16443`,
		"missing cluster ID":   `clusterID: `,
		"overlapping CAs":      `(?i)mesh-ca\.crt.*mesh-ca\.crt|same.*authorit`,
	} {
		if !regexp.MustCompile(want).MatchString(r.Stderr) {
			t.Errorf("%s: no line matches %q", what, want)
		}
	}
	// Nothing was started: the ports are free.
	for _, port := range []string{"16443", "17946", "17947"} {
		l, err := net.Listen("tcp", "127.0.0.1:"+port)
		if err != nil {
			t.Errorf("port %s: %v", port, err)
			continue
		}
		l.Close()
	}
	// Never overwrite: a second init or issue changes no file and says which one is there.
	before, err := os.ReadFile(at("mesh-ca.key"))
	if err != nil {
		t.Fatal(err)
	}
	again, err := harness.Run(ctx, harness.ProcessSpec{Name: "certs", Path: program, Args: []string{"certs", "init", "--cluster", "one", "--dir", dir}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	after, err := os.ReadFile(at("mesh-ca.key"))
	if err != nil {
		t.Fatal(err)
	}
	if again.ExitCode == 0 || !strings.Contains(again.Stderr, "mesh-ca") || !bytes.Equal(before, after) {
		t.Errorf("second init: exit code %d\n%s", again.ExitCode, again.Stderr)
	}
}
