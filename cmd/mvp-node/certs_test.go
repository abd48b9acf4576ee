package main

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

var certsNow = time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)

// runCerts executes "mvp-node certs ARGS" on a fixed day and returns standard output.
func runCerts(t *testing.T, args ...string) (string, error) {
	t.Helper()
	command := certsCommand(func() time.Time { return certsNow })
	command.SilenceErrors, command.SilenceUsage = true, true
	var out bytes.Buffer
	command.SetOut(&out)
	command.SetErr(&out)
	command.SetArgs(args)
	err := command.Execute()
	return out.String(), err
}

func mustRunCerts(t *testing.T, args ...string) string {
	t.Helper()
	out, err := runCerts(t, args...)
	if err != nil {
		t.Fatalf("certs %s: %v", strings.Join(args, " "), err)
	}
	return out
}

func readCert(t *testing.T, path string) *x509.Certificate {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(data)
	if block == nil {
		t.Fatalf("%s is not PEM", path)
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

func TestCertsForANode(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "mvp-node")
	out := mustRunCerts(t, "init", "--cluster", "prod", "--dir", dir)
	if want := "mesh-ca.crt: the mesh CA of prod, valid until 2036-11-27 12:00 UTC"; !strings.Contains(out, want) {
		t.Errorf("init says %q, want %q", out, want)
	}
	out = mustRunCerts(t, "issue", "--cluster", "prod", "--dir", dir, "--name", "cp-a",
		"--dns-san", "cp-a.example.com", "--ip-san", "192.0.2.11", "--lifetime", "30d")
	if want := "cp-a.crt: spiffe://prod/mvp-node/cp-a, valid until 2026-12-30 12:00 UTC"; !strings.Contains(out, want) {
		t.Errorf("issue says %q, want %q", out, want)
	}
	cert := readCert(t, filepath.Join(dir, "cp-a.crt"))
	if len(cert.URIs) != 1 || cert.URIs[0].String() != "spiffe://prod/mvp-node/cp-a" {
		t.Errorf("URIs %v", cert.URIs)
	}
	if !slices.Equal(cert.DNSNames, []string{"cp-a.example.com"}) || len(cert.IPAddresses) != 1 {
		t.Errorf("names %v %v", cert.DNSNames, cert.IPAddresses)
	}
	if err := cert.CheckSignatureFrom(readCert(t, filepath.Join(dir, meshCACert))); err != nil {
		t.Errorf("signature: %v", err)
	}
	for _, key := range []string{"cp-a.key", meshCAKey} {
		if info, err := os.Stat(filepath.Join(dir, key)); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", key, info, err)
		}
	}
}

func TestCertsForAnOperatorElsewhere(t *testing.T) {
	dir, out := t.TempDir(), t.TempDir()
	mustRunCerts(t, "init", "--cluster", "prod", "--dir", dir, "--lifetime", "24h")
	said := mustRunCerts(t, "issue", "--cluster", "prod", "--dir", dir, "--name", "alice", "--operator", "--out", out)
	// The CA ends first, and so does what it signs.
	if want := "spiffe://prod/mvp-operator/alice, valid until 2026-12-01 12:00 UTC"; !strings.Contains(said, want) {
		t.Errorf("issue says %q, want %q", said, want)
	}
	cert := readCert(t, filepath.Join(out, "alice.crt"))
	if !slices.Equal(cert.ExtKeyUsage, []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}) {
		t.Errorf("extended key usage %v, want client only", cert.ExtKeyUsage)
	}
	if _, err := os.Stat(filepath.Join(dir, "alice.crt")); !os.IsNotExist(err) {
		t.Errorf("also written beside the CA: %v", err)
	}
}

func TestCertsRefusals(t *testing.T) {
	dir, empty := t.TempDir(), t.TempDir()
	mustRunCerts(t, "init", "--cluster", "prod", "--dir", dir)
	mustRunCerts(t, "issue", "--cluster", "prod", "--dir", dir, "--name", "cp-a")
	before, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name, args, want string
		usage            bool // the command line is wrong, whatever is on the disk
	}{
		{"second init", "init --cluster prod --dir " + dir, "mesh-ca.crt exists already", false},
		{"second issue", "issue --cluster prod --name cp-a --dir " + dir, "cp-a.crt exists already", false},
		{"another cluster", "issue --cluster test --name cp-b --dir " + dir, `the CA is that of cluster "prod", not of "test"`, false},
		{"no CA", "issue --cluster prod --name cp-b --dir " + empty, `"mvp-node certs init" makes the mesh CA`, false},
		{"bad cluster", "init --cluster Prod --dir " + empty, `cluster ID "Prod" has the character 'P'`, true},
		{"bad name", "issue --cluster prod --name cp/b --dir " + dir, `name "cp/b" has the character '/'`, true},
		{"empty name", "issue --cluster prod --name= --dir " + dir, "name is empty", true},
		{"bad address", "issue --cluster prod --name cp-b --ip-san 1.2.3 --dir " + dir, "1.2.3", false},
		{"bad DNS name", "issue --cluster prod --name cp-b --dns-san a_b --dir " + dir, `DNS name "a_b"`, true},
		{"no days", "init --cluster prod --lifetime 0d --dir " + empty, "want a positive number of days", false},
		{"bad days", "init --cluster prod --lifetime 1.5d --dir " + empty, "want a positive number of days", false},
		{"negative", "init --cluster prod --lifetime -1h --dir " + empty, "want a positive number of days", false},
		{"no cluster", "init --dir " + empty, `required flag(s) "cluster" not set`, true},
		{"no folder", "issue --cluster prod --name cp-b", `required flag(s) "dir" not set`, true},
		{"mistyped command", "ini", "unknown command", true},
		{"an argument", "init prod", "unknown command", true},
	} {
		t.Run(test.name, func(t *testing.T) {
			out, err := runCerts(t, strings.Fields(test.args)...)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %q, %v, want an error with %q", out, err, test.want)
			}
			if _, usage := errors.AsType[usageError](err); usage != test.usage {
				t.Errorf("usage error: %v, want %v", usage, test.usage)
			}
		})
	}
	after, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(after) != len(before) {
		t.Errorf("folder has %v, had %v", after, before)
	}
	if left, err := os.ReadDir(empty); err != nil || len(left) != 0 {
		t.Errorf("something was written: %v, %v", left, err)
	}
}

func TestCertsHelpShowsKubeadm(t *testing.T) {
	out := mustRunCerts(t, "--help")
	for _, want := range []string{
		"/etc/kubernetes/pki/mvp-node",
		"/etc/kubernetes/pki/front-proxy-client.crt",
		"certs init --cluster prod",
		"Never copy mesh-ca.key",
		"scp ",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("help has no %q:\n%s", want, out)
		}
	}
	if !strings.Contains(mustRunCerts(t, "issue", "--help"), "(default 365d)") {
		t.Error("help of issue does not show the default lifetime in days")
	}
}
