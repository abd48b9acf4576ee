//go:build linux

package harness

// MutatingAdmissionPolicy is an object of a kind that v1.36 and later serve and v1.35 does not, as JSON knows it. It matches nothing.
func MutatingAdmissionPolicy(name string) map[string]any {
	return map[string]any{
		"apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingAdmissionPolicy",
		"metadata": map[string]any{"name": name},
		"spec": map[string]any{
			"reinvocationPolicy": "Never", "failurePolicy": "Ignore",
			"matchConstraints": map[string]any{"resourceRules": []any{map[string]any{
				"apiGroups": []string{"nothing.example.com"}, "apiVersions": []string{"v1"}, "operations": []string{"CREATE"}, "resources": []string{"things"},
			}}},
			"mutations": []any{map[string]any{"patchType": "JSONPatch", "jsonPatch": map[string]any{
				"expression": `[JSONPatch{op: "add", path: "/metadata/labels/a", value: "b"}]`,
			}}},
		},
	}
}
