//go:build tools

// Package tools names the command that the harness builds from this module.
package tools

import _ "go.etcd.io/etcd/server/v3"
