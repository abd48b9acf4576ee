//go:build e2e

package e2e

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gorilla/websocket"
	"github.com/mvp-mesh/mvp-node/test/harness"
	"k8s.io/apimachinery/pkg/util/httpstream/spdy" //nolint:staticcheck // the type that client-go still wants
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/remotecommand"
)

// slowReader says how much of what is read how fast, and how often at the same time.
type slowReader struct {
	sessions int
	bytes    int64
	rate     float64 // bytes a second, of each session
}

// slowReaderOf is CASES S-05 as written with MVP_LONG=1: 20 sessions of 1 GiB at 5 MiB/s, which take three and a half minutes.
func slowReaderOf() slowReader {
	if os.Getenv("MVP_LONG") != "" {
		return slowReader{20, 1 << 30, 5 << 20}
	}
	return slowReader{4, 32 << 20, 8 << 20}
}

// CASES S-05: a process writes as fast as it can and ends, the client reads slowly, and every byte arrives, on both paths and by both
// protocols; what the nodes hold meanwhile is bounded (S-09).
func TestSlowExec(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 40*time.Minute)
	defer cancel()
	c := harness.New(t, harness.Options{
		Binaries: testBinaries(t),
		Hosts: []harness.HostOptions{
			{Name: "cp-a", Version: harness.V135, NodeOverlay: map[string]any{"routing": map[string]any{"prefer": "newest"}}},
			{Name: "cp-b", Version: harness.V136},
		},
		Nodes: true,
	})
	converged(t, ctx, c)
	k, err := c.StartKubelet(ctx, "worker-1")
	if err != nil {
		t.Fatal(err)
	}
	if err := k.RunPod(ctx, "default", "web"); err != nil {
		t.Fatal(err)
	}
	load := slowReaderOf()
	command := []string{"sh", "-c", fmt.Sprintf("seq 1 1000000000 | head -c %d", load.bytes)}
	whole := fmt.Sprintf("%d bytes, %s", load.bytes, sumOfCommand(t, ctx, command))
	for _, way := range []struct{ name, url string }{
		{"direct", c.Host("cp-b").APIServer.URL()}, {"local", c.Host("cp-b").Node.URL()}, {"forwarded", c.Host("cp-a").Node.URL()},
	} {
		for _, protocol := range []string{"websocket", "spdy"} {
			t.Run(way.name+"/"+protocol, func(t *testing.T) {
				config, err := c.AdminKubeconfig(way.url)
				if err != nil {
					t.Fatal(err)
				}
				before := residentOf(t, c)
				forwarded := metric(t, ctx, c.Host("cp-a"), "mvp_front_requests_total", `reason="Preferred"`, `code="101"`)
				var peak [2]int64
				start := time.Now()
				var running sync.WaitGroup
				sums := make(chan string, load.sessions)
				for range load.sessions {
					running.Go(func() {
						sum, err := execSlowly(ctx, config, protocol, slices.Clone(command), load.bytes, load.rate)
						if err != nil {
							sum = err.Error()
						}
						sums <- sum
					})
				}
				over := make(chan struct{})
				go func() {
					running.Wait()
					close(over)
				}()
				for done := false; !done; {
					for i, n := range residentOf(t, c) {
						peak[i] = max(peak[i], n-before[i])
					}
					select {
					case <-over:
						done = true
					case <-time.After(200 * time.Millisecond):
					}
				}
				close(sums)
				equal := 0
				for sum := range sums {
					if sum == whole {
						equal++
					} else {
						t.Errorf("session: %s, want %s", sum, whole)
					}
				}
				t.Logf("%d of %d sessions of %d MiB equal after %v; memory of node cp-a rose by %d MiB at most, of cp-b by %d MiB",
					equal, load.sessions, load.bytes>>20, time.Since(start).Round(time.Millisecond), peak[0]>>20, peak[1]>>20)
				// Half a MiB for each stream on each node, and room for the garbage collector (S-09 allows 1 MiB each).
				for i, n := range peak {
					if limit := int64(load.sessions)<<20 + 64<<20; n > limit {
						t.Errorf("memory of node %s rose by %d MiB, more than %d", c.Hosts[i].Name, n>>20, limit>>20)
					}
				}
				// A request is counted when it is over for the node too, which is after it is for the client.
				want := map[string]float64{"forwarded": float64(load.sessions)}[way.name]
				eventually(t, ctx, 5*time.Second, "sessions are counted", func(ctx context.Context) error {
					moved := metric(t, ctx, c.Host("cp-a"), "mvp_front_requests_total", `reason="Preferred"`, `code="101"`) - forwarded
					if moved != want {
						return fmt.Errorf("%v sessions were forwarded, want %v", moved, want)
					}
					return nil
				})
				for _, h := range c.Hosts {
					eventually(t, ctx, 5*time.Second, "no upgraded connection left at "+h.Name, func(ctx context.Context) error {
						if n := metric(t, ctx, h, "mvp_front_upgraded_connections"); n != 0 {
							return fmt.Errorf("%v are left", n)
						}
						return nil
					})
				}
			})
		}
	}
}

