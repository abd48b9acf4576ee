package gossip

import (
	"testing"
)

func TestJoinAndConverge(t *testing.T) {
	m := newMesh(t)
	a, b, c := m.three(nil)
	_, _, _ = a, b, c
}
