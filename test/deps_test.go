// Package test holds what the whole repository must keep to. Tests of whole meshes are in the folders below.
package test

import (
	"bytes"
	"encoding/json"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/mvp-mesh/mvp-node"

// A layer is a place in the arrow cmd -> node -> edges -> core: what stands in it may import what is below it, never beside or above it.
type layer uint8

const (
	core  layer = iota + 1 // decides, in pure code
	leaf                   // stands by itself
	edge                   // does I/O, by interfaces of its own
	root                   // wires everything together
	cmd                    // flags and signals
	wire                   // generated from proto
	tests                  // tests and what only tests use
)

// packages says where each package of the module stands, and which packages of the module it may import itself. A package that
// is not in the table fails the test: decide where it belongs. An entry without a package is for one that is to come.
var packages = map[string]struct {
	layer layer
	may   []string
}{
	"internal/catalog":   {core, nil},
	"internal/route":     {core, []string{"internal/catalog"}},
	"internal/loopguard": {core, nil},
	"internal/authz":     {core, nil},
	"internal/reqctx":    {core, []string{"internal/authz", "internal/loopguard", "internal/route", "internal/catalog"}},
	"internal/rollout":   {core, []string{"internal/catalog", "internal/route"}},

	"internal/config": {leaf, []string{"internal/authz", "internal/catalog", "internal/route"}},
	"internal/duplex": {leaf, nil},
	"internal/pki":    {leaf, nil},

	"internal/upstream":  {edge, []string{coreOnly, "internal/duplex"}},
	"internal/discovery": {edge, []string{coreOnly}},
	"internal/gossip":    {edge, []string{coreOnly}},
	"internal/mesh":      {edge, []string{coreOnly, "proto/mvp/v1"}},
	"internal/forward":   {edge, []string{coreOnly, "internal/duplex", "proto/mvp/v1"}},
	"internal/front":     {edge, []string{coreOnly, "internal/duplex"}},
	"internal/audit":     {edge, []string{coreOnly}},
	"internal/admin":     {edge, []string{coreOnly}},

	"internal/node": {root, []string{coreOnly, edges, "internal/config"}},
	// Commands that look into a running node are clients of its mesh port.
	"cmd/mvp-node": {cmd, []string{coreOnly, "internal/config", "internal/mesh", "internal/node", "internal/pki", "proto/mvp/v1"}},

	"proto/mvp/v1": {wire, nil},

	"test":             {tests, nil},
	"test/conformance": {tests, []string{anything}},
	"test/demo":        {tests, []string{anything}},
	"test/e2e":         {tests, []string{anything}},
	"test/harness":     {tests, []string{anything}},
	"test/mesh":        {tests, []string{anything}},
	"test/stream":      {tests, []string{anything}},
	"test/fake":        {tests, nil},
	"test/parity":      {tests, []string{anything}},
}

// Groups that the table uses instead of a list.
const (
	coreOnly = "every core package"
	edges    = "every edge"
	anything = "everything"
)

// homes says where a library may be imported, and why nowhere else. The longest path that fits counts.
var homes = []struct {
	library string
	in      []string
	reason  string
}{
	{
		"google.golang.org/grpc", []string{"internal/mesh", "internal/forward", "proto/mvp/v1", "cmd/mvp-node"},
		"gRPC is the wire; whoever sees it can no longer be tested, or moved to another wire, without it",
	},
	{
		"google.golang.org/grpc.", []string{"internal/node"},
		"node hands the services of forward to the server of mesh, so it names their types; nothing else of gRPC is its business",
	},
	{
		"github.com/grpc-ecosystem", []string{"internal/mesh", "internal/forward"},
		"interceptors stand where the servers and clients are made",
	},
	{
		"google.golang.org/protobuf", []string{"internal/mesh", "internal/forward", "proto/mvp/v1", "cmd/mvp-node"},
		"no core type is a proto message, and messages end where the wire ends",
	},
	{
		"github.com/hashicorp", []string{"internal/gossip"},
		"memberlist calls back under its own lock; one package keeps to its terms of use",
	},
	{
		"k8s.io/client-go", []string{"internal/discovery", "internal/upstream", "internal/front", "internal/node", "internal/audit"},
		"client-go brings caches, rate limits and retries of its own; only who talks to an apiserver needs it",
	},
	{
		"k8s.io/apiserver", []string{"internal/front", "internal/audit"},
		"authenticators, RequestInfo and audit types are for the entrance; the rest of the node works with route.Attributes and authz.User",
	},
	{
		"k8s.io/apiserver/pkg/server/dynamiccertificates", []string{"internal/front", "internal/node"},
		"node owns the certificates and hands them out",
	},
	{
		"k8s.io/apiserver/pkg/server/healthz", []string{"internal/front", "internal/node", "internal/admin"},
		"node and admin answer /livez and /readyz as Kubernetes does",
	},
	{
		"k8s.io/kubernetes", nil,
		"Kubernetes itself is no library; the apiservers of the tests are built from modules of their own in test/kube",
	},
	{
		"github.com/spf13", []string{"cmd/mvp-node"},
		"flags end in cmd; everything below takes options",
	},
	{
		"go.yaml.in/yaml", []string{"internal/config"},
		"one package reads the configuration file",
	},
}

// impure lists the packages of the standard library that a core package does not import itself.
var impure = map[string]string{
	"net":          "core packages do not dial or listen (net/netip and net/url are fine)",
	"os":           "core packages do not touch files or the environment",
	"os/exec":      "core packages do not start anything",
	"io/fs":        "core packages do not touch files",
	"time":         "core packages do not read a clock; what depends on time is handed in",
	"log":          "core packages return what there is to say",
	"log/slog":     "core packages return what there is to say",
	"math/rand":    "core packages draw no random numbers; choices follow from a hash that is handed in",
	"math/rand/v2": "core packages draw no random numbers; choices follow from a hash that is handed in",
	"crypto/rand":  "core packages draw no random numbers",
}

// pkg is what go list says about a package.
type pkg struct {
	ImportPath string
	Standard   bool
	Imports    []string
}

// TestImportDirection holds the import direction of the design: down only, never sideways.
func TestImportDirection(t *testing.T) {
	all := listPackages(t)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		p := all[name]
		own, ok := strings.CutPrefix(name, module+"/")
		if !ok {
			continue
		}
		place, ok := packages[own]
		if !ok {
			t.Errorf("%s is not in the table of test/deps_test.go: decide which layer it belongs to", own)
			continue
		}
		for _, imported := range p.Imports {
			if below, ok := strings.CutPrefix(imported, module+"/"); ok {
				if !mayImport(place.may, below) {
					t.Errorf("%s imports %s: %s", own, below, whyNot(place.layer, packages[below].layer))
				}
				continue
			}
			if place.layer != tests {
				checkLibrary(t, own, imported)
			}
		}
		switch {
		case place.layer == core:
			checkCore(t, own, p, all)
		case place.layer == leaf:
			checkLeaf(t, own, p, all)
		}
	}
}

