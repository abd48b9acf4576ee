//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/mvp-mesh/mvp-node/test/harness"
)

const (
	// publicNode is the node whose address is no loopback address, if the machine has such a one: for the proxy subresource.
	publicNode = "public"
	// copied is how much is copied in each direction by kubectl cp.
	copied = 100 << 20
)

// streaming is how kubectl does exec, attach, cp and port-forward.
type streaming struct {
	name string
	env  []string
	// podEnd is how long kubectl port-forward may take to notice the end of the pod. With SPDY the news travels at once. An apiserver
	// that tunnels SPDY in a WebSocket cannot close it before something comes from the client (it holds its lock while it reads:
	// tunnelingWebsocketUpgraderConn in k8s.io/apiserver v0.36.3); so there it takes until the next of kubectl's pings, one in 10 s.
	podEnd time.Duration
}

var streamings = []streaming{
	{"SPDY", []string{"KUBECTL_REMOTE_COMMAND_WEBSOCKETS=false", "KUBECTL_PORT_FORWARD_WEBSOCKETS=false"}, 5 * time.Second},
	{"WebSocket", []string{"KUBECTL_REMOTE_COMMAND_WEBSOCKETS=true", "KUBECTL_PORT_FORWARD_WEBSOCKETS=true"}, 15 * time.Second},
}

// TestKubectl has kubectl do all that people do with it, straight to the newer apiserver, through that one's own node, and through the
// node of the older one that is told to prefer the newest: the last is what a load balancer does with somebody's requests in the middle
// of an upgrade, and kubectl must not be able to tell the difference (CASES S-04 to S-08).
func TestKubectl(t *testing.T) {
	for _, topology := range []struct{ older, newer string }{{harness.V135, harness.V136}, {harness.V136, harness.V137}} {
		t.Run(topology.older+" and "+topology.newer, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 2*longest)
			defer cancel()
			prefer := map[string]any{"routing": map[string]any{"prefer": "newest"}}
			c := harness.New(t, harness.Options{
				Binaries: testBinaries(t),
				Hosts: []harness.HostOptions{
					{Name: "cp-a", Version: topology.older, NodeOverlay: prefer},
					{Name: "cp-b", Version: topology.newer, NodeOverlay: prefer},
				},
				Nodes: true,
			})
			a, b := c.Host("cp-a"), c.Host("cp-b")
			converged(t, ctx, c)
			kubelet, err := c.StartKubelet(ctx, "worker-1")
			if err != nil {
				t.Fatal(err)
			}
			startPublicNode(t, ctx, c)
			suite := func(url string) func(*testing.T) {
				return func(t *testing.T) {
					config, err := c.AdminKubeconfig(url)
					if err != nil {
						t.Fatal(err)
					}
					kubectlSuite(t, ctx, c, config, kubelet)
				}
			}
			t.Run("direct", suite(b.APIServer.URL()))

			const requests, upgraded = "mvp_front_requests_total", "mvp_front_upgraded_connections"
			before := metric(t, ctx, b, requests, `outcome="Local"`)
			t.Run("local", suite(b.Node.URL()))
			if n := metric(t, ctx, b, requests, `outcome="Local"`) - before; n < 100 {
				t.Errorf("the node of %s has passed %v requests to its own apiserver, want a hundred or more", b.Name, n)
			}
			if n := metric(t, ctx, b, requests, `outcome="Forward"`); n != 0 {
				t.Errorf("the node of %s has forwarded %v requests, and its apiserver is the newest", b.Name, n)
			}

			local := metric(t, ctx, a, requests, `outcome="Local"`)
			before = metric(t, ctx, a, requests, `outcome="Forward"`)
			upgrades := metric(t, ctx, a, requests, `outcome="Forward"`, `code="101"`)
			t.Run("forwarded", suite(a.Node.URL()))
			// By SPDY and by WebSocket: five times exec, attach, three times exec for the two cp, port-forward. A request is counted when it
			// is over for the node too, which is after it is for kubectl.
			want := float64(2*(5+1+3+1) + subprotocols)
			eventually(t, ctx, settle, "upgraded requests are counted", func(ctx context.Context) error {
				if n := metric(t, ctx, a, requests, `outcome="Forward"`, `code="101"`) - upgrades; n != want {
					return fmt.Errorf("%v were forwarded, want %v", n, want)
				}
				return nil
			})
			forwarded := metric(t, ctx, a, requests, `outcome="Forward"`) - before
			local = metric(t, ctx, a, requests, `outcome="Local"`) - local
			t.Logf("the node of %s: %v requests forwarded, %v of them upgraded; %v to its own apiserver", a.Name, forwarded, want, local)
			if forwarded < 100 || local > 0 {
				t.Error("want a hundred or more forwarded, and none answered by the older apiserver")
			}
			for _, h := range c.Hosts {
				eventually(t, ctx, settle, "end of all upgraded connections at "+h.Name, func(ctx context.Context) error {
					if n := metric(t, ctx, h, upgraded); n != 0 {
						return fmt.Errorf("%v are open", n)
					}
					return nil
				})
			}
		})
	}
}

