package node

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/config"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
)

// certificates holds every key pair and CA bundle of a node and follows their files: a new pair is used by the next handshake, a
// broken one is logged and counted while the last good one stays in use (CASES I-08).
type certificates struct {
	front, frontProxy, mesh       *keyPair
	clientCA, apiserverCA, meshCA *caBundle
	watched                       []runner
	notAfter                      *prometheus.GaugeVec
	failures                      *prometheus.CounterVec
	logger                        *slog.Logger
}

// runner is the part of a dynamic certificate that watches its files.
type runner interface {
	Run(ctx context.Context, workers int)
}

func loadCertificates(cfg *config.Config, reg prometheus.Registerer, logger *slog.Logger) (*certificates, error) {
	f := promauto.With(reg)
	c := &certificates{
		logger: logger,
		notAfter: f.NewGaugeVec(prometheus.GaugeOpts{
			Name: "mvp_node_certificate_not_after_timestamp_seconds",
			Help: "Unix time at which the certificate in use expires, by purpose.",
		}, []string{"purpose"}),
		failures: f.NewCounterVec(prometheus.CounterOpts{
			Name: "mvp_node_certificate_reload_errors_total",
			Help: "Changed key pairs that could not be used, by purpose; the last good pair stays in use.",
		}, []string{"purpose"}),
	}
	for _, p := range []struct {
		dst     **keyPair
		purpose string
		files   config.KeyPair
	}{
		{&c.front, "front", cfg.Front.TLS},
		{&c.frontProxy, "front-proxy", cfg.APIServer.FrontProxy.KeyPair()},
		{&c.mesh, "mesh", cfg.Mesh.TLS.KeyPair()},
	} {
		k, err := c.keyPair(p.purpose, p.files)
		if err != nil {
			return nil, err
		}
		*p.dst = k
	}
	for _, b := range []struct {
		dst     **caBundle
		purpose string
		file    string
	}{
		{&c.clientCA, "client-ca", cfg.Front.Authentication.ClientCAFile},
		{&c.apiserverCA, "apiserver-ca", cfg.APIServer.CAFile},
		{&c.meshCA, "mesh-ca", cfg.Mesh.TLS.CAFile},
	} {
		content, err := dynamiccertificates.NewDynamicCAContentFromFile(b.purpose, b.file)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", b.purpose, err)
		}
		c.watched = append(c.watched, content)
		*b.dst = &caBundle{content}
	}
	return c, nil
}

// run follows the files until ctx ends.
func (c *certificates) run(ctx context.Context) error {
	done := make(chan struct{}, len(c.watched))
	for _, w := range c.watched {
		go func() { w.Run(ctx, 1); done <- struct{}{} }()
	}
	for range c.watched {
		<-done
	}
	return nil
}

// keyPair is a certificate with its key, parsed once per change.
type keyPair struct {
	owner   *certificates
	purpose string
	content *dynamiccertificates.DynamicCertKeyPairContent
	current atomic.Pointer[tls.Certificate]
}

func (c *certificates) keyPair(purpose string, files config.KeyPair) (*keyPair, error) {
	content, err := dynamiccertificates.NewDynamicServingContentFromFiles(purpose, files.CertFile, files.KeyFile)
	if err != nil {
		return nil, fmt.Errorf("%s certificate: %w", purpose, err)
	}
	k := &keyPair{owner: c, purpose: purpose, content: content}
	if err := k.parse(); err != nil {
		return nil, err
	}
	content.AddListener(k)
	c.failures.WithLabelValues(purpose)
	c.watched = append(c.watched, content)
	return k, nil
}

// Enqueue implements dynamiccertificates.Listener: the files changed and were read.
func (k *keyPair) Enqueue() {
	if err := k.parse(); err != nil {
		k.owner.failures.WithLabelValues(k.purpose).Inc()
		k.owner.logger.Error("changed certificate cannot be used; the last good one stays", "purpose", k.purpose, "err", err)
		return
	}
	k.owner.logger.Info("certificate reloaded", "purpose", k.purpose, "not_after", k.current.Load().Leaf.NotAfter.Format(time.RFC3339))
}

func (k *keyPair) parse() error {
	cert, key := k.content.CurrentCertKeyContent()
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return fmt.Errorf("%s certificate: %w", k.purpose, err)
	}
	k.current.Store(&pair)
	k.owner.notAfter.WithLabelValues(k.purpose).Set(float64(pair.Leaf.NotAfter.Unix()))
	return nil
}

// certificate is the pair to use for a handshake now.
func (k *keyPair) certificate() *tls.Certificate { return k.current.Load() }

// caBundle is a set of authorities.
type caBundle struct {
	dynamiccertificates.CAContentProvider
}

// roots are the authorities to verify a handshake with now.
func (b *caBundle) roots() *x509.CertPool {
	o, ok := b.VerifyOptions()
	if !ok {
		return x509.NewCertPool() // trusts nobody
	}
	return o.Roots
}
