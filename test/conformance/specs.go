//go:build linux

package main

import "regexp"

// selection is a part of Kubernetes' end-to-end tests that one process runs: specs of one SIG. A spec may be in one selection only.
type selection struct {
	Name  string   // of the folder for logs
	SIG   string   // such as "sig-apps"; empty: any
	Focus []string // regular expressions for what follows the SIG in the name of a spec; one of them has to fit
	Skip  []skip
}

// skip takes specs out of a selection again.
type skip struct {
	Pattern string // as in Focus
	Reason  string
}

// Reasons that come up more than once.
const (
	needsPod      = "waits for a pod to run; there is no kubelet"
	needsWebhook  = "calls a webhook or an API server that runs as a pod; there is no kubelet"
	breaksServers = "restarts or breaks the control plane by ssh"
	offByDefault  = "tests what is off by default"
	tooSlow       = "takes minutes, all of them waiting"
)

// selections are what is run: all specs of [sig-api-machinery] that can pass without running pods, conformance or not, and from the other
// SIGs the specs that only talk to the API; nearly all that is left there runs pods. The first ones take longest, so they start first.
var selections = []selection{
	{
		Name: "api-machinery-quota", SIG: "sig-api-machinery",
		Focus: []string{`ResourceQuota`},
		Skip:  []skip{{`ResourceQuota \[Feature:PodPriority\]`, "skipped by Kubernetes' own runs as well"}},
	},
	{
		Name: "api-machinery-crd", SIG: "sig-api-machinery",
		Focus: []string{`CustomResource`, `CRD`, `FieldValidation`, `OpenAPIV3`, `Discovery`, `AggregatedDiscovery`},
		Skip: []skip{
			{`CustomResourceConversionWebhook`, needsWebhook},
			{`CustomResourceFieldSelectors`, needsWebhook},
			{`OpenAPIV3 should contain OpenAPI V3 for Aggregated APIServer`, needsWebhook},
			{`.*\[Flaky\]`, "fails now and then in Kubernetes' own runs, and says so"},
		},
	},
	{
		Name: "api-machinery", SIG: "sig-api-machinery",
		Focus: []string{`.*`},
		Skip: []skip{
			{`ResourceQuota`, "in a selection of its own"},
			{`(CustomResource|CRD|FieldValidation|OpenAPIV3|Discovery|AggregatedDiscovery)`, "in a selection of their own"},
			{`AdmissionWebhook`, needsWebhook},
			{`Aggregator`, needsWebhook},
			{`CBOR .*sample-apiserver`, needsWebhook},
			{`.*\[Disruptive\]`, breaksServers},
			{`CoordinatedLeaderElection`, offByDefault},
			{`StorageVersion resources`, offByDefault},
			{`Namespaces \[Serial\] should ensure that all pods are removed when a namespace is deleted`, needsPod},
			{`OrderedNamespaceDeletion`, needsPod},
			{`Generated clientset should create pods`, needsPod},
			{`health handlers`, "expects checks of v1.36 by name; health is never forwarded, it is that of the apiserver behind the address"},
			{`Garbage collector should delete jobs and pods created by cronjob`, tooSlow},
			{`.*\[Slow\]`, tooSlow},
			{`API priority and fairness should ensure that requests can't be drowned out`, tooSlow},
			{`Namespaces \[Serial\] should (always )?delete fast`, "a hundred namespaces at once: a measurement of the machine more than of the API"},
		},
	},
	{
		Name: "scheduling", SIG: "sig-scheduling",
		Focus: []string{`LimitRange`, `SchedulerPreemption .*PriorityClass endpoints`},
	},
	{
		Name: "cli", SIG: "sig-cli",
		Focus: []string{
			`Kubectl client Kubectl (api-versions|cluster-info should|diff|server-side dry-run|version|create quota|get componentstatuses)`,
			`Kubectl client Kubectl (describe should check .* for cronjob|prune with applyset|run pod|apply|validation)`,
			`Kubectl client (Proxy server|kubectl subresource flag|kubectl wait)`,
			`kubectl kuberc`,
		},
	},
	{
		Name: "network", SIG: "sig-network",
		Focus: []string{
			`(EndpointSlice|EndpointsController) should create and delete .* with a selector that matches no pods`,
			`Endpoints should test the lifecycle`,
			`EndpointSlice should support creating EndpointSlice API operations`,
			`(Ingress|IngressClass|Netpol) API`,
			`ServiceCIDR and IPAddress API`,
			`Networking should provide unchanging, static URL paths`,
			`API Server should provide secure master service`,
			`Services should (complete a service status lifecycle|delete a collection of services|find a service from listing all)`,
			`Services should (check NodePort out-of-range|prevent NodePort collisions)`,
		},
	},
	{
		Name: "apps", SIG: "sig-apps",
		Focus: []string{
			`CronJob should support CronJob API operations`,
			`DisruptionController should create a PodDisruptionBudget`,
			`DisruptionController Listing PodDisruptionBudgets`,
			`(ReplicaSet|ReplicationController) should surface a failure condition on a common issue like exceeded quota`,
			`ReplicationController should get and update a ReplicationController scale`,
		},
	},
	{
		Name: "auth", SIG: "sig-auth",
		Focus: []string{
			`Certificates API`,
			`(SelfSubjectReview|SubjectReview)`,
			`ServiceAccounts (should run through the lifecycle|should update a ServiceAccount|no secret-based|should guarantee kube-root-ca)`,
			`ServiceAccounts should (allow opting out of API token automount|create a serviceAccountToken and ensure)`,
		},
	},
	{
		Name: "node", SIG: "sig-node",
		Focus: []string{
			`ConfigMap should (fail to create ConfigMap with empty key|run through a ConfigMap lifecycle|update ConfigMap successfully)`,
			`Secrets should (fail to create secret due to empty secret key|patch a secret)`,
			`Lease `,
			`PodTemplates`,
			`RuntimeClass .*(should support RuntimeClasses API operations|non-existent RuntimeClass|deleted RuntimeClass)`,
			`\[DRA\] CRUD Tests .*\[Conformance\]`,
			`Node Lifecycle should run through the lifecycle of a node`,
			`Pods Extended Pods Set QOS Class`,
			`Sysctls .* should reject invalid sysctls`,
		},
	},
	{
		Name: "storage", SIG: "sig-storage",
		Focus: []string{
			`(CSIInlineVolumes|CSINodes|CSIStorageCapacity|PersistentVolumes CSI Conformance|StorageClasses CSI Conformance)`,
			`(VolumeAttachment Conformance|VolumeAttributesClass)`,
			`(ConfigMap|Secrets) should be immutable if`,
		},
	},
	{
		Name: "instrumentation", SIG: "sig-instrumentation",
		Focus: []string{`(Events|Events API) should`},
	},
}

// focus returns the regular expressions for --ginkgo.focus: a spec runs if one of them fits.
func (s selection) focus() []string {
	var out []string
	for _, f := range s.Focus {
		out = append(out, s.pattern(f))
	}
	return out
}

// skips returns the regular expressions for --ginkgo.skip: a spec that one of them fits does not run.
func (s selection) skips() []string {
	var out []string
	for _, k := range s.Skip {
		out = append(out, s.pattern(k.Pattern))
	}
	return out
}

// pattern holds an expression to what follows the SIG. It cannot begin with ^, because ginkgo matches against the name with the name of
// the suite before it.
func (s selection) pattern(p string) string {
	if s.SIG == "" {
		return p
	}
	return regexp.QuoteMeta("["+s.SIG+"] ") + "(" + p + ")"
}

// selects reports whether the selection has the spec of that name.
func (s selection) selects(name string) bool {
	fits := func(patterns []string) bool {
		for _, p := range patterns {
			if regexp.MustCompile(p).MatchString(name) {
				return true
			}
		}
		return false
	}
	return fits(s.focus()) && !fits(s.skips())
}
