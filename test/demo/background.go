//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/mvp-mesh/mvp-node/test/harness"
)

// Processes of the harness end with the one that started them, so "up" leaves a holder behind that owns them all, and "down" ends
// the holder. Its folder, one per user, says where it is.
const holdCommand = "hold"

func stateDir() string {
	return filepath.Join(os.TempDir(), fmt.Sprintf("mvp-node-demo-%d", os.Getuid()))
}

func pidFile() string    { return filepath.Join(stateDir(), "pid") }
func reportFile() string { return filepath.Join(stateDir(), "report") }

// holder returns the process ID of the running holder, 0 if there is none. The command line is compared, so that a number that
// was given to another process since is never taken for it.
func holder() int {
	data, err := os.ReadFile(pidFile())
	if err != nil {
		return 0
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil || pid <= 1 {
		return 0
	}
	args, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil || !strings.HasSuffix(string(args), "\x00"+holdCommand+"\x00") {
		return 0
	}
	return pid
}

// up starts the holder and waits for its report.
func up(ctx context.Context, w io.Writer) error {
	if pid := holder(); pid != 0 {
		return fmt.Errorf("a demo is running already (pid %d); end it by: make demo-down", pid)
	}
	if err := os.RemoveAll(stateDir()); err != nil {
		return err
	}
	if err := os.MkdirAll(stateDir(), 0o700); err != nil {
		return err
	}
	// Everything that takes long is built here, where its progress is seen.
	binaries, err := harness.FindBinaries(w)
	if err != nil {
		return err
	}
	if err := binaries.Ensure(ctx, harness.V135, harness.V136); err != nil {
		return err
	}
	if _, err := binaries.Tool(ctx, "grpcurl"); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	// The program that "go run" built is deleted when this process ends; the holder needs it only to start.
	log, err := os.OpenFile(filepath.Join(stateDir(), "log"), os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(self, holdCommand)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	if err := os.WriteFile(pidFile(), []byte(strconv.Itoa(cmd.Process.Pid)), 0o600); err != nil {
		return errors.Join(err, cmd.Process.Kill())
	}
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }()
	fmt.Fprintln(w, "starting etcd, three apiservers and three nodes ...")
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case err := <-exited:
			output, _ := os.ReadFile(log.Name())
			return fmt.Errorf("the demo did not start: %v\n%s", err, output)
		case <-ctx.Done():
			return errors.Join(ctx.Err(), cmd.Process.Signal(syscall.SIGTERM), <-exited)
		case <-tick.C:
			if report, err := os.ReadFile(reportFile()); err == nil {
				_, err := w.Write(report)
				return err
			}
		}
	}
}

// down ends the holder, which ends everything else, and waits for it.
func down(ctx context.Context, w io.Writer) error {
	pid := holder()
	if pid == 0 {
		fmt.Fprintln(w, "no demo is running")
		return os.RemoveAll(stateDir())
	}
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
		return fmt.Errorf("end demo (pid %d): %w", pid, err)
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := harness.Eventually(ctx, func(context.Context) error {
		if holder() != 0 {
			return errors.New("still running")
		}
		return nil
	}); err != nil {
		return fmt.Errorf("end demo (pid %d): %w", pid, err)
	}
	fmt.Fprintln(w, "the demo is stopped")
	return os.RemoveAll(stateDir())
}

// hold runs act 1's cluster until it is told to end.
func hold(ctx context.Context) (err error) {
	c, err := prepare(ctx, os.Stderr, "")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	if err := c.Start(ctx); err != nil {
		return err
	}
	report, err := describe(ctx, c)
	if err != nil {
		return err
	}
	// Renamed into place, so that it is read whole or not at all.
	if err := os.WriteFile(reportFile()+".new", []byte(report), 0o600); err != nil {
		return err
	}
	if err := os.Rename(reportFile()+".new", reportFile()); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

// describe says how to reach each part.
func describe(ctx context.Context, c *harness.Cluster) (string, error) {
	var b strings.Builder
	binaries, err := harness.FindBinaries(os.Stderr)
	if err != nil {
		return "", err
	}
	kubectl, err := binaries.Kubectl(ctx)
	if err != nil {
		return "", err
	}
	grpcurl, err := binaries.Tool(ctx, "grpcurl")
	if err != nil {
		return "", err
	}
	operator, err := c.PKI.OperatorCert("alice")
	if err != nil {
		return "", err
	}
	fmt.Fprintf(&b, "\nRunning: etcd at %s; files in %s; end it by: make demo-down\n", c.Etcd.URL(), c.Dir)
	for _, h := range c.Hosts {
		straight, err := c.AdminKubeconfig(h.APIServer.URL())
		if err != nil {
			return "", err
		}
		through, err := c.AdminKubeconfig(h.Node.URL())
		if err != nil {
			return "", err
		}
		fmt.Fprintf(&b, "\n%s, kube-apiserver %s\n  through the node   %s --kubeconfig %s get --raw %s\n  straight           %s --kubeconfig %s get --raw %s\n",
			h.Name, h.APIServer.Version, kubectl, through, policies, kubectl, straight, policies)
		fmt.Fprintf(&b, "  look in            %s gossip dump --config %s\n  mesh (gRPC)        %s -cacert %s -cert %s -key %s -servername %s %s mvp.v1.MeshService/GetView\n  metrics            %s/metrics\n",
			h.Node.Program(), h.Node.ConfigFile(), grpcurl, c.PKI.MeshCAFile, operator.Cert, operator.Key, h.Name, h.Node.MeshAddress(), h.Node.AdminURL())
	}
	return b.String(), nil
}
