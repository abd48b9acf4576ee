# Everything that can be done to this repository. CI calls these targets and nothing else.
#
# Needed: Go, make, git, gcc (for the race detector). All other tools are built from tools/go.mod and kept in $(CACHE), each under a
# name that holds what went into it.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

GO ?= go
# The same folder that the test harness keeps the kube-apiservers in.
CACHE := $(or $(MVP_CACHE_DIR),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/mvp-node)
# Linking a linter takes a minute, so it is done once per version of the tools, not per "go tool".
TOOLS := $(CACHE)/tools-$(shell { cat tools/go.mod tools/go.sum; $(GO) env GOVERSION GOOS GOARCH; } | sha256sum | cut -c1-12)
GOLANGCI_LINT := $(TOOLS)/golangci-lint
BUF := $(TOOLS)/buf

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
IMAGE ?= mvp-node:$(VERSION)
LDFLAGS := -s -w -X main.buildVersion=$(VERSION)

# What "go test" gets: make unit RUN=TestParse PKG=./internal/config
PKG ?= ./...
RUN ?=
FUZZTIME ?= 20s
# Flags of the conformance run: make conformance CONFORMANCE='-way forwarded -focus Watchers -dir /tmp/c'
CONFORMANCE ?=

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: ## Build bin/mvp-node, static
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o bin/mvp-node ./cmd/mvp-node

# In this order, so that what fails fastest fails first.
.PHONY: test
test: ## Everything that CI checks: vet, lint, verify, unit tests with the race detector, end-to-end tests
	@$(MAKE) --no-print-directory vet
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory verify
	@$(MAKE) --no-print-directory race
	@$(MAKE) --no-print-directory e2e

.PHONY: vet
vet: ## go vet, all build tags
	$(GO) vet -tags e2e ./...

.PHONY: unit
unit: ## Unit tests; the seeds and found inputs of the fuzzers are among them
	$(GO) test -run '$(RUN)' $(PKG)

.PHONY: race
race: ## Unit tests with the race detector
	$(GO) test -race -run '$(RUN)' $(PKG)

# One package at a time: each starts whole control planes. Never from the cache of results: go does not know the apiservers.
.PHONY: e2e
e2e: ## End-to-end tests on real kube-apiservers, which the first run builds (20 minutes on 2 cores)
	$(GO) test -tags e2e -count=1 -p 1 -timeout 100m -run '$(RUN)' ./test/harness ./test/e2e

# Not part of "test": it takes too long. Its own unit tests are.
.PHONY: conformance
conformance: ## Kubernetes' own e2e tests: direct, through a node, forwarded; see docs/conformance.md (20 minutes on 2 cores)
	$(GO) run ./test/conformance $(CONFORMANCE)

.PHONY: fuzz
fuzz: ## Run every fuzzer for FUZZTIME (20s)
	@grep -rl --include='*_test.go' '^func Fuzz' cmd internal | sort | while read -r file; do \
		for name in $$(sed -n 's/^func \(Fuzz[A-Za-z0-9_]*\)(.*/\1/p' "$$file"); do \
			echo "== ./$$(dirname "$$file") $$name"; \
			$(GO) test -run '^$$' -fuzz "^$$name\$$" -fuzztime '$(FUZZTIME)' "./$$(dirname "$$file")" </dev/null; \
		done; \
	done

.PHONY: lint
lint: $(GOLANGCI_LINT) $(BUF) ## golangci-lint and buf lint
	$(GOLANGCI_LINT) run ./...
	$(BUF) lint proto

.PHONY: generate
generate: $(BUF) ## Generate Go from proto
	$(BUF) generate

.PHONY: tidy
tidy: ## go mod tidy, all modules
	$(GO) mod tidy
	$(GO) -C tools mod tidy

.PHONY: fmt
fmt: ## gofmt, all files
	gofmt -w cmd internal proto test

# On a copy, so that neither unfinished work in this tree nor ignored files make it pass or fail, and nothing is changed. What git
# does not know would be missing in a clone, so generated files must be known to it.
.PHONY: verify
verify: $(BUF) ## Fail, with a diff, unless generated code, go.mod, go.sum and formatting are as the tools write them
	@copy=$$(mktemp -d); trap 'chmod -R u+w "$$copy"; rm -rf "$$copy"' EXIT; \
	unknown=$$(git ls-files --others --exclude-standard -- '*.pb.go' '*go.mod' '*go.sum'); \
	if [ -n "$$unknown" ]; then printf 'verify: git does not know these files:\n%s\n' "$$unknown" >&2; exit 1; fi; \
	mkdir "$$copy/is" "$$copy/should"; \
	git ls-files -z --cached --others --exclude-standard | \
		{ while IFS= read -r -d '' name; do [ ! -e "$$name" ] || printf '%s\0' "$$name"; done; } | \
		tar --null --files-from=- --create | tar --extract --directory="$$copy/is"; \
	cp -a "$$copy/is/." "$$copy/should/"; \
	find "$$copy/should" -name '*.pb.go' -delete; \
	$(MAKE) --no-print-directory --directory="$$copy/should" VERSION=verify generate tidy fmt >"$$copy/log" 2>&1 || { cat "$$copy/log" >&2; exit 1; }; \
	cd "$$copy"; \
	if ! git --no-pager diff --no-index --no-color is should; then \
		echo 'verify: run "make generate tidy fmt" and commit what changes' >&2; exit 1; \
	fi

.PHONY: demo
demo: ## Tell the story on real kube-apiservers: what is wrong without mvp-node, and what it does about it
	$(GO) run ./test/demo

.PHONY: demo-up
demo-up: ## Leave the first act of the demo running and say how to reach it
	$(GO) run ./test/demo up

.PHONY: demo-down
demo-down: ## End what demo-up left running
	$(GO) run ./test/demo down

.PHONY: image
image: build ## Build the container image IMAGE, from nothing but the binary
	docker build --file deploy/Dockerfile --build-arg VERSION='$(VERSION)' --tag '$(IMAGE)' bin

.PHONY: clean
clean: ## Remove what was built here; the tools and apiservers in the cache stay
	rm -rf bin

$(GOLANGCI_LINT): TOOL := github.com/golangci/golangci-lint/v2/cmd/golangci-lint
$(BUF): TOOL := github.com/bufbuild/buf/cmd/buf
$(GOLANGCI_LINT) $(BUF):
	@echo "building $(@F); it is kept in $(@D)"
	@mkdir -p '$(@D)'
	@$(GO) -C tools build -buildvcs=false -o '$@' $(TOOL)
