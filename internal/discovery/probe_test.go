package discovery

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

func TestJudge(t *testing.T) {
	for name, test := range map[string]struct {
		wasUp   bool
		results []probeResult
		want    []bool
	}{
		"first answer":          {false, []probeResult{probeReady}, []bool{true}},
		"first refusal to tell": {false, []probeResult{probeForbidden}, []bool{true}},
		"refused":               {true, []probeResult{probeRefused, probeReady}, []bool{false, true}},
		"stopping":              {true, []probeResult{probeStopping, probeReady}, []bool{false, true}},
		"one failure":           {true, []probeResult{probeNotReady, probeReady, probeError, probeReady}, []bool{true, true, true, true}},
		"two failures":          {true, []probeResult{probeNotReady, probeError, probeError, probeReady}, []bool{true, false, false, true}},
		"refused as the second": {true, []probeResult{probeError, probeRefused}, []bool{true, false}},
		"down stays down":       {false, []probeResult{probeError, probeNotReady, probeRefused}, []bool{false, false, false}},
		"forbidden ends a row":  {true, []probeResult{probeError, probeForbidden, probeError}, []bool{true, true, true}},
	} {
		t.Run(name, func(t *testing.T) {
			up, failures := test.wasUp, 0
			var got []bool
			for _, r := range test.results {
				up, failures = judge(up, failures, r)
				got = append(got, up)
			}
			if d := cmp.Diff(test.want, got); d != "" {
				t.Error(d)
			}
		})
	}
}

// readyAnswer is one answer of /readyz.
type readyAnswer struct {
	status int
	body   string
}

const shuttingDown = "[+]ping ok\n[-]shutdown failed: reason withheld\nreadyz check failed\n"

// script makes /readyz give the answers one after the other, and the last one for ever. The result tells how many were given.
func (a *apiserver) script(answers ...readyAnswer) (asked func() int) {
	var mu sync.Mutex
	n := 0
	hook := func(path string) {
		if path != "/readyz" {
			return
		}
		mu.Lock()
		next := answers[min(n, len(answers)-1)]
		n++
		mu.Unlock()
		a.set(func(a *apiserver) { a.readyz, a.body = next.status, next.body })
	}
	a.set(func(a *apiserver) { a.hook = hook })
	return func() int {
		mu.Lock()
		defer mu.Unlock()
		return n
	}
}

// prober is a Probe under test with what it reported.
type prober struct {
	*Probe
	reg     *prometheus.Registry
	changes chan change
	log     *logs
}

// change is a report, and how many answers of each result led to it.
type change struct {
	health Health
	counts map[probeResult]int
}

func newProber(t testing.TB, a *apiserver, options ...func(*ProbeOptions)) *prober {
	t.Helper()
	p := &prober{reg: prometheus.NewPedanticRegistry(), changes: make(chan change, 100), log: &logs{}}
	o := DefaultProbeOptions()
	o.Config = a.config()
	// The timeout is never part of a passing test, but of those where it is the subject.
	o.Interval, o.Timeout = 5*time.Millisecond, 20*time.Second
	o.OnChange = func(h Health) { p.changes <- change{h, p.counts()} }
	o.Logger = slog.New(slog.NewTextHandler(p.log, nil))
	o.Registerer = p.reg
	for _, f := range options {
		f(&o)
	}
	var err error
	if p.Probe, err = NewProbe(o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.client.closeIdle)
	return p
}

// counts are the results so far, without zeros.
func (p *prober) counts() map[probeResult]int {
	counts := make(map[probeResult]int)
	for _, r := range []probeResult{probeReady, probeForbidden, probeNotReady, probeStopping, probeRefused, probeError} {
		if n := int(testutil.ToFloat64(p.metrics.probes.WithLabelValues(string(r)))); n > 0 {
			counts[r] = n
		}
	}
	return counts
}

// next waits for the next report.
func (p *prober) next(t testing.TB) change {
	t.Helper()
	select {
	case c := <-p.changes:
		return c
	case <-time.After(20 * time.Second):
		t.Fatalf("no change of health; it is %+v", p.Health())
		return change{}
	}
}

// logs collects log lines.
type logs struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logs) count(s string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.b.String(), s)
}

// start runs a Watcher or Probe; stop, called at the latest at the end of the test, waits until it has ended.
func start(t testing.TB, run func(context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("Run returned %v", err)
			}
		case <-time.After(20 * time.Second):
			t.Error("Run does not return")
		}
	})
	t.Cleanup(stop)
	return stop
}

var ok = readyAnswer{200, "ok"}

