//go:build linux

package harness

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Kubernetes versions the harness can build, oldest first. Two neighbours may serve one cluster (version skew policy).
const (
	V135 = "v1.35.4"
	V136 = "v1.36.3"
	V137 = "v1.37.2"
)

const (
	kubectlVersion = V136 // within one minor of all three servers
	etcdVersion    = "v3.6.16"
)

const (
	// binDirVariable names a folder of ready-made programs, called <name>-<version> or, for those without a version,
	// <name>. What is not in there is built.
	binDirVariable = "MVP_TEST_BIN_DIR"
	// cacheDirVariable names the folder that programs built by the harness are kept in.
	cacheDirVariable = "MVP_CACHE_DIR"
	// versionPackage is where Kubernetes programs keep what they answer on /version.
	versionPackage = "k8s.io/component-base/version"
)

// Binaries finds the programs that the harness runs and builds those that are missing. What is built is kept in
// $MVP_CACHE_DIR, or else in mvp-node/bin under the user's cache folder, under a name that holds the version and a hash of
// all that goes into it, so "git clean" and a fresh clone do not cost a quarter of an hour. A folder with ready-made
// programs can be given by $MVP_TEST_BIN_DIR. Several programs may use one cache at the same time.
type Binaries struct {
	// Root is the folder of the main module.
	Root string
	// CacheDir is where built programs are kept.
	CacheDir string
	// ReadyDir is searched first; it is never written to. Empty: none.
	ReadyDir string
	// Race builds mvp-node with the race detector.
	Race bool
	// Progress gets a line when something has to be built. Nil: no lines.
	Progress io.Writer
}

// FindBinaries returns Binaries for the module that the working folder is in, with the folders of the environment. The
// race detector is on for mvp-node if it is on for the caller.
func FindBinaries(progress io.Writer) (*Binaries, error) {
	root, err := moduleRoot()
	if err != nil {
		return nil, err
	}
	cache := os.Getenv(cacheDirVariable)
	if cache == "" {
		user, err := os.UserCacheDir()
		if err != nil {
			return nil, fmt.Errorf("cache for built programs (set %s to choose one): %w", cacheDirVariable, err)
		}
		cache = filepath.Join(user, "mvp-node", "bin")
	}
	return &Binaries{
		Root:     root,
		CacheDir: cache,
		ReadyDir: os.Getenv(binDirVariable),
		Race:     raceEnabled,
		Progress: progress,
	}, nil
}

// moduleRoot walks up from the working folder to the main module. The modules under test/ and tools/ are passed by.
func moduleRoot() (string, error) {
	start, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("folder of the main module: %w", err)
	}
	for dir := start; ; dir = filepath.Dir(dir) {
		data, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && slices.Contains(strings.Split(string(data), "\n"), "module github.com/mvp-mesh/mvp-node") {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("%s is not inside the module github.com/mvp-mesh/mvp-node", start)
		}
	}
}

// target is a program that is built from a module of its own and kept.
type target struct {
	name      string
	version   string // empty for tools, whose version is in their go.mod
	moduleDir string
	pkg       string
	ldflags   string
	usually   string // how long a first build takes, for people who wait
	isTest    bool   // the program is the package's test binary
}

func (t target) base() string {
	if t.version == "" {
		return t.name
	}
	return t.name + "-" + t.version
}

func (t target) buildArgs(output string) []string {
	args := []string{"build", "-trimpath", "-buildvcs=false"}
	if t.isTest {
		args = []string{"test", "-c", "-trimpath", "-buildvcs=false"}
	}
	if t.ldflags != "" {
		args = append(args, "-ldflags", t.ldflags)
	}
	return append(args, "-o", output, t.pkg)
}

// APIServer returns the path of the kube-apiserver of one of the versions [V135], [V136], [V137].
func (b *Binaries) APIServer(ctx context.Context, version string) (string, error) {
	if !slices.Contains([]string{V135, V136, V137}, version) {
		return "", fmt.Errorf("kube-apiserver %s: there is no module for this version under test/kube", version)
	}
	return b.kept(ctx, b.kubernetes("kube-apiserver", version, "3 to 5 minutes on 2 cores"))
}