func mayImport(may []string, below string) bool {
	return slices.ContainsFunc(may, func(m string) bool {
		return m == anything || m == below ||
			m == coreOnly && packages[below].layer == core ||
			m == edges && packages[below].layer == edge
	})
}

func whyNot(from, to layer) string {
	switch {
	case to == tests:
		return "production code does not import test code"
	case to == 0:
		return "it is not in the table of test/deps_test.go"
	case from == edge && to == edge:
		return "edges never import each other; declare the one or two methods that are needed as an interface here and let node hand it in"
	case to == root || to == cmd:
		return "imports go down only; nothing but cmd imports node, and nothing imports cmd"
	case from == core && to == wire:
		return "no core type is a proto message"
	case from == core:
		return "core packages import core packages further down the arrow only: reqctx -> {authz loopguard} and route -> catalog"
	}
	return "the table of test/deps_test.go does not allow it"
}

// checkLibrary holds the homes of the heavy libraries.
func checkLibrary(t *testing.T, own, imported string) {
	t.Helper()
	longest := -1
	for i, h := range homes {
		exact, isExact := strings.CutSuffix(h.library, ".") // that package and none below it
		fits := imported == exact || !isExact && strings.HasPrefix(imported, h.library+"/")
		if isExact && fits && slices.Contains(h.in, own) {
			return
		}
		if fits && !isExact && (longest < 0 || len(h.library) > len(homes[longest].library)) {
			longest = i
		}
	}
	if longest >= 0 && !slices.Contains(homes[longest].in, own) {
		h := homes[longest]
		t.Errorf("%s imports %s, whose home is %s: %s", own, imported, strings.Join(h.in, ", "), h.reason)
	}
}