// startPublicNode starts the kubelet of publicNode.
func startPublicNode(t *testing.T, ctx context.Context, c *harness.Cluster) {
	t.Helper()
	ip, err := harness.MachineIP()
	if err != nil {
		t.Fatal(err)
	}
	if ip == "" {
		_, err = c.StartKubelet(ctx, publicNode)
	} else {
		_, err = c.StartKubeletAt(ctx, publicNode, ip)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// kubectlCase runs kubectl in one namespace of one server.
type kubectlCase struct {
	c         *harness.Cluster
	config    string
	namespace string
	kubelet   *harness.Kubelet
}

// spec is how kubectl is run in the namespace.
func (k kubectlCase) spec(t *testing.T, ctx context.Context, env []string, args []string) harness.ProcessSpec {
	t.Helper()
	spec, err := k.c.KubectlSpec(ctx, k.config, append([]string{"--namespace", k.namespace}, args...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(spec.Dir) })
	spec.Env = append(spec.Env, env...)
	return spec
}

// run runs kubectl to its end.
func (k kubectlCase) run(t *testing.T, ctx context.Context, env []string, stdin io.Reader, args ...string) harness.Result {
	t.Helper()
	r, err := harness.Run(ctx, k.spec(t, ctx, env, args), stdin)
	if err != nil {
		t.Fatalf("kubectl %q: %v", args, err)
	}
	return r
}

// ok runs kubectl, which must succeed and say nothing on standard error, and returns what it says.
func (k kubectlCase) ok(t *testing.T, ctx context.Context, stdin string, args ...string) string {
	t.Helper()
	r := k.run(t, ctx, nil, strings.NewReader(stdin), args...)
	if r.ExitCode != 0 || r.Stderr != "" {
		t.Fatalf("kubectl %q: exit code %d\n%s%s", args, r.ExitCode, r.Stdout, r.Stderr)
	}
	return r.Stdout
}

// says runs kubectl, which must succeed and say what matches the pattern.
func (k kubectlCase) says(t *testing.T, ctx context.Context, pattern, stdin string, args ...string) {
	t.Helper()
	if got := k.ok(t, ctx, stdin, args...); !regexp.MustCompile(pattern).MatchString(got) {
		t.Errorf("kubectl %q says %q, want what matches %s", args, got, pattern)
	}
}

// background starts kubectl beside the test; it is killed at the end of it. Its output, standard error too, is in LogTail.
func (k kubectlCase) background(t *testing.T, ctx context.Context, env []string, args ...string) *harness.Process {
	t.Helper()
	spec := k.spec(t, ctx, env, args)
	spec.LogFile = filepath.Join(spec.Dir, "output")
	p, err := harness.StartProcess(spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Kill() })
	return p
}

// shows is a check for eventually: a kubectl in the background has said what matches the pattern.
func shows(p *harness.Process, pattern string) func(context.Context) error {
	return func(context.Context) error {
		if got := p.LogTail(100); !regexp.MustCompile(pattern).MatchString(got) {
			return fmt.Errorf("kubectl says %q, want what matches %s", got, pattern)
		}
		return nil
	}
}

// kubectlSuite is the acceptance by kubectl of the server of a kubeconfig, whatever is in between. The name of the test makes the
// namespace that it works in.
func kubectlSuite(t *testing.T, ctx context.Context, c *harness.Cluster, kubeconfig string, kubelet *harness.Kubelet) {
	t.Helper()
	name := t.Name()[strings.LastIndex(t.Name(), "/")+1:]
	k := kubectlCase{c: c, config: kubeconfig, namespace: "kubectl-" + name, kubelet: kubelet}
	k.ok(t, ctx, "", "create", "namespace", k.namespace)
	if err := kubelet.RunPod(ctx, k.namespace, "web", "main", "side"); err != nil {
		t.Fatal(err)
	}
	for _, part := range []struct {
		name string
		test func(*testing.T, context.Context, kubectlCase)
	}{
		{"objects", kubectlObjects}, {"tables", kubectlTables}, {"watch", kubectlWatch}, {"apply", kubectlApply}, {"patch", kubectlPatch},
		{"edit", kubectlEdit}, {"dry run and validation", kubectlValidation}, {"documents", kubectlDocuments}, {"logs", kubectlLogs},
		{"node proxy", kubectlNodeProxy}, {"subprotocols", kubectlSubprotocols},
	} {
		t.Run(part.name, func(t *testing.T) { part.test(t, ctx, k) })
	}
	for _, s := range streamings {
		t.Run("exec "+s.name, func(t *testing.T) { kubectlExec(t, ctx, k, s) })
		t.Run("attach "+s.name, func(t *testing.T) { kubectlAttach(t, ctx, k, s) })
		t.Run("cp "+s.name, func(t *testing.T) { kubectlCopy(t, ctx, k, s) })
		t.Run("port-forward "+s.name, func(t *testing.T) { kubectlPortForward(t, ctx, k, s) })
	}
}

const deployment = `apiVersion: apps/v1
kind: Deployment
metadata: {name: %s}
spec:
  replicas: 0
  selector: {matchLabels: {app: a}}
  template:
    metadata: {labels: {app: a}}
    spec: {containers: [{name: one, image: "registry.example.com/one:%s"}]}
`

const configMap = `apiVersion: v1
kind: ConfigMap
metadata: {name: %s}
data: {key: %s}
`

func kubectlObjects(t *testing.T, ctx context.Context, k kubectlCase) {
	for _, name := range []string{"first", "second"} {
		k.says(t, ctx, `^configmap/`+name+` created\n$`, "", "create", "configmap", name, "--from-literal=key=value")
	}
	k.says(t, ctx, `^value$`, "", "get", "configmap", "first", "-o", "jsonpath={.data.key}")
	k.says(t, ctx, `^configmap/first\nconfigmap/second\n$`, "", "get", "configmaps", "-o", "name")
	k.says(t, ctx, `^configmap/second\n$`, "", "get", "configmaps", "-o", "name", "--field-selector", "metadata.name=second")
	k.says(t, ctx, `^configmap/first labeled\n$`, "", "label", "configmap", "first", "some=label")
	k.says(t, ctx, `^configmap/first\n$`, "", "get", "configmaps", "-o", "name", "--selector", "some=label")
	// More than one page.
	k.says(t, ctx, `(?s)first.*second`, "", "get", "configmaps", "--chunk-size=1", "-o", "name")
	k.says(t, ctx, `^configmap "first" deleted from .* namespace\n$`, "", "delete", "configmap", "first")
	r := k.run(t, ctx, nil, nil, "get", "configmap", "first")
	if r.ExitCode != 1 || r.Stderr != "Error from server (NotFound): configmaps \"first\" not found\n" {
		t.Errorf("a deleted object: %+v", r)
	}
	k.says(t, ctx, `"second" deleted`, "", "delete", "configmaps", "--all")
	k.says(t, ctx, `(?m)^Username\s+admin$`, "", "auth", "whoami")
	k.says(t, ctx, `^yes\n$`, "", "auth", "can-i", "create", "pods/exec")
}

func kubectlTables(t *testing.T, ctx context.Context, k kubectlCase) {
	k.says(t, ctx, `^NAME +READY +STATUS +RESTARTS +AGE\nweb +2/2 +Running +0 +\S+\n$`, "", "get", "pods")
	k.says(t, ctx, `^NAME .* IP +NODE +NOMINATED NODE .*\nweb +2/2 +Running .* `+k.kubelet.IP()+` +worker-1 `, "",
		"get", "pods", "-o", "wide")
	k.says(t, ctx, `(?m)^worker-1 +Ready .* `+harness.V136+` +`+k.kubelet.IP(), "", "get", "nodes", "-o", "wide")
	k.says(t, ctx, `(?s)^Name: +web\n.*Node: +worker-1/.*Containers:\n  main:`, "", "describe", "pod", "web")
}

func kubectlWatch(t *testing.T, ctx context.Context, k kubectlCase) {
	k.ok(t, ctx, fmt.Sprintf(configMap, "before", "a"), "create", "-f", "-")
	p := k.background(t, ctx, nil, "get", "configmaps", "--watch", "-o", "name")
	eventually(t, ctx, settle, "what was there", shows(p, `configmap/before`))
	k.ok(t, ctx, fmt.Sprintf(configMap, "added", "a"), "create", "-f", "-")
	eventually(t, ctx, 2*time.Second, "what was added", shows(p, `configmap/added`))
	if !p.Running() {
		t.Errorf("the watch has ended: %s", p.LogTail(10))
	}
}

func kubectlApply(t *testing.T, ctx context.Context, k kubectlCase) {
	for _, step := range []struct{ tag, want string }{{"1", "created"}, {"2", "configured"}, {"2", "unchanged"}} {
		k.says(t, ctx, `^deployment.apps/applied `+step.want+`\n$`, fmt.Sprintf(deployment, "applied", step.tag), "apply", "-f", "-")
	}
	k.says(t, ctx, `^registry.example.com/one:2$`, "",
		"get", "deployment", "applied", "-o", "jsonpath={.spec.template.spec.containers[0].image}")
	k.says(t, ctx, `image: registry.example.com/one:2`, "", "apply", "view-last-applied", "deployment/applied")
	r := k.run(t, ctx, nil, strings.NewReader(fmt.Sprintf(deployment, "applied", "3")), "diff", "-f", "-")
	if r.ExitCode != 1 || !strings.Contains(r.Stdout, "+      - image: registry.example.com/one:3") {
		t.Errorf("diff: %+v", r)
	}
	for _, tag := range []string{"1", "2"} {
		k.says(t, ctx, `^deployment.apps/server serverside-applied\n$`, fmt.Sprintf(deployment, "server", tag),
			"apply", "--server-side", "-f", "-")
	}
	other := fmt.Sprintf(deployment, "server", "other")
	r = k.run(t, ctx, nil, strings.NewReader(other), "apply", "--server-side", "--field-manager=other", "-f", "-")
	if r.ExitCode != 1 || !strings.Contains(r.Stderr, `conflict with "kubectl"`) {
		t.Errorf("two managers: %+v", r)
	}
	k.says(t, ctx, `serverside-applied`, other, "apply", "--server-side", "--field-manager=other", "--force-conflicts", "-f", "-")
	k.says(t, ctx, `\bother\b`, "",
		"get", "deployment", "server", "--show-managed-fields", "-o", "jsonpath={.metadata.managedFields[*].manager}")
}

func kubectlPatch(t *testing.T, ctx context.Context, k kubectlCase) {
	k.ok(t, ctx, fmt.Sprintf(deployment, "patched", "1"), "create", "-f", "-")
	patch := func(args ...string) {
		t.Helper()
		k.says(t, ctx, `^deployment.apps/patched patched\n$`, "", append([]string{"patch", "deployment", "patched"}, args...)...)
	}
	patch("--type=strategic", "-p", `{"spec":{"template":{"spec":{"containers":[{"name":"two","image":"registry.example.com/two:1"}]}}}}`)
	patch("--type=merge", "-p", `{"metadata":{"labels":{"by":"merge"}}}`)
	patch("--type=json", "-p", `[{"op":"add","path":"/metadata/annotations","value":{"by":"json"}}]`)
	patch("--subresource=status", "--type=merge", "-p", `{"status":{"observedGeneration":1234}}`)
	k.says(t, ctx, `^scale.autoscaling/patched patched\n$`, "",
		"patch", "deployment", "patched", "--subresource=scale", "--type=merge", "-p", `{"spec":{"replicas":0}}`)
	k.says(t, ctx, `^two one merge json 1234$`, "", "get", "deployment", "patched", "-o",
		`jsonpath={.spec.template.spec.containers[*].name} {.metadata.labels.by} {.metadata.annotations.by} {.status.observedGeneration}`)
}

func kubectlEdit(t *testing.T, ctx context.Context, k kubectlCase) {
	k.ok(t, ctx, fmt.Sprintf(configMap, "edited", "before"), "create", "-f", "-")
	for _, variable := range []string{"KUBE_EDITOR", "EDITOR"} {
		r := k.run(t, ctx, []string{"KUBE_EDITOR=", variable + "=sed -i s/before/after-" + variable + "/"}, nil, "edit", "configmap", "edited")
		if r.ExitCode != 0 || r.Stdout != "configmap/edited edited\n" {
			t.Errorf("%s: %+v", variable, r)
		}
		k.says(t, ctx, `^after-`+variable+`$`, "", "get", "configmap", "edited", "-o", "jsonpath={.data.key}")
		k.ok(t, ctx, "", "patch", "configmap", "edited", "-p", `{"data":{"key":"before"}}`)
	}
}

func kubectlValidation(t *testing.T, ctx context.Context, k kubectlCase) {
	k.says(t, ctx, `^configmap/dry created \(server dry run\)\n$`, fmt.Sprintf(configMap, "dry", "a"),
		"create", "--dry-run=server", "-f", "-")
	k.says(t, ctx, `^$`, "", "get", "configmap", "dry", "--ignore-not-found")
	misspelt := strings.Replace(fmt.Sprintf(deployment, "misspelt", "1"), "  replicas: 0\n", "  replicas: 0\n  replicaz: 1\n", 1)
	r := k.run(t, ctx, nil, strings.NewReader(misspelt), "create", "--validate=warn", "-f", "-")
	if r.ExitCode != 0 || r.Stderr != "Warning: unknown field \"spec.replicaz\"\n" {
		t.Errorf("warning: %+v", r)
	}
	r = k.run(t, ctx, nil, strings.NewReader(misspelt), "apply", "--validate=strict", "-f", "-")
	if r.ExitCode != 1 || !strings.Contains(r.Stderr, `unknown field "spec.replicaz"`) {
		t.Errorf("error: %+v", r)
	}
}

func kubectlDocuments(t *testing.T, ctx context.Context, k kubectlCase) {
	k.says(t, ctx, `(?s)FIELD: replicas <integer>.*Number of desired pods`, "", "explain", "deployment.spec.replicas")
	k.says(t, ctx, `(?s)KIND: +Pod\n.*containers\s+<\[\]Container>`, "", "explain", "pod.spec")
	k.says(t, ctx, `(?m)^deployments +deploy +apps/v1 +true +Deployment`, "", "api-resources")
	k.says(t, ctx, `(?m)^admissionregistration.k8s.io/v1$`, "", "api-versions")
	newer := k.c.Host("cp-b").APIServer.Version
	k.says(t, ctx, `(?m)^Server Version: `+regexp.QuoteMeta(newer)+`$`, "", "version")
	// What only the newer apiserver of each topology has.
	k.says(t, ctx, `(?s)KIND: +MutatingAdmissionPolicy\n`, "", "explain", "mutatingadmissionpolicies")
	if newer == harness.V137 {
		k.says(t, ctx, `(?s)KIND: +ClusterTrustBundle\nVERSION: +v1\n`, "",
			"explain", "clustertrustbundles", "--api-version=certificates.k8s.io/v1")
	}
}

func kubectlLogs(t *testing.T, ctx context.Context, k kubectlCase) {
	log := func(lines ...string) {
		t.Helper()
		if err := k.kubelet.Log(k.namespace, "web", "side", lines...); err != nil {
			t.Fatal(err)
		}
	}
	log("one", "two", "three")
	k.says(t, ctx, `^one\ntwo\nthree\n$`, "", "logs", "web", "-c", "side")
	k.says(t, ctx, `^three\n$`, "", "logs", "web", "-c", "side", "--tail=1")
	k.says(t, ctx, `^\d{4}-\d\d-\d\dT\S+Z three\n$`, "", "logs", "web", "-c", "side", "--tail=1", "--timestamps")
	p := k.background(t, ctx, nil, "logs", "-f", "web", "-c", "side", "--tail=1")
	eventually(t, ctx, settle, "the line that was there", shows(p, `^three$`))
	for _, line := range []string{"four", "five"} {
		log(line)
		took := eventually(t, ctx, time.Second, "a later line", shows(p, line+`$`))
		t.Logf("logged line seen after %v", took.Round(time.Millisecond))
	}
}

// kubectlNodeProxy: apiservers refuse the proxy subresource of a node with a loopback address, and that is what kubectl must then say.
func kubectlNodeProxy(t *testing.T, ctx context.Context, k kubectlCase) {
	const path = "/api/v1/nodes/" + publicNode + "/proxy/"
	ip, err := harness.MachineIP()
	if err != nil {
		t.Fatal(err)
	}
	if ip == "" {
		r := k.run(t, ctx, nil, nil, "get", "--raw", path+"healthz")
		if r.ExitCode != 1 || !strings.Contains(r.Stderr, "address not allowed") {
			t.Errorf("a node at a loopback address: %+v", r)
		}
		return
	}
	k.says(t, ctx, `^ok$`, "", "get", "--raw", path+"healthz")
	k.says(t, ctx, `"kind":"PodList"`, "", "get", "--raw", path+"pods")
	if r := k.run(t, ctx, nil, nil, "get", "--raw", path+"nothing"); r.ExitCode != 1 || !strings.Contains(r.Stderr, "404 page not found") &&
		!strings.Contains(r.Stderr, "could not find the requested resource") {
		t.Errorf("what the kubelet does not have: %+v", r)
	}
}

func kubectlExec(t *testing.T, ctx context.Context, k kubectlCase, s streaming) {
	for _, c := range []struct {
		name, stdin string
		args        []string
		want        harness.Result
	}{
		{"exit code", "", []string{"--", "sh", "-c", "exit 7"},
			harness.Result{Stderr: "command terminated with exit code 7\n", ExitCode: 7}},
		{"both outputs", "", []string{"-c", "side", "--", "sh", "-c", "echo out; echo err >&2"},
			harness.Result{Stdout: "out\n", Stderr: "err\n"}},
		{"standard input", "a\nb\n", []string{"-c", "main", "-i", "--", "cat"}, harness.Result{Stdout: "a\nb\n"}},
		{"input and exit code", "a\n", []string{"-c", "main", "-i", "--", "sh", "-c", "cat; exit 3"},
			harness.Result{Stdout: "a\n", Stderr: "command terminated with exit code 3\n", ExitCode: 3}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := k.run(t, ctx, s.env, strings.NewReader(c.stdin), append([]string{"exec", "web"}, c.args...)...)
			r.Stderr = strings.TrimPrefix(r.Stderr, "Defaulted container \"main\" out of: main, side\n")
			if r != c.want {
				t.Errorf("got %+v, want %+v", r, c.want)
			}
		})
	}
	t.Run("the last of much output", func(t *testing.T) {
		const last = 3_000_000
		r := k.run(t, ctx, s.env, nil, "exec", "web", "-c", "main", "--", "seq", fmt.Sprint(last))
		if want := 22_888_896; len(r.Stdout) != want || r.ExitCode != 0 || !strings.HasSuffix(r.Stdout, fmt.Sprintf("\n%d\n", last)) {
			t.Errorf("%d bytes, exit code %d, standard error %.300q; want %d bytes", len(r.Stdout), r.ExitCode, r.Stderr, want)
		}
	})
	t.Run("no such container", func(t *testing.T) {
		r := k.run(t, ctx, s.env, nil, "exec", "web", "-c", "none", "--", "true")
		if r.ExitCode != 1 || !strings.Contains(r.Stderr, "container none is not valid for pod web") {
			t.Errorf("got %+v", r)
		}
	})
}

