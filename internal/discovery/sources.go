package discovery

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/mvp-mesh/mvp-node/internal/catalog"
)

// The objects that tell where a group-version comes from.
var (
	apiServiceGVR = schema.GroupVersionResource{Group: "apiregistration.k8s.io", Version: "v1", Resource: "apiservices"}
	crdGVR        = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
)

// managedLabel is set by the kube-aggregator on the APIServices that it keeps for what the apiserver itself serves
// (kube-aggregator pkg/controllers/autoregister): "true" on those of CRDs, "onstart" on built-in ones.
const (
	managedLabel   = "kube-aggregator.kubernetes.io/automanaged"
	managedCRD     = "true"
	managedBuiltin = "onstart"
)

// apiService is what matters of one APIService.
type apiService struct {
	service bool   // an aggregated API server answers
	managed string // value of managedLabel
}

// facts is what is known of the sources of group-versions at one moment. The maps are not changed once in a facts.
type facts struct {
	apiServices map[catalog.GV]apiService
	crdGroups   map[string]int // number of CRDs by group
}

// source tells where a group-version comes from.
//
// What is not known to come from a CRD or an aggregated API counts as built in. That is the safe side: a built-in group-version
// taken for a CRD's would never be forwarded, a misleading 404; a CRD's taken for built in may be forwarded because of a peer's
// old list, to be answered by that peer's apiserver, which has the same CRDs.
func (f facts) source(gv catalog.GV) catalog.Source {
	svc, ok := f.apiServices[gv]
	switch {
	case svc.service:
		return catalog.SourceAggregated
	case svc.managed == managedCRD:
		return catalog.SourceCRD
	case ok && svc.managed == managedBuiltin:
		// A built-in version of a group that has CRDs too, as storagemigration.k8s.io may have.
		return catalog.SourceBuiltin
	case f.crdGroups[gv.Group] > 0:
		// The APIService follows its CRD by a moment.
		return catalog.SourceCRD
	}
	return catalog.SourceBuiltin
}

// sources watches APIServices and CRDs.
type sources struct {
	apiServices *store
	crds        *store
}

func newSources(cfg *rest.Config, log *slog.Logger, m *metrics, changed func()) (*sources, error) {
	dyn, err := dynamic.NewForConfig(cfg)
	if err != nil {
		return nil, err
	}
	meta, err := metadata.NewForConfig(cfg)
	if err != nil {
		return nil, err
	}
	s := &sources{apiServices: newStore(sourceAPIServices, log, m, changed), crds: newStore(sourceCRDs, log, m, changed)}
	services := dyn.Resource(apiServiceGVR)
	s.apiServices.list = func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return services.List(ctx, o) }
	s.apiServices.watch = services.Watch
	// Names and groups are enough of a CRD; the schemas of some thousand are hundreds of megabytes.
	crds := meta.Resource(crdGVR)
	s.crds.list = func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return crds.List(ctx, o) }
	s.crds.watch = crds.Watch
	return s, nil
}

// run returns when ctx has ended and both reflectors with it.
func (s *sources) run(ctx context.Context) {
	var wg sync.WaitGroup
	wg.Go(func() { s.apiServices.run(ctx, &unstructured.Unstructured{}) })
	wg.Go(func() { s.crds.run(ctx, &metav1.PartialObjectMetadata{}) })
	wg.Wait()
}

