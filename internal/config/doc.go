// Package config reads the configuration file of a node: one strict, versioned YAML document. It answers the two questions an
// operator has about such a file: is it right, and if not, on which lines and why. Every problem is reported at once, each with
// file, line and the path of the field:
//
//	node.yaml:12: front.tls.certFile: open /etc/mvp-node/front.crt: no such file or directory
//
// Parse looks at the text alone and Config.Check at the certificates it names, so that a file can be validated on another host;
// Load does both. Defaults are filled in by Default and nowhere else.
//
// The package refuses to watch files, to build anything out of the configuration but values of the core packages, and to know
// about flags. cmd/mvp-node calls Load and hands the Config to internal/node. It starts no goroutines.
//
//	c, err := config.Load("/etc/mvp-node/node.yaml")
//	var bad *config.Error
//	if errors.As(err, &bad) { ... } // bad.Problems, by line
package config
