//go:build linux

package harness

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
)

// object is a Kubernetes object written down literally.
type object = map[string]any

// nodeRole is what the nodes' own user may do. Discovery, /readyz and /version are open to every authenticated user by
// the default roles.
var nodeRole = object{
	"apiVersion": "rbac.authorization.k8s.io/v1",
	"kind":       "ClusterRole",
	"metadata":   object{"name": nodeUser},
	"rules": []object{
		{
			"apiGroups": []string{"authentication.k8s.io"},
			"resources": []string{"tokenreviews"},
			"verbs":     []string{"create"},
		},
		{
			"apiGroups": []string{"authorization.k8s.io"},
			"resources": []string{"subjectaccessreviews"},
			"verbs":     []string{"create"},
		},
		{
			"apiGroups": []string{"apiregistration.k8s.io"},
			"resources": []string{"apiservices"},
			"verbs":     []string{"get", "list", "watch"},
		},
		{
			"apiGroups": []string{"apiextensions.k8s.io"},
			"resources": []string{"customresourcedefinitions"},
			"verbs":     []string{"get", "list", "watch"},
		},
		{
			// The apiservers' identity leases: who should be in the mesh.
			"apiGroups": []string{"coordination.k8s.io"},
			"resources": []string{"leases"},
			"verbs":     []string{"get", "list", "watch"},
		},
	},
}

// bootstrap creates, through the first apiserver, what a controller manager or an administrator would have.
func (c *Cluster) bootstrap(ctx context.Context) error {
	client, err := c.AdminClient(c.Hosts[0])
	if err != nil {
		return err
	}
	defer client.Close()
	const rbac = "/apis/rbac.authorization.k8s.io/v1"
	binding := object{
		"apiVersion": "rbac.authorization.k8s.io/v1",
		"kind":       "ClusterRoleBinding",
		"metadata":   object{"name": nodeUser},
		"roleRef":    object{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": nodeUser},
		"subjects":   []object{{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": nodeUser}},
	}
	for _, step := range []struct {
		path   string
		object object
	}{
		{rbac + "/clusterroles", nodeRole},
		{rbac + "/clusterrolebindings", binding},
		// Without it no pod can be created in the namespace.
		{"/api/v1/namespaces/default/serviceaccounts", serviceAccount("default")},
	} {
		if err := client.Create(ctx, step.path, step.object); err != nil {
			return fmt.Errorf("first objects of the cluster: %w", err)
		}
	}
	return nil
}

func serviceAccount(name string) object {
	return object{"apiVersion": "v1", "kind": "ServiceAccount", "metadata": object{"name": name}}
}

// BindClusterRole gives a subject a cluster role everywhere. kind is "User" or "Group"; a service account is the user
// system:serviceaccount:<namespace>:<name>.
func (c *Cluster) BindClusterRole(ctx context.Context, role, kind, name string) error {
	client, err := c.AdminClient(c.running())
	if err != nil {
		return err
	}
	defer client.Close()
	return client.Create(ctx, "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", object{
		"apiVersion": "rbac.authorization.k8s.io/v1",
		"kind":       "ClusterRoleBinding",
		"metadata":   object{"name": "harness-" + shortHash([]byte(role), []byte(kind), []byte(name))},
		"roleRef":    object{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
		"subjects":   []object{{"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name}},
	})
}

// ServiceAccountToken returns a bearer token, good for an hour, of a service account that is created if it is missing.
// The namespace must exist.
func (c *Cluster) ServiceAccountToken(ctx context.Context, namespace, name string) (string, error) {
	client, err := c.AdminClient(c.running())
	if err != nil {
		return "", err
	}
	defer client.Close()
	path := "/api/v1/namespaces/" + url.PathEscape(namespace) + "/serviceaccounts"
	if err := client.Create(ctx, path, serviceAccount(name)); err != nil {
		return "", fmt.Errorf("service account %s/%s: %w", namespace, name, err)
	}
	response, err := client.Do(ctx, http.MethodPost, path+"/"+url.PathEscape(name)+"/token", nil, object{
		"apiVersion": "authentication.k8s.io/v1",
		"kind":       "TokenRequest",
		"spec":       object{"expirationSeconds": 3600},
	})
	if err != nil {
		return "", fmt.Errorf("token of %s/%s: %w", namespace, name, err)
	}
	var answer struct {
		Status struct {
			Token string `json:"token"`
		} `json:"status"`
	}
	if err := response.Decode(&answer); err != nil {
		return "", fmt.Errorf("token of %s/%s: %w", namespace, name, err)
	}
	if answer.Status.Token == "" {
		return "", fmt.Errorf("token of %s/%s: answer (%d) %.300s", namespace, name, response.Status, response.Body)
	}
	return answer.Status.Token, nil
}

// running returns a host whose apiserver runs, or the first if none does, whose error then tells.
func (c *Cluster) running() *Host {
	for _, host := range c.Hosts {
		if host.APIServer.Running() {
			return host
		}
	}
	return c.Hosts[0]
}
