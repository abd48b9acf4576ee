// Package harness runs real Kubernetes control planes of several versions on loopback addresses: one etcd, and per host
// a kube-apiserver with, if wanted, a mvp-node in front of it. The whole-mesh tests, the demo and the benchmarks share
// it, so the core knows nothing of package testing; [New] is the thin layer for tests. [Cluster.StartControllerManager] adds a
// kube-controller-manager for those who need namespaces, quotas and garbage collection to work.
//
// A [Cluster] owns everything under it: addresses, certificates, files and processes. Close takes all of it away. No
// process outlives the one that runs the harness, not even if that is killed: see [StartProcess].
//
//	c := harness.New(t, harness.Options{
//		Hosts: []harness.HostOptions{{Name: "cp-a", Version: harness.V135}, {Name: "cp-b", Version: harness.V136}},
//		Nodes: true,
//	})
//	user, err := c.PKI.UserCert("alice", "developers")
//	...
//	config, err := c.Kubeconfig(c.Host("cp-a").Node.URL(), harness.Credential{Cert: user})
//	...
//	result, err := c.Kubectl(ctx, config, "get", "mutatingadmissionpolicies")
//
// [Cluster.StartKubelet] adds a node with pods for exec, attach, port-forward, cp and logs; see [Kubelet] for what they are.
//
// The binaries are built from source once and kept, see [Binaries]. The package needs Linux (addresses other than
// 127.0.0.1 on loopback, parent-death signals) and, for hosts with a hostname of their own, root.
//
// Goroutines: one that starts processes and lives as long as the program (goleak users exclude it with
// [SpawnerFunction]), one per running process that waits for it, and those of kubelets, which end with the cluster.
package harness
