package parity_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
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

	"sigs.k8s.io/yaml"

	"github.com/mvp-mesh/mvp-node/internal/config"
	"github.com/mvp-mesh/mvp-node/internal/node"
	"github.com/mvp-mesh/mvp-node/internal/pki"
	"github.com/mvp-mesh/mvp-node/test/fake"
)

// way is how a request comes to the apiserver of b.
type way string

const (
	direct    way = "direct"    // straight, with the client's own credential
	local     way = "local"     // through node b, which stands before it
	forwarded way = "forwarded" // through node a, whose own apiserver does not serve the resource
)

// What the two apiservers serve. Everything that the cases ask for is at b alone.
var (
	oldServes = map[string][]string{"v1": {"pods"}}
	newServes = map[string][]string{
		"v1": {"pods", "services", "services/proxy", "services/status", "nodes", "nodes/proxy"},
		"parity.example.com/v1": {
			"widgets", "widgets/status", "widgets/scale", "widgets/log", "widgets/eviction", "gadgets",
		},
	}
)

// credential is how a client proves who it is.
type credential string

const (
	byCertificate credential = "" // of user jane
	byToken       credential = "token"
	byNothing     credential = "anonymous"
)

const token = "a-token-that-is-no-jwt"

var robot = fake.User{
	Name: "system:serviceaccount:ns:robot", UID: "0d4f7a6c-8f0e-4f5b-a2b5-6d2b6c1f0a11",
	Groups: []string{"system:serviceaccounts", "system:serviceaccounts:ns"},
	Extra:  map[string][]string{"scopes.example/a b": {"one", "two"}, "50%": {"half"}},
}

// world is two nodes a and b in this process, each before a recording apiserver.
type world struct {
	t       *testing.T
	dir     string
	subnet  string
	servers map[string]*fake.Server
	roots   *x509.CertPool
	jane    tls.Certificate
	files   map[string]string // of CAs
}

// newWorld starts everything and waits until both nodes are converged.
func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{
		t: t, dir: t.TempDir(), servers: map[string]*fake.Server{}, roots: x509.NewCertPool(), files: map[string]string{},
		// Loopback addresses of this process's own, so that fixed ports meet nobody else's.
		subnet: fmt.Sprintf("127.%d.%d", 100+os.Getpid()>>8&0x7f, os.Getpid()&0xff),
	}
	now := time.Now()
	ca := func(name string) *pki.CA {
		ca, err := pki.NewCA(pki.CAOptions{CommonName: name, Now: now, Lifetime: time.Hour})
		w.must(err)
		w.files[name] = w.write(name+".crt", ca.CertPEM())
		return ca
	}
	clients, serving, proxies := ca("client-ca"), ca("serving-ca"), ca("front-proxy-ca")
	meshCA, err := pki.NewMeshCA("parity", now, time.Hour)
	w.must(err)
	w.files["mesh-ca"] = w.write("mesh-ca.crt", meshCA.CertPEM())
	w.roots.AppendCertsFromPEM(serving.CertPEM())
	trusted := x509.NewCertPool()
	trusted.AppendCertsFromPEM(clients.CertPEM())
	trusted.AppendCertsFromPEM(proxies.CertPEM())

	w.leaf(proxies, "front-proxy-client", pki.LeafOptions{CommonName: "front-proxy-client", Client: true})
	w.leaf(clients, "node-user", pki.LeafOptions{CommonName: "mvp-node", Client: true})
	w.jane = w.leaf(clients, "jane", pki.LeafOptions{CommonName: "jane", Organizations: []string{"dev", "ops, too"}, Client: true})
	for _, name := range []string{"a", "b"} {
		o := fake.Options{Name: name, Version: "v1.35.4", ClientCAs: trusted, Serves: oldServes, Tokens: map[string]fake.User{token: robot}}
		if name == "b" {
			o.Version, o.Serves = "v1.36.3", newServes
		}
		o.Certificate = w.leaf(serving, "apiserver-"+name, pki.LeafOptions{CommonName: "apiserver", IPs: ips("127.0.0.1"), Server: true})
		w.servers[name] = fake.Start(o)
		t.Cleanup(w.servers[name].Close)
		w.leaf(serving, "front-"+name, pki.LeafOptions{CommonName: "front", IPs: ips(w.ip(name)), Server: true})
		pair, err := meshCA.IssueNode("parity", name, pki.Extra{}, now, time.Hour)
		w.must(err)
		w.must(pki.WritePair(w.path("mesh-"+name+".crt"), w.path("mesh-"+name+".key"), pair))
	}
	for _, name := range []string{"a", "b"} {
		w.start(name)
	}
	for _, name := range []string{"a", "b"} {
		w.converged(name)
	}
	return w
}

