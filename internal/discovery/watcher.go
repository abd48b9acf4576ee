package discovery

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/rest"

	"github.com/mvp-mesh/mvp-node/internal/catalog"
)

// allSources is every source that a group-version can have.
var allSources = []catalog.Source{catalog.SourceBuiltin, catalog.SourceCRD, catalog.SourceAggregated}

// Options configure a Watcher. Start from DefaultOptions.
type Options struct {
	// Config is the node's own kubeconfig. It leads to the local apiserver itself, not to the node and not to a load balancer.
	// Required. The user needs get on /api, /api/*, /apis, /apis/*, /version and /readyz, and list and watch on APIServices and
	// CustomResourceDefinitions.
	Config *rest.Config
	// OnCatalog is called on Run's goroutine with every new catalog, before Catalog returns another. It must not block. Required.
	OnCatalog func(c *catalog.Catalog, generation uint64)
	// OnRead is called on Run's goroutine after every complete reading, behind OnCatalog if that is called; start is when the
	// reading began. What the apiserver served at start is the catalog of now. It must not block. May be nil.
	OnRead func(start time.Time)

	// Interval is the longest time between two readings. Changes of CRDs, of APIServices and of the apiserver's health are
	// followed at once; this is for what changes without a sign, an aggregated API that serves something new.
	Interval time.Duration
	// Timeout bounds one reading.
	Timeout time.Duration
	// SourcesWait bounds how long the first catalog waits until APIServices and CRDs were listed.
	SourcesWait time.Duration

	// Logger and Registerer are required.
	Logger     *slog.Logger
	Registerer prometheus.Registerer
}

// DefaultOptions gives every default; the required fields are left empty.
func DefaultOptions() Options {
	return Options{Interval: 30 * time.Second, Timeout: 15 * time.Second, SourcesWait: 5 * time.Second}
}

// Validate reports everything that is wrong with the options.
func (o Options) Validate() error {
	var errs []error
	if o.Config == nil {
		errs = append(errs, errors.New("discovery: Config is missing"))
	}
	if o.OnCatalog == nil {
		errs = append(errs, errors.New("discovery: OnCatalog is missing"))
	}
	if o.Interval <= 0 || o.Timeout <= 0 || o.SourcesWait <= 0 {
		errs = append(errs, fmt.Errorf("discovery: Interval %s, Timeout %s and SourcesWait %s must be positive", o.Interval, o.Timeout, o.SourcesWait))
	}
	if o.Logger == nil || o.Registerer == nil {
		errs = append(errs, errors.New("discovery: Logger or Registerer is missing"))
	}
	return errors.Join(errs...)
}

// Delays of the loop. Variables of the Watcher only so that their meaning is written in one place.
const (
	// minGap keeps a flood of changes from becoming a flood of readings; a reading that takes long stretches it.
	minGap    = 200 * time.Millisecond
	gapFactor = 5
	// firstRetry doubles up to maxRetry while readings fail.
	firstRetry = 200 * time.Millisecond
	maxRetry   = 5 * time.Second
)

// echoes are the times after a change at which discovery is read again: the apiserver's discovery follows CRDs and APIServices
// with a delay of its own. Most of these readings end in two 304.
var echoes = []time.Duration{500 * time.Millisecond, 1500 * time.Millisecond, 4 * time.Second}

// Watcher keeps the catalog of the local apiserver. Made by New, driven by Run; its other methods are safe for concurrent use.
type Watcher struct {
	o       Options
	log     *slog.Logger
	metrics *metrics
	client  *client
	fetcher *fetcher
	sources *sources
	kick    chan struct{} // capacity 1: a change that no reading has followed yet

	state  atomic.Pointer[state]
	status struct {
		sync.Mutex
		Status
	}
}

type state struct {
	catalog    *catalog.Catalog
	generation uint64
}

// Status says how fresh the catalog is.
type Status struct {
	LastSuccess  time.Time // of the last complete reading; zero if there was none
	LastError    error     // of the last reading; nil if it was complete
	Form         string    // v2, v2beta1 or legacy
	SourcesKnown bool      // APIServices and CRDs were read
}

// New makes a Watcher. It asks nobody yet: the apiserver need not be up.
func New(o Options) (*Watcher, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	c, err := newClient(o.Config)
	if err != nil {
		return nil, fmt.Errorf("discovery: %w", err)
	}
	m, err := newMetrics(o.Registerer)
	if err != nil {
		return nil, fmt.Errorf("discovery: metrics: %w", err)
	}
	w := &Watcher{o: o, log: o.Logger.With("component", "discovery"), metrics: m, client: c, fetcher: newFetcher(c), kick: make(chan struct{}, 1)}
	w.sources, err = newSources(o.Config, w.log, m, w.Refresh)
	if err != nil {
		return nil, fmt.Errorf("discovery: %w", err)
	}
	w.state.Store(&state{})
	return w, nil
}

// Catalog returns the last good catalog and its generation, nil and 0 while there is none. Generations start at 1 and rise by 1
// with every catalog of another content.
func (w *Watcher) Catalog() (*catalog.Catalog, uint64) {
	s := w.state.Load()
	return s.catalog, s.generation
}

// Status says how fresh the catalog is.
func (w *Watcher) Status() Status {
	w.status.Lock()
	defer w.status.Unlock()
	s := w.status.Status
	s.SourcesKnown = w.sources.known()
	return s
}

