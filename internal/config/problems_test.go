package config

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Each case changes lines of minimal (or is a whole file) and states the whole text of the error.
func TestProblems(t *testing.T) {
	for _, tc := range []struct {
		name string
		edit []string // old, new, old, new... in minimal
		add  string   // line 20 and on
		file string   // instead of minimal
		want string
	}{
		{
			name: "several at once, by line",
			edit: []string{"clusterID: demo", "clusterID: De_mo", "  address: 127.0.0.11:7444", "  address: 127.0.0.11", "name: cp-a\n", "name: cp-a\nmode: Off\n"},
			want: `node.yaml:3: clusterID: "De_mo" must be at most 253 characters, a-z, 0-9, '-' and '.', and each part begin and end with a letter or digit
node.yaml:5: mode: "Off" is not one of Enabled, ObserveOnly, Disabled
node.yaml:17: mesh.address: "127.0.0.11" is not host:port`,
		},
		{name: "empty file", file: "# nothing\n", want: `node.yaml: the file is empty`},
		{name: "null document", file: "---\n", want: `node.yaml:2: must be a mapping of fields, is empty`},
		{name: "a list", file: "- a\n", want: `node.yaml:1: must be a mapping of fields, is a list`},
		{
			name: "second document", add: "---\nkind: Other\n",
			want: `node.yaml:21: a second document begins here, only one is read`,
		},
		{name: "syntax", file: "front:\n  a: [\nb: c\n", want: `node.yaml:2: not YAML: did not find expected ',' or ']' (here, or further down in what begins here)`},
		{name: "tab", file: "front:\n\ta: b\n", want: `node.yaml:2: not YAML: found character that cannot start any token`},
		{name: "unknown anchor", file: "a: *b\n", want: `node.yaml:1: not YAML: unknown anchor 'b' referenced`},
		{
			name: "apiVersion of another release says only that",
			edit: []string{"v1alpha1", "v2", "name: cp-a", "nickname: cp-a"},
			want: `node.yaml:1: apiVersion: "config.mvp-node.io/v2" is not known to this mvp-node, which reads "config.mvp-node.io/v1alpha1"`,
		},
		{
			name: "another kind of file",
			edit: []string{"kind: NodeConfiguration", "kind: Config"},
			want: `node.yaml:2: kind: "Config" is not known to this mvp-node, which reads "NodeConfiguration"`,
		},
		{
			name: "nothing but a name",
			file: "\n# comment\nname: a\n",
			want: `node.yaml:3: apiVersion: is missing
node.yaml:3: kind: is missing
node.yaml:3: clusterID: is missing
node.yaml:3: front: is missing, it needs address, tls.certFile, tls.keyFile, authentication.clientCAFile
node.yaml:3: apiserver: is missing, it needs url, caFile, kubeconfig, frontProxy.certFile, frontProxy.keyFile, frontProxy.caFile
node.yaml:3: mesh: is missing, it needs address, tls.certFile, tls.keyFile, tls.caFile
node.yaml:3: gossip: is missing, it needs address`,
		},
		{
			name: "missing field: the line of its section",
			edit: []string{"  url: https://127.0.0.11:7443\n", ""},
			want: `node.yaml:10: apiserver.url: is missing`,
		},
		{
			name: "missing section: the line of the one around it",
			edit: []string{"  authentication:\n    clientCAFile: /pki/client-ca.crt\n", ""},
			want: `node.yaml:5: front.authentication: is missing, it needs clientCAFile`,
		},
		{
			name: "empty section",
			edit: []string{"gossip:\n  address: 127.0.0.11:7946\n", "gossip:\n"},
			want: `node.yaml:18: gossip: is missing, it needs address`,
		},
		{
			name: "empty mapping",
			edit: []string{"gossip:\n  address: 127.0.0.11:7946\n", "gossip: {}\n"},
			want: `node.yaml:18: gossip.address: is missing`,
		},
		{
			name: "empty values of required fields",
			edit: []string{"keyFile: front.key", "keyFile: ", "certFile: mesh.crt", `certFile: ""`},
			want: `node.yaml:7: front.tls.keyFile: must not be empty
node.yaml:17: mesh.tls.certFile: must not be empty`,
		},
		{
			name: "unknown fields: misspelt, in the wrong section, and neither",
			edit: []string{"  address: 127.0.0.11:6443", "  adddress: 127.0.0.11:6443\n  clientCAfile: x"},
			add:  "colour: green\nlogging: {verbosity: 4, Level: info}\n",
			want: `node.yaml:5: front.address: is missing
node.yaml:6: front.adddress: unknown field, did you mean front.address?
node.yaml:7: front.clientCAfile: unknown field, did you mean front.authentication.clientCAFile?
node.yaml:21: colour: unknown field, known here: apiVersion, kind, clusterID, name, mode, front, apiserver, mesh, gossip, expectedMembers, routing, view, admin, logging, shutdown
node.yaml:22: logging.verbosity: unknown field, known here: level, format
node.yaml:22: logging.Level: unknown field, did you mean logging.level?`,
		},
		{
			name: "duplicate keys",
			edit: []string{"  tls: {certFile: front.crt, keyFile: front.key}", "  tls: {certFile: front.crt, keyFile: front.key}\n  address: 127.0.0.11:1"},
			add:  "mode: Enabled\nmode: Disabled\nmode: ObserveOnly\n",
			want: `node.yaml:8: front.address: set twice, first on line 6
node.yaml:22: mode: set twice, first on line 21
node.yaml:23: mode: set twice, first on line 21`,
		},
		{
			name: "wrong types",
			edit: []string{
				"name: cp-a", "name: 1.10",
				"  authentication:\n", "  authentication:\n    anonymous: yes\n    tokenCacheTTL: 10\n",
				"  caFile: ca.crt", "  caFile: [ca.crt]",
			},
			add: "routing: true\nexpectedMembers: cp-a\nview: {staleGrace: 5 minutes, unknownCatalogHold: {}}\nlogging: {level: null, format: 2026-01-01}\nmode: 1\nadmin: []\nshutdown: {delay: 5s, drainTimeout: !x 1}\n",
			want: `node.yaml:4: name: must be a string, is the number 1.10; put it in quotes
node.yaml:9: front.authentication.anonymous: must be true or false, is the string "yes"
node.yaml:10: front.authentication.tokenCacheTTL: must be a duration such as 10s or 1m30s, is the number 10
node.yaml:14: apiserver.caFile: must be a string, is a list
node.yaml:22: routing: must be a section with fields of its own, is true
node.yaml:23: expectedMembers: must be a list, is the string "cp-a"
node.yaml:24: view.staleGrace: "5 minutes" is not a duration such as 10s or 1m30s
node.yaml:24: view.unknownCatalogHold: must be a duration such as 10s or 1m30s, is a mapping
node.yaml:25: logging.format: must be a string, is the date 2026-01-01; put it in quotes
node.yaml:26: mode: must be one of Enabled, ObserveOnly, Disabled, is the number 1
node.yaml:27: admin: must be a section with fields of its own, is a list
node.yaml:28: shutdown.drainTimeout: must be a duration such as 10s or 1m30s, is a value of type !x`,
		},
		{
			name: "keys that are no names",
			add:  "? [a]\n: b\n<<: {name: x}\n",
			want: `node.yaml:20: a key must be a plain name, is a list
node.yaml:22: <<: merge keys are not supported`,
		},
		{
			name: "lists and maps",
			edit: []string{"gossip:", "  allowedNames: [cp-a, \"\", Cp-b, 3, cp-a]\n  dnsNames:\n    a.example: cp-a\n    b.example: cp_b\n    a.example: cp-a\n    c.example: \"\"\n    d.example: [x]\n  deniedUsers: {a: b}\n  deniedGroups: [g, g]\ngossip:"},
			want: `node.yaml:18: mesh.allowedNames[1]: must not be empty
node.yaml:18: mesh.allowedNames[3]: must be a string, is the number 3; put it in quotes
node.yaml:18: mesh.allowedNames[2]: "Cp-b" must be at most 63 characters, a-z, 0-9, '-' and '.', and each part begin and end with a letter or digit
node.yaml:18: mesh.allowedNames[4]: "cp-a" is in the list twice, first on line 18
node.yaml:21: mesh.dnsNames[b.example]: "cp_b" must be at most 63 characters, a-z, 0-9, '-' and '.', and each part begin and end with a letter or digit
node.yaml:22: mesh.dnsNames[a.example]: set twice, first on line 20
node.yaml:23: mesh.dnsNames[c.example]: must not be empty
node.yaml:24: mesh.dnsNames[d.example]: must be a string, is a list
node.yaml:25: mesh.deniedUsers: must be a list, is a mapping
node.yaml:26: mesh.deniedGroups[1]: "g" is in the list twice, first on line 26`,
		},
		{
			name: "lists of members that do not fit together",
			edit: []string{"gossip:", "  allowedNames: [cp-b, cp-c]\ngossip:"},
			add:  "expectedMembers:\n- cp-b\n- cp-d\n",
			want: `node.yaml:18: mesh.allowedNames: does not list this node, "cp-a"
node.yaml:21: expectedMembers: does not list this node, "cp-a"
node.yaml:23: expectedMembers[1]: "cp-d" is not among mesh.allowedNames and could never join`,
		},
		{
			name: "addresses",
			edit: []string{
				"127.0.0.11:6443", "127.0.0.11:https",
				"127.0.0.11:7444", "localhost:7444",
				"address: 127.0.0.11:7946", "address: '[::1]:0'\n  seeds: [a_b:7946, cp-b, 'cp-c.example:7946', ':7946', '[fd00::1]:7946']",
			},
			add: "admin: {address: 0.0.0.0:9444}\n",
			want: `node.yaml:6: front.address: "127.0.0.11:https": the port must be a number from 1 to 65535
node.yaml:16: mesh.address: "localhost:7444": the node listens on an IP address, "localhost" is none
node.yaml:19: gossip.address: "[::1]:0": the port must be a number from 1 to 65535
node.yaml:20: gossip.seeds[0]: "a_b:7946": "a_b" is neither a DNS name nor an IP address
node.yaml:20: gossip.seeds[1]: "cp-b" is not host:port
node.yaml:20: gossip.seeds[3]: ":7946": "" is neither a DNS name nor an IP address
node.yaml:21: admin.address: 0.0.0.0:9444 is not a loopback address; nothing on the admin port is authenticated, so it must stay on 127.0.0.1 or [::1]`,
		},
		{
			name: "the same address twice",
			edit: []string{"127.0.0.11:7946", "127.0.0.11:7444"},
			want: `node.yaml:19: gossip.address: 127.0.0.11:7444 is taken by mesh.address on line 16`,
		},
		{
			name: "a wildcard takes the port on every address, and is no place to go to",
			edit: []string{"address: 127.0.0.11:7444", "address: :7946", "address: 127.0.0.11:7946", "address: 0.0.0.0:7945\n  advertiseAddress: cp-a.example:7945"},
			add:  "admin: {address: '127.0.0.1:7946'}\n",
			want: `node.yaml:15: mesh.advertiseAddress: must be set, as mesh.address is every address of the host
node.yaml:20: gossip.advertiseAddress: "cp-a.example:7945": gossip needs an IP address, "cp-a.example" is none
node.yaml:21: admin.address: 127.0.0.1:7946 is taken by mesh.address on line 16`,
		},
		{
			name: "advertised addresses",
			edit: []string{"  address: 127.0.0.11:7444", "  address: 127.0.0.11:7444\n  advertiseAddress: '[::]:7444'", "address: 127.0.0.11:7946", "address: 127.0.0.11:7946\n  advertiseAddress: 127.0.0.11"},
			want: `node.yaml:17: mesh.advertiseAddress: "[::]:7444" is no address that others could reach
node.yaml:21: gossip.advertiseAddress: "127.0.0.11" is not host:port`,
		},
		{
			name: "the apiserver is the node itself",
			edit: []string{"127.0.0.11:6443", "127.0.0.11:7443"},
			want: `node.yaml:11: apiserver.url: https://127.0.0.11:7443 is front.address on line 6, the node would talk to itself`,
		},
		{
			name: "the apiserver's port is taken by a wildcard",
			edit: []string{"127.0.0.11:6443", "0.0.0.0:7443"},
			want: `node.yaml:11: apiserver.url: https://127.0.0.11:7443 is front.address on line 6, the node would talk to itself`,
		},
		{
			name: "apiserver.url without TLS",
			edit: []string{"https://127.0.0.11:7443", "http://127.0.0.11:8080"},
			want: `node.yaml:11: apiserver.url: "http://127.0.0.11:8080": the scheme must be https, identities are never sent in the clear`,
		},
		{
			name: "apiserver.url with a path",
			edit: []string{"https://127.0.0.11:7443", "https://127.0.0.11:7443/k8s"},
			want: `node.yaml:11: apiserver.url: "https://127.0.0.11:7443/k8s" must have nothing but a host and a port`,
		},
		{
			name: "apiserver.url is no URL",
			edit: []string{"https://127.0.0.11:7443", "127.0.0.11:7443", "  caFile: ca.crt", "  caFile: ca.crt\n  tlsServerName: 'a b'"},
			want: `node.yaml:11: apiserver.url: "127.0.0.11:7443" is not a URL such as https://127.0.0.1:6443
node.yaml:13: apiserver.tlsServerName: "a b" is neither a DNS name nor an IP address`,
		},
		{
			name: "apiserver.url with a bad port",
			edit: []string{"https://127.0.0.11:7443", "https://cp-a:70000"},
			want: `node.yaml:11: apiserver.url: "https://cp-a:70000": the port must be a number from 1 to 65535`,
		},
		{
			name: "limits",
			edit: []string{"  authentication:\n", "  requestTimeout: 0s\n  maxHeaderBytes: 2000000\n  maxConcurrentStreams: 64KiB\n  authentication:\n    tokenCacheTTL: 1h\n"},
			add:  "view: {staleGrace: 48h, unknownCatalogHold: -1s}\nshutdown: {delay: -5s, drainTimeout: 2h}\nlogging: {level: INFO, format: yaml}\n",
			want: `node.yaml:8: front.requestTimeout: 0s must be at least 1ms
node.yaml:9: front.maxHeaderBytes: 2000000 must be from 4096 to 1048576
node.yaml:10: front.maxConcurrentStreams: must be a whole number, is the string "64KiB"
node.yaml:12: front.authentication.tokenCacheTTL: 1h0m0s must be at most 10m0s
node.yaml:24: view.staleGrace: 48h0m0s must be at most 24h0m0s
node.yaml:24: view.unknownCatalogHold: -1s must be at least 1ms
node.yaml:25: shutdown.delay: -5s must not be negative
node.yaml:25: shutdown.drainTimeout: 2h0m0s must be at most 1h0m0s
node.yaml:26: logging.level: "INFO" is not one of debug, info, warn, error
node.yaml:26: logging.format: "yaml" is not one of text, json`,
		},
		{
			name: "identity headers",
			edit: []string{"mesh:", "  requestHeaders: {user: [], uid: [], group: ['X Group'], extraPrefixes: [X-Remote-Extra-, '']}\nmesh:"},
			want: `node.yaml:15: apiserver.requestHeaders.extraPrefixes[1]: must not be empty
node.yaml:15: apiserver.requestHeaders.user: must name at least one header, or the apiserver would not learn it
node.yaml:15: apiserver.requestHeaders.group[0]: "X Group" is not the name of a header`,
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			text := tc.file
			if text == "" {
				text = minimal + tc.add
			}
			for i := 0; i < len(tc.edit); i += 2 {
				if !strings.Contains(text, tc.edit[i]) {
					t.Fatalf("minimal has no %q", tc.edit[i])
				}
				text = strings.Replace(text, tc.edit[i], tc.edit[i+1], 1)
			}
			_, err := Parse([]byte(text), "node.yaml")
			var bad *Error
			if !errors.As(err, &bad) {
				t.Fatalf("err = %v, want an *Error", err)
			}
			if diff := cmp.Diff(strings.Split(tc.want, "\n"), strings.Split(err.Error(), "\n")); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// Things that look unusual and are right.
func TestAccepted(t *testing.T) {
	for name, edit := range map[string][2]string{
		"anchors and aliases":        {"  tls: {certFile: front.crt, keyFile: front.key}", "  tls: &pair {certFile: front.crt, keyFile: front.key}"},
		"JSON":                       {"  tls: {certFile: front.crt, keyFile: front.key}", `  "tls": {"certFile": "front.crt", "keyFile": "front.key"}`},
		"apiserver on loopback":      {"https://127.0.0.11:7443", "https://127.0.0.1:6443/"},
		"apiserver by name":          {"https://127.0.0.11:7443", "https://localhost"},
		"apiserver elsewhere":        {"address: 127.0.0.11:6443", "address: 127.0.0.12:7443"},
		"no UID header":              {"mesh:", "  requestHeaders: {uid: []}\nmesh:"},
		"fields named without value": {"mesh:", "  tlsServerName:\n  requestHeaders:\nmesh:"},
		"wildcard with an address":   {"address: 127.0.0.11:7444", "address: :7444\n  advertiseAddress: cp-a.example:7444"},
		"same port, other address":   {"address: 127.0.0.11:7946", "address: 127.0.0.12:7444"},
		"IPv4 and IPv6 wildcards":    {"address: 127.0.0.11:7946", "address: '[::1]:6443'"},
		"no cache of tokens":         {"  authentication:\n", "  authentication:\n    tokenCacheTTL: 0s\n"},
	} {
		t.Run(name, func(t *testing.T) {
			text := strings.Replace(minimal, edit[0], edit[1], 1)
			if text == minimal {
				t.Fatalf("minimal has no %q", edit[0])
			}
			if _, err := Parse([]byte(text), "node.yaml"); err != nil {
				t.Error(err)
			}
		})
	}
}
