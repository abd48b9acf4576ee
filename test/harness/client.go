//go:build linux

package harness

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"sigs.k8s.io/yaml"
)

// Credential is how a client says who it is. The zero value is an anonymous client.
type Credential struct {
	Cert  CertFiles // client certificate; empty: none
	Token string    // bearer token; empty: none
}

// Client is a small REST client of one apiserver or front. It is safe for concurrent use. Close it to give its
// connections back.
type Client struct {
	// URL is the server's, without a slash at the end.
	URL string
	// HTTP does the requests. Its transport has the certificates; it does not add the token.
	HTTP  *http.Client
	token string
}

// Client returns a client for a server of the cluster, which may be an apiserver or the front of a node.
func (c *Cluster) Client(serverURL string, credential Credential) (*Client, error) {
	return newClient(serverURL, c.PKI.ServingCAFile, credential)
}

func newClient(serverURL, caFile string, credential Credential) (*Client, error) {
	ca, err := os.ReadFile(caFile)
	if err != nil {
		return nil, fmt.Errorf("client of %s: %w", serverURL, err)
	}
	config := &tls.Config{RootCAs: x509.NewCertPool()}
	if !config.RootCAs.AppendCertsFromPEM(ca) {
		return nil, fmt.Errorf("client of %s: %s has no certificate", serverURL, caFile)
	}
	if credential.Cert != (CertFiles{}) {
		pair, err := tls.LoadX509KeyPair(credential.Cert.Cert, credential.Cert.Key)
		if err != nil {
			return nil, fmt.Errorf("client of %s: %w", serverURL, err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return &Client{
		URL:   strings.TrimSuffix(serverURL, "/"),
		HTTP:  &http.Client{Transport: &http.Transport{TLSClientConfig: config, ForceAttemptHTTP2: true}},
		token: credential.Token,
	}, nil
}

// Close closes the idle connections.
func (c *Client) Close() { c.HTTP.CloseIdleConnections() }

// Response is an answer that has been read to its end.
type Response struct {
	Status int
	Header http.Header
	Body   []byte
}

// Decode reads the body as JSON. The error of a body that is none shows the body.
func (r *Response) Decode(into any) error {
	if err := json.Unmarshal(r.Body, into); err != nil {
		return fmt.Errorf("answer (%d) %.300q: %w", r.Status, r.Body, err)
	}
	return nil
}

// Do sends a request and reads the answer. body is sent as JSON unless it is nil; header may be nil. Any status is an
// answer and not an error.
func (c *Client) Do(ctx context.Context, method, path string, header http.Header, body any) (*Response, error) {
	var content io.Reader
	if body != nil {
		data, err := json.Marshal(body)
		if err != nil {
			return nil, fmt.Errorf("%s %s: %w", method, path, err)
		}
		content = bytes.NewReader(data)
	}
	request, err := http.NewRequestWithContext(ctx, method, c.URL+path, content)
	if err != nil {
		return nil, err
	}
	for name, values := range header {
		request.Header[name] = values
	}
	if body != nil && request.Header.Get("Content-Type") == "" {
		request.Header.Set("Content-Type", "application/json")
	}
	if c.token != "" {
		request.Header.Set("Authorization", "Bearer "+c.token)
	}
	response, err := c.HTTP.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	data, err := io.ReadAll(response.Body)
	if err != nil {
		return nil, fmt.Errorf("%s %s: answer (%d): %w", method, path, response.StatusCode, err)
	}
	return &Response{Status: response.StatusCode, Header: response.Header, Body: data}, nil
}

// Get is Do for the usual case.
func (c *Client) Get(ctx context.Context, path string) (*Response, error) {
	return c.Do(ctx, http.MethodGet, path, nil, nil)
}

// Create posts an object. One that exists already is no error and stays as it is.
func (c *Client) Create(ctx context.Context, path string, object any) error {
	response, err := c.Do(ctx, http.MethodPost, path, nil, object)
	if err != nil {
		return err
	}
	switch response.Status {
	case http.StatusOK, http.StatusCreated, http.StatusConflict:
		return nil
	}
	return fmt.Errorf("POST %s: %d: %s", path, response.Status, bytes.TrimSpace(response.Body))
}

// checkReady asks /readyz and returns what is not ready as an error, check by check.
func (c *Client) checkReady(ctx context.Context) error {
	// One hanging answer is not the end of the wait; an apiserver whose etcd hangs takes 4 s to say so.
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	response, err := c.Get(ctx, "/readyz?verbose")
	if err != nil {
		return err
	}
	if response.Status == http.StatusOK {
		return nil
	}
	var failing []string
	for line := range strings.Lines(string(response.Body)) {
		if strings.HasPrefix(line, "[-]") {
			failing = append(failing, strings.TrimSpace(line))
		}
	}
	if len(failing) == 0 {
		return fmt.Errorf("/readyz: %d: %.300s", response.Status, bytes.TrimSpace(response.Body))
	}
	return fmt.Errorf("/readyz: %d: %s", response.Status, strings.Join(failing, "; "))
}

// Kubeconfig writes a kubeconfig for a server of the cluster and returns its path. Each call writes a file of its own.
func (c *Cluster) Kubeconfig(serverURL string, credential Credential) (string, error) {
	f, err := os.CreateTemp(c.kubeconfigDir(), "*.kubeconfig") // mode 0600: there may be a token in it
	if err != nil {
		return "", fmt.Errorf("kubeconfig for %s: %w", serverURL, err)
	}
	_, err = f.Write(kubeconfig(serverURL, c.PKI.ServingCAFile, credential))
	if err = errors.Join(err, f.Close()); err != nil {
		return "", fmt.Errorf("kubeconfig for %s: %w", serverURL, err)
	}
	return f.Name(), nil
}

func (c *Cluster) kubeconfigDir() string { return filepath.Join(c.Dir, "kubeconfig") }

func kubeconfig(serverURL, caFile string, credential Credential) []byte {
	user := map[string]string{}
	if credential.Cert != (CertFiles{}) {
		user["client-certificate"], user["client-key"] = credential.Cert.Cert, credential.Cert.Key
	}
	if credential.Token != "" {
		user["token"] = credential.Token
	}
	data, err := yaml.Marshal(map[string]any{
		"apiVersion":      "v1",
		"kind":            "Config",
		"current-context": "default",
		"clusters": []any{map[string]any{
			"name":    "default",
			"cluster": map[string]string{"server": serverURL, "certificate-authority": caFile},
		}},
		"users": []any{map[string]any{"name": "default", "user": user}},
		"contexts": []any{map[string]any{
			"name":    "default",
			"context": map[string]string{"cluster": "default", "user": "default"},
		}},
	})
	if err != nil {
		panic(fmt.Sprintf("kubeconfig of strings only does not marshal: %v", err))
	}
	return data
}

// Kubectl runs kubectl. Its discovery cache is its own for each call, because a test restarts servers of other versions at
// the same address. A non-zero exit code is part of the result and not an error.
func (c *Cluster) Kubectl(ctx context.Context, kubeconfig string, args ...string) (Result, error) {
	return c.KubectlInput(ctx, kubeconfig, nil, args...)
}

// KubectlInput is Kubectl with something on standard input, for "apply -f -".
func (c *Cluster) KubectlInput(ctx context.Context, kubeconfig string, stdin io.Reader, args ...string) (Result, error) {
	spec, err := c.KubectlSpec(ctx, kubeconfig, args...)
	if err != nil {
		return Result{}, err
	}
	defer os.RemoveAll(spec.Dir)
	return Run(ctx, spec, stdin)
}

// KubectlSpec says how to run kubectl, for [Run], or for [StartProcess] if it is to run beside the test. Its working folder and home is a
// new and empty one under that of the cluster, and the caller's to remove.
func (c *Cluster) KubectlSpec(ctx context.Context, kubeconfig string, args ...string) (ProcessSpec, error) {
	program, err := c.binaries.Kubectl(ctx)
	if err != nil {
		return ProcessSpec{}, err
	}
	home, err := os.MkdirTemp(c.Dir, "kubectl-")
	if err != nil {
		return ProcessSpec{}, fmt.Errorf("home of kubectl: %w", err)
	}
	return ProcessSpec{
		Name: "kubectl",
		Path: program,
		Args: append([]string{"--kubeconfig", kubeconfig}, args...),
		Env:  []string{"HOME=" + home, "KUBECACHEDIR=" + filepath.Join(home, "cache"), "KUBECONFIG="},
		Dir:  home,
	}, nil
}
