// Package stream_test runs whole nodes in one process, over real sockets, before fake kube-apiservers, and holds them to the cases of
// streaming and fidelity: what passes through a node must be what was sent, when it was sent, and end as it ended.
//
// The same resource of the same apiserver is asked for through two nodes: through b, which stands before it (the local path), and
// through a, whose own apiserver does not have it (the forwarded path). Relays between the parts stand for the network.
//
// MVP_LONG=1 runs the sizes and times that the cases name where they take minutes.
package stream_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"k8s.io/klog/v2"
	"sigs.k8s.io/yaml"

	"github.com/mvp-mesh/mvp-node/internal/config"
	"github.com/mvp-mesh/mvp-node/internal/node"
	"github.com/mvp-mesh/mvp-node/internal/pki"
)

func TestMain(m *testing.M) {
	// The libraries of Kubernetes tell of every file that they begin and cease to follow.
	klog.SetSlogLogger(slog.New(slog.DiscardHandler))
	goleak.VerifyTestMain(m)
}

// long tells that minutes may be spent.
var long = os.Getenv("MVP_LONG") != ""

// scaled is the number of a case, or a smaller one that a quick run can afford.
func scaled[T any](quick, full T) T {
	if long {
		return full
	}
	return quick
}

var (
	// aServes has no pods: requests for them are forwarded.
	aServes = map[string][]string{"v1": {"configmaps"}}
	bServes = map[string][]string{"v1": {
		"configmaps", "pods", "pods/exec", "pods/attach", "pods/portforward", "pods/proxy", "pods/log", "services", "services/proxy", "nodes", "nodes/proxy",
		"nodes/status",
	}, "console.example.com/v1": {"machines", "machines/vnc"}}
)

// setup says what a test wants to be other than usual.
type setup struct {
	names  string         // nodes; "ab" if empty. All but a serve the same.
	front  map[string]any // settings of the fronts
	drain  string         // shutdown.drainTimeout
	direct bool           // no relays: for measurements
}

type authority struct {
	ca   *pki.CA
	file string
}

// mesh is the nodes with all that is around them.
type mesh struct {
	t      *testing.T
	setup  setup
	dir    string
	subnet string

	clients, serving, requests, meshCA authority

	servers   map[string]*apiserver
	apiRelay  map[string]*relay // before each apiserver
	meshRelay map[string]*relay // before each mesh port
	nodes     map[string]*runningNode
	roots     *x509.CertPool
	user      tls.Certificate
}

type runningNode struct {
	node *node.Node
	stop context.CancelFunc
	done chan error
	logs *bytes.Buffer
}

// meshes counts the meshes of this process, for addresses that none has used.
var meshes atomic.Int64

// newMesh starts everything and waits until all nodes are converged.
func newMesh(t *testing.T, s setup) *mesh {
	t.Helper()
	if s.names == "" {
		s.names = "ab"
	}
	if s.drain == "" {
		s.drain = "1s"
	}
	m := &mesh{
		t: t, setup: s, dir: t.TempDir(), servers: map[string]*apiserver{}, nodes: map[string]*runningNode{},
		apiRelay: map[string]*relay{}, meshRelay: map[string]*relay{},
		// Loopback addresses of this process's own, so that fixed ports meet nobody else's.
		subnet: fmt.Sprintf("127.%d.%d", 32+os.Getpid()>>8&0x3f, os.Getpid()&0xff),
	}
	number := int(meshes.Add(1))
	m.subnet += fmt.Sprintf(".%d", number*4) // the address of node a; the others follow
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
	m.roots = x509.NewCertPool()
	m.roots.AppendCertsFromPEM(m.serving.ca.CertPEM())
	m.leaf(m.requests, "front-proxy-client", pki.LeafOptions{CommonName: "front-proxy-client", Client: true})
	m.leaf(m.clients, "node-user", pki.LeafOptions{CommonName: "mvp-node", Client: true})
	m.user = m.leaf(m.clients, "jane", pki.LeafOptions{CommonName: "jane", Organizations: []string{"dev"}, Client: true})

	for _, name := range m.names() {
		serves := bServes
		if name == "a" {
			serves = aServes
		}
		both := x509.NewCertPool()
		both.AppendCertsFromPEM(m.requests.ca.CertPEM())
		both.AppendCertsFromPEM(m.clients.ca.CertPEM())
		ips := []net.IP{net.ParseIP("127.0.0.1"), net.ParseIP(m.ip(name))}
		cert := m.leaf(m.serving, "apiserver-"+name, pki.LeafOptions{CommonName: "apiserver-" + name, IPs: ips, Server: true})
		m.servers[name] = newAPIServer(t, name, cert, both, serves)
		m.leaf(m.serving, "front-"+name, pki.LeafOptions{CommonName: "front-" + name, IPs: ips, Server: true})
		pair, err := m.meshCA.ca.IssueNode("test", name, pki.Extra{}, now, time.Hour)
		m.must(err)
		m.must(pki.WritePair(m.path("mesh-"+name+".crt"), m.path("mesh-"+name+".key"), pair))
		if !s.direct {
			m.apiRelay[name] = newRelay(t, m.ip(name)+":6444", m.servers[name].address())
			m.meshRelay[name] = newRelay(t, m.ip(name)+":7445", m.ip(name)+":7444")
		}
	}
	for _, name := range m.names() {
		m.start(name)
	}
	t.Cleanup(m.end)
	m.converge()
	return m
}

