package mesh

import (
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/keepalive"
)

// What both ends of a mesh connection must agree about stands here and nowhere else: a client that pings more often than the
// server allows is disconnected again and again (CASES S-11). Numbers are those of RELIABILITY section 2.
const (
	// pingAfter and pingTimeout find a peer that vanished without a word in at most 13 s, on both ends. gRPC's clients ping no
	// more often than every 10 s.
	pingAfter   = 10 * time.Second
	pingTimeout = 3 * time.Second
	// pingMinTime is what the server allows; half of what clients do, so that clocks and schedulers may disagree.
	pingMinTime = pingAfter / 2

	// maxStreams bounds the streams of one connection. gRPC's clients wait silently when they are used up, so a client's own
	// limits must end before that: forward.Limits allows 256 short requests on shortConns and 2,000 long ones on longConns.
	maxStreams = 1000
	shortConns = 2
	longConns  = 3

	maxHeaderBytes = 64 << 10 // of gRPC metadata; a forward carries none, its head is a message
	// maxRequestBytes bounds a message to a server: a head with 64 KiB of headers, 32 KiB of body, and a user with thousands of
	// groups.
	maxRequestBytes = 2 << 20
	// maxCatalogBytes bounds a catalog, after decompression: 100,000 resources of 80 bytes.
	maxCatalogBytes = 8 << 20
	// handshakeTimeout bounds a connection from accept to the end of the HTTP/2 preface.
	handshakeTimeout = 5 * time.Second

	// Windows. A stream that nobody reads holds at most its window on the receiver and 64 KiB (gRPC's write quota) on the sender,
	// far less than the 1 MiB of CASES S-09. The connection's window is larger than 16 streams' and is given back on arrival, not
	// on reading, so that one stalled stream never stops the others.
	streamWindow     = 256 << 10
	longStreamWindow = 64 << 10
	connWindow       = 4 << 20

	// connectTimeout is how long one try to connect may take; a peer whose host is gone answers nothing at all.
	connectTimeout = 3 * time.Second
	// idleTimeout closes connections that had no call for so long.
	idleTimeout = 10 * time.Minute

	// unaryTimeout bounds unary calls that their caller gave no deadline.
	unaryTimeout = 10 * time.Second
	// shortTimeout bounds short forwards that their caller gave no deadline: kube-apiserver's --request-timeout and a second. The
	// front sets its own, from its configuration; this is for what forgot to.
	shortTimeout = 61 * time.Second
)

func serverLimits() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.MaxConcurrentStreams(maxStreams),
		grpc.MaxHeaderListSize(maxHeaderBytes),
		grpc.MaxRecvMsgSize(maxRequestBytes),
		grpc.ConnectionTimeout(handshakeTimeout),
		grpc.StaticStreamWindowSize(streamWindow),
		grpc.StaticConnWindowSize(connWindow),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: pingMinTime, PermitWithoutStream: true}),
		// No MaxConnectionAge: at its end plus the grace it would cut watches and exec sessions.
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: pingAfter, Timeout: pingTimeout}),
	}
}

func clientLimits(long bool) []grpc.DialOption {
	window := int32(streamWindow)
	if long {
		window = longStreamWindow
	}
	return []grpc.DialOption{
		grpc.WithStaticStreamWindowSize(window),
		grpc.WithStaticConnWindowSize(connWindow),
		grpc.WithMaxHeaderListSize(maxHeaderBytes),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: pingAfter, Timeout: pingTimeout, PermitWithoutStream: true}),
		grpc.WithIdleTimeout(idleTimeout),
		// A node that comes back is used again within about a second.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
			MinConnectTimeout: connectTimeout,
		}),
		// Only what this program says decides: no service config from a resolver, no retries that it does not know about, no
		// proxy from the environment.
		grpc.WithDisableServiceConfig(),
		grpc.WithDisableRetry(),
		grpc.WithNoProxy(),
	}
}
