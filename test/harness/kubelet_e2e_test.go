//go:build e2e && linux

package harness

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
)

// The kubelet of the harness is one that a real apiserver and a real kubectl are content with.
func TestKubelet(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	c := New(t, Options{Binaries: testBinaries(t), Hosts: []HostOptions{{Name: "cp-a", Version: V136}}})
	k, err := c.StartKubelet(ctx, "worker-1")
	if err != nil {
		t.Fatal(err)
	}
	if err := k.RunPod(ctx, "default", "web", "main", "side"); err != nil {
		t.Fatal(err)
	}
	config, err := c.AdminKubeconfig(c.Host("cp-a").APIServer.URL())
	if err != nil {
		t.Fatal(err)
	}
	run := func(t *testing.T, env []string, stdin io.Reader, args ...string) Result {
		t.Helper()
		spec, err := c.KubectlSpec(ctx, config, args...)
		if err != nil {
			t.Fatal(err)
		}
		spec.Env = append(spec.Env, env...)
		result, err := Run(ctx, spec, stdin)
		if err != nil {
			t.Fatal(err)
		}
		return result
	}
	start := func(t *testing.T, env []string, args ...string) *Process {
		t.Helper()
		spec, err := c.KubectlSpec(ctx, config, args...)
		if err != nil {
			t.Fatal(err)
		}
		spec.Env, spec.LogFile = append(spec.Env, env...), filepath.Join(t.TempDir(), "kubectl.log")
		p, err := StartProcess(spec)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = p.Kill() })
		return p
	}
	within := func(t *testing.T, what string, limit time.Duration, check func() error) {
		t.Helper()
		bounded, cancel := context.WithTimeout(ctx, limit)
		defer cancel()
		if err := Eventually(bounded, func(context.Context) error { return check() }); err != nil {
			t.Errorf("%s: not within %v: %v", what, limit, err)
		}
	}

	t.Run("only apiservers", func(t *testing.T) {
		url := "https://" + hostPort(k.ip, k.port)
		for _, client := range []struct {
			name string
			cert CertFiles
			want string
		}{{"no certificate", CertFiles{}, "no answer"}, {"another certificate", c.admin, "403"}} {
			cl, err := c.Client(url, Credential{Cert: client.cert})
			if err != nil {
				t.Fatal(err)
			}
			answer, err := cl.Get(ctx, "/pods")
			cl.Close()
			got := "no answer" // the handshake fails
			if err == nil {
				got = strconv.Itoa(answer.Status)
			}
			if got != client.want {
				t.Errorf("%s: got %s, %v, want %s", client.name, got, err, client.want)
			}
		}
	})
	t.Run("objects", func(t *testing.T) {
		if r := run(t, nil, nil, "get", "nodes"); !strings.Contains(r.Stdout, "worker-1   Ready") {
			t.Errorf("nodes: %+v", r)
		}
		if r := run(t, nil, nil, "get", "pods"); !regexp.MustCompile(`web\s+2/2\s+Running`).MatchString(r.Stdout) {
			t.Errorf("pods: %+v", r)
		}
	})
	t.Run("proxy", func(t *testing.T) {
		if r := run(t, nil, nil, "get", "--raw", "/api/v1/nodes/worker-1/proxy/healthz"); !strings.Contains(r.Stderr, "address not allowed") {
			t.Errorf("loopback address: %+v", r)
		}
		ip, err := MachineIP()
		if err != nil {
			t.Fatal(err)
		}
		if ip == "" {
			t.Log("this machine has no address but loopback ones")
			return
		}
		public, err := c.StartKubeletAt(ctx, "public", ip)
		if err != nil {
			t.Fatal(err)
		}
		if err := public.RunPod(ctx, "default", "there"); err != nil {
			t.Fatal(err)
		}
		if r := run(t, nil, nil, "get", "--raw", "/api/v1/nodes/public/proxy/healthz"); r.Stdout != "ok" {
			t.Errorf("health: %+v", r)
		}
		if r := run(t, nil, nil, "get", "--raw", "/api/v1/nodes/public/proxy/pods"); !strings.Contains(r.Stdout, `"name":"there"`) {
			t.Errorf("pods: %+v", r)
		}
	})
	for _, protocol := range []struct {
		name, websockets string
		end              time.Duration // bound for the news of a pod's end
	}{
		{"SPDY", "false", 5 * time.Second},
		// An apiserver that tunnels SPDY in a WebSocket cannot close it before something comes from the client (it holds its lock while
		// it reads, tunnelingWebsocketUpgraderConn in k8s.io/apiserver v0.36.3): the next of kubectl's pings, one in 10 s.
		{"WebSocket", "true", 15 * time.Second},
	} {
		env := []string{"KUBECTL_REMOTE_COMMAND_WEBSOCKETS=" + protocol.websockets, "KUBECTL_PORT_FORWARD_WEBSOCKETS=" + protocol.websockets}
		t.Run("exec "+protocol.name, func(t *testing.T) {
			r := run(t, env, nil, "exec", "web", "-c", "side", "--", "sh", "-c", "echo out; echo err >&2; exit 7")
			if r.ExitCode != 7 || r.Stdout != "out\n" || !strings.Contains(r.Stderr, "err\n") {
				t.Errorf("got %+v", r)
			}
			if r := run(t, env, strings.NewReader("a\nb\n"), "exec", "-i", "web", "--", "cat"); r.ExitCode != 0 || r.Stdout != "a\nb\n" {
				t.Errorf("standard input: got %+v", r)
			}
			if r := run(t, env, nil, "exec", "web", "--", "no-such-command"); r.ExitCode != 1 || !strings.Contains(r.Stderr, "not found") {
				t.Errorf("no such command: got %+v", r)
			}
			if r := run(t, env, nil, "exec", "web", "--", "seq", "3000000"); len(r.Stdout) != 22888896 || r.ExitCode != 0 {
				t.Errorf("much output: %d bytes, exit code %d, %.300s", len(r.Stdout), r.ExitCode, r.Stderr)
			}
		})
		t.Run("exec ends with its client "+protocol.name, func(t *testing.T) {
			dir, err := k.PodDir("default", "web")
			if err != nil {
				t.Fatal(err)
			}
			file := filepath.Join(dir, "pid-"+protocol.name)
			p := start(t, env, "exec", "web", "--", "sh", "-c", "echo $$ > "+filepath.Base(file)+"; sleep 1000")
			var pid string
			within(t, "command runs", 10*time.Second, func() error {
				data, err := os.ReadFile(file)
				if pid = strings.TrimSpace(string(data)); err == nil && pid == "" {
					err = errors.New("no process number yet")
				}
				return err
			})
			if err := p.Kill(); err != nil {
				t.Fatal(err)
			}
			within(t, "end of the command", 5*time.Second, func() error {
				if _, err := os.Stat("/proc/" + pid); err == nil {
					return fmt.Errorf("process %s still runs", pid)
				}
				return nil
			})
		})
		t.Run("attach "+protocol.name, func(t *testing.T) {
			r := run(t, env, strings.NewReader("one\ntwo\n"), "attach", "-i", "web", "-c", "main")
			if r.ExitCode != 0 || r.Stdout != "one\ntwo\n" {
				t.Errorf("got %+v", r)
			}
		})
		t.Run("port-forward "+protocol.name, func(t *testing.T) {
			pod := "forward-" + strings.ToLower(protocol.name)
			if err := k.RunPod(ctx, "default", pod); err != nil {
				t.Fatal(err)
			}
			port := echoServer(t)
			p := start(t, env, "port-forward", "pod/"+pod, ":"+port)
			var local string
			within(t, "forwarding", 10*time.Second, func() error {
				found := regexp.MustCompile(`127\.0\.0\.1:(\d+) -> `).FindStringSubmatch(p.LogTail(10))
				if found == nil {
					return errors.New(p.LogTail(10))
				}
				local = found[1]
				return nil
			})
			for range 2 {
				conn, err := net.Dial("tcp", "127.0.0.1:"+local)
				if err != nil {
					t.Fatal(err)
				}
				if got, err := exchange(conn, "hello"); err != nil || got != "hello" {
					t.Errorf("got %q, %v", got, err)
				}
			}
			if err := k.DeletePod(ctx, "default", pod); err != nil {
				t.Fatal(err)
			}
			within(t, "end of port-forward", protocol.end, func() error {
				if p.Running() {
					return errors.New(p.LogTail(10))
				}
				return nil
			})
			if !strings.Contains(p.LogTail(10), "lost connection to pod") {
				t.Errorf("kubectl said %s", p.LogTail(10))
			}
		})
		t.Run("cp "+protocol.name, func(t *testing.T) {
			data := make([]byte, 20<<20)
			_, _ = rand.Read(data)
			local := t.TempDir()
			if err := os.WriteFile(filepath.Join(local, "there"), data, 0o600); err != nil {
				t.Fatal(err)
			}
			for _, args := range [][]string{
				{"cp", filepath.Join(local, "there"), "web:data", "-c", "main"},
				{"cp", "web:data", filepath.Join(local, "back"), "-c", "main"},
			} {
				if r := run(t, env, nil, args...); r.ExitCode != 0 {
					t.Fatalf("%q: %+v", args, r)
				}
			}
			back, err := os.ReadFile(filepath.Join(local, "back"))
			if err != nil || sha256.Sum256(back) != sha256.Sum256(data) {
				t.Errorf("%d bytes came back, %v; want the same %d", len(back), err, len(data))
			}
		})
	}
	t.Run("logs", func(t *testing.T) {
		log := func(lines ...string) {
			t.Helper()
			if err := k.Log("default", "web", "side", lines...); err != nil {
				t.Fatal(err)
			}
		}
		log("1", "2", "3")
		for want, args := range map[string][]string{
			"1\n2\n3\n": {"logs", "web", "-c", "side"},
			"3\n":       {"logs", "web", "-c", "side", "--tail=1"},
			"1":         {"logs", "web", "-c", "side", "--limit-bytes=1"},
			"":          {"logs", "web", "-c", "side", "--since-time=2100-01-01T00:00:00Z"},
		} {
			if r := run(t, nil, nil, args...); r.ExitCode != 0 || r.Stdout != want {
				t.Errorf("%q: got %+v, want %q", args, r, want)
			}
		}
		p := start(t, nil, "logs", "-f", "web", "-c", "side", "--tail=1")
		within(t, "what was there", 10*time.Second, func() error { return wantText(p, "3") })
		log("4")
		within(t, "what came later", time.Second, func() error { return wantText(p, "3\n4") })
	})
	t.Run("the pod ends", func(t *testing.T) {
		exec := start(t, nil, "exec", "web", "--", "sh", "-c", "echo started; sleep 1000")
		logs := start(t, nil, "logs", "-f", "web", "-c", "main")
		for _, p := range []*Process{exec, logs} {
			within(t, "start of kubectl", 10*time.Second, func() error {
				if p.LogTail(9) == "" {
					return errors.New("nothing yet")
				}
				return nil
			})
		}
		if err := k.DeletePod(ctx, "default", "web"); err != nil {
			t.Fatal(err)
		}
		for _, p := range []*Process{exec, logs} {
			within(t, "end of kubectl", 5*time.Second, func() error {
				if p.Running() {
					return errors.New("still running")
				}
				return nil
			})
		}
		if got := exec.cmd.ProcessState.ExitCode(); got != 137 {
			t.Errorf("exec: exit code %d, want that of a killed command, 137", got)
		}
		if r := run(t, nil, nil, "get", "pod", "web"); !strings.Contains(r.Stderr, "NotFound") {
			t.Errorf("get: %+v", r)
		}
	})
}

func wantText(p *Process, want string) error {
	if got := p.LogTail(100); got != want {
		return fmt.Errorf("got %q, want %q", got, want)
	}
	return nil
}

// echoServer listens until the test ends, on a port of 127.0.0.1 that it returns, and sends back what it gets.
func echoServer(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	go func() { // ends with the listener
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() { // ends with the connection
				defer conn.Close()
				_, _ = io.Copy(conn, conn)
			}()
		}
	}()
	_, port, _ := net.SplitHostPort(listener.Addr().String())
	return port
}

// exchange sends text, says that it is all, and returns what comes back.
func exchange(conn net.Conn, text string) (string, error) {
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		return "", err
	}
	if _, err := io.WriteString(conn, text); err != nil {
		return "", err
	}
	if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
		return "", err
	}
	var got bytes.Buffer
	_, err := io.Copy(&got, conn)
	return got.String(), err
}