func kubectlAttach(t *testing.T, ctx context.Context, k kubectlCase, s streaming) {
	r := k.run(t, ctx, s.env, strings.NewReader("one\ntwo\n"), "attach", "-i", "web", "-c", "main")
	if r.ExitCode != 0 || r.Stdout != "one\ntwo\n" {
		t.Errorf("got %+v", r)
	}
}

func kubectlCopy(t *testing.T, ctx context.Context, k kubectlCase, s streaming) {
	dir := t.TempDir()
	there, back := filepath.Join(dir, "there"), filepath.Join(dir, "back")
	data := make([]byte, copied)
	_, _ = rand.Read(data)
	want := sha256.Sum256(data)
	if err := os.WriteFile(there, data, 0o600); err != nil {
		t.Fatal(err)
	}
	pod, err := k.kubelet.PodDir(k.namespace, "web")
	if err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct{ from, to, file string }{
		{there, k.namespace + "/web:data", filepath.Join(pod, "data")},
		{k.namespace + "/web:data", back, back},
	} {
		start := time.Now()
		if r := k.run(t, ctx, s.env, nil, "cp", step.from, step.to, "-c", "main"); r.ExitCode != 0 {
			t.Fatalf("cp: %+v", r)
		}
		took := time.Since(start)
		got, err := os.ReadFile(step.file)
		if err != nil || sha256.Sum256(got) != want {
			t.Fatalf("%d bytes have arrived, %v; want the same %d", len(got), err, len(data))
		}
		t.Logf("%d MiB in %v", len(data)>>20, took.Round(10*time.Millisecond))
	}
	if err := os.Remove(filepath.Join(pod, "data")); err != nil {
		t.Error(err)
	}
}

