package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/mvp-mesh/mvp-node/internal/config"
	"github.com/mvp-mesh/mvp-node/internal/mesh"
	mvpv1 "github.com/mvp-mesh/mvp-node/proto/mvp/v1"
)

// clientFlags say which node to ask and how to prove who asks. On a host that runs a node, its configuration file has all of it.
type clientFlags struct {
	config                string
	address               string
	cluster               string
	certFile, keyFile, ca string
	output                string
	timeout               time.Duration
}

func (f *clientFlags) add(cmd *cobra.Command) {
	addConfigFlag(cmd, &f.config)
	fl := cmd.Flags()
	fl.StringVar(&f.address, "address", "", "mesh `HOST:PORT` of the node to ask (default: the node of --config)")
	fl.StringVar(&f.cluster, "cluster", "", "cluster `ID` (default: from --config)")
	fl.StringVar(&f.certFile, "cert", "", "client certificate `FILE` of a node or operator (default: from --config)")
	fl.StringVar(&f.keyFile, "key", "", "its private key `FILE` (default: from --config)")
	fl.StringVar(&f.ca, "ca", "", "mesh CA `FILE` (default: from --config)")
	fl.StringVarP(&f.output, "output", "o", "table", "table or json")
	fl.DurationVar(&f.timeout, "timeout", 10*time.Second, "how long to wait for the answer")
}

// complete fills what was not given from the configuration file. If everything was given, no file is needed.
func (f *clientFlags) complete() error {
	if f.output != "table" && f.output != "json" {
		return usageError{fmt.Errorf("--output %q: want table or json", f.output)}
	}
	missing := false
	for _, s := range []string{f.address, f.cluster, f.certFile, f.keyFile, f.ca} {
		missing = missing || s == ""
	}
	if !missing {
		return nil
	}
	cfg, err := config.Load(f.config)
	if err != nil {
		return usageError{fmt.Errorf("%w\n(or give --address, --cluster, --cert, --key and --ca)", err)}
	}
	for _, d := range []struct {
		dst   *string
		value string
	}{
		{&f.address, cfg.Mesh.AdvertiseAddress}, {&f.cluster, cfg.ClusterID}, {&f.certFile, cfg.Mesh.TLS.CertFile},
		{&f.keyFile, cfg.Mesh.TLS.KeyFile}, {&f.ca, cfg.Mesh.TLS.CAFile},
	} {
		if *d.dst == "" {
			*d.dst = d.value
		}
	}
	return nil
}

// ask calls a node and prints its answer: JSON as it is, or as the table that print writes.
func ask[T proto.Message](cmd *cobra.Command, f *clientFlags, call func(context.Context, mvpv1.MeshServiceClient) (T, error), print func(io.Writer, T) error) error {
	if err := f.complete(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), f.timeout)
	defer cancel()
	client, err := dial(ctx, f)
	if err != nil {
		return err
	}
	defer client.Close()
	answer, err := call(ctx, client)
	if err != nil {
		if s, ok := status.FromError(err); ok {
			return fmt.Errorf("node at %s: %s: %s", f.address, s.Code(), s.Message())
		}
		return fmt.Errorf("node at %s: %w", f.address, err)
	}
	if f.output == "json" {
		return printJSON(cmd.OutOrStdout(), answer)
	}
	return print(cmd.OutOrStdout(), answer)
}

func dial(ctx context.Context, f *clientFlags) (*mesh.OperatorConn, error) {
	var pem [3][]byte
	for i, file := range []string{f.certFile, f.keyFile, f.ca} {
		data, err := os.ReadFile(file)
		if err != nil {
			return nil, usageError{err}
		}
		pem[i] = data
	}
	client, err := mesh.DialOperator(ctx, f.address, pem[0], pem[1], pem[2], f.cluster)
	if err != nil {
		return nil, fmt.Errorf("node at %s: %w", f.address, err)
	}
	return client, nil
}

// printJSON writes a message in protobuf's JSON mapping, indented; equal messages give equal bytes (protojson alone varies its
// white space on purpose).
func printJSON(w io.Writer, m proto.Message) error {
	raw, err := protojson.MarshalOptions{EmitUnpopulated: true}.Marshal(m)
	if err != nil {
		return fmt.Errorf("encode answer: %w", err)
	}
	var tight, out bytes.Buffer
	if err := errors.Join(json.Compact(&tight, raw), json.Indent(&out, tight.Bytes(), "", "  ")); err != nil {
		return fmt.Errorf("encode answer: %w", err)
	}
	out.WriteByte('\n')
	_, err = out.WriteTo(w)
	return err
}

// table writes rows under a header with aligned columns.
func table(w io.Writer, header string, rows func(row func(format string, args ...any))) error {
	tw := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	fmt.Fprintln(tw, header)
	rows(func(format string, args ...any) { fmt.Fprintf(tw, format+"\n", args...) })
	return tw.Flush()
}

// short is the beginning of a hexadecimal digest, "-" for none.
func short(digest string) string {
	if digest == "" {
		return "-"
	}
	if len(digest) > 12 {
		return digest[:12]
	}
	return digest
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