// end stops every node. It may be called by the test itself, before it counts what is left.
func (m *mesh) end() {
	for name := range m.nodes {
		m.stop(name)
	}
}

func (m *mesh) names() []string { return strings.Split(m.setup.names, "") }

// converge waits until every node says that all hold the same view.
func (m *mesh) converge() {
	m.t.Helper()
	for _, name := range m.names() {
		m.eventually(20*time.Second, "node "+name+" converged", func() error {
			if v := m.metric(name, "mvp_gossip_converged", nil); v != 1 {
				return fmt.Errorf("mvp_gossip_converged is %v", v)
			}
			return nil
		})
	}
}

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
	ip := net.ParseIP(m.subnet).To4()
	ip[3] += byte(strings.Index("abc", name)) + 1
	return ip.String()
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
	api, advertised := "https://"+m.servers[name].address(), m.ip(name)+":7444"
	if !m.setup.direct {
		api, advertised = "https://"+m.apiRelay[name].address, m.meshRelay[name].address
	}
	kubeconfig := map[string]any{
		"apiVersion": "v1", "kind": "Config", "current-context": "x",
		"clusters": []any{map[string]any{"name": "x", "cluster": map[string]any{"server": api, "certificate-authority": m.serving.file}}},
		"users": []any{map[string]any{"name": "x", "user": map[string]any{
			"client-certificate-data": read("node-user.crt"), "client-key-data": read("node-user.key"),
		}}},
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
	front := map[string]any{
		"address": m.ip(name) + ":6443", "tls": pair("front-"+name, ""), "authentication": map[string]any{"clientCAFile": m.clients.file},
	}
	for k, v := range m.setup.front {
		front[k] = v
	}
	file := m.write("node-"+name+".yaml", marshal(map[string]any{
		"apiVersion": config.APIVersion, "kind": config.Kind, "clusterID": "test", "name": name,
		"front": front,
		"apiserver": map[string]any{
			"url": api, "caFile": m.serving.file, "kubeconfig": m.write("kubeconfig-"+name, marshal(kubeconfig)),
			"frontProxy": pair("front-proxy-client", m.requests.file),
		},
		"mesh":            map[string]any{"address": m.ip(name) + ":7444", "advertiseAddress": advertised, "tls": pair("mesh-"+name, m.meshCA.file)},
		"gossip":          map[string]any{"address": m.ip(name) + ":7946", "seeds": []string{m.ip("a") + ":7946", m.ip("b") + ":7946"}},
		"expectedMembers": m.names(),
		"view":            map[string]any{"staleGrace": "1m", "unknownCatalogHold": "3s"},
		"admin":           map[string]any{"address": m.ip(name) + ":9444"},
		"shutdown":        map[string]any{"delay": "0s", "drainTimeout": m.setup.drain},
	}))
	cfg, err := config.Load(file)
	m.must(err)
	return cfg
}

func (m *mesh) start(name string) {
	m.t.Helper()
	logs := &bytes.Buffer{}
	n, err := node.New(node.Options{Config: m.config(name), Logger: slog.New(slog.NewTextHandler(logs, &slog.HandlerOptions{Level: slog.LevelWarn})), Version: "test"})
	m.must(err)
	ctx, cancel := context.WithCancel(context.Background())
	r := &runningNode{node: n, stop: cancel, done: make(chan error, 1), logs: logs}
	go func() { r.done <- n.Run(ctx) }() // stop waits for it
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
		return // its log is still being written
	}
	if m.t.Failed() {
		text := r.logs.Bytes()
		m.t.Logf("end of the log of node %s:\n%s", name, text[max(0, len(text)-8000):])
	}
}

// eventually polls a condition.
func (m *mesh) eventually(limit time.Duration, what string, check func() error) {
	m.t.Helper()
	if err := poll(limit, check); err != nil {
		m.t.Fatalf("%s: %v", what, err)
	}
}

// poll asks until the answer is nil, or returns the last one.
func poll(limit time.Duration, check func() error) error {
	deadline := time.Now().Add(limit)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		err := check()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		<-tick.C
	}
}

// metric is the sum of all series of a metric of a node that have the labels.
func (m *mesh) metric(name, metric string, labels map[string]string) float64 {
	m.t.Helper()
	families, err := m.nodes[name].node.Registry().Gather()
	m.must(err)
	sum, found := 0.0, false
	for _, f := range families {
		if f.GetName() != metric {
			continue
		}
		found = true
	series:
		for _, s := range f.GetMetric() {
			have := map[string]string{}
			for _, l := range s.GetLabel() {
				have[l.GetName()] = l.GetValue()
			}
			for k, v := range labels {
				if have[k] != v {
					continue series
				}
			}
			sum += s.GetCounter().GetValue() + s.GetGauge().GetValue()
		}
	}
	if !found {
		m.t.Fatalf("node %s has no metric %s", name, metric)
	}
	return sum
}