func kubectlPortForward(t *testing.T, ctx context.Context, k kubectlCase, s streaming) {
	pod := "forward-" + strings.ToLower(s.name)
	if err := k.kubelet.RunPod(ctx, k.namespace, pod); err != nil {
		t.Fatal(err)
	}
	p := k.background(t, ctx, s.env, "port-forward", "pod/"+pod, ":"+echoServer(t))
	var local string
	eventually(t, ctx, settle, "port-forward", func(context.Context) error {
		found := regexp.MustCompile(`Forwarding from (127\.0\.0\.1:\d+) -> `).FindStringSubmatch(p.LogTail(10))
		if found == nil {
			return fmt.Errorf("kubectl says %q", p.LogTail(10))
		}
		local = found[1]
		return nil
	})
	data := make([]byte, 4<<20)
	_, _ = rand.Read(data)
	for range 3 {
		if got, err := exchange(ctx, local, data); err != nil || !bytes.Equal(got, data) {
			t.Fatalf("%d bytes came back, %v; want the same %d", len(got), err, len(data))
		}
	}
	if !p.Running() {
		t.Fatalf("port-forward has ended: %s", p.LogTail(10))
	}
	if err := k.kubelet.DeletePod(ctx, k.namespace, pod); err != nil {
		t.Fatal(err)
	}
	took := eventually(t, ctx, s.podEnd, "end of port-forward after the end of the pod", func(context.Context) error {
		if p.Running() {
			return errors.New("it still runs")
		}
		return nil
	})
	if got := p.LogTail(10); !strings.Contains(got, "lost connection to pod") {
		t.Errorf("kubectl says %q", got)
	}
	t.Logf("port-forward ended %v after the pod", took.Round(time.Millisecond))
}

// echoServer listens until the test ends, on a port of 127.0.0.1 that it returns, and sends back what it gets.
func echoServer(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	go func() { // ends with the listener
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() { // ends with the connection
				defer conn.Close()
				_, _ = io.Copy(conn, conn)
			}()
		}
	}()
	_, port, _ := net.SplitHostPort(listener.Addr().String())
	return port
}

// exchange sends data to an echo server, says that it is all, and returns what comes back until the other side says so too.
func exchange(ctx context.Context, address string, data []byte) ([]byte, error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(settle)); err != nil {
		return nil, err
	}
	sent := make(chan error, 1)
	go func() { // ends with the connection at the latest
		_, err := conn.Write(data)
		sent <- errors.Join(err, conn.(*net.TCPConn).CloseWrite())
	}()
	got, err := io.ReadAll(conn)
	conn.Close()
	return got, errors.Join(err, <-sent)
}