// Refresh asks for a reading soon and returns at once. Many calls make one reading.
func (w *Watcher) Refresh() {
	select {
	case w.kick <- struct{}{}:
	default:
	}
}

// Run reads discovery until ctx ends; it then returns nil. Nothing the apiserver does makes it return earlier.
func (w *Watcher) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	wg.Go(func() { w.sources.run(ctx) })
	if !w.sources.wait(ctx, w.o.SourcesWait) && ctx.Err() == nil {
		w.log.Warn("APIServices and CRDs are not known yet; their group-versions count as built in until they are")
	}
	s := newSchedule(w.o.Interval, time.Now())
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			wg.Wait()
			w.client.closeIdle()
			return nil
		case <-w.kick:
			s.changed(time.Now())
		case <-timer.C:
			start := time.Now()
			err := w.refresh(ctx)
			if ctx.Err() == nil {
				s.done(start, time.Now(), err == nil)
			}
		}
		timer.Reset(time.Until(s.next()))
	}
}

// errNotReady reports that the apiserver is starting, stopping or ill: what it lists now may be half of what it serves.
var errNotReady = errors.New("apiserver is not ready")

// errVersionChanged reports that the apiserver became another one while it was read, again and again.
var errVersionChanged = errors.New("apiserver changed its version while it was read")

// refresh makes one reading and publishes it if it differs from the last.
func (w *Watcher) refresh(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, w.o.Timeout)
	defer cancel()
	start := time.Now()
	version, r, err := w.read(ctx)
	var c *catalog.Catalog
	var dropped int
	if err == nil {
		last, _ := w.Catalog()
		c, dropped, err = assemble(version, r.gvs, w.sources.facts(), last)
	}
	if err != nil {
		w.failed(ctx, err)
		return err
	}
	w.publish(c, r.form, dropped)
	if w.o.OnRead != nil {
		w.o.OnRead(start)
	}
	return nil
}

// read returns documents and the version that they belong to.
func (w *Watcher) read(ctx context.Context) (string, reading, error) {
	version, err := w.readyVersion(ctx)
	if err != nil {
		return "", reading{}, err
	}
	for range 3 {
		w.fetcher.of(version)
		r, err := w.fetcher.fetch(ctx)
		if err != nil {
			return "", reading{}, err
		}
		after, err := w.readyVersion(ctx)
		if err != nil {
			return "", reading{}, err
		}
		if after == version {
			return version, r, nil
		}
		version = after
	}
	return "", reading{}, errVersionChanged
}

// readyVersion returns the version of an apiserver that is ready.
func (w *Watcher) readyVersion(ctx context.Context) (string, error) {
	ok, _, a, err := w.client.ready(ctx)
	if err != nil {
		return "", err
	}
	if !ok {
		return "", fmt.Errorf("%w: %d", errNotReady, a.status)
	}
	return w.client.version(ctx)
}

func (w *Watcher) failed(ctx context.Context, err error) {
	if errors.Is(ctx.Err(), context.Canceled) {
		return // the node stops
	}
	result := resultError
	if errors.Is(err, errNotReady) {
		result = resultNotReady
	}
	w.metrics.refreshes.WithLabelValues(result).Inc()
	w.status.Lock()
	first := w.status.LastError == nil
	w.status.LastError = err
	w.status.Unlock()
	_, generation := w.Catalog()
	if first {
		w.log.Warn("reading discovery failed, the last good catalog stays", "generation", generation, "err", err)
	} else {
		w.log.Debug("reading discovery failed again", "err", err)
	}
}

func (w *Watcher) publish(c *catalog.Catalog, f form, dropped int) {
	now := time.Now()
	w.status.Lock()
	recovered := w.status.LastError != nil
	w.status.LastSuccess, w.status.LastError, w.status.Form = now, nil, string(f)
	w.status.Unlock()
	w.metrics.lastSuccess.Set(float64(now.UnixMilli()) / 1000)
	for _, other := range forms {
		w.metrics.form.WithLabelValues(string(other)).Set(0)
	}
	w.metrics.form.WithLabelValues(string(f)).Set(1)
	if recovered {
		w.log.Info("discovery can be read again")
	}

	old := w.state.Load()
	if old.catalog != nil && old.catalog.Digest() == c.Digest() {
		w.metrics.refreshes.WithLabelValues(resultUnchanged).Inc()
		return
	}
	w.metrics.refreshes.WithLabelValues(resultChanged).Inc()
	w.metrics.dropped.Add(float64(dropped))
	if !w.sources.known() {
		w.metrics.sourceErrors.WithLabelValues(sourceUnsynced).Inc()
	}
	s := &state{catalog: c, generation: old.generation + 1}
	w.state.Store(s)
	w.metrics.generation.Set(float64(s.generation))
	count := make(map[catalog.Source]int)
	stale := 0
	for _, gv := range c.GroupVersions() {
		count[gv.Source]++
		if gv.Stale {
			stale++
		}
	}
	for _, src := range allSources {
		w.metrics.groupVersions.WithLabelValues(src.String()).Set(float64(count[src]))
	}
	w.metrics.stale.Set(float64(stale))
	w.log.Info("local catalog changed", "generation", s.generation, "digest", c.Digest().Short(), "version", c.ServerVersion(),
		"resources", c.Len(), "form", f, "dropped", dropped)
	w.o.OnCatalog(c, s.generation)
}