// Kubectl returns the path of kubectl.
func (b *Binaries) Kubectl(ctx context.Context) (string, error) {
	return b.kept(ctx, b.kubernetes("kubectl", kubectlVersion, "1 minute on 2 cores"))
}

// ControllerManager returns the path of the kube-controller-manager of [V136].
func (b *Binaries) ControllerManager(ctx context.Context) (string, error) {
	return b.kept(ctx, b.kubernetes("kube-controller-manager", V136, "1 to 3 minutes on 2 cores"))
}

// KubernetesE2E returns the path of Kubernetes' own end-to-end test program of [V136].
func (b *Binaries) KubernetesE2E(ctx context.Context) (string, error) {
	t := b.kubernetes("kubernetes-e2e", V136, "2 to 5 minutes on 2 cores")
	t.pkg, t.isTest = "k8s.io/kubernetes/test/e2e", true
	return b.kept(ctx, t)
}

func (b *Binaries) kubernetes(name, version, usually string) target {
	major, rest, _ := strings.Cut(strings.TrimPrefix(version, "v"), ".")
	minor, _, _ := strings.Cut(rest, ".")
	return target{
		name:      name,
		version:   version,
		moduleDir: filepath.Join(b.Root, "test", "kube", "v"+major+"."+minor),
		pkg:       "k8s.io/kubernetes/cmd/" + name,
		ldflags: fmt.Sprintf("-s -w -X %[1]s.gitVersion=%[2]s -X %[1]s.gitMajor=%[3]s -X %[1]s.gitMinor=%[4]s -X %[1]s.gitTreeState=clean",
			versionPackage, version, major, minor),
		usually: usually,
	}
}

// Etcd returns the path of etcd.
func (b *Binaries) Etcd(ctx context.Context) (string, error) {
	return b.kept(ctx, target{
		name:      "etcd",
		version:   etcdVersion,
		moduleDir: filepath.Join(b.Root, "test", "kube", "etcd"),
		pkg:       "go.etcd.io/etcd/server/v3",
		ldflags:   "-s -w",
		usually:   "half a minute on 2 cores",
	})
}

// Tool returns the path of a development tool of tools/go.mod, by the last element of its package ("grpcurl").
func (b *Binaries) Tool(ctx context.Context, name string) (string, error) {
	dir := filepath.Join(b.Root, "tools")
	pkg, err := toolPackage(filepath.Join(dir, "go.mod"), name)
	if err != nil {
		return "", err
	}
	return b.kept(ctx, target{name: name, moduleDir: dir, pkg: pkg, ldflags: "-s -w", usually: "a minute or two on 2 cores"})
}

// toolPackage looks a tool up among the tool directives of a go.mod.
func toolPackage(goMod, name string) (string, error) {
	data, err := os.ReadFile(goMod)
	if err != nil {
		return "", fmt.Errorf("tool %s: %w", name, err)
	}
	inBlock := false
	for line := range strings.Lines(string(data)) {
		fields := strings.Fields(line)
		switch {
		case len(fields) == 2 && fields[0] == "tool" && fields[1] == "(":
			inBlock = true
		case len(fields) == 1 && fields[0] == ")":
			inBlock = false
		case len(fields) == 2 && fields[0] == "tool" && commandName(fields[1]) == name:
			return fields[1], nil
		case inBlock && len(fields) == 1 && commandName(fields[0]) == name:
			return fields[0], nil
		}
	}
	return "", fmt.Errorf("tool %s: not among the tools of %s", name, goMod)
}

// commandName is the name that "go install" gives the program of a package: the last path element that is no version.
func commandName(pkg string) string {
	last := pkg[strings.LastIndex(pkg, "/")+1:]
	if len(last) > 1 && last[0] == 'v' && strings.Trim(last[1:], "0123456789") == "" {
		rest := strings.TrimSuffix(pkg, "/"+last)
		return rest[strings.LastIndex(rest, "/")+1:]
	}
	return last
}

