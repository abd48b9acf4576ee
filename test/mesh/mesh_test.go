package mesh_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/mvp-mesh/mvp-node/internal/config"
	"github.com/mvp-mesh/mvp-node/internal/node"
	"github.com/mvp-mesh/mvp-node/internal/pki"
)

const (
	podsPath    = "/api/v1/pods"
	widgetsPath = "/apis/widgets.example.com/v1/widgets"
	gadgetsPath = "/apis/gadgets.example.com/v1/gadgets"
	thingsPath  = "/apis/nobody.example.com/v1/things"
)

var (
	oldServes = map[string][]string{"v1": {"pods"}, "old.example.com/v1": {"relics"}}
	newServes = map[string][]string{"v1": {"pods", "pods/resize"}, "widgets.example.com/v1": {"widgets"}}
)

// authority is a CA of the test with its file.
type authority struct {
	ca   *pki.CA
	file string
}

// mesh is three nodes a, b and c. a stands before an old apiserver, b and c before new ones.
type mesh struct {
	t         *testing.T
	dir       string
	subnet    string
	clients   authority
	serving   authority
	requests  authority // request-header CA
	meshCA    authority
	servers   map[string]*apiserver
	nodes     map[string]*runningNode
	caBundle  *x509.CertPool
	userCache map[string]tls.Certificate
}

type runningNode struct {
	node *node.Node
	stop context.CancelFunc
	done chan error
	logs *bytes.Buffer
}

// newMesh starts everything and waits until all nodes are converged.
func newMesh(t *testing.T) *mesh {
	t.Helper()
	m := &mesh{
		t: t, dir: t.TempDir(), servers: map[string]*apiserver{}, nodes: map[string]*runningNode{}, userCache: map[string]tls.Certificate{},
		// Loopback addresses of this process's own, so that fixed ports meet nobody else's.
		subnet: fmt.Sprintf("127.%d.%d", 100+os.Getpid()>>8&0x7f, os.Getpid()&0xff),
	}
	now := time.Now()
	for _, a := range []struct {
		dst  *authority
		name string
	}{{&m.clients, "client-ca"}, {&m.serving, "serving-ca"}, {&m.requests, "front-proxy-ca"}} {
		ca, err := pki.NewCA(pki.CAOptions{CommonName: a.name, Now: now, Lifetime: time.Hour})
		m.must(err)
		*a.dst = authority{ca, m.write(a.name+".crt", ca.CertPEM())}
	}
	ca, err := pki.NewMeshCA("test", now, time.Hour)
	m.must(err)
	m.meshCA = authority{ca, m.write("mesh-ca.crt", ca.CertPEM())}
	m.caBundle = x509.NewCertPool()
	m.caBundle.AppendCertsFromPEM(m.serving.ca.CertPEM())
	m.leaf(m.requests, "front-proxy-client", pki.LeafOptions{CommonName: "front-proxy-client", Client: true})
	m.leaf(m.clients, "node-user", pki.LeafOptions{CommonName: "mvp-node", Client: true})

	for _, name := range []string{"a", "b", "c"} {
		version, serves := "v1.36.3", newServes
		if name == "a" {
			version, serves = "v1.35.4", oldServes
		}
		both := x509.NewCertPool()
		both.AppendCertsFromPEM(m.requests.ca.CertPEM())
		both.AppendCertsFromPEM(m.clients.ca.CertPEM())
		cert := m.leaf(m.serving, "apiserver-"+name, pki.LeafOptions{CommonName: "apiserver-" + name, DNSNames: []string{"localhost"}, IPs: ips("127.0.0.1"), Server: true})
		m.servers[name] = newAPIServer(t, name, version, cert, both, serves)
		m.leaf(m.serving, "front-"+name, pki.LeafOptions{CommonName: "front-" + name, IPs: ips(m.ip(name)), Server: true})
		pair, err := m.meshCA.ca.IssueNode("test", name, pki.Extra{}, now, time.Hour)
		m.must(err)
		m.must(pki.WritePair(m.path("mesh-"+name+".crt"), m.path("mesh-"+name+".key"), pair))
	}
	for _, name := range []string{"a", "b", "c"} {
		m.start(name)
	}
	t.Cleanup(func() {
		for name := range m.nodes {
			m.stop(name)
		}
	})
	m.converge()
	return m
}

