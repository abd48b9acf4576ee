package main

import (
	"io"
	"log/slog"

	"github.com/spf13/cobra"
	"k8s.io/klog/v2"

	"github.com/mvp-mesh/mvp-node/internal/config"
	"github.com/mvp-mesh/mvp-node/internal/node"
)

func newServeCommand() *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "serve --config FILE",
		Short: "Run a node before the local kube-apiserver",
		Long: "Run a node. It stops by itself only when one of its ports fails; SIGTERM drains and stops it, a second signal ends it at\n" +
			"once. A configuration with problems is refused as a whole, with every problem listed, before anything is started.",
		Args: exactArgs(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := loadConfig(file)
			if err != nil {
				return err
			}
			logger := newLogger(cmd.ErrOrStderr(), cfg.Logging)
			klog.SetSlogLogger(logger.With("component", "kubernetes"))
			n, err := node.New(node.Options{Config: cfg, Logger: logger, Version: version()})
			if err != nil {
				return err
			}
			return n.Run(cmd.Context())
		},
	}
	addConfigFlag(cmd, &file)
	return cmd
}

// defaultConfigFile is where the packages and manifests of deploy/ put it.
const defaultConfigFile = "/etc/mvp-node/node.yaml"

func addConfigFlag(cmd *cobra.Command, file *string) {
	cmd.Flags().StringVar(file, "config", defaultConfigFile, "the node's configuration `FILE`")
	_ = cmd.MarkFlagFilename("config", "yaml")
}

func newLogger(w io.Writer, l config.Logging) *slog.Logger {
	o := &slog.HandlerOptions{Level: l.SlogLevel()}
	if l.Format == "json" {
		return slog.New(slog.NewJSONHandler(w, o))
	}
	return slog.New(slog.NewTextHandler(w, o))
}
