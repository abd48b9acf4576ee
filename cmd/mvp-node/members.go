package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	mvpv1 "github.com/mvp-mesh/mvp-node/proto/mvp/v1"
)

func newMembersCommand() *cobra.Command {
	var f clientFlags
	cmd := &cobra.Command{
		Use:     "members",
		Short:   "List the members of the mesh as a node sees them",
		Example: "  mvp-node members --config /etc/mvp-node/node.yaml\n  mvp-node members -o json | jq -r '.members[] | select(.state != \"Ready\") | .name'",
		Args:    exactArgs(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return ask(cmd, &f, func(ctx context.Context, c mvpv1.MeshServiceClient) (*mvpv1.GetViewResponse, error) {
				return c.GetView(ctx, &mvpv1.GetViewRequest{})
			}, printMembers)
		},
	}
	f.add(cmd)
	return cmd
}

func printMembers(w io.Writer, v *mvpv1.GetViewResponse) error {
	return table(w, "NAME\tADDRESS\tSTATE\tMODE\tKUBERNETES\tRESOURCES\tCATALOG\tAGE", func(row func(string, ...any)) {
		for _, m := range v.GetMembers() {
			row("%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s", m.GetName(), dash(m.GetAddress()), m.GetState(), m.GetMode(), dash(m.GetServerVersion()),
				resources(m), short(m.GetCatalogDigest()), age(m.GetCatalogAge()))
		}
	})
}

// resources counts the entries of the held catalog; "?" says that none is held, "*" that the member advertises a newer one.
func resources(m *mvpv1.Member) string {
	switch {
	case m.GetHeldDigest() == "":
		return "?"
	case m.GetHeldDigest() != m.GetCatalogDigest():
		return fmt.Sprintf("%d*", m.GetResources())
	}
	return fmt.Sprint(m.GetResources())
}

// age is a duration as kubectl would round it.
func age(d *durationpb.Duration) string {
	if d == nil {
		return "-"
	}
	t := d.AsDuration()
	if t < 10*time.Minute {
		return t.Round(time.Second).String()
	}
	return t.Round(time.Minute).String()
}

func newGossipCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "gossip", Short: "Look into the gossip of a mesh"}
	var f clientFlags
	var catalogs bool
	dump := &cobra.Command{
		Use:   "dump",
		Short: "Print all that a node knows of the mesh",
		Long: "Print a node's view (members, states, versions, digests and the hash of the view that each member holds) and the member table\n" +
			"of the gossip layer below it. With -o json the output has everything and is the same for the same state.",
		Args: exactArgs(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return ask(cmd, &f, func(ctx context.Context, c mvpv1.MeshServiceClient) (*mvpv1.DumpGossipResponse, error) {
				return c.DumpGossip(ctx, &mvpv1.DumpGossipRequest{Catalogs: catalogs})
			}, printDump)
		},
	}
	f.add(dump)
	dump.Flags().BoolVar(&catalogs, "catalogs", false, "include every member's catalog")
	cmd.AddCommand(dump)
	return cmd
}

func printDump(w io.Writer, d *mvpv1.DumpGossipResponse) error {
	v := d.GetView()
	fmt.Fprintf(w, "node %s, cluster %s\nview %s, complete: %t, converged: %t\n\n", v.GetSelf(), v.GetClusterId(), short(v.GetViewHash()), v.GetComplete(), v.GetConverged())
	err := table(w, "NAME\tSTATE\tMODE\tKUBERNETES\tNODE\tADVERTISED\tHELD\tGEN\tRESOURCES\tAGE\tVIEW\tHOLDS UP\tLAST ERROR", func(row func(string, ...any)) {
		for _, m := range v.GetMembers() {
			row("%s\t%s\t%s\t%s\t%s\t%s\t%s\t%d\t%s\t%s\t%s\t%t\t%s", m.GetName(), m.GetState(), m.GetMode(), dash(m.GetServerVersion()), dash(m.GetNodeVersion()),
				short(m.GetCatalogDigest()), short(m.GetHeldDigest()), m.GetCatalogGeneration(), resources(m), age(m.GetCatalogAge()),
				short(m.GetViewHash()), m.GetHoldsUp(), dash(m.GetLastError()))
		}
	})
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "\ngossip: health score %d, %d packets pending\n", d.GetHealthScore(), d.GetPendingPackets())
	err = table(w, "NAME\tGOSSIP ADDRESS\tSTATUS\tGONE FOR\tBOOT\tMETA\tFAILED PULLS", func(row func(string, ...any)) {
		for _, m := range d.GetGossipMembers() {
			row("%s\t%s\t%s\t%s\t%s\tv%d\t%d", m.GetName(), dash(m.GetAddress()), m.GetStatus(), age(m.GetVanished()), dash(short(m.GetBoot())),
				m.GetMetaFormat(), m.GetFetchFailures())
		}
	})
	if err != nil {
		return err
	}
	fmt.Fprintln(w)
	err = table(w, "SEED\tADDRESSES\tLAST ERROR", func(row func(string, ...any)) {
		for _, s := range d.GetSeeds() {
			row("%s\t%s\t%s", s.GetSeed(), dash(strings.Join(s.GetAddresses(), ", ")), dash(s.GetLastError()))
		}
	})
	if err != nil {
		return err
	}
	for _, c := range d.GetCatalogs() {
		fmt.Fprintf(w, "\ncatalog of %s: %s\n", c.GetName(), short(c.GetDigest()))
		if err := table(w, "GROUP-VERSION\tSOURCE\tRESOURCE\tVERBS", func(row func(string, ...any)) { catalogRows(c.GetCatalog(), row) }); err != nil {
			return err
		}
	}
	return nil
}

func catalogRows(c *mvpv1.Catalog, row func(string, ...any)) {
	for _, gv := range c.GetGroupVersions() {
		name := gv.GetVersion()
		if gv.GetGroup() != "" {
			name = gv.GetGroup() + "/" + name
		}
		source := map[mvpv1.Source]string{mvpv1.Source_SOURCE_BUILTIN: "Builtin", mvpv1.Source_SOURCE_CRD: "CRD", mvpv1.Source_SOURCE_AGGREGATED: "Aggregated"}[gv.GetSource()]
		for _, r := range gv.GetResources() {
			resource := r.GetName()
			if r.GetSubresource() != "" {
				resource += "/" + r.GetSubresource()
			}
			row("%s\t%s\t%s\t%v", name, source, resource, r.GetVerbs())
		}
	}
}