// converge waits until every node says that all hold the same view.
func (m *mesh) converge() {
	m.t.Helper()
	for _, name := range []string{"a", "b", "c"} {
		m.eventually("node "+name+" converged", func() error { return m.metricIs(name, "mvp_gossip_converged", 1) })
	}
}

func ips(s string) []net.IP { return []net.IP{net.ParseIP(s)} }

func (m *mesh) must(err error) {
	m.t.Helper()
	if err != nil {
		m.t.Fatal(err)
	}
}

func (m *mesh) path(name string) string { return filepath.Join(m.dir, name) }

func (m *mesh) write(name string, data []byte) string {
	m.t.Helper()
	m.must(os.WriteFile(m.path(name), data, 0o600))
	return m.path(name)
}

func (m *mesh) ip(name string) string {
	return fmt.Sprintf("%s.%d", m.subnet, 1+strings.Index("abc", name))
}

// leaf issues a certificate into NAME.crt and NAME.key.
func (m *mesh) leaf(a authority, name string, o pki.LeafOptions) tls.Certificate {
	m.t.Helper()
	o.Now, o.Lifetime = time.Now(), time.Hour
	pair, err := a.ca.Issue(o)
	m.must(err)
	m.must(pki.WritePair(m.path(name+".crt"), m.path(name+".key"), pair))
	cert, err := tls.LoadX509KeyPair(m.path(name+".crt"), m.path(name+".key"))
	m.must(err)
	return cert
}

// config is the configuration of a node, read from a file as an operator's is.
func (m *mesh) config(name string) *config.Config {
	m.t.Helper()
	// The certificate is in the file itself: client-go follows one in files of its own by goroutines that nothing can end.
	read := func(name string) string {
		data, err := os.ReadFile(m.path(name))
		m.must(err)
		return base64.StdEncoding.EncodeToString(data)
	}
	kubeconfig := map[string]any{
		"apiVersion": "v1", "kind": "Config", "current-context": "x",
		"clusters": []any{map[string]any{"name": "x", "cluster": map[string]any{"server": m.servers[name].server.URL, "certificate-authority": m.serving.file}}},
		"users":    []any{map[string]any{"name": "x", "user": map[string]any{"client-certificate-data": read("node-user.crt"), "client-key-data": read("node-user.key")}}},
		"contexts": []any{map[string]any{"name": "x", "context": map[string]any{"cluster": "x", "user": "x"}}},
	}
	pair := func(file, ca string) map[string]any {
		p := map[string]any{"certFile": m.path(file + ".crt"), "keyFile": m.path(file + ".key")}
		if ca != "" {
			p["caFile"] = ca
		}
		return p
	}
	marshal := func(v any) []byte {
		data, err := yaml.Marshal(v)
		m.must(err)
		return data
	}
	file := m.write("node-"+name+".yaml", marshal(map[string]any{
		"apiVersion": config.APIVersion, "kind": config.Kind, "clusterID": "test", "name": name,
		"front": map[string]any{"address": m.ip(name) + ":6443", "tls": pair("front-"+name, ""), "authentication": map[string]any{"clientCAFile": m.clients.file}},
		"apiserver": map[string]any{
			"url": m.servers[name].server.URL, "caFile": m.serving.file, "kubeconfig": m.write("kubeconfig-"+name, marshal(kubeconfig)),
			"frontProxy": pair("front-proxy-client", m.requests.file),
		},
		"mesh":            map[string]any{"address": m.ip(name) + ":7444", "tls": pair("mesh-"+name, m.meshCA.file)},
		"gossip":          map[string]any{"address": m.ip(name) + ":7946", "seeds": []string{m.ip("a") + ":7946", m.ip("b") + ":7946"}},
		"expectedMembers": []string{"a", "b", "c"},
		"view":            map[string]any{"staleGrace": "1m", "unknownCatalogHold": "3s"},
		"admin":           map[string]any{"address": m.ip(name) + ":9444"},
		"shutdown":        map[string]any{"delay": "0s", "drainTimeout": "2s"},
	}))
	cfg, err := config.Load(file)
	m.must(err)
	return cfg
}

