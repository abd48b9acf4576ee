// Package node is where a node is put together: it reads the completed configuration, builds each part, hands the parts to each
// other, owns every long-lived goroutine and holds the order of a stop. It is the only package that knows all the others, and
// it decides nothing about requests.
//
// Reading order: New (what is built from what), Run (which goroutines run, and what ends them), stop (the timeline).
//
//	n, err := node.New(node.Options{Config: cfg, Logger: logger})
//	if err != nil { ... }          // nothing runs, nothing is left open
//	err = n.Run(ctx)               // until ctx ends or a part fails
package node
