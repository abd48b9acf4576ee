//go:build linux

package harness

import (
	"context"
	"fmt"
	"net/http"
	"path/filepath"
	"time"
)

// etcdReadyTimeout bounds the start of etcd, which takes well under a second on an idle machine.
const etcdReadyTimeout = 60 * time.Second

// Etcd is the one etcd of a cluster: plain HTTP on a loopback address. It survives Stop or Kill followed by Start.
type Etcd struct {
	daemon

	program string
	dir     string
	ip      string
	client  int
	peer    int
}

func newEtcd(dir, ip string) (*Etcd, error) {
	client, err := freePort(ip, portEtcdClient)
	if err != nil {
		return nil, fmt.Errorf("etcd: %w", err)
	}
	peer, err := freePort(ip, portEtcdPeer)
	if err != nil {
		return nil, fmt.Errorf("etcd: %w", err)
	}
	return &Etcd{dir: dir, ip: ip, client: client, peer: peer}, nil
}

// URL is the client URL.
func (e *Etcd) URL() string { return "http://" + hostPort(e.ip, e.client) }

// Start starts etcd and waits until it is ready.
func (e *Etcd) Start(ctx context.Context) error {
	peerURL := "http://" + hostPort(e.ip, e.peer)
	err := e.start(ProcessSpec{
		Name: "etcd",
		Path: e.program,
		Args: []string{
			"--name=harness",
			"--data-dir=" + filepath.Join(e.dir, "data"),
			"--listen-client-urls=" + e.URL(), "--advertise-client-urls=" + e.URL(),
			"--listen-peer-urls=" + peerURL, "--initial-advertise-peer-urls=" + peerURL,
			"--initial-cluster=harness=" + peerURL,
			"--log-level=warn",
			"--unsafe-no-fsync", // nothing here has to survive a power failure
		},
		LogFile: filepath.Join(e.dir, "etcd.log"),
	})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, etcdReadyTimeout)
	defer cancel()
	plain := &Client{URL: e.URL(), HTTP: &http.Client{Transport: &http.Transport{}}}
	defer plain.Close()
	return eventuallyRunning(ctx, e.Process, plain.checkReady)
}
