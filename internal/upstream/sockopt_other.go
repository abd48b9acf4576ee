//go:build !linux

package upstream

import (
	"syscall"
	"time"
)

// userTimeout has no counterpart here; HTTP/2 pings and TCP keepalive find dead connections.
func userTimeout(time.Duration) func(network, address string, c syscall.RawConn) error { return nil }
