package discovery

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/rest"
)

// maxDocument bounds one discovery document. 5,000 CRDs make about 5 MB.
const maxDocument = 64 << 20

// client gets paths of the apiserver with the node's own credentials.
type client struct {
	base *url.URL
	http *http.Client
}

// newClient speaks HTTP/1.1 and so on connections of its own: a request never waits behind the informers' watches on a
// connection that died without a sign, and one that times out takes its connection with it.
func newClient(cfg *rest.Config) (*client, error) {
	cfg = rest.CopyConfig(cfg)
	cfg.NextProtos = []string{"http/1.1"}
	cfg.Timeout = 0 // each request has its context's
	base, _, err := rest.DefaultServerUrlFor(cfg)
	if err != nil {
		return nil, err
	}
	h, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return nil, err
	}
	if h == http.DefaultClient {
		h = &http.Client{Transport: http.DefaultTransport.(*http.Transport).Clone()}
	}
	h.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return &client{base: base, http: h}, nil
}

// answer is one HTTP response, read to its end.
type answer struct {
	status      int
	contentType string
	etag        string
	body        []byte
}

// get never fails because of a status.
func (c *client) get(ctx context.Context, path, accept, ifNoneMatch string, limit int64) (answer, error) {
	u := *c.base
	u.Path = strings.TrimSuffix(u.Path, "/") + path
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return answer{}, err
	}
	if accept != "" {
		req.Header.Set("Accept", accept)
	}
	if ifNoneMatch != "" {
		req.Header.Set("If-None-Match", ifNoneMatch)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, limit+1))
	if err != nil {
		return answer{}, fmt.Errorf("GET %s: %w", path, err)
	}
	if int64(len(body)) > limit {
		return answer{}, fmt.Errorf("GET %s: answer is longer than %d bytes", path, limit)
	}
	return answer{resp.StatusCode, resp.Header.Get("Content-Type"), resp.Header.Get("ETag"), body}, nil
}

// closeIdle gives up the connections that are not in use.
func (c *client) closeIdle() { utilnet.CloseIdleConnectionsFor(c.http.Transport) }

// smallAnswer bounds /version and /readyz.
const smallAnswer = 256 << 10

// version reads gitVersion from /version.
func (c *client) version(ctx context.Context) (string, error) {
	a, err := c.get(ctx, "/version", "application/json", "", smallAnswer)
	if err != nil {
		return "", err
	}
	if a.status != http.StatusOK {
		return "", &statusError{"/version", a.status}
	}
	var v struct {
		GitVersion string `json:"gitVersion"`
	}
	if err := json.Unmarshal(a.body, &v); err != nil {
		return "", fmt.Errorf("/version: %w", err)
	}
	if v.GitVersion == "" {
		return "", fmt.Errorf("/version: no gitVersion")
	}
	return v.GitVersion, nil
}

// ready asks /readyz. allowed is false when the node's own user may not ask it; what answers that is taken as ready.
func (c *client) ready(ctx context.Context) (ok, allowed bool, a answer, err error) {
	a, err = c.get(ctx, "/readyz", "", "", smallAnswer)
	if err != nil {
		return false, true, a, err
	}
	switch a.status {
	case http.StatusOK:
		return true, true, a, nil
	case http.StatusUnauthorized, http.StatusForbidden:
		return true, false, a, nil
	}
	return false, true, a, nil
}

// statusError reports an answer of another status than 200.
type statusError struct {
	path   string
	status int
}

func (e *statusError) Error() string {
	return fmt.Sprintf("GET %s: %d %s", e.path, e.status, http.StatusText(e.status))
}
