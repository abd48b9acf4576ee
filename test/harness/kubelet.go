//go:build linux

package harness

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"
)

// firstKubelet is the last byte of the address of a cluster's first kubelet.
const firstKubelet = 101

// Kubelet is a stand-in for a kubelet: a Node object, and the HTTPS server behind it that an apiserver sends exec, attach,
// port-forward, logs and the node's proxy subresource to. The streaming is done by the library that container runtimes use for it,
// so what passes between apiserver and kubelet is the real thing. The pods are not:
//
//   - A pod is a folder on this machine, and there is no isolation. exec runs the command as a process of this machine whose working
//     folder is the pod's; so paths given to kubectl cp are best relative. It dies with the connection that asked for it.
//   - The main process of a container writes to its log what [Kubelet.Log] says, and the lines that come in on its standard input.
//     attach shows what is written from then on and ends when its input does; without input it ends with the pod.
//   - port-forward reaches whatever listens on 127.0.0.1 of this machine.
//   - A terminal is a pipe: no echo, no line discipline, and resizing has no effect.
//
// It runs the pods that [Kubelet.RunPod] made and no others: it does not watch the apiserver, and there is no lease. It speaks only to
// clients with the certificate of [PKI.KubeletClientCert], as all apiservers of the harness have. Its methods are safe for concurrent
// use.
type Kubelet struct {
	name    string
	ip      string
	port    int
	dir     string // folders of pods
	cluster *Cluster

	server   *http.Server
	serving  sync.WaitGroup
	sessions group // requests under way

	mu     sync.Mutex              // guards the two below
	pods   map[podName]*kubeletPod // nil after Close
	failed error                   // why the server ended by itself
}

// podName is how the Kubernetes API and the kubelet's URLs name a pod.
type podName struct{ namespace, name string }

func (n podName) String() string { return n.namespace + "/" + n.name }

// kubeletPod is a pod while it runs.
type kubeletPod struct {
	podName
	uid      string
	object   json.RawMessage // as the apiserver holds it
	dir      string
	logs     map[string]*containerLog // by container
	gone     chan struct{}            // closed when the pod's processes have to end
	sessions group                    // requests under way that are about this pod
}

// end ends all that goes on in the pod and waits for it. To be called once.
func (p *kubeletPod) end() {
	close(p.gone)
	p.sessions.closeAndWait()
}

// StartKubelet starts a kubelet and registers its Node object, which is ready and has no taints. It ends with the cluster.
func (c *Cluster) StartKubelet(ctx context.Context, name string) (*Kubelet, error) {
	return c.StartKubeletAt(ctx, name, c.subnet.ip(firstKubelet+len(c.kubelets)))
}

// StartKubeletAt is StartKubelet at an address of the caller's choice. It is for what apiservers refuse to do with a loopback address:
// the proxy subresource of nodes answers 400 "address not allowed" then, whereas exec and the like work. See [MachineIP].
func (c *Cluster) StartKubeletAt(ctx context.Context, name, ip string) (*Kubelet, error) {
	k := &Kubelet{
		name:    name,
		ip:      ip,
		dir:     filepath.Join(c.Dir, "kubelet-"+name),
		cluster: c,
		pods:    map[podName]*kubeletPod{},
	}
	for _, other := range c.kubelets {
		if other.name == name {
			return nil, fmt.Errorf("kubelet %s: the cluster has one of this name already", name)
		}
	}
	if err := k.listen(ctx); err != nil {
		return nil, fmt.Errorf("kubelet %s: %w", name, err)
	}
	c.kubelets = append(c.kubelets, k)
	if err := k.register(ctx); err != nil {
		return nil, fmt.Errorf("kubelet %s: %w", name, err) // Close of the cluster ends it
	}
	return k, nil
}

// listen starts the server.
func (k *Kubelet) listen(ctx context.Context) error {
	if err := os.MkdirAll(k.dir, 0o700); err != nil {
		return err
	}
	files, err := k.cluster.PKI.KubeletCert(k.name, k.ip)
	if err != nil {
		return err
	}
	pair, err := tls.LoadX509KeyPair(files.Cert, files.Key)
	if err != nil {
		return err
	}
	clients := x509.NewCertPool()
	if ca, err := os.ReadFile(k.cluster.PKI.ClientCAFile); err != nil {
		return err
	} else if !clients.AppendCertsFromPEM(ca) {
		return fmt.Errorf("%s has no certificate", k.cluster.PKI.ClientCAFile)
	}
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", hostPort(k.ip, portKubelet))
	if errors.Is(err, syscall.EADDRINUSE) { // not in the cluster's own subnet
		listener, err = config.Listen(ctx, "tcp", hostPort(k.ip, 0))
	}
	if err != nil {
		return err
	}
	k.port = listener.Addr().(*net.TCPAddr).Port
	k.server = &http.Server{
		Handler: k.handler(),
		TLSConfig: &tls.Config{
			MinVersion:   tls.VersionTLS12,
			Certificates: []tls.Certificate{pair},
			ClientAuth:   tls.RequireAndVerifyClientCert,
			ClientCAs:    clients,
		},
		ReadHeaderTimeout: 30 * time.Second,
		ErrorLog:          log.New(io.Discard, "", 0), // of clients without a certificate, and there are tests that are such
	}
	k.serving.Go(func() {
		if err := k.server.ServeTLS(listener, "", ""); !errors.Is(err, http.ErrServerClosed) {
			k.mu.Lock()
			defer k.mu.Unlock()
			k.failed = fmt.Errorf("kubelet %s: %w", k.name, err)
		}
	})
	return nil
}