func ips(s string) []net.IP { return []net.IP{net.ParseIP(s)} }

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) path(name string) string { return filepath.Join(w.dir, name) }

func (w *world) write(name string, data []byte) string {
	w.t.Helper()
	w.must(os.WriteFile(w.path(name), data, 0o600))
	return w.path(name)
}

func (w *world) ip(name string) string {
	return fmt.Sprintf("%s.%d", w.subnet, 1+strings.Index("ab", name))
}

// leaf issues a certificate into NAME.crt and NAME.key.
func (w *world) leaf(ca *pki.CA, name string, o pki.LeafOptions) tls.Certificate {
	w.t.Helper()
	o.Now, o.Lifetime = time.Now(), time.Hour
	pair, err := ca.Issue(o)
	w.must(err)
	w.must(pki.WritePair(w.path(name+".crt"), w.path(name+".key"), pair))
	cert, err := tls.LoadX509KeyPair(w.path(name+".crt"), w.path(name+".key"))
	w.must(err)
	return cert
}

// config is the configuration of a node, read from a file as an operator's is.
func (w *world) config(name string) *config.Config {
	w.t.Helper()
	// The certificate is in the file itself: client-go follows one in files of its own by goroutines that nothing can end.
	read := func(name string) string {
		data, err := os.ReadFile(w.path(name))
		w.must(err)
		return base64.StdEncoding.EncodeToString(data)
	}
	url := w.servers[name].URL()
	kubeconfig := map[string]any{
		"apiVersion": "v1", "kind": "Config", "current-context": "x",
		"clusters": []any{map[string]any{"name": "x", "cluster": map[string]any{"server": url, "certificate-authority": w.files["serving-ca"]}}},
		"users": []any{map[string]any{"name": "x", "user": map[string]any{
			"client-certificate-data": read("node-user.crt"), "client-key-data": read("node-user.key"),
		}}},
		"contexts": []any{map[string]any{"name": "x", "context": map[string]any{"cluster": "x", "user": "x"}}},
	}
	pair := func(file, ca string) map[string]any {
		p := map[string]any{"certFile": w.path(file + ".crt"), "keyFile": w.path(file + ".key")}
		if ca != "" {
			p["caFile"] = w.files[ca]
		}
		return p
	}
	marshal := func(v any) []byte {
		data, err := yaml.Marshal(v)
		w.must(err)
		return data
	}
	file := w.write("node-"+name+".yaml", marshal(map[string]any{
		"apiVersion": config.APIVersion, "kind": config.Kind, "clusterID": "parity", "name": name,
		"front": map[string]any{
			"address": w.ip(name) + ":6443", "tls": pair("front-"+name, ""), "authentication": map[string]any{"clientCAFile": w.files["client-ca"]},
		},
		"apiserver": map[string]any{
			"url": url, "caFile": w.files["serving-ca"], "kubeconfig": w.write("kubeconfig-"+name, marshal(kubeconfig)),
			"frontProxy": pair("front-proxy-client", "front-proxy-ca"),
		},
		"mesh":            map[string]any{"address": w.ip(name) + ":7444", "tls": pair("mesh-"+name, "mesh-ca")},
		"gossip":          map[string]any{"address": w.ip(name) + ":7946", "seeds": []string{w.ip("a") + ":7946"}},
		"expectedMembers": []string{"a", "b"},
		"admin":           map[string]any{"address": w.ip(name) + ":9444"},
		"shutdown":        map[string]any{"delay": "0s", "drainTimeout": "2s"},
	}))
	cfg, err := config.Load(file)
	w.must(err)
	return cfg
}

