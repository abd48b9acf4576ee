package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/mvp-mesh/mvp-node/internal/config"
)

// loadConfig reads a configuration file and the certificates that it names. Its errors list every problem with line and field,
// and end the program with exitUsage.
func loadConfig(file string) (*config.Config, error) {
	cfg, err := config.Load(file)
	if err != nil {
		return nil, usageError{err}
	}
	return cfg, nil
}

func newConfigCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "config", Short: "Work with configuration files"}
	cmd.AddCommand(&cobra.Command{
		Use:   "validate FILE",
		Short: "Check a configuration and the certificates it names, without starting anything",
		Long:  "Check a configuration file as \"serve\" would: every problem is listed at once with its line and field, and the exit code is 2.",
		Args:  exactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg, err := loadConfig(args[0])
			if err != nil {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%s: valid configuration of node %s in cluster %s\n", args[0], cfg.Name, cfg.ClusterID)
			return nil
		},
	})
	return cmd
}
