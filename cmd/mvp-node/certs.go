package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/mvp-mesh/mvp-node/internal/pki"
)

// Names of the mesh CA's files in the folder given by --dir.
const (
	meshCACert = "mesh-ca.crt"
	meshCAKey  = "mesh-ca.key"
)

const certsLong = `Make the certificates that the nodes of a mesh prove their identity with.

A cluster has one mesh CA. Each node has one certificate of it, whose URI names the cluster and the node
(spiffe://CLUSTER/mvp-node/NAME), and an operator who calls the mesh port has one that is good for a client only
(spiffe://CLUSTER/mvp-operator/NAME). These commands only write files; they talk to nobody. A cluster that runs SPIRE or
cert-manager can have them issue certificates with the same URIs instead.

On hosts made by kubeadm, put the files into /etc/kubernetes/pki/mvp-node:

  mesh-ca.crt         on every control-plane host
  NAME.crt, NAME.key  on host NAME only
  mesh-ca.key         on the one host where "certs init" was run, or better, offline: it is never copied to
                      another host. Who has it can be any node.

Everything else that a node needs is there already, made by kubeadm:

  /etc/kubernetes/pki/front-proxy-client.crt, .key  apiserver.frontProxy: certFile, keyFile
  /etc/kubernetes/pki/front-proxy-ca.crt            apiserver.frontProxy: caFile
  /etc/kubernetes/pki/ca.crt                        apiserver: caFile; front.authentication: clientCAFile
  /etc/kubernetes/pki/apiserver.crt, .key           front.tls: certFile, keyFile`

const certsExample = `  # Once, on one control-plane host (here cp-a):
  mvp-node certs init --cluster prod --dir /etc/kubernetes/pki/mvp-node

  # Once for every control-plane host, on that same host:
  mvp-node certs issue --cluster prod --dir /etc/kubernetes/pki/mvp-node --name cp-a
  mvp-node certs issue --cluster prod --dir /etc/kubernetes/pki/mvp-node --name cp-b --out ./cp-b

  # Copy the pair of the other host and the CA certificate there. Never copy mesh-ca.key.
  ssh root@cp-b mkdir -p -m 0700 /etc/kubernetes/pki/mvp-node
  scp ./cp-b/cp-b.crt ./cp-b/cp-b.key /etc/kubernetes/pki/mvp-node/mesh-ca.crt root@cp-b:/etc/kubernetes/pki/mvp-node/
  rm -r ./cp-b`

// newCertsCommand returns "mvp-node certs", which makes the certificates of a mesh. The errors of its commands are to be
// shown to the user as they are.
func newCertsCommand() *cobra.Command {
	return certsCommand(time.Now)
}

// certsCommand is newCertsCommand with a clock, which a test can set.
func certsCommand(now func() time.Time) *cobra.Command {
	command := &cobra.Command{
		Use:     "certs",
		Short:   "Make the mesh CA and the certificates of nodes and operators",
		Long:    certsLong,
		Example: certsExample,
		Args:    certsArgs,
		// Without a Run of its own, cobra answers a mistyped subcommand with the help and success.
		RunE: func(command *cobra.Command, _ []string) error { return command.Help() },
	}
	command.AddCommand(certsInitCommand(now), certsIssueCommand(now))
	return command
}

func certsInitCommand(now func() time.Time) *cobra.Command {
	var cluster, dir string
	lifetime := lifetimeValue(pki.DefaultCALifetime)
	command := &cobra.Command{
		Use:   "init --cluster ID --dir DIR",
		Short: "Make the mesh CA of a cluster",
		Long: `Make the mesh CA of a cluster: mesh-ca.crt, which every node needs, and mesh-ca.key, which signs new certificates and
stays where it is. Run it once per cluster. Files that exist are never overwritten.`,
		Example: "  mvp-node certs init --cluster prod --dir /etc/kubernetes/pki/mvp-node",
		Args:    certsArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			if err := pki.ValidateCluster(cluster); err != nil {
				return usageError{err}
			}
			ca, err := pki.NewMeshCA(cluster, now(), time.Duration(lifetime))
			if err != nil {
				return err
			}
			cert, key := filepath.Join(dir, meshCACert), filepath.Join(dir, meshCAKey)
			if err := pki.WritePair(cert, key, ca.Pair()); err != nil {
				return err
			}
			return reportCerts(command.OutOrStdout(), cert, "the mesh CA of "+cluster, ca.NotAfter(), key,
				"keep it on this host")
		},
	}
	certsFlags(command, &cluster, &dir, &lifetime, "folder that the CA is written to")
	return command
}