func TestProbeHealth(t *testing.T) {
	up, down := func(h Health) bool { return h.Up }, func(h Health) bool { return !h.Up }
	for name, test := range map[string]struct {
		script []readyAnswer
		want   []int // after how many answers up and down are reported, in turn
		reason string
	}{
		"up on the first ok":          {[]readyAnswer{{500, "[-]etcd failed"}, {503, ""}, {503, ""}, ok}, []int{4}, ""},
		"down at once while stopping": {[]readyAnswer{ok, ok, {500, shuttingDown}}, []int{1, 3}, "/readyz says that the apiserver shuts down"},
		"down after two failures":     {[]readyAnswer{ok, {500, "[-]etcd failed"}, ok, {500, ""}, {503, ""}}, []int{1, 5}, "/readyz answers 503"},
		"up again on the first ok":    {[]readyAnswer{ok, {500, ""}, {500, ""}, {500, ""}, ok}, []int{1, 3, 5}, ""},
		"up at once after stopping":   {[]readyAnswer{ok, {500, shuttingDown}, ok}, []int{1, 2, 3}, ""},
		"a redirection is no answer":  {[]readyAnswer{ok, {302, ""}, {302, ""}}, []int{1, 3}, "/readyz answers 302"},
		"forbidden counts as up":      {[]readyAnswer{{403, "forbidden"}, {403, "forbidden"}, {500, ""}, {403, ""}, {500, ""}, {500, ""}}, []int{1, 6}, "/readyz answers 500"},
		"unauthorized counts as up":   {[]readyAnswer{{500, ""}, {401, ""}}, []int{2}, ""},
		"too many requests: 429":      {[]readyAnswer{ok, {429, ""}, ok, {429, ""}, {429, ""}}, []int{1, 5}, "/readyz answers 429"},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAPIServer(t)
			a.script(test.script...)
			p := newProber(t, a)
			if d := cmp.Diff(Health{Reason: "not asked yet"}, p.Health()); d != "" {
				t.Error(d)
			}
			stop := start(t, p.Run)
			var last Health
			for i, want := range test.want {
				is := up
				if i%2 == 1 {
					is = down
				}
				c := p.next(t)
				n := 0
				for _, m := range c.counts {
					n += m
				}
				if !is(c.health) || n != want || c.health.Version != "v1.36.3" {
					t.Errorf("report %d: %+v after %d answers (%v), want %d", i, c.health, n, c.counts, want)
				}
				last = c.health
			}
			if last.Reason != test.reason {
				t.Errorf("reason is %q, want %q", last.Reason, test.reason)
			}
			stop()
			if n := len(p.changes); n != 0 {
				t.Errorf("%d more changes than expected", n)
			}
			gauge := 0.0
			if last.Up {
				gauge = 1
			}
			if got := testutil.ToFloat64(p.metrics.up); got != gauge {
				t.Errorf("mvp_discovery_apiserver_up is %v, want %v", got, gauge)
			}
		})
	}
}

// A user who may not ask /readyz is told about once, not once a second.
func TestProbeWarnsOnce(t *testing.T) {
	for _, status := range []int{http.StatusUnauthorized, http.StatusForbidden} {
		a := newAPIServer(t)
		asked := a.script(readyAnswer{status, ""})
		p := newProber(t, a)
		stop := start(t, p.Run)
		if c := p.next(t); !c.health.Up {
			t.Errorf("%d: %+v", status, c.health)
		}
		eventually(t, "asked five times", func() bool { return asked() >= 5 })
		stop()
		if n := p.log.count("level=WARN"); n != 1 {
			t.Errorf("%d: %d warnings", status, n)
		}
	}
}

// A closed port is certain: down at the first refusal, and up at the first ok of the apiserver that comes back on it.
func TestProbeRefused(t *testing.T) {
	a := newAPIServer(t)
	p := newProber(t, a)
	start(t, p.Run)
	if c := p.next(t); !c.health.Up {
		t.Fatalf("%+v", c.health)
	}
	a.CloseClientConnections()
	a.Close()
	c := p.next(t)
	if d := cmp.Diff(Health{Version: "v1.36.3", Reason: "connection refused"}, c.health); d != "" {
		t.Error(d)
	}
	// A question under way when the port closed may have been cut off before.
	if c.counts[probeRefused] != 1 || c.counts[probeError] > 1 {
		t.Errorf("down after %v", c.counts)
	}
	a.set(func(a *apiserver) { a.version = "v1.37.0" })
	a.restart(t)
	if d := cmp.Diff(Health{Up: true, Version: "v1.37.0"}, p.next(t).health); d != "" {
		t.Error(d)
	}
}

// An apiserver that takes connections and never answers is found by the timeout; Run does not wait for it at the end.
func TestProbeHangs(t *testing.T) {
	a := newAPIServer(t)
	p := newProber(t, a, func(o *ProbeOptions) { o.Timeout = 500 * time.Millisecond })
	stop := start(t, p.Run)
	if c := p.next(t); !c.health.Up {
		t.Fatalf("%+v", c.health)
	}
	a.hang("/readyz")
	c := p.next(t)
	if c.health.Up || c.counts[probeError] != 2 || !strings.Contains(c.health.Reason, "deadline") {
		t.Errorf("%+v after %v", c.health, c.counts)
	}
	stop()
	if len(p.changes) != 0 {
		t.Errorf("the end was reported as a change: %+v", <-p.changes)
	}
}

