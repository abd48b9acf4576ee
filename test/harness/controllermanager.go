//go:build linux

package harness

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// controllerManagerReadyTimeout bounds the start of a kube-controller-manager: 3 s when nothing else runs.
const controllerManagerReadyTimeout = 90 * time.Second

// withoutNodes are the controllers that would look for machines, or for a cloud, behind the Node objects. A Node in the harness is
// an object that somebody wrote: nothing renews its lease, so the first of them would call it dead and taint it within a minute.
var withoutNodes = []string{
	"node-lifecycle-controller",
	"taint-eviction-controller",
	"device-taint-eviction-controller",
	"node-ipam-controller",
	"cloud-node-lifecycle-controller",
	"node-route-controller",
	"service-lb-controller",
}

// ControllerManager is the kube-controller-manager of a cluster, [V136], which talks to one apiserver directly, past any node. With
// it namespaces get their default service account and root CA, garbage is collected, quotas are counted and replica sets get their
// pods. The pods stay pending: there is neither a scheduler nor a kubelet. Start and stop it from one goroutine at a time.
type ControllerManager struct {
	daemon

	spec   ProcessSpec
	url    string
	caFile string
}

// LogFile is where the output of all runs goes.
func (m *ControllerManager) LogFile() string { return m.spec.LogFile }

// Start starts it and returns without waiting for it to be ready.
func (m *ControllerManager) Start() error { return m.start(m.spec) }

// WaitReady waits until /healthz says ok. The error has the end of the log.
func (m *ControllerManager) WaitReady(ctx context.Context) error {
	if m.Process == nil {
		return errors.New("kube-controller-manager was not started")
	}
	client, err := newClient(m.url, m.caFile, Credential{})
	if err != nil {
		return err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, controllerManagerReadyTimeout)
	defer cancel()
	return eventuallyRunning(ctx, m.Process, func(ctx context.Context) error {
		answer, err := client.Get(ctx, "/healthz")
		if err == nil && answer.Status != 200 {
			err = fmt.Errorf("/healthz: %d: %.300s", answer.Status, answer.Body)
		}
		return err
	})
}

// StartControllerManager starts the cluster's one kube-controller-manager, built if need be, against the apiserver of h, and waits
// until it is ready. It ends with the cluster.
func (c *Cluster) StartControllerManager(ctx context.Context, h *Host) (*ControllerManager, error) {
	if c.controllers != nil {
		return nil, errors.New("the cluster has a kube-controller-manager already")
	}
	program, err := c.binaries.ControllerManager(ctx)
	if err != nil {
		return nil, err
	}
	serving, err := c.PKI.ServingCert("controller-manager", h.IP, h.Name)
	if err != nil {
		return nil, err
	}
	config, err := c.AdminKubeconfig(h.APIServer.URL())
	if err != nil {
		return nil, err
	}
	port, err := freePort(h.IP, portControllerManager)
	if err != nil {
		return nil, fmt.Errorf("kube-controller-manager: %w", err)
	}
	signing := c.PKI.files("client-ca")
	c.controllers = &ControllerManager{
		url:    "https://" + hostPort(h.IP, port),
		caFile: c.PKI.ServingCAFile,
		spec: ProcessSpec{
			Name: "kube-controller-manager beside " + h.Name,
			Path: program,
			Args: []string{
				"--kubeconfig=" + config,
				"--bind-address=" + h.IP,
				"--secure-port=" + strconv.Itoa(port),
				"--tls-cert-file=" + serving.Cert,
				"--tls-private-key-file=" + serving.Key,
				"--leader-elect=false",
				"--controllers=*,-" + strings.Join(withoutNodes, ",-"),
				"--service-account-private-key-file=" + c.PKI.ServiceAccountKeyFile,
				"--root-ca-file=" + c.PKI.ServingCAFile,
				// So that an approved CertificateSigningRequest becomes a certificate that apiservers and fronts accept.
				"--cluster-signing-cert-file=" + signing.Cert,
				"--cluster-signing-key-file=" + signing.Key,
				// The defaults, 20 and 30, are for one that runs for months; tests make and delete namespaces by the dozen.
				"--kube-api-qps=200",
				"--kube-api-burst=400",
				// The default is 5 minutes, which is how long a changed status would stay as somebody else wrote it.
				"--resource-quota-sync-period=10s",
			},
			LogFile: filepath.Join(c.Dir, "controller-manager.log"),
		},
	}
	c.progressf("starting kube-controller-manager %s beside %s\n", V136, h.Name)
	if err := c.controllers.Start(); err != nil {
		return nil, err
	}
	if err := c.controllers.WaitReady(ctx); err != nil {
		return nil, err
	}
	return c.controllers, nil
}
