package gossip

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"sync"

	"github.com/hashicorp/memberlist"
)

// delegate is what memberlist calls. Most of the calls come under memberlist's node lock: they copy, enqueue and return, and
// never call memberlist.
type delegate struct{ n *Node }

var (
	_ memberlist.Delegate         = delegate{}
	_ memberlist.EventDelegate    = delegate{}
	_ memberlist.AliveDelegate    = delegate{}
	_ memberlist.ConflictDelegate = delegate{}
	_ memberlist.MergeDelegate    = delegate{}
)

// NodeMeta is the own node's metadata. memberlist keeps the slice; nobody writes to it again.
func (d delegate) NodeMeta(int) []byte { return *d.n.encoded.Load() }

// NotifyMsg, GetBroadcasts, LocalState and MergeRemoteState are not used: all that a node has to say fits its metadata.
func (d delegate) NotifyMsg([]byte) {}

// GetBroadcasts is not used.
func (d delegate) GetBroadcasts(int, int) [][]byte { return nil }

// LocalState is not used.
func (d delegate) LocalState(bool) []byte { return nil }

// MergeRemoteState is not used.
func (d delegate) MergeRemoteState([]byte, bool) {}

// NotifyJoin says that a member is there, or there again.
func (d delegate) NotifyJoin(m *memberlist.Node) { d.seen(m) }

// NotifyUpdate says that a member's metadata changed.
func (d delegate) NotifyUpdate(m *memberlist.Node) { d.seen(m) }

func (d delegate) seen(m *memberlist.Node) {
	facts, err := decodeMeta(m.Meta)
	if err != nil {
		facts = meta{} // NotifyAlive has refused it before
	}
	d.n.mail.put(event{kind: eventAlive, name: m.Name, address: m.Address(), meta: facts})
}

// NotifyLeave says that a member left or was found dead. Which of the two is not to be had from m: memberlist fills in no State.
func (d delegate) NotifyLeave(m *memberlist.Node) {
	d.n.mail.put(event{kind: eventDead, name: m.Name})
}

// NotifyAlive refuses members that cannot be one. What it refuses is no member for memberlist either.
func (d delegate) NotifyAlive(m *memberlist.Node) error {
	if m.Name == d.n.o.Name {
		return nil
	}
	err := checkName(m.Name)
	if err == nil && !d.n.o.allowed(m.Name) {
		err = fmt.Errorf("%q is not on the list of allowed names", m.Name)
	}
	if err == nil {
		_, err = decodeMeta(m.Meta)
	}
	if err != nil {
		d.n.metrics.refused.Inc()
	}
	return err
}

// NotifyConflict says that a live member's name is claimed from another address. A machine that was replaced ends so until the
// old one is found dead; anything that lasts is a configuration error.
func (d delegate) NotifyConflict(existing, other *memberlist.Node) {
	d.n.metrics.conflicts.Inc()
	d.n.log.Warn("member claimed from two addresses", "peer", existing.Name, "address", existing.Address(), "claimed", other.Address())
}

// NotifyMerge sees the whole state of another node before a full exchange with it. It learns who left cleanly, and whether the
// other one knows the own node as it is now; if not, sync repeats the exchange. It runs under no lock and never refuses.
func (d delegate) NotifyMerge(others []*memberlist.Node) error {
	known := false
	for _, m := range others {
		switch {
		case m.Name == d.n.o.Name:
			ip, port, _ := d.n.transport.FinalAdvertiseAddr("", 0)
			known = m.State == memberlist.StateAlive && m.Addr.Equal(ip) && int(m.Port) == port
		case m.State == memberlist.StateLeft:
			if facts, err := decodeMeta(m.Meta); err == nil && facts.known {
				d.n.mail.put(event{kind: eventLeft, name: m.Name, meta: facts})
			}
		}
	}
	if !known {
		d.n.contested.Store(true)
		notify(d.n.kick)
	}
	return nil
}

// eventKind says what an event tells.
type eventKind uint8

const (
	eventAlive   eventKind = iota + 1 // name is alive at address and says meta
	eventDead                         // name left or was found dead
	eventLeft                         // name, in the boot of meta, left cleanly, as another member knows
	eventSeed                         // somebody is at the seed called name
	eventNoSeed                       // nobody is
	eventRefetch                      // the catalog of name is outdated
)

type event struct {
	kind    eventKind
	name    string
	address string
	meta    meta
}

// mailbox hands events to the loop. put never blocks, because memberlist calls it under its lock.
type mailbox struct {
	mu     sync.Mutex // guards events
	events []event
	wake   chan struct{} // capacity 1
}

func (m *mailbox) put(e event) {
	m.mu.Lock()
	m.events = append(m.events, e)
	m.mu.Unlock()
	notify(m.wake)
}

func (m *mailbox) take() []event {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := m.events
	m.events = nil
	return out
}

// notify wakes the receiver of a channel of capacity 1, once however often it is called.
func notify(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// logWriter turns memberlist's lines into records of our logger.
type logWriter struct{ log *slog.Logger }

// maxLogLine cuts lines off in which memberlist prints metadata.
const maxLogLine = 400

// Write implements io.Writer. Each call is one line.
func (w logWriter) Write(line []byte) (int, error) {
	n := len(line)
	level := slog.LevelInfo
	line = bytes.TrimSpace(line)
	for _, p := range []struct {
		prefix string
		level  slog.Level
	}{
		{"[DEBUG] ", slog.LevelDebug}, {"[INFO] ", slog.LevelInfo}, {"[WARN] ", slog.LevelWarn}, {"[ERR] ", slog.LevelError},
		{"[ERROR] ", slog.LevelError},
	} {
		if rest, ok := bytes.CutPrefix(line, []byte(p.prefix)); ok {
			line, level = rest, p.level
			break
		}
	}
	line = bytes.TrimPrefix(line, []byte("memberlist: "))
	if bytes.HasPrefix(line, []byte("Binding to public address without encryption")) {
		return n, nil // memberlist cannot know that the transport is mTLS
	}
	w.log.Log(context.Background(), level, "memberlist", "line", string(line[:min(len(line), maxLogLine)]))
	return n, nil
}