// checkCore holds a core package to what it may be built from. What it imports of the module is core as well, so its own imports
// are all there is to look at.
func checkCore(t *testing.T, own string, p pkg, all map[string]pkg) {
	t.Helper()
	for _, imported := range p.Imports {
		reason, bad := impure[imported]
		if carries := own == "internal/reqctx" && imported == "time"; carries {
			bad = false // a point in time among the facts about a request; TestCarriersReadNoClock holds it to that
		}
		if bad {
			t.Errorf("%s imports %s: %s", own, imported, reason)
		}
		apiTypes := strings.HasPrefix(imported, "k8s.io/api/") || strings.HasPrefix(imported, "k8s.io/apimachinery/")
		switch {
		case all[imported].Standard || strings.HasPrefix(imported, module+"/"):
		case apiTypes && (own == "internal/catalog" || own == "internal/route"):
		default:
			t.Errorf("%s imports %s: core packages are built from the standard library (catalog and route also from Kubernetes' API types), "+
				"so that they can be read, tested and fuzzed alone", own, imported)
		}
	}
}

// TestCarriersReadNoClock: a core package that carries points in time takes from package time nothing but their type.
func TestCarriersReadNoClock(t *testing.T) {
	files, err := filepath.Glob("../internal/reqctx/*.go")
	if err != nil || len(files) == 0 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(parsed, func(n ast.Node) bool {
			sel, ok := n.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			if pkg, ok := sel.X.(*ast.Ident); ok && pkg.Name == "time" && sel.Sel.Name != "Time" {
				t.Errorf("%s uses time.%s: core packages do not read a clock", file, sel.Sel.Name)
			}
			return true
		})
	}
}

// checkLeaf holds config and pki to the standard library, core packages and, for config, YAML.
func checkLeaf(t *testing.T, own string, p pkg, all map[string]pkg) {
	t.Helper()
	for _, imported := range p.Imports {
		switch {
		case all[imported].Standard || strings.HasPrefix(imported, module+"/"):
		case own == "internal/config" && strings.HasPrefix(imported, "go.yaml.in/yaml/"):
		default:
			t.Errorf("%s imports %s: it is a leaf, so that a configuration or a certificate can be checked by anything", own, imported)
		}
	}
}

// listPackages runs go list once for all packages and everything they depend on.
func listPackages(t *testing.T) map[string]pkg {
	t.Helper()
	// go test takes an earlier result if the files that the test process looked at are as they were. It does not see what go list
	// looks at, so look at every file here.
	for _, dir := range []string{"../cmd", "../internal", "../proto", "."} {
		err := filepath.WalkDir(dir, func(name string, _ fs.DirEntry, err error) error {
			if err == nil && path.Ext(name) == ".go" {
				_, err = os.Stat(name)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	list := exec.Command("go", "list", "-deps", "-json=ImportPath,Standard,Imports", "./...")
	list.Dir = ".."
	var stderr bytes.Buffer
	list.Stderr = &stderr
	out, err := list.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, stderr.Bytes())
	}
	all := map[string]pkg{}
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		all[p.ImportPath] = p
	}
	if len(all) == 0 {
		t.Fatal("go list says nothing")
	}
	return all
}

// The table itself must make sense: no package may be allowed to import one that is not in it, or one above or beside it.
func TestTableOfPackages(t *testing.T) {
	for name, p := range packages {
		for _, m := range p.may {
			if m == coreOnly || m == edges || m == anything {
				continue
			}
			below, ok := packages[m]
			if !ok || m != path.Clean(m) {
				t.Errorf("%s may import %s, which is not in the table", name, m)
			}
			if p.layer == edge && below.layer == edge || p.layer == core && below.layer != core {
				t.Errorf("%s may import %s: %s", name, m, whyNot(p.layer, below.layer))
			}
		}
	}
}