func (m *mesh) start(name string) {
	m.t.Helper()
	logs := &bytes.Buffer{}
	n, err := node.New(node.Options{Config: m.config(name), Logger: slog.New(slog.NewTextHandler(logs, nil)), Version: "test"})
	m.must(err)
	ctx, cancel := context.WithCancel(context.Background())
	r := &runningNode{node: n, stop: cancel, done: make(chan error, 1), logs: logs}
	go func() { r.done <- n.Run(ctx) }()
	m.nodes[name] = r
}

// stop ends a node as SIGTERM does and returns when nothing of it runs.
func (m *mesh) stop(name string) {
	m.t.Helper()
	r := m.nodes[name]
	delete(m.nodes, name)
	r.stop()
	select {
	case err := <-r.done:
		if err != nil {
			m.t.Errorf("node %s: %v", name, err)
		}
	case <-time.After(20 * time.Second):
		m.t.Errorf("node %s did not stop", name)
	}
	if m.t.Failed() {
		m.t.Logf("log of node %s:\n%s", name, r.logs)
	}
}

func (m *mesh) eventually(what string, check func() error) {
	m.t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			m.t.Fatalf("%s: %v", what, err)
		}
		<-tick.C
	}
}

func (m *mesh) metricIs(name, metric string, want float64) error {
	resp, err := http.Get("http://" + m.ip(name) + ":9444/metrics")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(data)) {
		if value, ok := strings.CutPrefix(strings.TrimSpace(line), metric+" "); ok {
			if value == fmt.Sprint(want) {
				return nil
			}
			return fmt.Errorf("%s of %s is %s, want %v", metric, name, value, want)
		}
	}
	return fmt.Errorf("%s of %s is not there: %d bytes, code %d", metric, name, len(data), resp.StatusCode)
}

// as returns a client with a certificate of a user.
func (m *mesh) as(user string, groups ...string) *http.Client {
	m.t.Helper()
	cert, ok := m.userCache[user]
	if !ok {
		cert = m.leaf(m.clients, "user-"+user, pki.LeafOptions{CommonName: user, Organizations: groups, Client: true})
		m.userCache[user] = cert
	}
	tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: m.caBundle, Certificates: []tls.Certificate{cert}}, ForceAttemptHTTP2: true}
	m.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 20 * time.Second}
}

type answer struct {
	code   int
	header http.Header
	body   string
}

// from names the apiserver that answered, or the cause of mvp-node.
func (a answer) from() string {
	var served struct{ From string }
	if json.Unmarshal([]byte(a.body), &served) == nil && served.From != "" {
		return served.From
	}
	var s metav1.Status
	if json.Unmarshal([]byte(a.body), &s) == nil && s.Details != nil && len(s.Details.Causes) > 0 && s.Details.Causes[0].Message == "mvp-node" {
		return string(s.Details.Causes[0].Type)
	}
	return fmt.Sprintf("%d %s", a.code, strings.TrimSpace(a.body))
}

