package upstream

import (
	"io"
	"sync/atomic"
)

// closing remembers that it was closed.
type closing struct {
	io.Reader
	closed atomic.Bool
}

func (c *closing) Close() error {
	c.closed.Store(true)
	return nil
}

func (c *closing) isClosed() bool { return c.closed.Load() }
