// Command mvp-node is a mixed version proxy for Kubernetes control planes: the node itself (serve), and the tools to look at a
// mesh (members, gossip dump, explain) and to prepare one (certs, config).
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
)

// Exit codes, as kubectl and linkerd have them.
const (
	exitOK    = 0
	exitError = 1 // something failed
	exitUsage = 2 // the command line or the configuration is wrong; nothing was started
)

func main() {
	// The first signal ends the context and with it, in order, the node; the second ends the process at once.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop)
	os.Exit(run(ctx, newRootCommand()))
}

func run(ctx context.Context, root *cobra.Command) int {
	err := root.ExecuteContext(ctx)
	if err == nil {
		return exitOK
	}
	fmt.Fprintln(root.ErrOrStderr(), "Error:", err)
	if _, ok := errors.AsType[usageError](err); ok {
		return exitUsage
	}
	return exitError
}

// usageError marks what is wrong with the command line.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:           "mvp-node",
		Short:         "Mixed version proxy for Kubernetes control planes",
		Long:          "mvp-node stands before a kube-apiserver during a rolling upgrade. Requests for resources that only another\nkube-apiserver of the cluster serves are forwarded there, instead of ending in a misleading 404.",
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.AddCommand(
		newServeCommand(),
		newConfigCommand(),
		newCertsCommand(),
		newMembersCommand(),
		newGossipCommand(),
		newExplainCommand(),
		newVersionCommand(),
	)
	return root
}

// exactArgs is cobra.ExactArgs with our exit code.
func exactArgs(n int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := cobra.ExactArgs(n)(cmd, args); err != nil {
			return usageError{fmt.Errorf("%w; see %s --help", err, cmd.CommandPath())}
		}
		return nil
	}
}