// MachineIP returns an IPv4 address of this machine that is no loopback address, or "" if it has none.
func MachineIP() (string, error) {
	addresses, err := net.InterfaceAddrs()
	if err != nil {
		return "", fmt.Errorf("addresses of this machine: %w", err)
	}
	for _, address := range addresses {
		if network, ok := address.(*net.IPNet); ok && network.IP.To4() != nil && network.IP.IsGlobalUnicast() {
			return network.IP.String(), nil
		}
	}
	return "", nil
}

// Name is the name of the Node object.
func (k *Kubelet) Name() string { return k.name }

// IP is the address of the node and of all its pods.
func (k *Kubelet) IP() string { return k.ip }

// Close ends all processes and connections and the server. The objects stay in the API. It may be called more than once.
func (k *Kubelet) Close() error {
	k.mu.Lock()
	pods := k.pods
	k.pods = nil
	k.mu.Unlock()
	if pods == nil {
		return nil
	}
	err := k.server.Close()
	var ending sync.WaitGroup
	for _, pod := range pods {
		ending.Go(pod.end)
	}
	ending.Wait()
	k.sessions.closeAndWait()
	k.serving.Wait()
	k.mu.Lock()
	defer k.mu.Unlock()
	return errors.Join(err, k.failed)
}

// register writes the Node object.
func (k *Kubelet) register(ctx context.Context) error {
	now := time.Now().UTC().Format(time.RFC3339)
	resources := object{"cpu": "8", "memory": "16Gi", "pods": "110", "ephemeral-storage": "100Gi"}
	const nodes = "/api/v1/nodes"
	if _, err := k.call(ctx, http.MethodPost, nodes, object{
		"apiVersion": "v1",
		"kind":       "Node",
		"metadata": object{"name": k.name, "labels": object{
			"kubernetes.io/hostname": k.name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64",
		}},
	}); err != nil {
		return err
	}
	// Admission taints every new node as not ready, and it is the node lifecycle controller, which there is none of, that takes the
	// taint away.
	if _, err := k.call(ctx, http.MethodPatch, nodes+"/"+k.name, object{"spec": object{"taints": nil}}); err != nil {
		return err
	}
	_, err := k.call(ctx, http.MethodPatch, nodes+"/"+k.name+"/status", object{"status": object{
		"capacity":    resources,
		"allocatable": resources,
		"addresses": []object{
			{"type": "InternalIP", "address": k.ip},
			{"type": "Hostname", "address": k.name},
		},
		"daemonEndpoints": object{"kubeletEndpoint": object{"Port": k.port}},
		"conditions": []object{{
			"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "the test harness says so",
			"lastHeartbeatTime": now, "lastTransitionTime": now,
		}},
		"nodeInfo": object{
			"kubeletVersion": V136, "osImage": "test harness", "kernelVersion": "none", "containerRuntimeVersion": "none://0",
			"operatingSystem": "linux", "architecture": "amd64", "machineID": k.name, "systemUUID": k.name, "bootID": k.name,
			"kubeProxyVersion": "",
		},
	}})
	return err
}

// RunPod creates a pod on this node, and the default service account of its namespace if that is missing; the namespace must exist.
// Without names of containers there is one, "main". When it returns the pod is Running and Ready.
func (k *Kubelet) RunPod(ctx context.Context, namespace, name string, containers ...string) error {
	if len(containers) == 0 {
		containers = []string{"main"}
	}
	pod := &kubeletPod{
		podName: podName{namespace, name},
		dir:     filepath.Join(k.dir, namespace+"_"+name),
		logs:    map[string]*containerLog{},
		gone:    make(chan struct{}),
	}
	if err := k.runPod(ctx, pod, containers); err != nil {
		return fmt.Errorf("pod %s on %s: %w", pod, k.name, err)
	}
	return nil
}

