package discovery

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/rest"
)

// Health is what a Probe knows of the local apiserver.
type Health struct {
	// Up is false until /readyz answered once, and while the apiserver is not ready.
	Up bool
	// Version is the gitVersion that /version gave last, "" until then. It is kept while the apiserver is down.
	Version string
	// Reason says in a few words why Up is false.
	Reason string
}

// ProbeOptions configure a Probe. Start from DefaultProbeOptions.
type ProbeOptions struct {
	// Config is the node's own kubeconfig, as in Options. Required.
	Config *rest.Config
	// OnChange is called on Run's goroutine whenever Up or Version changes. It must not block. Required.
	OnChange func(Health)

	// Interval is the time between two questions, Timeout the time for one. An apiserver that answers is found down after two
	// failures in a row, so within Interval + Timeout of the first (CASES E-04: 2 s); one that refuses connections or says that
	// it shuts down, at once.
	Interval, Timeout time.Duration
	// VersionEvery is how often /version is read of an apiserver that stays up.
	VersionEvery time.Duration

	// Logger and Registerer are required.
	Logger     *slog.Logger
	Registerer prometheus.Registerer
}

// DefaultProbeOptions gives every default; the required fields are left empty.
func DefaultProbeOptions() ProbeOptions {
	return ProbeOptions{Interval: time.Second, Timeout: time.Second, VersionEvery: 15 * time.Second}
}

// Validate reports everything that is wrong with the options.
func (o ProbeOptions) Validate() error {
	var errs []error
	if o.Config == nil || o.OnChange == nil {
		errs = append(errs, errors.New("probe: Config or OnChange is missing"))
	}
	if o.Interval <= 0 || o.Timeout <= 0 || o.VersionEvery <= 0 {
		errs = append(errs, fmt.Errorf("probe: Interval %s, Timeout %s and VersionEvery %s must be positive", o.Interval, o.Timeout, o.VersionEvery))
	}
	if o.Logger == nil || o.Registerer == nil {
		errs = append(errs, errors.New("probe: Logger or Registerer is missing"))
	}
	return errors.Join(errs...)
}

// probeResult is the outcome of one question; the metric label.
type probeResult string

const (
	probeReady     probeResult = "ready"
	probeForbidden probeResult = "forbidden" // it answers, but not to the node's user
	probeNotReady  probeResult = "not_ready"
	probeStopping  probeResult = "stopping" // /readyz says that the apiserver shuts down
	probeRefused   probeResult = "refused"
	probeError     probeResult = "error"
)

// up reports whether the result lets the apiserver count as up.
func (r probeResult) up() bool { return r == probeReady || r == probeForbidden }

// certain reports whether one such result is enough to call the apiserver down. The others may be a hiccup of one check.
func (r probeResult) certain() bool { return r == probeRefused || r == probeStopping }

// judge is the rule by which the apiserver is up or down, given what was so before and the failures in a row before this result.
func judge(wasUp bool, failures int, r probeResult) (up bool, now int) {
	if r.up() {
		return true, 0
	}
	failures++
	return wasUp && !r.certain() && failures < 2, failures
}

// Probe asks the local apiserver's /readyz. Made by NewProbe, driven by Run; Health is safe for concurrent use.
type Probe struct {
	o       ProbeOptions
	log     *slog.Logger
	metrics *probeMetrics
	client  *client
	health  atomic.Pointer[Health]
}

// NewProbe makes a Probe. It asks nobody yet.
func NewProbe(o ProbeOptions) (*Probe, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	c, err := newClient(o.Config)
	if err != nil {
		return nil, fmt.Errorf("probe: %w", err)
	}
	m, err := newProbeMetrics(o.Registerer)
	if err != nil {
		return nil, fmt.Errorf("probe: metrics: %w", err)
	}
	p := &Probe{o: o, log: o.Logger.With("component", "probe"), metrics: m, client: c}
	p.health.Store(&Health{Reason: "not asked yet"})
	return p, nil
}

// Health returns what is known now.
func (p *Probe) Health() Health { return *p.health.Load() }

// Run asks until ctx ends; it then returns nil.
func (p *Probe) Run(ctx context.Context) error {
	defer p.client.closeIdle()
	tick := time.NewTicker(p.o.Interval)
	defer tick.Stop()
	failures := 0
	warned := false
	var versionRead time.Time // zero: read it at the next chance
	for {
		result, reason := p.ask(ctx)
		if ctx.Err() != nil {
			return nil
		}
		p.metrics.probes.WithLabelValues(string(result)).Inc()
		if result == probeForbidden && !warned {
			warned = true
			p.log.Warn("the node's user may not ask /readyz; the apiserver counts as up while it answers at all", "reason", reason)
		}
		h := p.Health()
		up, n := judge(h.Up, failures, result)
		if failures > 0 || !h.Up {
			versionRead = time.Time{} // it may have been replaced meanwhile
		}
		failures = n
		next := Health{Up: up, Version: h.Version}
		if !up {
			next.Reason = reason
		} else if result.up() && time.Since(versionRead) >= p.o.VersionEvery {
			if v, err := p.version(ctx); err == nil {
				next.Version, versionRead = v, time.Now()
			}
		}
		if ctx.Err() != nil {
			return nil
		}
		p.set(h, next)
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

func (p *Probe) set(old, next Health) {
	p.health.Store(&next)
	if next.Up == old.Up && next.Version == old.Version {
		return
	}
	p.metrics.up.Set(0)
	if next.Up {
		p.metrics.up.Set(1)
	}
	p.log.Info("local apiserver", "up", next.Up, "version", next.Version, "reason", next.Reason)
	p.o.OnChange(next)
}

func (p *Probe) version(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, p.o.Timeout)
	defer cancel()
	return p.client.version(ctx)
}

// ask puts one question.
func (p *Probe) ask(ctx context.Context) (probeResult, string) {
	ctx, cancel := context.WithTimeout(ctx, p.o.Timeout)
	defer cancel()
	ok, allowed, a, err := p.client.ready(ctx)
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return probeRefused, "connection refused"
	case err != nil:
		return probeError, err.Error()
	case !allowed:
		return probeForbidden, fmt.Sprintf("/readyz answers %d", a.status)
	case ok:
		return probeReady, ""
	case bytes.Contains(a.body, []byte("[-]shutdown")):
		return probeStopping, "/readyz says that the apiserver shuts down"
	}
	return probeNotReady, fmt.Sprintf("/readyz answers %d", a.status)
}