// start runs a node until the end of the test.
func (w *world) start(name string) {
	w.t.Helper()
	logs := &bytes.Buffer{}
	n, err := node.New(node.Options{Config: w.config(name), Logger: slog.New(slog.NewTextHandler(logs, nil)), Version: "test"})
	w.must(err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }() // the cleanup waits for it
	w.t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			w.t.Errorf("node %s: %v", name, err)
		}
		if w.t.Failed() {
			w.t.Logf("end of the log of node %s:\n%s", name, tail(logs.String()))
		}
	})
}

func tail(s string) string {
	const most = 4000
	if len(s) > most {
		return s[len(s)-most:]
	}
	return s
}

// converged waits until a node says that it and the other hold the same view.
func (w *world) converged(name string) {
	w.t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		resp, err := http.Get("http://" + w.ip(name) + ":9444/metrics")
		if err == nil {
			var data []byte
			data, err = io.ReadAll(resp.Body)
			resp.Body.Close()
			if err == nil && strings.Contains(string(data), "\nmvp_gossip_converged 1\n") {
				return
			}
		}
		if time.Now().After(deadline) {
			w.t.Fatalf("node %s does not converge: %v", name, err)
		}
		<-tick.C
	}
}

// address is where a way begins.
func (w *world) address(v way) string {
	switch v {
	case local:
		return w.ip("b") + ":6443"
	case forwarded:
		return w.ip("a") + ":6443"
	}
	return w.servers["b"].Addr()
}

// clients are connections of one worker, opened as they are needed.
type clients struct {
	world *world
	open  map[string]client
}

func (w *world) clients() *clients { return &clients{world: w, open: map[string]client{}} }

func (c *clients) close() {
	for _, open := range c.open {
		open.close()
	}
}

func (c *clients) get(v way, p protocol, cred credential) client {
	key := fmt.Sprint(v, p, cred)
	if have := c.open[key]; have != nil {
		return have
	}
	address := c.world.address(v)
	t := &tls.Config{RootCAs: c.world.roots, NextProtos: []string{"http/1.1"}}
	if p == http2 {
		t.NextProtos[0] = "h2"
	}
	if cred == byCertificate {
		t.Certificates = []tls.Certificate{c.world.jane}
	}
	dial := func() (net.Conn, error) {
		conn, err := tls.DialWithDialer(&net.Dialer{Timeout: 5 * time.Second}, "tcp", address, t)
		if err != nil {
			return nil, err
		}
		return conn, nil
	}
	if p == http2 {
		c.open[key] = &client2{dial: dial}
	} else {
		c.open[key] = &client1{dial: dial}
	}
	return c.open[key]
}

// identityHeaders are what an apiserver must be told of a client by its front proxy.
func (w *world) identityHeaders(cred credential) map[string][]string {
	switch cred {
	case byToken:
		return map[string][]string{
			"X-Remote-User": {robot.Name}, "X-Remote-Uid": {robot.UID}, "X-Remote-Group": append(robot.Groups[:2:2], "system:authenticated"),
			"X-Remote-Extra-Scopes.example%2fa%20b": robot.Extra["scopes.example/a b"], "X-Remote-Extra-50%25": robot.Extra["50%"],
		}
	case byNothing:
		return map[string][]string{"X-Remote-User": {"system:anonymous"}, "X-Remote-Group": {"system:unauthenticated"}}
	}
	sum := sha256.Sum256(w.jane.Certificate[0])
	return map[string][]string{
		"X-Remote-User": {"jane"}, "X-Remote-Group": {"dev", "ops, too", "system:authenticated"},
		"X-Remote-Extra-Authentication.kubernetes.io%2fcredential-Id": {"X509SHA256=" + hex.EncodeToString(sum[:])},
	}
}
