//go:build linux

package harness

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// containerLog is what the main process of a container has written, line by line.
type containerLog struct {
	mu    sync.Mutex    // guards the two below
	lines []logLine     // only ever appended to
	more  chan struct{} // closed, and replaced, when lines are added
}

type logLine struct {
	at   time.Time
	text string // without the end of the line
}

func newContainerLog() *containerLog { return &containerLog{more: make(chan struct{})} }

func (l *containerLog) add(lines ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, line := range lines {
		l.lines = append(l.lines, logLine{at: time.Now(), text: line})
	}
	close(l.more)
	l.more = make(chan struct{})
}

// now returns the lines so far, for reading only, and a channel that is closed when there are more.
func (l *containerLog) now() ([]logLine, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lines, l.more
}

// logOptions are the parameters of a request for a log.
type logOptions struct {
	follow     bool
	timestamps bool
	since      time.Time // zero: all
	tail       int       // last lines before following; -1: all
	limit      int       // bytes; -1: no limit
}

func parseLogOptions(query url.Values, now time.Time) (logOptions, error) {
	o := logOptions{tail: -1, limit: -1}
	var errs []error
	number := func(name string, into *int) bool {
		text := query.Get(name)
		if text == "" {
			return false
		}
		n, err := strconv.Atoi(text)
		if err != nil || n < 0 {
			errs = append(errs, fmt.Errorf("%s: %q is not a number", name, text))
			return false
		}
		*into = n
		return true
	}
	truth := func(name string) bool {
		value, err := parseBool(query.Get(name))
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", name, err))
		}
		return value
	}
	o.follow, o.timestamps = truth("follow"), truth("timestamps")
	if truth("previous") {
		errs = append(errs, errors.New("previous terminated container not found"))
	}
	number("tailLines", &o.tail)
	number("limitBytes", &o.limit)
	var seconds int
	if number("sinceSeconds", &seconds) {
		o.since = now.Add(-time.Duration(seconds) * time.Second)
	}
	if text := query.Get("sinceTime"); text != "" {
		since, err := time.Parse(time.RFC3339, text)
		if err != nil {
			errs = append(errs, fmt.Errorf("sinceTime: %w", err))
		}
		o.since = since
	}
	return o, errors.Join(errs...)
}

// read hands out the lines that o asks for, each with its end, until there are none left or, following, until ctx ends or write fails.
func (l *containerLog) read(ctx context.Context, o logOptions, write func(string) error) {
	lines, more := l.now()
	next := 0
	for next < len(lines) && lines[next].at.Before(o.since) {
		next++
	}
	if o.tail >= 0 {
		next = max(next, len(lines)-o.tail)
	}
	for {
		for ; next < len(lines); next++ {
			text := lines[next].text + "\n"
			if o.timestamps {
				text = lines[next].at.UTC().Format(time.RFC3339Nano) + " " + text
			}
			if o.limit >= 0 {
				text = text[:min(len(text), o.limit)]
				o.limit -= len(text)
			}
			if err := write(text); err != nil || o.limit == 0 {
				return
			}
		}
		if !o.follow {
			return
		}
		select {
		case <-more:
		case <-ctx.Done():
			return
		}
		lines, more = l.now()
	}
}

// attach writes lines to out as they are added, and adds those that come from in. It returns when in has ended and all that was added
// until then is written, when ctx ends, or when out fails. in may be nil, and out too. The reading of in is counted in input, and goes
// on after the return until in ends or fails.
func (l *containerLog) attach(ctx context.Context, in io.Reader, out io.Writer, input *sync.WaitGroup) error {
	if out == nil {
		out = io.Discard
	}
	before, _ := l.now()
	next := len(before)
	var ended chan struct{} // nil, so never, without input
	if in != nil {
		ended = make(chan struct{})
		input.Go(func() {
			defer close(ended)
			for reader := bufio.NewReader(in); ; {
				line, err := reader.ReadString('\n')
				if line != "" {
					l.add(strings.TrimSuffix(line, "\n"))
				}
				if err != nil {
					return
				}
			}
		})
	}
	for last := false; ; {
		lines, more := l.now()
		for ; next < len(lines); next++ {
			if _, err := io.WriteString(out, lines[next].text+"\n"); err != nil {
				return err
			}
		}
		if last {
			return nil
		}
		select {
		case <-more:
		case <-ended:
			last = true // once more, for what came between the last look and the end
		case <-ctx.Done():
			return nil
		}
	}
}

// exitStatus is the error of a command that ran and whose code was not 0. The streaming library knows it by its methods
// (k8s.io/utils/exec.ExitError), and only if it is not wrapped.
type exitStatus int

func (e exitStatus) Error() string   { return "exit status " + strconv.Itoa(int(e)) }
func (e exitStatus) String() string  { return e.Error() }
func (e exitStatus) Exited() bool    { return true }
func (e exitStatus) ExitStatus() int { return int(e) }

// runCommand runs a command in the folder of a pod to its end, or until ctx ends, which kills it with all that it has started. What it
// has written is delivered before the return, however long the other side takes. Any of in, out and errs may be nil. The reading of in
// is counted in input and may go on after the return, until in ends or fails: nobody can tell whether more would have come.
func runCommand(ctx context.Context, pod *kubeletPod, command []string, in io.Reader, out, errs io.Writer, input *sync.WaitGroup) error {
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Dir = pod.dir
	cmd.Env = append(os.Environ(), "HOME="+pod.dir, "HOSTNAME="+pod.name)
	// A nil Writer is the null device; the library gives a nil interface for a stream that the client has not asked for.
	cmd.Stdout, cmd.Stderr = out, errs
	var stdin io.WriteCloser
	if in != nil {
		var err error
		if stdin, err = cmd.StdinPipe(); err != nil {
			return err
		}
	}
	if err := spawn(cmd); err != nil {
		return err
	}
	process := &Process{spec: ProcessSpec{Name: command[0]}, cmd: cmd, pid: cmd.Process.Pid, done: make(chan struct{})}
	stop := context.AfterFunc(ctx, func() { _ = process.Signal(syscall.SIGKILL) })
	defer stop()
	if stdin != nil {
		input.Go(func() {
			_, _ = io.Copy(stdin, in) // a command may end without reading all
			_ = stdin.Close()
		})
	}
	process.wait()
	var exit *exec.ExitError
	switch {
	case process.err == nil:
		return nil
	case !errors.As(process.err, &exit):
		return process.err
	}
	if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return exitStatus(128 + int(status.Signal())) // as shells and container runtimes have it
	}
	return exitStatus(exit.ExitCode())
}

// forwardPort copies between a stream and a port of this machine until both directions have ended, or ctx has. It closes the stream.
func forwardPort(ctx context.Context, port int32, stream io.ReadWriteCloser) error {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp4", hostPort("127.0.0.1", int(port)))
	if err != nil {
		return err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	var in sync.WaitGroup
	in.Go(func() {
		_, _ = io.Copy(conn, stream)
		_ = conn.(*net.TCPConn).CloseWrite()
	})
	_, _ = io.Copy(stream, conn)
	// A SPDY stream is closed in this direction only: the client answers by closing the other one.
	_ = stream.Close()
	in.Wait()
	return nil
}
