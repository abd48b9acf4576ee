package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	mvpv1 "github.com/mvp-mesh/mvp-node/proto/mvp/v1"
)

func newExplainCommand() *cobra.Command {
	var f clientFlags
	var user string
	cmd := &cobra.Command{
		Use:   "explain METHOD PATH",
		Short: "Tell what a node would do with a request, and why, without sending it",
		Example: "  mvp-node explain GET /apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicies\n" +
			"  mvp-node explain PATCH /apis/storage.k8s.io/v1/csinodes/n1/status --user system:node:n1",
		Args: exactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return ask(cmd, &f, func(ctx context.Context, c mvpv1.MeshServiceClient) (*mvpv1.ExplainResponse, error) {
				return c.Explain(ctx, &mvpv1.ExplainRequest{Method: strings.ToUpper(args[0]), Target: args[1], User: user})
			}, printExplanation)
		},
	}
	f.add(cmd)
	cmd.Flags().StringVar(&user, "user", "", "`NAME` of the user whose request it would be; the choice among several peers depends on it")
	return cmd
}

func printExplanation(w io.Writer, e *mvpv1.ExplainResponse) error {
	err := table(w, "node\t"+e.GetNode()+" (mode "+e.GetMode()+")", func(row func(string, ...any)) {
		if e.GetResourceRequest() {
			gv := e.GetVersion()
			if e.GetGroup() != "" {
				gv = e.GetGroup() + "/" + gv
			}
			row("group-version\t%s", gv)
			row("resource\t%s", e.GetResource())
			if e.GetSubresource() != "" {
				row("subresource\t%s", e.GetSubresource())
			}
			if e.GetNamespace() != "" {
				row("namespace\t%s", e.GetNamespace())
			}
			if e.GetName() != "" {
				row("name\t%s", e.GetName())
			}
		} else {
			row("resource\tnone: the path names no resource")
		}
		row("verb\t%s", dash(e.GetVerb()))
		row("long-running\t%t", e.GetLongRunning())
		row("view complete\t%t", e.GetViewComplete())
		row("outcome\t%s", e.GetOutcome())
		row("reason\t%s", e.GetReason())
		if e.GetCause() != "" {
			row("cause\t%s", e.GetCause())
		}
		if len(e.GetCandidates()) > 0 {
			row("candidates\t%s", strings.Join(e.GetCandidates(), ", "))
		}
		if e.GetObservedOutcome() != "" {
			row("if Enabled\t%s", e.GetObservedOutcome())
		}
	})
	if err != nil || len(e.GetServedBy()) == 0 {
		return err
	}
	fmt.Fprintln(w)
	return table(w, "MEMBER\tSTATE\tKUBERNETES\tSERVES IT", func(row func(string, ...any)) {
		for _, s := range e.GetServedBy() {
			row("%s\t%s\t%s\t%s", s.GetName(), s.GetState(), dash(s.GetServerVersion()), s.GetServes())
		}
	})
}
