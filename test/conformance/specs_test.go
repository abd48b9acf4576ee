//go:build linux

package main

import (
	"regexp"
	"testing"
)

func TestSelectionsAreSound(t *testing.T) {
	names := map[string]bool{}
	for _, s := range selections {
		if names[s.Name] || s.Name == "" {
			t.Errorf("two selections are called %q, or one has no name", s.Name)
		}
		names[s.Name] = true
		if s.SIG == "" || len(s.Focus) == 0 {
			t.Errorf("%s would run the specs of all SIGs, or all specs of one without saying so", s.Name)
		}
		for _, p := range append(s.focus(), s.skips()...) {
			if _, err := regexp.Compile(p); err != nil {
				t.Errorf("%s: %v", s.Name, err)
			}
		}
		for _, k := range s.Skip {
			if k.Reason == "" {
				t.Errorf("%s skips %s without a reason", s.Name, k.Pattern)
			}
		}
	}
}

// A spec that two selections have would be counted twice.
func TestSelects(t *testing.T) {
	for name, want := range map[string]string{
		"[sig-api-machinery] ResourceQuota should create a ResourceQuota and capture the life of a secret. [Conformance]":             "api-machinery-quota",
		"[sig-api-machinery] ResourceQuota [Feature:PodPriority] should verify":                                                       "",
		"[sig-api-machinery] CustomResourceDefinition Watch [Privileged:ClusterAdmin] CustomResourceDefinition Watch":                 "api-machinery-crd",
		"[sig-api-machinery] CustomResourceConversionWebhook [Privileged:ClusterAdmin] should be able to convert from CR v1 to CR v2": "",
		"[sig-api-machinery] Watchers should observe add, update, and delete watch notifications on configmaps [Conformance]":         "api-machinery",
		"[sig-api-machinery] ResourceQuota should create a ResourceQuota and capture the life of a custom resource.":                  "api-machinery-quota",
		"[sig-api-machinery] Garbage collector should support orphan deletion of custom resources":                                    "api-machinery",
		"[sig-api-machinery] ValidatingAdmissionPolicy [Privileged:ClusterAdmin] should type check a CRD":                             "api-machinery",
		"[sig-api-machinery] AdmissionWebhook [Privileged:ClusterAdmin] should mutate custom resource [Conformance]":                  "",
		"[sig-cli] Kubectl client Kubectl diff should check if kubectl diff finds a difference for Deployments [Conformance]":         "cli",
		"[sig-cli] Kubectl client Simple pod should support exec":                                                                     "",
		"[sig-storage] Secrets should be immutable if `immutable` field is set [Conformance]":                                         "storage",
		"[sig-node] Secrets should patch a secret [Conformance]":                                                                      "node",
		"[sig-windows] anything": "",
	} {
		got := ""
		for _, s := range selections {
			if s.selects(name) {
				if got != "" {
					t.Errorf("%s is in %s and in %s", name, got, s.Name)
				}
				got = s.Name
			}
		}
		if got != want {
			t.Errorf("%s is in %q, want %q", name, got, want)
		}
	}
}
