//go:build linux

package harness

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// lockPoll is how often a busy file lock is tried again. flock(2) cannot be waited for with a context.
const lockPoll = 200 * time.Millisecond

// key is a short hash of all that decides what the build of t gives: the module with its checksums, the flags, and the Go
// release.
func (t target) key(ctx context.Context) (string, error) {
	goVersion, err := goVersion(ctx)
	if err != nil {
		return "", err
	}
	goMod, err := os.ReadFile(filepath.Join(t.moduleDir, "go.mod"))
	if err != nil {
		return "", err
	}
	goSum, err := os.ReadFile(filepath.Join(t.moduleDir, "go.sum"))
	if err != nil {
		return "", err
	}
	return shortHash(goMod, goSum, []byte(strings.Join(t.buildArgs(""), "\x00")), []byte(goVersion)), nil
}

// shortHash hashes parts so that moving a byte from one part to the next changes the result.
func shortHash(parts ...[]byte) string {
	h := sha256.New()
	for _, part := range parts {
		fmt.Fprintf(h, "%d:", len(part))
		h.Write(part)
	}
	return hex.EncodeToString(h.Sum(nil)[:6])
}

var goVersionOnce struct {
	sync.Mutex
	version string
}

// goVersion asks the go command once for its release and platform.
func goVersion(ctx context.Context) (string, error) {
	goVersionOnce.Lock()
	defer goVersionOnce.Unlock()
	if goVersionOnce.version == "" {
		result, err := Run(ctx, ProcessSpec{Name: "go", Path: "go", Args: []string{"env", "GOVERSION", "GOOS", "GOARCH"}}, nil)
		if err == nil && result.ExitCode != 0 {
			err = errors.New(strings.TrimSpace(result.Stderr))
		}
		if err != nil {
			return "", fmt.Errorf("release of the go command: %w", err)
		}
		goVersionOnce.version = result.Stdout
	}
	return goVersionOnce.version, nil
}

// goBuild builds to a temporary name and renames, so that a path that exists is always a whole program.
func goBuild(ctx context.Context, dir string, env []string, args func(output string) []string, path string) error {
	temp := fmt.Sprintf("%s.%d.tmp", path, os.Getpid())
	defer os.Remove(temp)
	if err := runGo(ctx, dir, env, args(temp)...); err != nil {
		return err
	}
	return os.Rename(temp, path)
}

// runGo runs the go command in dir. A go.work of the caller does not apply to the module there.
func runGo(ctx context.Context, dir string, env []string, args ...string) error {
	result, err := Run(ctx, ProcessSpec{
		Name: "go", Path: "go", Args: args, Dir: dir, Env: append([]string{"GOWORK=off"}, env...),
	}, nil)
	if err != nil {
		return err
	}
	if result.ExitCode != 0 {
		return fmt.Errorf("go %s, in %s: exit code %d\n%s", strings.Join(args, " "), dir, result.ExitCode,
			strings.TrimSpace(result.Stderr))
	}
	return nil
}

// lockFile takes an exclusive lock on a file that it creates, and returns the function that gives it back. The kernel
// gives it back, too, when the process dies. busy is called once if somebody else holds the lock.
func lockFile(ctx context.Context, path string, busy func()) (unlock func(), err error) {
	for told := false; ; {
		unlock, err := tryLockFile(path)
		if err == nil {
			return unlock, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, err
		}
		if !told {
			told = true
			busy()
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("waiting for the lock %s: %w", path, ctx.Err())
		case <-time.After(lockPoll):
		}
	}
}

// tryLockFile is lockFile without waiting: it returns syscall.EWOULDBLOCK if somebody else holds the lock.
func tryLockFile(path string) (unlock func(), err error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	// The descriptor is close-on-exec, so no child holds the lock on. The file stays: removing it would let two processes
	// lock two files of one name.
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return func() { f.Close() }, nil
}
