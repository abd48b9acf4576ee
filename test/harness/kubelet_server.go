//go:build linux

package harness

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"k8s.io/cri-streaming/pkg/streaming"
	"k8s.io/cri-streaming/pkg/streaming/portforward"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
)

// sessionGrace is how long a session has after the end of its pod to tell its client, before the connection is cut.
const sessionGrace = 2 * time.Second

// handler returns what the kubelet serves. The paths are those of a real one.
func (k *Kubelet) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") })
	mux.HandleFunc("GET /pods", k.servePods)
	const container, ofUID = "/{namespace}/{pod}/{container}", "/{namespace}/{pod}/{uid}/{container}"
	mux.HandleFunc("GET /containerLogs"+container, k.session(serveLogs))
	for _, method := range []string{"GET ", "POST "} { // WebSocket comes as GET, SPDY as POST
		mux.HandleFunc(method+"/exec"+container, k.session(serveExec))
		mux.HandleFunc(method+"/exec"+ofUID, k.session(serveExec))
		mux.HandleFunc(method+"/attach"+container, k.session(serveAttach))
		mux.HandleFunc(method+"/attach"+ofUID, k.session(serveAttach))
		mux.HandleFunc(method+"/portForward/{namespace}/{pod}", k.session(servePortForward))
		mux.HandleFunc(method+"/portForward/{namespace}/{pod}/{uid}", k.session(servePortForward))
	}
	return k.authorized(mux)
}

// authorized lets the apiservers in, and nobody else who has a certificate of the client CA.
func (k *Kubelet) authorized(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.TLS.PeerCertificates[0].Subject.CommonName != kubeletClientName {
			http.Error(w, "Forbidden", http.StatusForbidden)
			return
		}
		if !k.sessions.enter() {
			http.Error(w, "the kubelet ends", http.StatusServiceUnavailable)
			return
		}
		defer k.sessions.leave()
		next.ServeHTTP(w, r)
	})
}

func (k *Kubelet) servePods(w http.ResponseWriter, _ *http.Request) {
	items := []json.RawMessage{} // an empty list, not null
	k.mu.Lock()
	for _, pod := range k.pods {
		items = append(items, pod.object)
	}
	k.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(object{"apiVersion": "v1", "kind": "PodList", "metadata": object{}, "items": items})
}

// session makes a handler of a function that serves one request about a pod, whose context ends when the connection, or the pod,
// does. It may go on after that for the sessionGrace, in which the connection of a pod that has ended still works.
func (k *Kubelet) session(serve func(*sessionWriter, *http.Request, *kubeletPod)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		pod := k.pod(r.PathValue("namespace"), r.PathValue("pod"))
		if uid := r.PathValue("uid"); pod == nil || uid != "" && uid != pod.uid {
			http.Error(w, "pod does not exist", http.StatusNotFound)
			return
		}
		if name := r.PathValue("container"); name != "" && pod.logs[name] == nil {
			http.Error(w, fmt.Sprintf("container %q not found in pod %q", name, pod.name), http.StatusNotFound)
			return
		}
		if !pod.sessions.enter() {
			http.Error(w, "pod does not exist", http.StatusNotFound)
			return
		}
		defer pod.sessions.leave()
		ctx, cancel := context.WithCancel(r.Context())
		session := &sessionWriter{ResponseWriter: w, gone: make(chan struct{})}
		served := make(chan struct{})
		var watch sync.WaitGroup
		watch.Go(func() {
			select {
			case <-pod.gone:
			case <-session.gone:
			case <-served:
			}
			cancel()
			select {
			case <-time.After(sessionGrace):
				session.close()
			case <-served:
			}
		})
		defer watch.Wait()
		defer close(served)
		serve(session, r.WithContext(ctx), pod)
	}
}

