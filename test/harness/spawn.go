//go:build linux

package harness

import (
	"os/exec"
	"runtime"
	"sync"
	"syscall"
)

// SpawnerFunction is the name of the function whose goroutine starts all processes and never ends. Tests that look for
// leaked goroutines exclude it: goleak.IgnoreAnyFunction(harness.SpawnerFunction).
const SpawnerFunction = "github.com/mvp-mesh/mvp-node/test/harness.spawnLoop"

type spawnRequest struct {
	cmd  *exec.Cmd
	done chan error
}

var (
	spawnOnce     sync.Once
	spawnRequests chan spawnRequest
)

// spawn starts cmd in its own process group, with SIGKILL as its parent-death signal.
//
// The kernel sends that signal when the *thread* dies that started the process, and the Go runtime ends threads when it
// likes. So every process is started from one goroutine that is locked to its thread and never returns: that thread
// dies only with the program, however the program dies.
func spawn(cmd *exec.Cmd) error {
	spawnOnce.Do(func() {
		spawnRequests = make(chan spawnRequest)
		go spawnLoop() // lives as long as the program, see above
	})
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	request := spawnRequest{cmd: cmd, done: make(chan error)}
	spawnRequests <- request
	return <-request.done
}

func spawnLoop() {
	runtime.LockOSThread()
	for request := range spawnRequests {
		request.done <- request.cmd.Start()
	}
}
