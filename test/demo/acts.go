//go:build linux

package main

import (
	"fmt"

	"github.com/mvp-mesh/mvp-node/test/harness"
)

const (
	policies   = "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicies"
	migrations = "/apis/storagemigration.k8s.io/v1/storageversionmigrations"
	csiNodes   = "/apis/storage.k8s.io/v1/csinodes"
	nobodys    = "/apis/nobody.example.com/v1/things"
)

// steps runs each function until one fails.
func steps(fs ...func() error) error {
	for _, f := range fs {
		if err := f(); err != nil {
			return err
		}
	}
	return nil
}

func (s *story) actOne() error {
	a, b := s.c.Host("cp-a"), s.c.Host("cp-b")
	s.act(fmt.Sprintf("Act 1: cp-a runs %s, cp-b and cp-c run %s; one etcd; a mvp-node before each apiserver", harness.V135, harness.V136))
	fmt.Fprintln(s.w, "kubectl is called with --raw: without it, it first asks discovery what there is, and a node answers discovery for its own\napiserver only so far.")
	if err := s.settled(); err != nil {
		return err
	}
	straight, through := "straight-to-cp-a", "cp-a"
	var w *watch
	return steps(
		func() error {
			s.say("Straight to the v1.35 apiserver: it does not know the resource and says so with a 404, which misleads")
			return s.kubectl(a.APIServer.URL(), straight, outcome{fails: true, has: []string{"NotFound"}}, "get", "--raw", policies)
		},
		func() error {
			s.say("The same request to the node before that apiserver: answered, by v1.36")
			return s.kubectl(a.Node.URL(), through, outcome{has: []string{"MutatingAdmissionPolicyList"}}, "get", "--raw", policies)
		},
		func() (err error) {
			s.say("A watch through the v1.35 side opens at once")
			w, err = s.watch(a.Node.URL(), policies)
			return err
		},
		func() error {
			s.say("Create a MutatingAdmissionPolicy through the v1.35 side")
			file, err := s.file("policy.json", harness.MutatingAdmissionPolicy("demo"))
			if err != nil {
				return err
			}
			return s.kubectl(a.Node.URL(), through, outcome{has: []string{`"name":"demo"`}}, "create", "--raw", policies, "-f", file)
		},
		func() error { return s.expect(w, "ADDED demo") },
		func() error {
			s.say("Get it")
			return s.kubectl(a.Node.URL(), through, outcome{has: []string{`"name":"demo"`}}, "get", "--raw", policies+"/demo")
		},
		func() error {
			s.say("Patch it")
			return s.request(a.Node.URL(), "PATCH", policies+"/demo", "application/merge-patch+json",
				map[string]any{"metadata": map[string]any{"labels": map[string]any{"patched": "through-v1.35"}}}, 200)
		},
		func() error { return s.expect(w, "MODIFIED demo") },
		func() error {
			s.say("The v1.36 apiserver has it, patched; it is the same etcd")
			return s.kubectl(b.APIServer.URL(), "straight-to-cp-b", outcome{has: []string{"demo", "patched=through-v1.35"}}, "get", "mutatingadmissionpolicies", "--show-labels")
		},
		func() error {
			s.say("Delete it")
			return s.kubectl(a.Node.URL(), through, outcome{has: []string{"Success"}}, "delete", "--raw", policies+"/demo")
		},
		func() error { return s.expect(w, "DELETED demo") },
		func() error {
			w.stop()
			s.say("What nobody serves stays the apiserver's own 404")
			return s.kubectl(a.Node.URL(), through, outcome{fails: true, has: []string{"NotFound"}}, "get", "--raw", nobodys)
		},
		func() error {
			s.say("Who am I, through the node: the apiserver sees the client, not the node")
			return s.kubectl(a.Node.URL(), through, outcome{has: []string{"Username", "admin", "system:masters"}}, "auth", "whoami")
		},
		func() error {
			s.say("What the node of cp-a knows of the mesh")
			return s.node(a, outcome{has: []string{"converged: true", harness.V135, harness.V136}}, "gossip", "dump")
		},
		func() error {
			s.say("Why a request goes where it goes")
			return s.node(a, outcome{has: []string{"Forward", "ServedByPeer"}}, "explain", "GET", policies)
		},
		func() error {
			s.say("The same by grpcurl, with an operator's certificate")
			return s.grpcurl(a)
		},
	)
}