func certsIssueCommand(now func() time.Time) *cobra.Command {
	var cluster, dir, name, out string
	var operator bool
	var extra pki.Extra
	lifetime := lifetimeValue(pki.DefaultLeafLifetime)
	command := &cobra.Command{
		Use:   "issue --cluster ID --dir DIR --name NAME",
		Short: "Issue the certificate of a node or an operator",
		Long: `Issue the certificate of a node, or with --operator that of a person or tool that calls the mesh port, and write it to
NAME.crt and NAME.key. It is signed by the mesh CA that "certs init" put into --dir, and ends with it at the latest.
Files that exist are never overwritten: to renew a certificate, issue it into another folder with --out and move it over
the old one. A node takes up new files without a restart.`,
		Example: `  # The node of this host, which has address 192.0.2.11; with the address in the certificate, grpcurl can verify it.
  mvp-node certs issue --cluster prod --dir /etc/kubernetes/pki/mvp-node --name cp-a --ip-san 192.0.2.11

  # Somebody who looks at the mesh with mvp-node or grpcurl.
  mvp-node certs issue --cluster prod --dir /etc/kubernetes/pki/mvp-node --name alice --operator --lifetime 30d --out .`,
		Args: certsArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			if out == "" {
				out = dir
			}
			identity, issue := pki.NodeURI, (*pki.CA).IssueNode
			if operator {
				identity, issue = pki.OperatorURI, (*pki.CA).IssueOperator
			}
			uri, err := identity(cluster, name)
			if err != nil {
				return usageError{err}
			}
			for _, dns := range extra.DNSNames {
				if err := pki.ValidateDNSName(dns); err != nil {
					return usageError{err}
				}
			}
			ca, err := pki.LoadCA(filepath.Join(dir, meshCACert), filepath.Join(dir, meshCAKey))
			if err != nil {
				return fmt.Errorf(`%w ("mvp-node certs init" makes the mesh CA)`, err)
			}
			at := now()
			pair, err := issue(ca, cluster, name, extra, at, time.Duration(lifetime))
			if err != nil {
				return err
			}
			cert, key := filepath.Join(out, name+".crt"), filepath.Join(out, name+".key")
			if err := pki.WritePair(cert, key, pair); err != nil {
				return err
			}
			until := at.Add(time.Duration(lifetime))
			if until.After(ca.NotAfter()) {
				until = ca.NotAfter()
			}
			return reportCerts(command.OutOrStdout(), cert, uri.String(), until, key, "secret")
		},
	}
	certsFlags(command, &cluster, &dir, &lifetime, "folder of the mesh CA")
	flags := command.Flags()
	flags.StringVar(&name, "name", "", "name of the node, as in its configuration, or of the operator (required)")
	flags.BoolVar(&operator, "operator", false, "issue for an operator: may call the mesh port, is never a member")
	flags.StringSliceVar(&extra.DNSNames, "dns-san", nil, "also put this DNS name into the certificate; may be repeated")
	flags.IPSliceVar(&extra.IPs, "ip-san", []net.IP(nil), "also put this IP address into the certificate; may be repeated")
	flags.Lookup("ip-san").DefValue = "" // pflag would show "(default [])"
	flags.StringVar(&out, "out", "", "folder that the certificate is written to (default that of the mesh CA)")
	requireFlags(command, "name")
	return command
}

// certsFlags adds the flags that both commands have.
func certsFlags(command *cobra.Command, cluster, dir *string, lifetime *lifetimeValue, dirUsage string) {
	flags := command.Flags()
	flags.StringVar(cluster, "cluster", "", "cluster ID, as clusterID in the nodes' configuration (required)")
	flags.StringVar(dir, "dir", "", dirUsage+" (required)")
	flags.Var(lifetime, "lifetime", "how long the certificate is valid, in days or as a duration (30d, 12h)")
	requireFlags(command, "cluster", "dir")
}

// reportCerts says what was written, one file a line.
func reportCerts(w io.Writer, cert, what string, until time.Time, key, keyNote string) error {
	_, err := fmt.Fprintf(w, "%s: %s, valid until %s\n%s: its key, %s\n",
		cert, what, until.UTC().Format("2006-01-02 15:04 MST"), key, keyNote)
	return err
}

// lifetimeValue is a flag for a duration that may also be given in days, which is what certificates are counted in.
type lifetimeValue time.Duration

// day is 24 hours: the days of certificates have nothing to do with daylight saving time.
const day = 24 * time.Hour

func (v *lifetimeValue) Set(s string) error {
	duration, err := time.ParseDuration(s)
	if count, isDays := strings.CutSuffix(s, "d"); isDays {
		var days uint64
		days, err = strconv.ParseUint(count, 10, 16)
		duration = time.Duration(days) * day
	}
	if err != nil || duration <= 0 {
		return errors.New("want a positive number of days such as 30d, or a duration such as 12h")
	}
	*v = lifetimeValue(duration)
	return nil
}

func (v *lifetimeValue) String() string {
	if duration := time.Duration(*v); duration%day != 0 {
		return duration.String()
	}
	return strconv.FormatInt(int64(time.Duration(*v)/day), 10) + "d"
}

// Type is the placeholder in the help text.
func (v *lifetimeValue) Type() string { return "duration" }

// certsArgs refuses arguments, and flags that are missing, as what they are: wrong usage. Cobra checks the flags only later,
// and its error could not be told from that of a command that ran.
func certsArgs(command *cobra.Command, args []string) error {
	err := cobra.NoArgs(command, args)
	if err == nil {
		err = command.ValidateRequiredFlags()
	}
	if err != nil {
		return usageError{fmt.Errorf("%w; see %s --help", err, command.CommandPath())}
	}
	return nil
}

// requireFlags marks flags that must be given.
func requireFlags(command *cobra.Command, names ...string) {
	for _, name := range names {
		if err := command.MarkFlagRequired(name); err != nil {
			panic(err) // no flag of that name: a mistake in this program
		}
	}
}