func (m *mesh) send(c *http.Client, node, method, path, body string, header http.Header) (answer, error) {
	req, err := http.NewRequest(method, "https://"+m.ip(node)+":6443"+path, strings.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	for k, v := range header {
		req.Header[k] = v
	}
	resp, err := c.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	return answer{resp.StatusCode, resp.Header, string(data)}, err
}

func (m *mesh) get(c *http.Client, node, path string) answer {
	m.t.Helper()
	a, err := m.send(c, node, "GET", path, "", nil)
	m.must(err)
	return a
}

func (m *mesh) becomes(c *http.Client, node, path, want string) {
	m.t.Helper()
	m.eventually("GET "+path+" through "+node, func() error {
		a, err := m.send(c, node, "GET", path, "", nil)
		if err != nil {
			return err
		}
		if a.from() != want {
			return fmt.Errorf("answered by %s, want %s", a.from(), want)
		}
		return nil
	})
}

func TestMain(tm *testing.M) { goleak.VerifyTestMain(tm) }

func TestMesh(t *testing.T) {
	m := newMesh(t)
	jane := m.as("jane", "dev", "ops")

	t.Run("each request finds its server", func(t *testing.T) {
		for _, tc := range []struct{ node, path, want string }{
			{"a", podsPath, "a"}, {"b", podsPath, "b"}, {"b", widgetsPath, "b"}, {"c", widgetsPath, "c"},
			{"b", "/apis/old.example.com/v1/relics", "a"}, {"a", thingsPath, "404 404 page not found"},
			{"a", "/apis/merged.example.com/v1/peerthings", "404 404 page not found"}, // CASES D-04: nobody believed the merged list
			{"a", "//api/v1/pods", "404 404 page not found"},
		} {
			if got := m.get(jane, tc.node, tc.path).from(); got != tc.want {
				t.Errorf("GET %s through %s: answered by %s, want %s", tc.path, tc.node, got, tc.want)
			}
		}
		if got := m.get(jane, "a", widgetsPath).from(); got != "b" && got != "c" {
			t.Errorf("widgets through a: answered by %s", got)
		}
	})

	t.Run("the metrics reference is complete", func(t *testing.T) { metricsReference(t, m.nodes["a"].node) })

	t.Run("R-05 subresource", func(t *testing.T) {
		if a, err := m.send(jane, "a", "PATCH", podsPath+"/p/resize", "{}", nil); err != nil || a.from() == "a" || a.code != 200 {
			t.Errorf("patch of pods/p/resize: %s, %v", a.from(), err)
		}
		if got := m.get(jane, "a", podsPath+"/p").from(); got != "a" {
			t.Errorf("pods/p: answered by %s", got)
		}
	})

	t.Run("what the serving apiserver receives", func(t *testing.T) {
		forged := http.Header{
			"X-Remote-User": {"root"}, "X-Remote-Group": {"system:masters"}, "x-remote-EXTRA-a": {"b"}, "X_Remote_User": {"root"},
			"X-Kubernetes-Peer-Proxied": {"true"}, "Authorization": {"Basic cm9vdDp4"}, "Cookie": {"c=d"}, "X-Forwarded-For": {"6.6.6.6"},
			"Audit-Id": {"mine"}, "X-Custom": {"one", "two"}, "Content-Type": {"application/x-test; p=1"}, "Idempotency-Key": {"k"},
			"Impersonate-User": {"joe"}, "User-Agent": {"test/1"},
		}
		for _, tc := range []struct {
			what, node, path string
			hops             int
		}{{"local", "a", podsPath, 0}, {"forwarded", "a", widgetsPath, 1}} {
			path := tc.path + "?fieldManager=x%2Fy&empty="
			a, err := m.send(jane, tc.node, "POST", path, "the body", forged)
			m.must(err)
			server := m.servers[a.from()]
			if server == nil {
				t.Fatalf("%s: %s", tc.what, a.from())
			}
			r := server.last(t, tc.path)
			if r.RequestURI != path {
				t.Errorf("%s: target %q, sent %q", tc.what, r.RequestURI, path)
			}
			h := r.Header.Clone()
			auditID, forwardedFor, credential := h.Get("Audit-Id"), h.Get("X-Forwarded-For"), h.Get("X-Remote-Extra-Authentication.kubernetes.io%2fcredential-Id")
			for name := range h {
				if strings.HasPrefix(strings.ToLower(name), "x-remote-extra-authentication") {
					credential = h[name][0]
					delete(h, name)
				}
			}
			h.Del("Audit-Id")
			h.Del("X-Forwarded-For")
			want := http.Header{
				"X-Remote-User": {"jane"}, "X-Remote-Group": {"dev", "ops", "system:authenticated"},
				"X-Kubernetes-Peer-Proxied": {"true"}, "X-Custom": {"one", "two"}, "Content-Type": {"application/x-test; p=1"},
				"Impersonate-User": {"joe"}, "User-Agent": {"test/1"}, "Content-Length": {"8"}, "Accept-Encoding": {"gzip"},
			}
			if d := cmp.Diff(want, h); d != "" {
				t.Errorf("%s: headers at the apiserver (-want +got):\n%s", tc.what, d)
			}
			if !strings.HasPrefix(credential, "X509SHA256=") {
				t.Errorf("%s: credential ID %q", tc.what, credential)
			}
			if auditID == "" || auditID == "mine" || a.header.Get("Audit-Id") != auditID {
				t.Errorf("%s: audit ID at the apiserver %q, in the answer %q", tc.what, auditID, a.header.Get("Audit-Id"))
			}
			chain := strings.Split(forwardedFor, ", ")
			if len(chain) != 1+tc.hops || !strings.HasPrefix(chain[0], "127.") {
				t.Errorf("%s: X-Forwarded-For %q, want the client and %d nodes", tc.what, forwardedFor, tc.hops)
			}
		}
	})

	t.Run("I-02 without an identity nothing is sent", func(t *testing.T) {
		nobody := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: m.caBundle}}}
		defer nobody.CloseIdleConnections()
		a, err := m.send(nobody, "a", "GET", podsPath, "", http.Header{"X-Remote-User": {"root"}, "X-Remote-Group": {"system:masters"}})
		m.must(err)
		r := m.servers["a"].last(t, podsPath)
		if a.code != 200 || r.Header.Get("X-Remote-User") != "system:anonymous" || !cmp.Equal(r.Header["X-Remote-Group"], []string{"system:unauthenticated"}) {
			t.Errorf("anonymous: %d, arrived as %q %q", a.code, r.Header["X-Remote-User"], r.Header["X-Remote-Group"])
		}
		before := m.servers["a"].count(podsPath)
		if a, err := m.send(nobody, "a", "GET", podsPath, "", http.Header{"Authorization": {"Bearer x"}}); err != nil || a.code != 401 && a.code != 503 {
			t.Errorf("token that nobody can check: %d, %v", a.code, err)
		}
		if m.servers["a"].count(podsPath) != before {
			t.Error("a request without an identity reached the apiserver")
		}
	})

	t.Run("the local boundary holds", func(t *testing.T) {
		before := m.servers["b"].count(widgetsPath) + m.servers["c"].count(widgetsPath)
		if a := m.get(m.as("denied"), "a", widgetsPath); a.code != 403 {
			t.Errorf("got %d %s", a.code, a.body)
		}
		if m.servers["b"].count(widgetsPath)+m.servers["c"].count(widgetsPath) != before {
			t.Error("a denied request left the node")
		}
	})

	t.Run("F-06 a client stays with its peer", func(t *testing.T) {
		first := m.get(jane, "a", widgetsPath).from()
		for range 50 {
			if got := m.get(jane, "a", widgetsPath+"?watch=0").from(); got != first {
				t.Fatalf("answered by %s, before by %s", got, first)
			}
		}
	})

	t.Run("a peer's apiserver changes under it", func(t *testing.T) {
		// gadgets appear at b alone; then b loses them without a word: never a 404 while b's catalog lists them, and the true
		// one after.
		m.servers["b"].set("v1.37.2", map[string][]string{"v1": {"pods"}, "widgets.example.com/v1": {"widgets"}, "gadgets.example.com/v1": {"gadgets"}})
		m.restartAPIServer("b")
		m.becomes(jane, "a", gadgetsPath, "b")
		m.servers["b"].set("v1.36.3", newServes)
		m.restartAPIServer("b")
		m.becomes(jane, "a", gadgetsPath, "404 404 page not found")
	})

	t.Run("an apiserver is replaced while clients ask", func(t *testing.T) {
		// b and c serve gadgets; b's apiserver is replaced by one that does not, within a blink, so that neither probe nor
		// discovery saw it go. Nobody gets its 404 while c serves them.
		with := map[string][]string{"v1": {"pods"}, "widgets.example.com/v1": {"widgets"}, "gadgets.example.com/v1": {"gadgets"}}
		for _, name := range []string{"b", "c"} {
			m.servers[name].set("v1.37.2", with)
			m.restartAPIServer(name)
			m.becomes(jane, name, gadgetsPath, name)
		}
		for _, node := range []string{"b", "a"} {
			m.converge()
			m.servers["b"].set("v1.36.3", newServes)
			m.servers["b"].server.CloseClientConnections()
			refused := 0
			m.eventually("gadgets answered by c through "+node, func() error {
				got := m.get(jane, node, gadgetsPath)
				if got.code == 404 {
					t.Fatalf("through %s: a misleading 404: %s", node, got.body)
				}
				if got.from() == "NotServed" {
					refused++
				}
				if got.from() != "c" {
					return fmt.Errorf("answered by %s", got.from())
				}
				return nil
			})
			t.Logf("through %s: NotServed %d times until c answered", node, refused)
			m.servers["b"].set("v1.37.2", with)
			m.restartAPIServer("b")
			m.becomes(jane, "b", gadgetsPath, "b")
		}
		for _, name := range []string{"b", "c"} {
			m.servers[name].set("v1.36.3", newServes)
			m.restartAPIServer(name)
		}
		m.becomes(jane, "a", gadgetsPath, "404 404 page not found")
	})

	t.Run("the local apiserver is away", func(t *testing.T) {
		m.servers["a"].setReady(false)
		m.eventually("pods answered by a peer", func() error {
			if got := m.get(jane, "a", podsPath).from(); got == "a" {
				return fmt.Errorf("answered by %s", got)
			}
			return nil
		})
		m.servers["a"].setReady(true)
		m.becomes(jane, "a", podsPath, "a")
	})

	t.Run("R-03 clean leave of every server of X", func(t *testing.T) {
		m.stop("b")
		m.becomes(jane, "a", widgetsPath, "c")
		m.stop("c")
		// Both are expected: their absence holds up the 404 for the configured three seconds, and no longer.
		if got := m.get(jane, "a", widgetsPath).from(); got != "ViewIncomplete" && got != "NoPeerAvailable" {
			t.Errorf("right after: %s", got)
		}
		if got := m.get(jane, "a", podsPath).from(); got != "a" {
			t.Errorf("pods: %s", got)
		}
		m.becomes(jane, "a", widgetsPath, "404 404 page not found")
		m.start("b")
		m.becomes(jane, "a", widgetsPath, "b")
		m.start("c")
	})
}

// restartAPIServer lets a node see its apiserver go and come back, as in an upgrade.
func (m *mesh) restartAPIServer(name string) {
	m.t.Helper()
	m.servers[name].setReady(false)
	m.eventually("node "+name+" sees its apiserver down", func() error {
		resp, err := http.Get("http://" + m.ip(name) + ":9444/readyz")
		if err != nil {
			return err
		}
		resp.Body.Close()
		if resp.StatusCode == 200 {
			return fmt.Errorf("still ready")
		}
		return nil
	})
	m.servers[name].setReady(true)
}