// sumOfCommand is the SHA-256 of what a command writes.
func sumOfCommand(t *testing.T, ctx context.Context, command []string) string {
	t.Helper()
	h := sha256.New()
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Stdout = h
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// execSlowly runs a command in the pod and reads what it writes at a rate. It returns the number and SHA-256 of the bytes.
//
// A kube-apiserver itself loses the end of what a program wrote (kubernetes/kubernetes#60140), with no node in between: it gives up on a
// SPDY session when it cannot pass on a heartbeat of the client's, which client-go sends every 5 s, to a kubelet that has ended it; and
// where it translates a WebSocket to SPDY, it drops what it has not passed on when the kubelet ends. Seen here without a node: 7 and 14
// of 20 sessions whole. So the SPDY client of this test sends no heartbeats, and the program behind the WebSocket ends when the client
// has read everything.
func execSlowly(ctx context.Context, kubeconfig, protocol string, command []string, size int64, rate float64) (string, error) {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return "", err
	}
	target, err := url.Parse(config.Host + "/api/v1/namespaces/default/pods/web/exec")
	if err != nil {
		return "", err
	}
	query := url.Values{"container": {"main"}, "stdout": {"true"}, "stderr": {"true"}, "command": command}
	h := sha256.New()
	out := &throttle{w: h, rate: rate, start: time.Now()}
	run := execSPDY
	if protocol == "websocket" {
		run = func(ctx context.Context, config *rest.Config, target *url.URL, _ io.Writer) error {
			return execWebSocket(ctx, config, target, out, size)
		}
		command[len(command)-1] += "; cat >/dev/null"
		query.Set("stdin", "true")
	}
	query["command"] = command
	target.RawQuery = query.Encode()
	if err := run(ctx, config, target, out); err != nil {
		return "", fmt.Errorf("after %d bytes: %w", out.n, err)
	}
	return fmt.Sprintf("%d bytes, %x", out.n, h.Sum(nil)), nil
}

func execSPDY(ctx context.Context, config *rest.Config, target *url.URL, out io.Writer) error {
	tlsConfig, err := rest.TLSConfigFor(config)
	if err != nil {
		return err
	}
	transport, err := spdy.NewRoundTripperWithConfig(spdy.RoundTripperConfig{TLS: tlsConfig})
	if err != nil {
		return err
	}
	e, err := remotecommand.NewSPDYExecutorForTransports(transport, transport, http.MethodPost, target)
	if err != nil {
		return err
	}
	return e.StreamWithContext(ctx, remotecommand.StreamOptions{Stdout: out, Stderr: io.Discard})
}

// Channels of v5.channel.k8s.io: the first byte of each message. A message on channelClose closes the channel that it names.
const (
	channelStdin  = 0
	channelStdout = 1
	channelError  = 3
	channelClose  = 255
)

// execWebSocket closes the program's standard input when size bytes of its output were read.
func execWebSocket(ctx context.Context, config *rest.Config, target *url.URL, out *throttle, size int64) error {
	tlsConfig, err := rest.TLSConfigFor(config)
	if err != nil {
		return err
	}
	dialer := websocket.Dialer{TLSClientConfig: tlsConfig, Subprotocols: []string{"v5.channel.k8s.io"}, ReadBufferSize: 32 << 10}
	secure := *target
	secure.Scheme = "wss"
	conn, resp, err := dialer.DialContext(ctx, secure.String(), nil)
	if err != nil {
		return err
	}
	resp.Body.Close()
	defer conn.Close()
	var status string
	for {
		_, message, err := conn.NextReader()
		switch {
		case websocket.IsCloseError(err, websocket.CloseNormalClosure) && strings.Contains(status, `"Success"`):
			return nil
		case err != nil:
			return fmt.Errorf("status %q: %w", status, err)
		}
		var channel [1]byte
		if _, err := io.ReadFull(message, channel[:]); err != nil {
			return err
		}
		to := io.Discard
		var text strings.Builder
		switch channel[0] {
		case channelStdout:
			to = out
		case channelError:
			to = &text
		}
		if _, err := io.Copy(to, message); err != nil {
			return err
		}
		status += text.String()
		if channel[0] == channelStdout && out.n == size {
			if err := conn.WriteMessage(websocket.BinaryMessage, []byte{channelClose, channelStdin}); err != nil {
				return err
			}
		}
	}
}

// throttle is a reader's pace: Write returns when so many bytes may have been read since the start.
type throttle struct {
	w     io.Writer
	rate  float64
	start time.Time
	n     int64
}

func (s *throttle) Write(p []byte) (int, error) {
	n, err := s.w.Write(p)
	s.n += int64(n)
	time.Sleep(time.Until(s.start.Add(time.Duration(float64(s.n) / s.rate * float64(time.Second))))) // the pace itself
	return n, err
}

// residentOf is the memory of the two nodes' processes, in bytes.
func residentOf(t *testing.T, c *harness.Cluster) (out [2]int64) {
	t.Helper()
	for i, h := range c.Hosts {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", h.Node.Process.PID()))
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(status)) {
			if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
				if _, err := fmt.Sscan(rest, &out[i]); err != nil {
					t.Fatalf("%q: %v", line, err)
				}
				out[i] <<= 10
			}
		}
	}
	return out
}