// wait returns when both lists were read, or d is over, or ctx has ended.
func (s *sources) wait(ctx context.Context, d time.Duration) (synced bool) {
	t := time.NewTimer(d)
	defer t.Stop()
	for _, st := range []*store{s.apiServices, s.crds} {
		select {
		case <-st.synced:
		case <-t.C:
			return false
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// known reports whether both lists were read at least once.
func (s *sources) known() bool {
	for _, st := range []*store{s.apiServices, s.crds} {
		select {
		case <-st.synced:
		default:
			return false
		}
	}
	return true
}

func (s *sources) facts() facts {
	f := facts{apiServices: make(map[catalog.GV]apiService), crdGroups: make(map[string]int)}
	s.apiServices.each(func(name string, v apiService) {
		// "v1.apps"; the core group's is "v1.".
		if version, group, ok := strings.Cut(name, "."); ok {
			f.apiServices[catalog.GV{Group: group, Version: version}] = v
		}
	})
	s.crds.each(func(name string, _ apiService) {
		// "<plural>.<group>"; a plural has no dot.
		if _, group, ok := strings.Cut(name, "."); ok {
			f.crdGroups[group]++
		}
	})
	return f
}

// store is the end of one reflector: it keeps a few bytes per object and reports changes of them.
type store struct {
	name    string // metric label
	log     *slog.Logger
	metrics *metrics
	changed func() // must not block
	list    func(context.Context, metav1.ListOptions) (runtime.Object, error)
	watch   func(context.Context, metav1.ListOptions) (watch.Interface, error)

	synced chan struct{} // closed with the first complete list

	mu      sync.Mutex
	objects map[string]apiService
	failing bool // so that a row of failures is logged once
}

func newStore(name string, log *slog.Logger, m *metrics, changed func()) *store {
	return &store{name: name, log: log, metrics: m, changed: changed, synced: make(chan struct{}), objects: make(map[string]apiService)}
}

func (s *store) run(ctx context.Context, kind runtime.Object) {
	lw := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			l, err := s.list(ctx, o)
			if err != nil { // all is well with the watch that follows, not before
				s.note(ctx, err)
			}
			return l, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			w, err := s.watch(ctx, o)
			// An apiserver without streamed lists refuses one as invalid, and the reflector then lists: no failure.
			if o.SendInitialEvents == nil || !apierrors.IsInvalid(err) {
				s.note(ctx, err)
			}
			return w, err
		},
	}
	// The default waits up to 30 s between attempts, too long after a restart of the apiserver.
	backoff := &wait.Backoff{Duration: 200 * time.Millisecond, Factor: 2, Steps: 5, Cap: 5 * time.Second, Jitter: 0.1}
	cache.NewReflectorWithOptions(lw, kind, s, cache.ReflectorOptions{Name: "mvp-node/" + s.name, Backoff: backoff}).RunWithContext(ctx)
}

// note counts a failure and logs the first of a row.
func (s *store) note(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	s.mu.Lock()
	was := s.failing
	s.failing = err != nil
	s.mu.Unlock()
	if err != nil {
		s.metrics.sourceErrors.WithLabelValues(s.name).Inc()
		if !was {
			s.log.Warn("cannot read what tells the source of group-versions; unknown ones count as built in", "source", s.name, "err", err)
		}
	} else if was {
		s.log.Info("source of group-versions can be read again", "source", s.name)
	}
}

func (s *store) each(f func(name string, v apiService)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, v := range s.objects {
		f(name, v)
	}
}

// digest takes from an object what the store keeps.
func digest(obj any) (name string, v apiService, ok bool) {
	switch o := obj.(type) {
	case *unstructured.Unstructured:
		svc, found, err := unstructured.NestedMap(o.Object, "spec", "service")
		return o.GetName(), apiService{service: found && err == nil && svc != nil, managed: o.GetLabels()[managedLabel]}, true
	case *metav1.PartialObjectMetadata:
		return o.Name, apiService{}, true
	}
	return "", apiService{}, false
}

// Add implements cache.ReflectorStore; called on the reflector's goroutine, as all the following are.
func (s *store) Add(obj any) error { return s.Update(obj) }

// Update implements cache.ReflectorStore.
func (s *store) Update(obj any) error {
	name, v, ok := digest(obj)
	if !ok {
		return nil
	}
	s.mu.Lock()
	s.objects[name] = v
	s.mu.Unlock()
	// Whatever changed, conditions included, may go with a change of what is served.
	s.changed()
	return nil
}

// Delete implements cache.ReflectorStore.
func (s *store) Delete(obj any) error {
	name, _, ok := digest(obj)
	if !ok {
		return nil
	}
	s.mu.Lock()
	delete(s.objects, name)
	s.mu.Unlock()
	s.changed()
	return nil
}

// Replace implements cache.ReflectorStore.
func (s *store) Replace(list []any, _ string) error {
	objects := make(map[string]apiService, len(list))
	for _, obj := range list {
		if name, v, ok := digest(obj); ok {
			objects[name] = v
		}
	}
	s.mu.Lock()
	s.objects = objects
	s.mu.Unlock()
	select {
	case <-s.synced:
	default:
		close(s.synced)
	}
	s.changed()
	return nil
}

// Resync implements cache.ReflectorStore.
func (s *store) Resync() error { return nil }

// Transformer implements cache.TransformingStore: during a streamed list the reflector holds all objects at once.
func (s *store) Transformer() cache.TransformFunc {
	return func(obj any) (any, error) {
		switch o := obj.(type) {
		case *unstructured.Unstructured:
			unstructured.RemoveNestedField(o.Object, "metadata", "managedFields")
			unstructured.RemoveNestedField(o.Object, "metadata", "annotations")
			unstructured.RemoveNestedField(o.Object, "status")
		case *metav1.PartialObjectMetadata:
			o.ManagedFields, o.Annotations, o.Labels = nil, nil, nil
		}
		return obj, nil
	}
}
