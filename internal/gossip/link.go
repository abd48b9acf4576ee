package gossip

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/memberlist"
)

// link sends packets to one peer over one connection, which it makes when there is something to send and closes when there has
// been nothing for a while.
type link struct {
	addr  memberlist.Address
	queue chan []byte
}

// WriteToAddress implements memberlist.NodeAwareTransport. It never blocks: the packet is queued for the peer, or dropped and
// counted. memberlist does without packets that are lost, and with an error would do nothing better.
func (t *transport) WriteToAddress(b []byte, addr memberlist.Address) (time.Time, error) {
	now := time.Now()
	if len(b) == 0 || len(b) > maxPacket {
		t.drop(dropTooLarge, 1)
		return now, fmt.Errorf("packet of %d bytes, 1 to %d are allowed", len(b), maxPacket)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return now, errClosed
	}
	l := t.links[addr]
	if l == nil {
		if len(t.links) >= maxLinks {
			t.drop(dropPeers, 1)
			return now, nil
		}
		l = &link{addr: addr, queue: make(chan []byte, queueLength)}
		t.links[addr] = l
		t.wg.Go(func() { t.run(l) })
	}
	select {
	case l.queue <- append([]byte(nil), b...):
		t.pending.Add(1)
		t.metrics.packetsQueued.Inc()
	default:
		t.drop(dropFull, 1)
	}
	return now, nil
}

func (t *transport) drop(r dropReason, n int) {
	t.metrics.dropped.WithLabelValues(string(r)).Add(float64(n))
}

// take receives one queued packet without waiting.
func (t *transport) take(l *link) ([]byte, bool) {
	select {
	case p := <-l.queue:
		t.metrics.packetsQueued.Dec()
		return p, true
	default:
		return nil, false
	}
}

// run is the link's goroutine. It ends when the link was idle, or with the transport.
func (t *transport) run(l *link) {
	const firstPause, longestPause = 50 * time.Millisecond, time.Second
	var (
		c        *packetConn
		pause    = firstPause
		notUntil time.Time // no dialling before: a peer that is away is not dialled for each packet
	)
	hold := func() {
		notUntil, pause = time.Now().Add(pause), min(2*pause, longestPause)
	}
	hangUp := func() {
		if c == nil {
			return
		}
		t.pending.Add(-int64(c.hangUp()))
		if c.good.Load() {
			pause = firstPause
		} else {
			hold() // TLS 1.3 lets the other end refuse us after our side of the handshake is done
		}
		c = nil
	}
	defer hangUp()
	idle := time.NewTimer(t.timing.IdleTimeout)
	defer idle.Stop()
	for {
		var lost <-chan struct{}
		if c != nil {
			lost = c.lost
		}
		select {
		case <-t.life.Done():
			return
		case <-lost:
			hangUp()
		case <-idle.C:
			if t.retire(l) {
				return
			}
			idle.Reset(t.timing.IdleTimeout)
		case p := <-l.queue:
			t.metrics.packetsQueued.Dec()
			idle.Reset(t.timing.IdleTimeout)
			if c != nil && (c.isLost() || time.Since(c.born) > maxAge) {
				hangUp()
			}
			if c == nil {
				if time.Now().Before(notUntil) {
					t.pending.Add(-1)
					t.drop(dropUnreachable, 1)
					continue
				}
				var err error
				if c, err = t.openPackets(l.addr); err != nil {
					n := 1 + t.drain(l)
					t.pending.Add(-int64(n))
					t.drop(dropUnreachable, n) // what waited for the dialling is too old to be of use
					hold()
					continue
				}
			}
			if err := t.send(c, l, p); err != nil {
				hangUp()
			}
		}
	}
}

// retire ends a link to which nothing was sent. WriteToAddress queues under the same lock, so nothing is lost between.
func (t *transport) retire(l *link) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(l.queue) > 0 {
		return false
	}
	delete(t.links, l.addr)
	return true
}

func (t *transport) drain(l *link) (n int) {
	for {
		if _, ok := t.take(l); !ok {
			return n
		}
		n++
	}
}