// kept returns the path of a target, from the ready-made ones, from the cache, or built.
func (b *Binaries) kept(ctx context.Context, t target) (string, error) {
	if path := b.ready(t.base()); path != "" {
		return path, nil
	}
	key, err := t.key(ctx)
	if err != nil {
		return "", fmt.Errorf("program %s: %w", t.base(), err)
	}
	path := filepath.Join(b.CacheDir, t.base()+"-"+key)
	if isProgram(path) {
		return path, nil
	}
	unlock, err := lockFile(ctx, path+".lock", func() {
		b.progressf("%s is being built by another process; waiting for it\n", t.base())
	})
	if err != nil {
		return "", fmt.Errorf("program %s: %w", t.base(), err)
	}
	defer unlock()
	if isProgram(path) { // built while we waited
		return path, nil
	}
	b.progressf("building %s (the first time usually %s); it is kept in %s\n", t.base(), t.usually, b.CacheDir)
	start := time.Now()
	if err := goBuild(ctx, t.moduleDir, []string{"CGO_ENABLED=0"}, t.buildArgs, path); err != nil {
		return "", fmt.Errorf("program %s: %w", t.base(), err)
	}
	b.progressf("built %s in %v\n", t.base(), time.Since(start).Round(time.Second))
	return path, nil
}

// Node builds mvp-node from the tree as it is now and puts the program at path, which must be on the caller's own: two
// test packages then never see each other's. Unchanged code costs about a second.
func (b *Binaries) Node(ctx context.Context, path string) error {
	if ready := b.ready("mvp-node"); ready != "" {
		return place(ready, path)
	}
	name, usually := "mvp-node", "1 minute"
	env := []string(nil)
	args := func(output string) []string {
		return []string{"build", "-o", output, "./cmd/mvp-node"}
	}
	if b.Race {
		name, usually = "mvp-node-race", "5 minutes"
		env = []string{"CGO_ENABLED=1"}
		args = func(output string) []string {
			return []string{"build", "-race", "-o", output, "./cmd/mvp-node"}
		}
	}
	// The last result stays in the cache because "go build" does not link again what is up to date. It may belong to
	// another tree, so the hash of the folder is in the name; and the go command replaces it rather than writing into it,
	// so a link made from it keeps its content.
	last := filepath.Join(b.CacheDir, name+"-"+shortHash([]byte(b.Root)))
	unlock, err := lockFile(ctx, last+".lock", func() {})
	if err != nil {
		return fmt.Errorf("program %s: %w", name, err)
	}
	defer unlock()
	if !isProgram(last) {
		b.progressf("building %s (the first time usually %s on 2 cores)\n", name, usually)
	}
	if err := runGo(ctx, b.Root, env, args(last)...); err != nil {
		return fmt.Errorf("program %s: %w", name, err)
	}
	return place(last, path)
}

// Ensure builds all that a cluster with these Kubernetes versions needs, one after the other: each build uses all cores
// on its own.
func (b *Binaries) Ensure(ctx context.Context, versions ...string) error {
	if _, err := b.Etcd(ctx); err != nil {
		return err
	}
	for _, version := range versions {
		if _, err := b.APIServer(ctx, version); err != nil {
			return err
		}
	}
	_, err := b.Kubectl(ctx)
	return err
}

// ready looks for a ready-made program.
func (b *Binaries) ready(name string) string {
	if b.ReadyDir == "" {
		return ""
	}
	if path := filepath.Join(b.ReadyDir, name); isProgram(path) {
		return path
	}
	return ""
}

func (b *Binaries) progressf(format string, args ...any) {
	if b.Progress != nil {
		fmt.Fprintf(b.Progress, format, args...)
	}
}

func isProgram(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular() && info.Mode().Perm()&0o100 != 0
}

// place makes the program from also appear at to: as a hard link, or as a copy on another file system.
func place(from, to string) error {
	if err := os.Remove(to); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("placing %s: %w", to, err)
	}
	if os.Link(from, to) == nil {
		return nil
	}
	source, err := os.Open(from)
	if err != nil {
		return fmt.Errorf("placing %s: %w", to, err)
	}
	defer source.Close()
	copied, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o755)
	if err != nil {
		return fmt.Errorf("placing %s: %w", to, err)
	}
	_, err = io.Copy(copied, source)
	if err = errors.Join(err, copied.Close()); err != nil {
		return fmt.Errorf("placing %s: %w", to, err)
	}
	return nil
}