func (s *story) actTwo() error {
	a, b := s.c.Host("cp-a"), s.c.Host("cp-b")
	s.act(fmt.Sprintf("Act 2: cp-a is upgraded to %s under a running watch, then cp-b to %s", harness.V136, harness.V137))
	var w *watch
	return steps(
		func() (err error) {
			s.say("A watch through cp-a, forwarded, is open")
			w, err = s.watch(a.Node.URL(), policies)
			return err
		},
		func() error {
			s.say("The apiserver of cp-a is stopped and started again as %s; its node keeps running", harness.V136)
			if err := a.APIServer.RestartWithVersion(s.ctx, harness.V136); err != nil {
				return err
			}
			if err := s.settled(); err != nil {
				return err
			}
			return s.node(a, outcome{has: []string{"Local", "ServedLocally"}}, "explain", "GET", policies)
		},
		func() error {
			s.say("Create a policy, now served by cp-a itself; the watch from before the upgrade still gets its event")
			file, err := s.file("policy.json", harness.MutatingAdmissionPolicy("after-upgrade"))
			if err != nil {
				return err
			}
			return s.kubectl(a.Node.URL(), "cp-a", outcome{has: []string{`"name":"after-upgrade"`}}, "create", "--raw", policies, "-f", file)
		},
		func() error { return s.expect(w, "ADDED after-upgrade") },
		func() error {
			w.stop()
			s.say("The second host goes to %s", harness.V137)
			if err := b.APIServer.RestartWithVersion(s.ctx, harness.V137); err != nil {
				return err
			}
			if err := s.settled(); err != nil {
				return err
			}
			return s.node(a, outcome{has: []string{harness.V136, harness.V137}}, "members")
		},
		func() error {
			s.say("A group that only v1.37 has, straight to the v1.36 apiserver of cp-a and through its node")
			if err := s.kubectl(a.APIServer.URL(), "straight-to-cp-a", outcome{fails: true, has: []string{"NotFound"}}, "get", "--raw", migrations); err != nil {
				return err
			}
			return s.kubectl(a.Node.URL(), "cp-a", outcome{has: []string{"StorageVersionMigrationList"}}, "get", "--raw", migrations)
		},
		func() error {
			s.say("A subresource that only v1.37 has, of a resource that v1.36 serves too: csinodes/status")
			node := map[string]any{"apiVersion": "storage.k8s.io/v1", "kind": "CSINode", "metadata": map[string]any{"name": "n1"}, "spec": map[string]any{"drivers": []any{}}}
			file, err := s.file("csinode.json", node)
			if err != nil {
				return err
			}
			if err := s.kubectl(a.Node.URL(), "cp-a", outcome{has: []string{`"name":"n1"`}}, "create", "--raw", csiNodes, "-f", file); err != nil {
				return err
			}
			if err := s.node(a, outcome{has: []string{"Local", "ServedLocally"}}, "explain", "PATCH", csiNodes+"/n1"); err != nil {
				return err
			}
			if err := s.node(a, outcome{has: []string{"Forward", "ServedByPeer"}}, "explain", "PATCH", csiNodes+"/n1/status"); err != nil {
				return err
			}
			return s.request(a.Node.URL(), "PATCH", csiNodes+"/n1/status", "application/merge-patch+json",
				map[string]any{"metadata": map[string]any{"labels": map[string]any{"by": "status"}}}, 200)
		},
	)
}

// grpcurl shows the view by the mesh port itself.
func (s *story) grpcurl(h *harness.Host) error {
	program, err := s.c.Tool(s.ctx, "grpcurl")
	if err != nil {
		return err
	}
	operator, err := s.c.PKI.OperatorCert("alice")
	if err != nil {
		return err
	}
	r, err := harness.Run(s.ctx, harness.ProcessSpec{Name: "grpcurl", Path: program, Args: []string{
		"-cacert", s.c.PKI.MeshCAFile, "-cert", operator.Cert, "-key", operator.Key, "-servername", h.Name,
		h.Node.MeshAddress(), "mvp.v1.MeshService/GetView",
	}}, nil)
	if err != nil {
		return err
	}
	return s.show("grpcurl -cacert mesh-ca.crt -cert alice.crt -key alice.key "+h.Node.MeshAddress()+" mvp.v1.MeshService/GetView", r,
		outcome{has: []string{`"converged": true`, harness.V135}})
}