// send writes p and what else is queued.
func (t *transport) send(c *packetConn, l *link, p []byte) error {
	c.SetWriteDeadline(time.Now().Add(t.timing.WriteTimeout))
	n, bytes := 0, 0
	for ok := true; ok; p, ok = t.next(l, n) {
		c.expect(t.timing.WriteTimeout)
		var head [2]byte
		binary.BigEndian.PutUint16(head[:], uint16(len(p)))
		c.out.Write(head[:]) // its error stays, and Flush returns it
		c.out.Write(p)
		n, bytes = n+1, bytes+len(p)
	}
	if err := c.out.Flush(); err != nil {
		t.drop(dropBroken, n)
		return err
	}
	t.metrics.packets.WithLabelValues(string(outbound)).Add(float64(n))
	t.metrics.packetBytes.WithLabelValues(string(outbound)).Add(float64(bytes))
	return nil
}

// next is take, but for a batch that is full.
func (t *transport) next(l *link, n int) ([]byte, bool) {
	if n >= queueLength {
		return nil, false
	}
	return t.take(l)
}

// flush waits until all packets were acknowledged or given up, or ctx ends.
func (t *transport) flush(ctx context.Context) {
	const look = 5 * time.Millisecond
	for t.pending.Load() > 0 && sleep(ctx, look) {
	}
}

// packetConn is an outgoing packet connection. Its reader goroutine takes the acknowledgements and so finds out, without a packet
// being lost to it, that the other end hung up.
type packetConn struct {
	net.Conn
	out     *bufio.Writer
	born    time.Time
	pending *atomic.Int64 // the transport's
	good    atomic.Bool   // something was acknowledged
	lost    chan struct{} // closed when the reader has ended

	mu    sync.Mutex // guards unack, and its tie to the read deadline
	unack int        // packets written and not acknowledged
}

func (t *transport) openPackets(addr memberlist.Address) (*packetConn, error) {
	ctx, cancel := context.WithTimeout(t.life, t.timing.DialTimeout)
	defer cancel()
	conn, err := t.connect(ctx, addr, kindPackets)
	if err != nil {
		return nil, err
	}
	c := &packetConn{
		Conn: conn, out: bufio.NewWriterSize(conn, maxPacket+2), born: time.Now(), pending: &t.pending, lost: make(chan struct{}),
	}
	if !t.spawn(func() {
		if err := c.readAcks(t.timing.WriteTimeout); t.life.Err() == nil {
			t.log.Debug("gossip packet connection ended", "peer", addr.String(), "err", err)
		}
	}) {
		c.Close()
		return nil, errClosed
	}
	return c, nil
}

func (c *packetConn) isLost() bool {
	select {
	case <-c.lost:
		return true
	default:
		return false
	}
}

// hangUp closes the connection and returns how many packets were never acknowledged.
func (c *packetConn) hangUp() int {
	c.Close()
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.unack
	c.unack = 0
	return n
}

// expect notes a packet that is about to be written. If nothing is acknowledged for d from the first on, the reader gives up.
func (c *packetConn) expect(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.unack == 0 {
		c.SetReadDeadline(time.Now().Add(d))
	}
	c.unack++
}

var errAck = errors.New("acknowledgement of a packet that was not sent")

func (c *packetConn) acked(n int, d time.Duration) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if n > c.unack {
		return errAck
	}
	c.good.Store(true)
	c.pending.Add(-int64(n))
	if c.unack -= n; c.unack > 0 {
		return c.SetReadDeadline(time.Now().Add(d))
	}
	return c.SetReadDeadline(time.Time{})
}

// readAcks returns why the connection ended; it never returns nil.
func (c *packetConn) readAcks(d time.Duration) error {
	defer c.Close()
	defer close(c.lost) // before the Close, so that nobody sees it closed and not lost
	buf := make([]byte, queueLength)
	for {
		n, err := c.Read(buf)
		if err == nil {
			err = c.acked(n, d)
		}
		if err != nil {
			return err
		}
	}
}