func serveExec(w *sessionWriter, r *http.Request, pod *kubeletPod) {
	options, err := remotecommand.NewOptions(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	command := r.URL.Query()["command"]
	if len(command) == 0 {
		http.Error(w, "no command", http.StatusBadRequest)
		return
	}
	// The library closes the connection when it returns, so by then nothing can block the copying of standard input for long.
	var input sync.WaitGroup
	defer input.Wait()
	run := executor(func(ctx context.Context, in io.Reader, out, errs io.WriteCloser, tty bool) error {
		if tty {
			errs = out
		}
		return runCommand(ctx, pod, command, in, out, errs, &input)
	})
	remotecommand.ServeExec(w, r, run, pod.name, pod.uid, r.PathValue("container"), command, options,
		streaming.DefaultConfig.StreamIdleTimeout, streaming.DefaultConfig.StreamCreationTimeout,
		streaming.DefaultConfig.SupportedRemoteCommandProtocols)
}

func serveAttach(w *sessionWriter, r *http.Request, pod *kubeletPod) {
	options, err := remotecommand.NewOptions(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	container := r.PathValue("container")
	var input sync.WaitGroup
	defer input.Wait()
	attach := executor(func(ctx context.Context, in io.Reader, out, _ io.WriteCloser, _ bool) error {
		return pod.logs[container].attach(ctx, in, out, &input)
	})
	remotecommand.ServeAttach(w, r, attach, pod.name, pod.uid, container, options,
		streaming.DefaultConfig.StreamIdleTimeout, streaming.DefaultConfig.StreamCreationTimeout,
		streaming.DefaultConfig.SupportedRemoteCommandProtocols)
}

func servePortForward(w *sessionWriter, r *http.Request, pod *kubeletPod) {
	options, err := portforward.NewV4Options(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	// For SPDY the library waits for the end of the connection, and for none of the forwards on it.
	var forwards group
	defer forwards.closeAndWait()
	// After the pod nothing comes from it any more, and only the end of the connection tells the client.
	stop := context.AfterFunc(r.Context(), w.close)
	defer stop()
	forward := forwarder(func(port int32, stream io.ReadWriteCloser) error {
		if !forwards.enter() {
			return errors.New("the session has ended")
		}
		defer forwards.leave()
		return forwardPort(r.Context(), port, stream)
	})
	portforward.ServePortForward(w, r, forward, pod.name, pod.uid, options,
		streaming.DefaultConfig.StreamIdleTimeout, streaming.DefaultConfig.StreamCreationTimeout,
		streaming.DefaultConfig.SupportedPortForwardProtocols)
}

// serveLogs knows the parameters of PodLogOptions that kubectl has flags for.
func serveLogs(w *sessionWriter, r *http.Request, pod *kubeletPod) {
	o, err := parseLogOptions(r.URL.Query(), time.Now())
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	control := http.NewResponseController(w.ResponseWriter)
	w.Header().Set("Content-Type", "text/plain")
	w.WriteHeader(http.StatusOK)
	_ = control.Flush() // a failure shows at the next write
	pod.logs[r.PathValue("container")].read(r.Context(), o, func(line string) error {
		if _, err := io.WriteString(w, line); err != nil {
			return err
		}
		return control.Flush()
	})
}

// executor is the one method that remotecommand needs of a container runtime, both for exec and for attach. Terminal sizes are taken
// and dropped.
type executor func(ctx context.Context, in io.Reader, out, errs io.WriteCloser, tty bool) error

func (e executor) ExecInContainer(ctx context.Context, _, _, _ string, _ []string, in io.Reader, out, errs io.WriteCloser, tty bool,
	_ <-chan remotecommand.TerminalSize, _ time.Duration,
) error {
	return e(ctx, in, out, errs, tty)
}

func (e executor) AttachContainer(ctx context.Context, _, _, _ string, in io.Reader, out, errs io.WriteCloser, tty bool,
	_ <-chan remotecommand.TerminalSize,
) error {
	return e(ctx, in, out, errs, tty)
}

// forwarder is the one method that portforward needs of a container runtime. The library gives it a context without an end.
type forwarder func(port int32, stream io.ReadWriteCloser) error

func (f forwarder) PortForward(_ context.Context, _, _ string, port int32, stream io.ReadWriteCloser) error {
	return f(port, stream)
}

// sessionWriter is the ResponseWriter of a session. If the connection is taken over, it notices when the client leaves, which net/http
// no longer does then.
type sessionWriter struct {
	http.ResponseWriter
	gone chan struct{} // closed when the connection that was taken over has ended

	mu     sync.Mutex // guards the two below
	conn   net.Conn   // nil: not taken over
	closed bool       // close was called, perhaps before there was a connection
}

// Hijack implements [http.Hijacker].
func (w *sessionWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, buffer, err := http.NewResponseController(w.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, err
	}
	ahead, err := buffer.Peek(buffer.Reader.Buffered()) // what the client sent without waiting for the answer
	if err != nil {
		return nil, nil, errors.Join(err, conn.Close())
	}
	watched := &watchedConn{Conn: conn, gone: sync.OnceFunc(func() { close(w.gone) })}
	reader := bufio.NewReader(io.MultiReader(bytes.NewReader(bytes.Clone(ahead)), watched))
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return nil, nil, errors.Join(errors.New("the pod has ended"), conn.Close())
	}
	w.conn = watched
	return watched, bufio.NewReadWriter(reader, bufio.NewWriter(watched)), nil
}

// close ends the connection, if it was taken over.
func (w *sessionWriter) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
	if w.conn != nil {
		_ = w.conn.Close()
	}
}

// watchedConn tells when nothing more can come from the other side.
type watchedConn struct {
	net.Conn
	gone func()
}

func (c *watchedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if err != nil {
		c.gone()
	}
	return n, err
}

func (c *watchedConn) Close() error {
	c.gone()
	return c.Conn.Close()
}

// parseBool is strconv.ParseBool, with absence as false.
func parseBool(s string) (bool, error) {
	if s == "" {
		return false, nil
	}
	return strconv.ParseBool(s)
}
