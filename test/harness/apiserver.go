//go:build linux

package harness

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"time"
)

// apiServerReadyTimeout bounds the start of a kube-apiserver: 5 s when nothing else runs, several times that when three
// start together on two cores.
const apiServerReadyTimeout = 3 * time.Minute

// APIServer is the kube-apiserver of one host. It can be stopped, killed and started again, with another version or
// other flags, always at the same address. Start and stop it from one goroutine at a time.
type APIServer struct {
	// Version is what the next start runs: [V135], [V136] or [V137].
	Version string
	// ExtraArgs follow the harness's own flags at the next start, and win over them.
	ExtraArgs []string
	// Hostname, if set, is the hostname that the apiserver sees, so that several on one machine have identity leases of
	// their own. It needs root (a UTS namespace).
	Hostname string
	// Env is added to the environment at the next start.
	Env []string

	daemon

	name    string
	ip      string
	port    int
	dir     string
	args    []string // the harness's own flags, the same for all versions
	admin   CertFiles
	ca      string
	program func(ctx context.Context, version string) (string, error)
}

// URL is where the apiserver serves HTTPS.
func (a *APIServer) URL() string { return "https://" + hostPort(a.ip, a.port) }

// Port is the port it serves at.
func (a *APIServer) Port() int { return a.port }

// LogFile is where the output of all runs goes.
func (a *APIServer) LogFile() string { return filepath.Join(a.dir, "apiserver.log") }

// Start starts the apiserver and returns without waiting for it to be ready.
func (a *APIServer) Start(ctx context.Context) error {
	program, err := a.program(ctx, a.Version)
	if err != nil {
		return err
	}
	args := append(append([]string{}, a.args...), a.ExtraArgs...)
	if a.Hostname != "" {
		// exec keeps the process, its group and its parent-death signal the same.
		args = append([]string{"--uts", "sh", "-c", `hostname "$0" && exec "$@"`, a.Hostname, program}, args...)
		program = "unshare"
	}
	return a.start(ProcessSpec{
		Name:    "kube-apiserver " + a.Version + " of " + a.name,
		Path:    program,
		Args:    args,
		Env:     a.Env,
		LogFile: a.LogFile(),
	})
}

// WaitReady waits until /readyz says ok to the administrator. The error says which checks fail, and has the end of the
// log.
func (a *APIServer) WaitReady(ctx context.Context) error {
	if a.Process == nil {
		return fmt.Errorf("kube-apiserver of %s was not started", a.name)
	}
	client, err := newClient(a.URL(), a.ca, Credential{Cert: a.admin})
	if err != nil {
		return err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, apiServerReadyTimeout)
	defer cancel()
	return eventuallyRunning(ctx, a.Process, client.checkReady)
}

// Restart stops the apiserver, starts it again as Version, ExtraArgs and Hostname now say, and waits until it is ready.
func (a *APIServer) Restart(ctx context.Context) error {
	if err := a.Stop(ctx); err != nil {
		return err
	}
	if err := a.Start(ctx); err != nil {
		return err
	}
	return a.WaitReady(ctx)
}

// RestartWithVersion is Restart with another version and the same flags: the upgrade, or the rollback, of one host.
func (a *APIServer) RestartWithVersion(ctx context.Context, version string) error {
	a.Version = version
	return a.Restart(ctx)
}

// apiServerArgs are the flags that all versions are started with.
func apiServerArgs(p *PKI, etcdURL, name, ip string, port int) ([]string, error) {
	serving, servingErr := p.ServingCert("apiserver-"+name, ip, name)
	proxy, proxyErr := p.FrontProxyCert()
	kubelet, kubeletErr := p.KubeletClientCert()
	if err := errors.Join(servingErr, proxyErr, kubeletErr); err != nil {
		return nil, fmt.Errorf("kube-apiserver of %s: %w", name, err)
	}
	return []string{
		"--bind-address=" + ip,
		// Without it the server takes the machine's own address for what others reach it by. It is also what the built-in
		// peer proxy uses in truth: --peer-advertise-ip is read and not passed on (seen in v1.36.3,
		// pkg/controlplane/apiserver/config.go).
		"--advertise-address=" + ip,
		"--secure-port=" + strconv.Itoa(port),
		"--tls-cert-file=" + serving.Cert,
		"--tls-private-key-file=" + serving.Key,
		"--etcd-servers=" + etcdURL,
		"--client-ca-file=" + p.ClientCAFile,
		"--requestheader-client-ca-file=" + p.FrontProxyCAFile,
		"--requestheader-allowed-names=" + frontProxyName,
		"--requestheader-username-headers=X-Remote-User",
		"--requestheader-uid-headers=X-Remote-Uid",
		"--requestheader-group-headers=X-Remote-Group",
		"--requestheader-extra-headers-prefix=X-Remote-Extra-",
		"--proxy-client-cert-file=" + proxy.Cert,
		"--proxy-client-key-file=" + proxy.Key,
		"--kubelet-certificate-authority=" + p.ServingCAFile,
		"--kubelet-client-certificate=" + kubelet.Cert,
		"--kubelet-client-key=" + kubelet.Key,
		"--kubelet-preferred-address-types=InternalIP", // by default the hostname comes first, and nobody can resolve it
		"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file=" + p.ServiceAccountPublicFile,
		"--service-account-signing-key-file=" + p.ServiceAccountKeyFile,
		"--service-cluster-ip-range=10.96.0.0/16",
		"--authorization-mode=Node,RBAC",
		"--endpoint-reconciler-type=none", // nothing in here reads the endpoints, and loopback may not be one
		"--allow-privileged=true",
		"--shutdown-delay-duration=0", // the harness itself waits where it has to
		// By default open watches hold up the end of an apiserver until its request timeout, a minute; with this they are closed.
		"--shutdown-watch-termination-grace-period=2s",
	}, nil
}

// BuiltinPeerProxyArgs are the extra flags that make the apiserver's own mixed version proxy reachable for the others. It
// is on by default from v1.36; the servers need a Hostname each.
func (a *APIServer) BuiltinPeerProxyArgs() []string {
	return []string{
		"--peer-ca-file=" + a.ca,
		"--peer-advertise-ip=" + a.ip,
		"--peer-advertise-port=" + strconv.Itoa(a.port),
	}
}