func (k *Kubelet) runPod(ctx context.Context, pod *kubeletPod, containers []string) error {
	base := "/api/v1/namespaces/" + url.PathEscape(pod.namespace)
	client, err := k.cluster.AdminClient(k.cluster.running())
	if err != nil {
		return err
	}
	defer client.Close()
	if err := client.Create(ctx, base+"/serviceaccounts", serviceAccount("default")); err != nil {
		return err
	}
	now := time.Now().UTC().Format(time.RFC3339)
	var specs, statuses []object
	for _, container := range containers {
		const image = "registry.example.com/none:v1"
		pod.logs[container] = newContainerLog()
		// Without stdin kubectl would not offer its own to attach.
		specs = append(specs, object{"name": container, "image": image, "stdin": true})
		statuses = append(statuses, object{
			"name": container, "image": image, "imageID": image, "containerID": "none://" + pod.namespace + "/" + pod.name + "/" + container,
			"ready": true, "started": true, "restartCount": 0, "state": object{"running": object{"startedAt": now}},
		})
	}
	if err := os.Mkdir(pod.dir, 0o700); err != nil {
		return err
	}
	if _, err := k.call(ctx, http.MethodPost, base+"/pods", object{
		"apiVersion": "v1",
		"kind":       "Pod",
		"metadata":   object{"name": pod.name, "labels": object{"app": pod.name}},
		"spec":       object{"nodeName": k.name, "automountServiceAccountToken": false, "containers": specs},
	}); err != nil {
		return errors.Join(err, os.RemoveAll(pod.dir))
	}
	var conditions []object
	for _, condition := range []string{"PodScheduled", "Initialized", "ContainersReady", "Ready"} {
		conditions = append(conditions, object{"type": condition, "status": "True", "lastTransitionTime": now})
	}
	running, err := k.call(ctx, http.MethodPatch, base+"/pods/"+pod.name+"/status", object{"status": object{
		"phase": "Running", "startTime": now, "conditions": conditions, "containerStatuses": statuses,
		"hostIP": k.ip, "hostIPs": []object{{"ip": k.ip}}, "podIP": k.ip, "podIPs": []object{{"ip": k.ip}},
	}})
	if err != nil {
		return errors.Join(err, os.RemoveAll(pod.dir))
	}
	var made struct {
		Metadata struct {
			UID string `json:"uid"`
		} `json:"metadata"`
	}
	if err := running.Decode(&made); err != nil {
		return err
	}
	pod.uid, pod.object = made.Metadata.UID, running.Body
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.pods == nil {
		return errors.New("the kubelet is closed")
	}
	k.pods[pod.podName] = pod
	return nil
}

// DeletePod ends what goes on in the pod, exec and attach and log streams and forwarded ports, and takes it out of the API.
func (k *Kubelet) DeletePod(ctx context.Context, namespace, name string) error {
	key := podName{namespace, name}
	k.mu.Lock()
	pod := k.pods[key]
	delete(k.pods, key)
	k.mu.Unlock()
	if pod == nil {
		return fmt.Errorf("pod %s does not run on %s", key, k.name)
	}
	pod.end()
	path := "/api/v1/namespaces/" + url.PathEscape(namespace) + "/pods/" + url.PathEscape(name)
	_, err := k.call(ctx, http.MethodDelete, path+"?gracePeriodSeconds=0", nil)
	return errors.Join(err, os.RemoveAll(pod.dir))
}

// Log writes lines to the log of a container, as its main process would.
func (k *Kubelet) Log(namespace, name, container string, lines ...string) error {
	pod := k.pod(namespace, name)
	if pod == nil || pod.logs[container] == nil {
		return fmt.Errorf("container %s of pod %s/%s does not run on %s", container, namespace, name, k.name)
	}
	pod.logs[container].add(lines...)
	return nil
}

// PodDir is the folder in which commands run in a pod find themselves. It goes with the pod.
func (k *Kubelet) PodDir(namespace, name string) (string, error) {
	if pod := k.pod(namespace, name); pod != nil {
		return pod.dir, nil
	}
	return "", fmt.Errorf("pod %s/%s does not run on %s", namespace, name, k.name)
}

// pod returns a running pod, or nil.
func (k *Kubelet) pod(namespace, name string) *kubeletPod {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.pods[podName{namespace, name}]
}

// call asks an apiserver that runs, as administrator. Patches are merge patches. Any answer but success is an error.
func (k *Kubelet) call(ctx context.Context, method, path string, body any) (*Response, error) {
	client, err := k.cluster.AdminClient(k.cluster.running())
	if err != nil {
		return nil, err
	}
	defer client.Close()
	header := http.Header{}
	if method == http.MethodPatch {
		header.Set("Content-Type", "application/merge-patch+json")
	}
	response, err := client.Do(ctx, method, path, header, body)
	if err != nil {
		return nil, err
	}
	if response.Status < 200 || response.Status > 299 {
		return nil, fmt.Errorf("%s %s: %d: %.500s", method, path, response.Status, response.Body)
	}
	return response, nil
}

// group counts users of something that is to end. The zero value is an open group without users.
type group struct {
	mu     sync.Mutex // guards closed, and that nobody enters while the last ones are waited for
	closed bool
	users  sync.WaitGroup
}

// enter adds a user, who has to leave again. It returns false, and adds nobody, once the group is closed.
func (g *group) enter() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return false
	}
	g.users.Add(1)
	return true
}

func (g *group) leave() { g.users.Done() }

// closeAndWait lets nobody in any more and returns when all have left.
func (g *group) closeAndWait() {
	g.mu.Lock()
	g.closed = true
	g.mu.Unlock()
	g.users.Wait()
}
