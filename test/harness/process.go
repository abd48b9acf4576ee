//go:build linux

package harness

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// stopTimeout is how long Stop waits after SIGTERM before it kills, if the context allows as much. A kube-apiserver waits up to its
// --request-timeout, a minute, for connections that are busy: mostly it is gone in two seconds, but a watch that is opened in the
// very moment of the end is not told of it.
const stopTimeout = 75 * time.Second

// tailBytes is how much of the end of a log is read for an error message.
const tailBytes = 16 << 10

// ProcessSpec says what to run.
type ProcessSpec struct {
	Name    string   // for messages
	Path    string   // the program
	Args    []string // without the program itself
	Env     []string // added to the environment of the caller
	Dir     string   // working directory; empty: the caller's
	LogFile string   // standard output and error are appended to it; empty: discarded
}

// Process is a running program, or one that has ended. Its methods are safe for concurrent use.
type Process struct {
	spec ProcessSpec
	cmd  *exec.Cmd
	pid  int
	done chan struct{} // closed when the process has ended and err is set
	err  error         // result of the wait, read after done

	mu     sync.Mutex // guards reaped, and so that no signal goes to a process number that may belong to another
	reaped bool
}

// StartProcess starts the program in a process group of its own and returns at once. The kernel kills the program when
// the calling program dies, so nothing is left behind by a test that panics, times out or is killed itself. (What the
// program starts in turn is killed by group when the program ends under our eyes, but has no such guarantee.)
func StartProcess(spec ProcessSpec) (*Process, error) {
	cmd := exec.Command(spec.Path, spec.Args...)
	cmd.Dir = spec.Dir
	cmd.Env = append(os.Environ(), spec.Env...)
	if spec.LogFile != "" {
		log, err := os.OpenFile(spec.LogFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
		if err != nil {
			return nil, fmt.Errorf("log of %s: %w", spec.Name, err)
		}
		defer log.Close() // the child has its own copy
		cmd.Stdout, cmd.Stderr = log, log
	}
	if err := spawn(cmd); err != nil {
		return nil, fmt.Errorf("starting %s: %w", spec.Name, err)
	}
	p := &Process{spec: spec, cmd: cmd, pid: cmd.Process.Pid, done: make(chan struct{})}
	go p.wait() // ends with the process; Stop, Kill and Wait wait for it through done
	return p, nil
}

// wait reaps the process. Between its end and the reaping its number still belongs to it, which is the moment to kill
// what is left of its group without ever hitting a stranger.
func (p *Process) wait() {
	for {
		err := unix.Waitid(unix.P_PID, p.pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	p.mu.Lock()
	_ = syscall.Kill(-p.pid, syscall.SIGKILL) // only the dead leader is the usual case
	p.err = p.cmd.Wait()
	p.reaped = true
	p.mu.Unlock()
	close(p.done)
}

// PID returns the process number, also after the process has ended.
func (p *Process) PID() int { return p.pid }

// Name returns the name given in the spec.
func (p *Process) Name() string { return p.spec.Name }

// Done is closed when the process has ended and been reaped.
func (p *Process) Done() <-chan struct{} { return p.done }

// Running reports whether the process has not ended yet.
func (p *Process) Running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// Wait waits for the end of the process. It returns nil if the process ended with code 0, an [exec.ExitError] if it ended
// otherwise, and the context's error if that ends first.
func (p *Process) Wait(ctx context.Context) error {
	select {
	case <-p.done:
		return p.err
	case <-ctx.Done():
		return fmt.Errorf("waiting for the end of %s (pid %d): %w", p.spec.Name, p.pid, ctx.Err())
	}
}

// Signal sends a signal to the whole process group. A process that has ended is no error.
func (p *Process) Signal(signal syscall.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.reaped {
		return nil
	}
	if err := syscall.Kill(-p.pid, signal); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("sending %v to %s (pid %d): %w", signal, p.spec.Name, p.pid, err)
	}
	return nil
}

// Stop asks the process to end (SIGTERM) and waits for it; after 30 seconds, or when ctx ends, it kills it. A paused
// process is continued first. It returns an error only if it had to kill.
func (p *Process) Stop(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, stopTimeout)
	defer cancel()
	if err := errors.Join(p.Signal(syscall.SIGTERM), p.Signal(syscall.SIGCONT)); err != nil {
		return err
	}
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
		return errors.Join(fmt.Errorf("%s (pid %d) did not end after SIGTERM, killing it: %w",
			p.spec.Name, p.pid, ctx.Err()), p.Kill())
	}
}

// Kill ends the process at once (SIGKILL) and waits until it is gone. This is how a test crashes something.
func (p *Process) Kill() error {
	if err := p.Signal(syscall.SIGKILL); err != nil {
		return err
	}
	<-p.done
	return nil
}

// Pause stops the process from running (SIGSTOP) while its connections stay open: the peer that hangs.
func (p *Process) Pause() error { return p.Signal(syscall.SIGSTOP) }

// Continue ends a Pause.
func (p *Process) Continue() error { return p.Signal(syscall.SIGCONT) }

// LogTail returns the last lines of the log, or a note why there is none.
func (p *Process) LogTail(lines int) string { return tail(p.spec.LogFile, lines) }

func tail(path string, lines int) string {
	if path == "" {
		return "(no log)"
	}
	f, err := os.Open(path)
	if err != nil {
		return fmt.Sprintf("(no log: %v)", err)
	}
	defer f.Close()
	if size, err := f.Seek(0, io.SeekEnd); err == nil {
		_, _ = f.Seek(max(0, size-tailBytes), io.SeekStart)
	}
	data, err := io.ReadAll(io.LimitReader(f, tailBytes))
	if err != nil {
		return fmt.Sprintf("(no log: %v)", err)
	}
	all := strings.Split(strings.TrimRight(string(data), "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// failure describes why a process is not as it should be, with the end of its log.
func (p *Process) failure(err error) error {
	state := "still running"
	if !p.Running() {
		state = "ended: exit code 0"
		if p.err != nil {
			state = "ended: " + p.err.Error()
		}
	}
	return fmt.Errorf("%s (%s): %w\n--- end of %s:\n%s", p.spec.Name, state, err, p.spec.LogFile, p.LogTail(25))
}

// Result is what a program that ran to its end has left.
type Result struct {
	Stdout   string
	Stderr   string
	ExitCode int // -1 if it was killed by a signal
}

// Run runs a program to its end, with the same guarantees as [StartProcess]; when ctx ends it is killed. A non-zero exit
// code is not an error: an error means that the program did not run to its end. stdin may be nil, and so may spec.LogFile
// be empty, which is not used here.
func Run(ctx context.Context, spec ProcessSpec, stdin io.Reader) (Result, error) {
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, spec.Path, spec.Args...)
	cmd.Dir = spec.Dir
	cmd.Env = append(os.Environ(), spec.Env...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &stdout, &stderr
	cmd.WaitDelay = 5 * time.Second // a grandchild that keeps the pipes open does not hold us for ever
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	if err := spawn(cmd); err != nil {
		return Result{}, fmt.Errorf("starting %s: %w", spec.Name, err)
	}
	err := cmd.Wait()
	result := Result{Stdout: stdout.String(), Stderr: stderr.String(), ExitCode: cmd.ProcessState.ExitCode()}
	if ctx.Err() != nil {
		return result, fmt.Errorf("%s %s: %w", filepath.Base(spec.Path), strings.Join(spec.Args, " "), ctx.Err())
	}
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		return result, fmt.Errorf("running %s: %w", spec.Name, err)
	}
	return result, nil
}
