//go:build linux

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/mvp-mesh/mvp-node/test/harness"
)

// story prints what is done and what came of it, and stops at the first thing that went otherwise than it must.
type story struct {
	ctx   context.Context
	w     io.Writer
	c     *harness.Cluster
	steps int
}

// act prints a headline.
func (s *story) act(title string) {
	fmt.Fprintf(s.w, "\n%s\n%s\n%s\n", strings.Repeat("=", 100), title, strings.Repeat("=", 100))
}

// say prints the point of the step that follows.
func (s *story) say(format string, args ...any) {
	s.steps++
	fmt.Fprintf(s.w, "\n# %d. %s\n", s.steps, fmt.Sprintf(format, args...))
}

// outcome is what a step must come to.
type outcome struct {
	fails bool     // the exit code must not be 0
	has   []string // pieces that the output must have
}

// kubectl runs kubectl against a server as the administrator and shows command and output.
func (s *story) kubectl(server, what string, want outcome, args ...string) error {
	config, err := s.c.AdminKubeconfig(server)
	if err != nil {
		return err
	}
	r, err := s.c.Kubectl(s.ctx, config, args...)
	if err != nil {
		return err
	}
	return s.show("kubectl --kubeconfig "+what+" "+quoted(args), r, want)
}

// node runs a mvp-node command on a host, by the configuration of its node.
func (s *story) node(h *harness.Host, want outcome, args ...string) error {
	r, err := harness.Run(s.ctx, harness.ProcessSpec{Name: "mvp-node", Path: h.Node.Program(), Args: append(args, "--config", h.Node.ConfigFile())}, nil)
	if err != nil {
		return err
	}
	return s.show("mvp-node "+quoted(args)+" --config "+filepath.Base(h.Node.ConfigFile()), r, want)
}

func (s *story) show(command string, r harness.Result, want outcome) error {
	out := strings.TrimRight(r.Stdout+r.Stderr, "\n")
	fmt.Fprintf(s.w, "$ %s\n", command)
	for line := range strings.Lines(out + "\n") {
		fmt.Fprintf(s.w, "  %s\n", clip(strings.TrimRight(line, "\n")))
	}
	if (r.ExitCode != 0) != want.fails {
		return fmt.Errorf("exit code %d, %s", r.ExitCode, map[bool]string{true: "want a failure", false: "want 0"}[want.fails])
	}
	for _, piece := range want.has {
		if !strings.Contains(out, piece) {
			return fmt.Errorf("%q is not in the output", piece)
		}
	}
	return nil
}

// clip keeps long JSON from hiding the story.
func clip(line string) string {
	const most = 180
	if len(line) <= most {
		return line
	}
	return fmt.Sprintf("%s ... (%d bytes)", line[:most], len(line))
}

func quoted(args []string) string {
	var b strings.Builder
	for i, a := range args {
		if i > 0 {
			b.WriteByte(' ')
		}
		if strings.ContainsAny(a, " ?&{}'") {
			a = "'" + a + "'"
		}
		b.WriteString(a)
	}
	return b.String()
}

// request sends what kubectl has no --raw form for.
func (s *story) request(server, method, path, contentType string, body any, code int) error {
	credential, err := s.adminCredential()
	if err != nil {
		return err
	}
	cl, err := s.c.Client(server, credential)
	if err != nil {
		return err
	}
	defer cl.Close()
	data, err := json.Marshal(body)
	if err != nil {
		return err
	}
	r, err := cl.Do(s.ctx, method, path, http.Header{"Content-Type": {contentType}}, json.RawMessage(data))
	if err != nil {
		return err
	}
	fmt.Fprintf(s.w, "> %s %s  (%s) %s\n< %d %s\n", method, path, contentType, clip(string(data)), r.Status, clip(string(bytes.TrimSpace(r.Body))))
	if r.Status != code {
		return fmt.Errorf("answer %d, want %d", r.Status, code)
	}
	return nil
}

func (s *story) adminCredential() (harness.Credential, error) {
	files, err := s.c.PKI.UserCert("demo-admin", "system:masters")
	return harness.Credential{Cert: files}, err
}

// watch is a running watch whose events are printed as they come.
type watch struct {
	stop  context.CancelFunc
	names chan string
	ended chan error
}

func (s *story) watch(server, path string) (*watch, error) {
	credential, err := s.adminCredential()
	if err != nil {
		return nil, err
	}
	cl, err := s.c.Client(server, credential)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(s.ctx)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, server+path+"?watch=true", nil)
	if err != nil {
		cancel()
		return nil, err
	}
	resp, err := cl.HTTP.Do(req)
	if err != nil {
		cancel()
		return nil, err
	}
	fmt.Fprintf(s.w, "> GET %s?watch=true\n< %s %s: the watch is open, nothing has happened yet\n", path, resp.Proto, resp.Status)
	if resp.StatusCode != http.StatusOK {
		cancel()
		resp.Body.Close()
		return nil, fmt.Errorf("watch: %s", resp.Status)
	}
	w := &watch{stop: cancel, names: make(chan string, 64), ended: make(chan error, 1)}
	go func() {
		defer cl.Close()
		defer resp.Body.Close()
		lines := bufio.NewReader(resp.Body)
		for {
			line, err := lines.ReadBytes('\n')
			if err != nil {
				w.ended <- err
				return
			}
			var e struct {
				Type   string
				Object struct{ Metadata struct{ Name string } }
			}
			if json.Unmarshal(line, &e) == nil {
				w.names <- e.Type + " " + e.Object.Metadata.Name
			}
		}
	}()
	return w, nil
}

// expect waits for an event.
func (s *story) expect(w *watch, want string) error {
	start := time.Now()
	for {
		select {
		case got := <-w.names:
			fmt.Fprintf(s.w, "< event on the watch: %s\n", got)
			if got == want {
				return nil
			}
		case err := <-w.ended:
			return fmt.Errorf("the watch ended: %w", err)
		case <-s.ctx.Done():
			return s.ctx.Err()
		case <-time.After(10 * time.Second):
			return fmt.Errorf("no event %q within %v", want, time.Since(start).Round(time.Second))
		}
	}
}

// settled waits until all nodes hold the same view.
func (s *story) settled() error {
	ctx, cancel := context.WithTimeout(s.ctx, time.Minute)
	defer cancel()
	for _, h := range s.c.Hosts {
		if err := harness.Eventually(ctx, func(ctx context.Context) error {
			r, err := harness.Run(ctx, harness.ProcessSpec{Name: "mvp-node", Path: h.Node.Program(), Args: []string{"members", "-o", "json", "--config", h.Node.ConfigFile()}}, nil)
			if err != nil {
				return err
			}
			var v struct{ Converged bool }
			if err := json.Unmarshal([]byte(r.Stdout), &v); err != nil {
				return errors.New(r.Stderr)
			}
			if !v.Converged {
				return fmt.Errorf("the view of %s is not converged: %s", h.Name, r.Stdout)
			}
			return nil
		}); err != nil {
			return err
		}
	}
	return nil
}

// file writes a manifest for kubectl create --raw.
func (s *story) file(name string, object any) (string, error) {
	data, err := json.Marshal(object)
	if err != nil {
		return "", err
	}
	path := filepath.Join(s.c.Dir, name)
	return path, os.WriteFile(path, data, 0o600)
}
