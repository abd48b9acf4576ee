package gossip

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/hashicorp/memberlist"

	"github.com/mvp-mesh/mvp-node/internal/catalog"
	"github.com/mvp-mesh/mvp-node/internal/route"
)

// metaFormat is the first byte of the metadata that this version writes.
const metaFormat = 1

// leavingBit in the state byte says that the node is about to leave cleanly. memberlist's own callback does not tell a node that
// left from one that died, so each node says it itself, before.
const leavingBit = 0x80

// meta is what a node says about itself in memberlist's node metadata. It is a value: equal metas are the same facts.
type meta struct {
	format        byte
	known         bool // false for a format newer than ours: nothing below is set then
	state         route.State
	leaving       bool
	mode          route.Mode
	boot          uint64 // drawn at random when the process starts; generations of different boots do not compare
	generation    uint64
	digest        catalog.Digest
	viewHash      route.Hash
	meshAddress   string
	serverVersion string
	nodeVersion   string
}

// metaFixed is the length of the part that has no strings: format, state, mode, boot, generation, digest, view hash.
const metaFixed = 3 + 8 + 8 + 32 + 16

// A compile-time proof of CASES G-02: the longest legal metadata fits memberlist's limit, beyond which it panics.
const (
	maxMeta = metaFixed + 2 + (maxHost + len("[]:65535")) + 1 + maxVersion + 1 + maxVersion
	_       = uint(memberlist.MetaMaxSize - maxMeta)
)

// check reports a value that must not go out, or came in and must not be believed.
func (m meta) check() error {
	if m.state < route.Starting || m.state > route.LocalDown {
		return fmt.Errorf("state %s is not one that a node can be in", m.state)
	}
	if m.mode < route.Enabled || m.mode > route.Disabled {
		return fmt.Errorf("mode %s is not one that a node can be in", m.mode)
	}
	if m.meshAddress != "" {
		if err := checkHostPort(m.meshAddress, false); err != nil {
			return fmt.Errorf("mesh address: %w", err)
		}
	}
	if err := checkVersion(m.serverVersion); err != nil {
		return fmt.Errorf("server version: %w", err)
	}
	if err := checkVersion(m.nodeVersion); err != nil {
		return fmt.Errorf("node version: %w", err)
	}
	if m.state == route.Ready && (m.digest.IsZero() || m.meshAddress == "") {
		return errors.New("state Ready needs a catalog and a mesh address")
	}
	return nil
}

// encode writes a meta that check accepts.
func (m meta) encode() []byte {
	b := make([]byte, 0, maxMeta)
	state := byte(m.state)
	if m.leaving {
		state |= leavingBit
	}
	b = append(b, metaFormat, state, byte(m.mode))
	b = binary.BigEndian.AppendUint64(b, m.boot)
	b = binary.BigEndian.AppendUint64(b, m.generation)
	b = append(b, m.digest[:]...)
	b = append(b, m.viewHash[:]...)
	b = binary.BigEndian.AppendUint16(b, uint16(len(m.meshAddress)))
	b = append(b, m.meshAddress...)
	b = append(b, byte(len(m.serverVersion)))
	b = append(b, m.serverVersion...)
	b = append(b, byte(len(m.nodeVersion)))
	return append(b, m.nodeVersion...)
}

var errMetaShort = errors.New("metadata ends early")

// decodeMeta reads what a member says about itself. A newer format is no error: the member exists, its facts are not known.
func decodeMeta(b []byte) (meta, error) {
	if len(b) == 0 {
		return meta{}, errMetaShort
	}
	m := meta{format: b[0]}
	if m.format == 0 {
		return meta{}, errors.New("metadata of format 0")
	}
	if m.format > metaFormat {
		return m, nil
	}
	if len(b) < metaFixed {
		return meta{}, errMetaShort
	}
	m.known = true
	m.state, m.leaving = route.State(b[1]&^leavingBit), b[1]&leavingBit != 0
	m.mode = route.Mode(b[2])
	b = b[3:]
	m.boot = binary.BigEndian.Uint64(b)
	m.generation = binary.BigEndian.Uint64(b[8:])
	b = b[16:]
	b = b[copy(m.digest[:], b):]
	b = b[copy(m.viewHash[:], b):]
	for _, f := range []struct {
		s     *string
		bytes int // of the length
	}{{&m.meshAddress, 2}, {&m.serverVersion, 1}, {&m.nodeVersion, 1}} {
		if len(b) < f.bytes {
			return meta{}, errMetaShort
		}
		n := int(b[0])
		if f.bytes == 2 {
			n = n<<8 | int(b[1])
		}
		if b = b[f.bytes:]; len(b) < n {
			return meta{}, errMetaShort
		}
		*f.s, b = string(b[:n]), b[n:]
	}
	if len(b) != 0 {
		return meta{}, fmt.Errorf("%d bytes behind the metadata", len(b))
	}
	if err := m.check(); err != nil {
		return meta{}, err
	}
	return m, nil
}
