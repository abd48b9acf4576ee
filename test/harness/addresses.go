//go:build linux

package harness

import (
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"syscall"
)

// Ports that the harness prefers, so that logs and configurations of all clusters look alike. The addresses are the
// cluster's own, so they are usually free.
const (
	portEtcdClient = 2379
	portEtcdPeer   = 2380
	portFront      = 6443
	portAPIServer  = 7443
	portMesh       = 7444
	portGossip     = 7946
	portAdmin      = 9444

	portControllerManager = 10257
	portKubelet           = 10250
)

// firstHost is the last byte of the address of a cluster's first host; etcd has .1.
const firstHost = 11

// subnet is a piece of the loopback network, 127.77.N.0/24, that belongs to one cluster while it is leased. Servers can
// then be stopped and started again at the same address without anybody taking it in between, which asking the kernel
// for free ports of a shared address cannot promise.
type subnet struct {
	prefix  string // such as "127.77.3"
	release func()
}

// leaseSubnet takes a piece of the loopback network that no other cluster on this machine has. The lease is an abstract Unix
// socket: it leaves no file, ends with the process if it is not released before, and is known in the same network namespace
// that the addresses are.
func leaseSubnet() (*subnet, error) {
	for n := range 256 {
		lease, err := net.Listen("unix", fmt.Sprintf("@mvp-node-harness-subnet-%d", n))
		if errors.Is(err, syscall.EADDRINUSE) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("loopback addresses: %w", err)
		}
		return &subnet{prefix: "127.77." + strconv.Itoa(n), release: sync.OnceFunc(func() { _ = lease.Close() })}, nil
	}
	return nil, errors.New("loopback addresses: all of 127.77.0.0/16 is leased by other clusters")
}

// fixedSubnet is a piece of the loopback network that the caller vouches for, such as "127.0.0".
func fixedSubnet(prefix string) (*subnet, error) {
	if ip := net.ParseIP(prefix + ".1"); ip == nil || !ip.IsLoopback() {
		return nil, fmt.Errorf("loopback addresses: %q is not the first three bytes of one, such as 127.0.0", prefix)
	}
	return &subnet{prefix: prefix, release: func() {}}, nil
}

func (s *subnet) ip(last int) string { return s.prefix + "." + strconv.Itoa(last) }

// freePort returns the preferred port if nothing listens on it at ip, and else one that the kernel says is free. Nothing
// holds the port afterwards, but nobody else has a reason to use this address.
func freePort(ip string, preferred int) (int, error) {
	var first error
	for _, port := range []int{preferred, 0} {
		listener, err := net.Listen("tcp", net.JoinHostPort(ip, strconv.Itoa(port)))
		if err == nil {
			defer listener.Close()
			return listener.Addr().(*net.TCPAddr).Port, nil
		}
		if first == nil {
			first = err
		}
	}
	return 0, fmt.Errorf("free port on %s: %w", ip, first)
}

func hostPort(ip string, port int) string { return net.JoinHostPort(ip, strconv.Itoa(port)) }
