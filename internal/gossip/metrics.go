package gossip

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/mvp-mesh/mvp-node/internal/route"
)

// rejectReason says why a connection did not come about. The first group is found by the TLS handshake.
type rejectReason string

const (
	rejectForeignCluster rejectReason = "foreign_cluster" // certificate of another trust domain, or another label
	rejectNotAllowed     rejectReason = "not_allowed"     // an operator, or a node that is not on the list
	rejectNoIdentity     rejectReason = "no_identity"     // certificate of the mesh CA without a usable identity
	rejectWrongPeer      rejectReason = "wrong_peer"      // another node than the dialled one
	rejectUntrusted      rejectReason = "untrusted"       // not signed by the mesh CA, or expired
	rejectTimeout        rejectReason = "timeout"         // handshake or greeting took too long
	rejectProtocol       rejectReason = "protocol"        // not our protocol, no certificate, or the other end hung up
	rejectLimit          rejectReason = "limit"           // too many connections at once
)

var rejectReasons = []rejectReason{
	rejectForeignCluster, rejectNotAllowed, rejectNoIdentity, rejectWrongPeer, rejectUntrusted, rejectTimeout, rejectProtocol,
	rejectLimit,
}

// dropReason says why a packet was not sent.
type dropReason string

const (
	dropFull        dropReason = "queue_full"  // the peer takes packets more slowly than they come
	dropUnreachable dropReason = "unreachable" // no connection to the peer
	dropBroken      dropReason = "broken"      // the connection broke while it was written
	dropTooLarge    dropReason = "too_large"   // longer than a packet may be
	dropPeers       dropReason = "too_many_peers"
)

var dropReasons = []dropReason{dropFull, dropUnreachable, dropBroken, dropTooLarge, dropPeers}

type metrics struct {
	members       *prometheus.GaugeVec
	expected      prometheus.Gauge
	missing       prometheus.Gauge
	unreached     prometheus.Gauge
	complete      prometheus.Gauge
	converged     prometheus.Gauge
	behind        prometheus.Gauge
	health        prometheus.Gauge
	viewChanges   prometheus.Counter
	updates       prometheus.Counter
	fetches       *prometheus.CounterVec
	fetchSeconds  prometheus.Histogram
	joins         *prometheus.CounterVec
	conflicts     prometheus.Counter
	refused       prometheus.Counter
	foreign       prometheus.Counter
	rejected      *prometheus.CounterVec
	connections   *prometheus.GaugeVec
	packets       *prometheus.CounterVec
	packetBytes   *prometheus.CounterVec
	packetsQueued prometheus.Gauge
	dropped       *prometheus.CounterVec
}

func newMetrics(reg prometheus.Registerer) *metrics {
	f := promauto.With(reg)
	gauge := func(name, help string) prometheus.Gauge {
		return f.NewGauge(prometheus.GaugeOpts{Name: "mvp_gossip_" + name, Help: help})
	}
	counter := func(name, help string) prometheus.Counter {
		return f.NewCounter(prometheus.CounterOpts{Name: "mvp_gossip_" + name, Help: help})
	}
	counters := func(name, help string, labels ...string) *prometheus.CounterVec {
		return f.NewCounterVec(prometheus.CounterOpts{Name: "mvp_gossip_" + name, Help: help}, labels)
	}
	gauges := func(name, help string, labels ...string) *prometheus.GaugeVec {
		return f.NewGaugeVec(prometheus.GaugeOpts{Name: "mvp_gossip_" + name, Help: help}, labels)
	}
	m := &metrics{
		members:     gauges("members", "Members in the view by state, the own node included.", "state"),
		expected:    gauge("expected_members", "Members that the configuration says should be there, the own node included; 0 if it does not say."),
		missing:     gauge("missing_members", "Expected members that are not alive. Alert when this stays above 0."),
		unreached:   gauge("seeds_unreached", "Seeds at which no live member is and that do not answer. Alert when this stays above 0."),
		complete:    gauge("view_complete", "1 while everything that any member may serve is known, so that a 404 is the truth."),
		converged:   gauge("converged", "1 while all expected members are ready and all live members hold the same view."),
		behind:      gauge("catalogs_behind", "Live or stale members whose held catalog is not the one that they advertise, also after the hold is over."),
		health:      gauge("health_score", "Memberlist's own health: 0 is healthy, each step means slower probing."),
		viewChanges: counter("view_changes_total", "Views published."),
		updates:     counter("updates_total", "Updates of the own metadata handed to memberlist."),
		fetches:     counters("fetches_total", "Pulls of a member's catalog by result.", "result"),
		fetchSeconds: f.NewHistogram(prometheus.HistogramOpts{
			Name: "mvp_gossip_fetch_duration_seconds", Help: "Time that a pull of a catalog took, failures included.",
			Buckets: []float64{.001, .005, .02, .1, .5, 2, 10},
		}),
		joins:         counters("joins_total", "Full state exchanges with seeds and members by result.", "result"),
		conflicts:     counter("conflicts_total", "Times that a name was claimed from two addresses at once."),
		refused:       counter("members_refused_total", "Times that a member was refused for its name or its metadata."),
		foreign:       counter("foreign_cluster_rejected_total", "Connections, packets and streams of another cluster that were rejected."),
		rejected:      counters("connections_rejected_total", "Connections that did not come about, by direction and reason.", "direction", "reason"),
		connections:   gauges("connections", "Open connections by direction.", "direction"),
		packets:       counters("packets_total", "Packets by direction.", "direction"),
		packetBytes:   counters("packet_bytes_total", "Bytes of packets by direction.", "direction"),
		packetsQueued: gauge("packets_queued", "Packets that wait for a connection to take them."),
		dropped:       counters("packets_dropped_total", "Packets that were not sent, by reason.", "reason"),
	}
	// Zero is an observation too: all label sets exist from the start.
	for s := route.Starting; s <= route.Missing; s++ {
		m.members.WithLabelValues(s.String())
	}
	for _, d := range []direction{inbound, outbound} {
		for _, r := range rejectReasons {
			m.rejected.WithLabelValues(string(d), string(r))
		}
		m.connections.WithLabelValues(string(d))
		m.packets.WithLabelValues(string(d))
		m.packetBytes.WithLabelValues(string(d))
	}
	for _, r := range dropReasons {
		m.dropped.WithLabelValues(string(r))
	}
	for _, r := range []string{resultOK, resultCurrent, resultError} {
		m.fetches.WithLabelValues(r)
	}
	for _, r := range []string{resultOK, resultError} {
		m.joins.WithLabelValues(r)
	}
	return m
}

// Results of fetches and joins.
const (
	resultOK      = "ok"
	resultCurrent = "current" // the origin still has what is held
	resultError   = "error"
)

// direction of a connection or packet, seen from the own node.
type direction string

const (
	inbound  direction = "in"
	outbound direction = "out"
)

func bit(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
