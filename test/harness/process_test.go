//go:build linux

package harness

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// helperVariable makes the test binary be another program, see TestMain.
const helperVariable = "MVP_HARNESS_TEST_HELPER"

func TestMain(m *testing.M) {
	switch os.Getenv(helperVariable) {
	case "":
		goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction(SpawnerFunction))
	case "parent":
		helperParent()
	case "node":
		helperNode()
	default:
		panic("unknown helper")
	}
}

// helperParent starts a process, tells its number, and waits to be killed.
func helperParent() {
	p, err := StartProcess(ProcessSpec{Name: "child", Path: "sleep", Args: []string{"600"}})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("child", p.PID())
	<-p.Done()
}

func start(t *testing.T, script string) *Process {
	t.Helper()
	p, err := StartProcess(ProcessSpec{
		Name: "test", Path: "sh", Args: []string{"-c", script}, LogFile: filepath.Join(t.TempDir(), "log"),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Kill(); err != nil {
			t.Error(err)
		}
	})
	return p
}

func bounded(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// logged waits until the log of p has the text.
func logged(t *testing.T, p *Process, text string) {
	t.Helper()
	if err := Eventually(bounded(t), func(context.Context) error {
		if log := p.LogTail(100); !strings.Contains(log, text) {
			return fmt.Errorf("log has no %q: %q", text, log)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// gone reports whether there is no process of that number, or only what is left of one until it is reaped.
func gone(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return true
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	return strings.HasPrefix(rest, "Z")
}

func waitGone(t *testing.T, pid int) {
	t.Helper()
	if err := Eventually(bounded(t), func(context.Context) error {
		if !gone(pid) {
			return fmt.Errorf("process %d is still there", pid)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}

func TestProcessStopIsGraceful(t *testing.T) {
	p := start(t, `trap 'echo bye; exit 3' TERM; echo up; while :; do sleep 0.05; done`)
	logged(t, p, "up")
	if err := p.Stop(bounded(t)); err != nil {
		t.Fatal(err)
	}
	exit := (*exec.ExitError)(nil)
	if err := p.Wait(bounded(t)); !errors.As(err, &exit) || exit.ExitCode() != 3 {
		t.Errorf("got %v, want exit code 3", err)
	}
	if tail := p.LogTail(1); tail != "bye" {
		t.Errorf("last line of the log is %q, want bye", tail)
	}
	if p.Running() {
		t.Error("still running")
	}
}

func TestProcessStopKillsWhatDoesNotEnd(t *testing.T) {
	p := start(t, `trap '' TERM; echo up; while :; do sleep 0.05; done`)
	logged(t, p, "up")
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := p.Stop(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want DeadlineExceeded", err)
	}
	if p.Running() {
		t.Error("still running")
	}
}

func TestProcessStopsWhilePaused(t *testing.T) {
	p := start(t, `echo up; exec sleep 600`)
	logged(t, p, "up")
	if err := p.Pause(); err != nil {
		t.Fatal(err)
	}
	if err := p.Stop(bounded(t)); err != nil {
		t.Error(err)
	}
}

func TestProcessPauseAndContinue(t *testing.T) {
	p := start(t, `exec sleep 600`)
	state := func(want string) {
		t.Helper()
		if err := Eventually(bounded(t), func(context.Context) error {
			stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.PID()))
			if err != nil {
				return err
			}
			_, rest, _ := strings.Cut(string(stat), ") ")
			if got := rest[:1]; (got == "T") != (want == "T") {
				return fmt.Errorf("state is %s, want %s", got, want)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.Pause(); err != nil {
		t.Fatal(err)
	}
	state("T")
	if err := p.Continue(); err != nil {
		t.Fatal(err)
	}
	state("S")
}

func TestProcessKillTakesTheGroup(t *testing.T) {
	p := start(t, `sleep 600 & echo child $!; wait`)
	logged(t, p, "child")
	child, err := strconv.Atoi(strings.Fields(p.LogTail(1))[1])
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	waitGone(t, child)
}

func TestProcessGroupEndsWithItsLeader(t *testing.T) {
	p := start(t, `sleep 600 & echo child $!`)
	if err := p.Wait(bounded(t)); err != nil {
		t.Fatal(err)
	}
	child, err := strconv.Atoi(strings.Fields(p.LogTail(1))[1])
	if err != nil {
		t.Fatal(err)
	}
	waitGone(t, child)
}

func TestProcessAfterItsEnd(t *testing.T) {
	p := start(t, `exit 0`)
	if err := p.Wait(bounded(t)); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(p.Stop(bounded(t)), p.Kill(), p.Pause(), p.Continue()); err != nil {
		t.Errorf("signals after the end: %v", err)
	}
}

func TestStartProcessOfNoProgram(t *testing.T) {
	_, err := StartProcess(ProcessSpec{Name: "ghost", Path: "/does/not/exist"})
	if !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "ghost") {
		t.Errorf("got %v, want ErrNotExist that names ghost", err)
	}
}

// Nothing may be left when a test binary is killed, say by a time-out that sends SIGKILL.
func TestProcessDiesWithItsParent(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log")
	parent, err := StartProcess(ProcessSpec{
		Name: "parent", Path: os.Args[0], Env: []string{helperVariable + "=parent"}, LogFile: log,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer parent.Kill()
	logged(t, parent, "child ")
	child, err := strconv.Atoi(strings.TrimPrefix(parent.LogTail(1), "child "))
	if err != nil {
		t.Fatalf("%v; log: %s", err, parent.LogTail(20))
	}
	if gone(child) {
		t.Fatal("the child does not run")
	}
	// Only the parent: the child has a process group of its own.
	if err := parent.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	waitGone(t, child)
}

func TestRun(t *testing.T) {
	result, err := Run(bounded(t), ProcessSpec{
		Name: "sh", Path: "sh", Args: []string{"-c", `read line; echo "out $line"; echo err >&2; exit 4`},
	}, strings.NewReader("hello\n"))
	if err != nil {
		t.Fatal(err)
	}
	if want := (Result{Stdout: "out hello\n", Stderr: "err\n", ExitCode: 4}); result != want {
		t.Errorf("got %+v, want %+v", result, want)
	}
}

func TestRunEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	// The grandchild holds the output open; it goes down with the group.
	_, err := Run(ctx, ProcessSpec{Name: "sh", Path: "sh", Args: []string{"-c", `sleep 600 & sleep 600`}}, nil)
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want DeadlineExceeded", err)
	}
}

func TestEventuallyKeepsTheLastReason(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 150*time.Millisecond)
	defer cancel()
	reason := errors.New("not yet")
	err := Eventually(ctx, func(ctx context.Context) error {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return reason
	})
	if !errors.Is(err, reason) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want both the reason and the end of the context", err)
	}
}

func TestEventuallyRunningEndsWithTheProcess(t *testing.T) {
	p := start(t, `echo last words; exit 7`)
	err := eventuallyRunning(bounded(t), p, func(context.Context) error { return errors.New("not yet") })
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{"not yet", "the process has ended", "exit status 7", "last words"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error has no %q: %v", want, err)
		}
	}
}
