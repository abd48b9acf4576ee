//go:build linux

package harness

import (
	"context"
	"fmt"
)

// daemon is what etcd, the apiservers and the nodes have in common: a program that is started, stopped and started
// again. Its methods must not be called while another start or stop of the same daemon is under way.
type daemon struct {
	// Process is the present run, or the last one; nil before the first start.
	Process *Process
}

func (d *daemon) start(spec ProcessSpec) error {
	if d.Running() {
		return fmt.Errorf("%s is running already (pid %d)", d.Process.Name(), d.Process.PID())
	}
	process, err := StartProcess(spec)
	if err != nil {
		return err
	}
	d.Process = process
	return nil
}

// Running reports whether it has been started and has not ended.
func (d *daemon) Running() bool { return d.Process != nil && d.Process.Running() }

// Stop ends it gracefully (see [Process.Stop]). It is no error if it does not run.
func (d *daemon) Stop(ctx context.Context) error {
	if d.Process == nil {
		return nil
	}
	return d.Process.Stop(ctx)
}

// Kill ends it at once, as a crash does. It is no error if it does not run.
func (d *daemon) Kill() error {
	if d.Process == nil {
		return nil
	}
	return d.Process.Kill()
}

// Pause makes it hang with its connections open, until Continue.
func (d *daemon) Pause() error {
	if d.Process == nil {
		return nil
	}
	return d.Process.Pause()
}

// Continue ends a Pause.
func (d *daemon) Continue() error {
	if d.Process == nil {
		return nil
	}
	return d.Process.Continue()
}
