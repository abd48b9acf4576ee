package gossip

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/hashicorp/memberlist"
)

// accept takes connections until the listener is closed. A listener that dies by itself ends the Node.
func (t *transport) accept() {
	const firstPause, longestPause = 5 * time.Millisecond, time.Second
	pause := firstPause
	for {
		raw, err := t.listener.Accept()
		if err != nil {
			if t.life.Err() != nil {
				return
			}
			if errors.Is(err, net.ErrClosed) {
				t.broken <- fmt.Errorf("gossip listener: %w", err)
				return
			}
			// Out of file descriptors, or a connection that was reset before it was taken.
			t.log.Warn("gossip listener cannot accept", "err", err)
			if !sleep(t.life, pause) {
				return
			}
			pause = min(2*pause, longestPause)
			continue
		}
		pause = firstPause
		done, err := t.admit(raw)
		if err != nil {
			raw.Close()
			t.reject(inbound, raw.RemoteAddr().String(), err)
			continue
		}
		if !t.spawn(func() { t.serve(raw, done) }) {
			raw.Close()
			return
		}
	}
}

// admit takes a place among the handshakes; done gives it back.
func (t *transport) admit(raw net.Conn) (done func(), err error) {
	host, _, err := net.SplitHostPort(raw.RemoteAddr().String())
	if err != nil {
		host = raw.RemoteAddr().String()
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.inbound >= maxInbound:
		return nil, fmt.Errorf("%w: %d are open", errLimit, t.inbound)
	case t.shaking >= maxHandshakes:
		return nil, fmt.Errorf("%w: %d are in handshake", errLimit, t.shaking)
	case t.shakingBy[host] >= maxHandshakesPerHost:
		return nil, fmt.Errorf("%w: %d from this host are in handshake", errLimit, t.shakingBy[host])
	}
	t.shaking++
	t.shakingBy[host]++
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.shaking--
		if t.shakingBy[host]--; t.shakingBy[host] == 0 {
			delete(t.shakingBy, host)
		}
	}, nil
}

// serve authenticates an accepted connection and lives as long as it carries packets. A stream becomes memberlist's.
func (t *transport) serve(raw net.Conn, done func()) {
	conn, err := t.track(raw, inbound)
	if err != nil {
		done()
		return
	}
	c := tls.Server(conn, t.server)
	kind, err := t.welcome(c)
	done()
	if err != nil {
		conn.Close()
		if t.life.Err() == nil {
			t.reject(inbound, raw.RemoteAddr().String(), err)
		}
		return
	}
	if kind == kindStream {
		select {
		case t.streams <- &stream{Conn: c, left: maxStream}:
		case <-t.life.Done():
			conn.Close()
		}
		return
	}
	defer conn.Close()
	if err := t.readPackets(c); err != nil && t.life.Err() == nil && !errors.Is(err, io.EOF) {
		t.log.Debug("gossip packet connection ended", "peer", raw.RemoteAddr().String(), "err", err)
	}
}

// welcome does the TLS handshake, which admits nodes of this cluster only, and reads the greeting.
func (t *transport) welcome(c *tls.Conn) (kind byte, err error) {
	ctx, cancel := context.WithTimeout(t.life, t.timing.HandshakeTimeout)
	defer cancel()
	if err := c.HandshakeContext(ctx); err != nil {
		return 0, err
	}
	deadline, _ := ctx.Deadline()
	c.SetDeadline(deadline)
	head := make([]byte, 2)
	if _, err := io.ReadFull(c, head); err != nil {
		return 0, fmt.Errorf("greeting: %w", err)
	}
	if head[0] != kindPackets && head[0] != kindStream {
		return 0, fmt.Errorf("greeting: kind %q is not known", head[0])
	}
	cluster := make([]byte, head[1])
	if _, err := io.ReadFull(c, cluster); err != nil {
		return 0, fmt.Errorf("greeting: %w", err)
	}
	if string(cluster) != t.cluster {
		return 0, fmt.Errorf("%w: %q", errLabel, cluster)
	}
	return head[0], c.SetDeadline(time.Time{})
}

// readPackets hands packets to memberlist and acknowledges them, so that the sender finds a connection that leads nowhere within
// its write timeout instead of within TCP's quarter of an hour.
func (t *transport) readPackets(c *tls.Conn) error {
	// The sender closes an idle connection first; this is for one that vanished.
	patience := 2*t.timing.IdleTimeout + t.timing.WriteTimeout
	r := bufio.NewReaderSize(c, maxPacket)
	var acks []byte
	for {
		c.SetReadDeadline(time.Now().Add(patience))
		var head [2]byte
		if _, err := io.ReadFull(r, head[:]); err != nil {
			return err
		}
		n := int(binary.BigEndian.Uint16(head[:]))
		if n == 0 || n > maxPacket {
			return fmt.Errorf("packet of %d bytes, 1 to %d are allowed", n, maxPacket)
		}
		buf := make([]byte, n)
		if _, err := io.ReadFull(r, buf); err != nil {
			return err
		}
		if _, label, err := memberlist.RemoveLabelHeaderFromPacket(buf); err != nil || label != t.cluster {
			// memberlist would drop it as well, but without a count.
			err = fmt.Errorf("packet: %w: %q", errLabel, label)
			t.reject(inbound, c.RemoteAddr().String(), err)
			return err
		}
		select {
		case t.packets <- &memberlist.Packet{Buf: buf, From: c.RemoteAddr(), Timestamp: time.Now()}:
		case <-t.life.Done():
			return errClosed
		}
		t.metrics.packets.WithLabelValues(string(inbound)).Inc()
		t.metrics.packetBytes.WithLabelValues(string(inbound)).Add(float64(n))
		if acks = append(acks, ackByte); r.Buffered() > 0 && len(acks) < queueLength {
			continue
		}
		c.SetWriteDeadline(time.Now().Add(t.timing.WriteTimeout))
		if _, err := c.Write(acks); err != nil {
			return err
		}
		acks = acks[:0]
	}
}

// sleep waits; false if ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