// The listener is there but nobody speaks TLS behind it.
func TestProbeCutOff(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_ = c.Close()
		}
	})
	t.Cleanup(func() { _ = l.Close(); wg.Wait() })
	a := newAPIServer(t)
	p := newProber(t, a, func(o *ProbeOptions) { o.Config.Host = "https://" + l.Addr().String() })
	stop := start(t, p.Run)
	eventually(t, "asked three times", func() bool { return p.counts()[probeError] >= 3 })
	stop()
	if h := p.Health(); h.Up || h.Reason == "" || len(p.changes) != 0 {
		t.Errorf("%+v, %d changes", h, len(p.changes))
	}
}

func TestProbeVersion(t *testing.T) {
	t.Run("changes are reported", func(t *testing.T) {
		a := newAPIServer(t)
		p := newProber(t, a, func(o *ProbeOptions) { o.VersionEvery = time.Nanosecond })
		start(t, p.Run)
		for _, v := range []string{"v1.36.3", "v1.37.0", "v1.36.3"} {
			a.set(func(a *apiserver) { a.version = v })
			if d := cmp.Diff(Health{Up: true, Version: v}, p.next(t).health); d != "" {
				t.Error(d)
			}
		}
	})
	t.Run("read again after any failure", func(t *testing.T) {
		a := newAPIServer(t)
		p := newProber(t, a, func(o *ProbeOptions) { o.VersionEvery = time.Hour })
		asked := a.script(ok, ok, readyAnswer{500, ""}, ok)
		start(t, p.Run)
		p.next(t)
		a.set(func(a *apiserver) { a.version = "v1.37.0" })
		if c := p.next(t); c.health != (Health{Up: true, Version: "v1.37.0"}) || asked() < 4 {
			t.Errorf("%+v after %d questions", c.health, asked())
		}
	})
	t.Run("not read all the time", func(t *testing.T) {
		a := newAPIServer(t)
		p := newProber(t, a, func(o *ProbeOptions) { o.VersionEvery = time.Hour })
		stop := start(t, p.Run)
		eventually(t, "asked five times", func() bool { return p.counts()[probeReady] >= 5 })
		stop()
		n := 0
		for _, s := range a.take() {
			if strings.HasPrefix(s, "/version") {
				n++
			}
		}
		if n != 1 {
			t.Errorf("/version was read %d times", n)
		}
	})
	t.Run("an answer that is none keeps the old one", func(t *testing.T) {
		a := newAPIServer(t)
		p := newProber(t, a, func(o *ProbeOptions) { o.VersionEvery = time.Nanosecond })
		start(t, p.Run)
		p.next(t)
		a.set(func(a *apiserver) { a.version = "" })
		n := p.counts()[probeReady]
		eventually(t, "asked three times more", func() bool { return p.counts()[probeReady] > n+3 })
		if d := cmp.Diff(Health{Up: true, Version: "v1.36.3"}, p.Health()); d != "" {
			t.Error(d)
		}
		a.set(func(a *apiserver) { a.fail["/version"] = 500; a.version = "v1.37.0" })
		n = p.counts()[probeReady]
		eventually(t, "asked three times more", func() bool { return p.counts()[probeReady] > n+3 })
		a.set(func(a *apiserver) { delete(a.fail, "/version") })
		if d := cmp.Diff(Health{Up: true, Version: "v1.37.0"}, p.next(t).health); d != "" {
			t.Error(d)
		}
	})
}

func TestProbeMetrics(t *testing.T) {
	a := newAPIServer(t)
	p := newProber(t, a)
	want := `
# HELP mvp_discovery_apiserver_up 1 while the local apiserver is ready, by its /readyz.
# TYPE mvp_discovery_apiserver_up gauge
mvp_discovery_apiserver_up 0
# HELP mvp_discovery_probes_total Questions for the local apiserver's /readyz, by result.
# TYPE mvp_discovery_probes_total counter
mvp_discovery_probes_total{result="error"} 0
mvp_discovery_probes_total{result="forbidden"} 0
mvp_discovery_probes_total{result="not_ready"} 0
mvp_discovery_probes_total{result="ready"} 0
mvp_discovery_probes_total{result="refused"} 0
mvp_discovery_probes_total{result="stopping"} 0
`
	if err := testutil.GatherAndCompare(p.reg, strings.NewReader(want)); err != nil {
		t.Error(err)
	}
}

func TestProbeOptions(t *testing.T) {
	var zero ProbeOptions
	err := zero.Validate()
	for _, want := range []string{"Config or OnChange", "Interval 0s", "Logger or Registerer"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not say %q", err, want)
		}
	}
	if _, err := NewProbe(zero); err == nil {
		t.Error("NewProbe took no options at all")
	}
}
