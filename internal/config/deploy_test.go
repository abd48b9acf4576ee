package config

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"
)

func deployFile(t *testing.T, name string) []byte {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("..", "..", "deploy", name))
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// Whatever stops a node must wait longer than a stop takes by default, and probe the port that is the default.
func TestManifestsFitTheDefaults(t *testing.T) {
	d := Default()
	stop := d.Shutdown.Delay + d.Shutdown.DrainTimeout
	for name, pattern := range map[string]string{
		"static-pod.yaml":  `(?m)^  terminationGracePeriodSeconds: (\d+)$`,
		"mvp-node.service": `(?m)^TimeoutStopSec=(\d+)$`,
	} {
		data := deployFile(t, name)
		m := regexp.MustCompile(pattern).FindSubmatch(data)
		if m == nil {
			t.Errorf("%s does not say how long a stop may take", name)
			continue
		}
		seconds, err := strconv.Atoi(string(m[1]))
		if err != nil {
			t.Fatal(err)
		}
		if patience := time.Duration(seconds) * time.Second; patience < stop+5*time.Second {
			t.Errorf("%s waits %s, a stop takes up to %s and a little", name, patience, stop)
		}
	}
	host, port, _ := strings.Cut(d.Admin.Address, ":")
	if probe := "{host: " + host + ", port: " + port + ","; bytes.Count(deployFile(t, "static-pod.yaml"), []byte(probe)) != 2 {
		t.Errorf("static-pod.yaml does not probe %s", d.Admin.Address)
	}
}

// The manifests are YAML without a field given twice.
func TestManifestsAreYAML(t *testing.T) {
	for _, name := range []string{"static-pod.yaml", "rbac.yaml"} {
		dec := yaml.NewDecoder(bytes.NewReader(deployFile(t, name)))
		n := 0
		for ; ; n++ {
			var object struct {
				APIVersion string         `yaml:"apiVersion"`
				Kind       string         `yaml:"kind"`
				Metadata   map[string]any `yaml:"metadata"`
				Rest       map[string]any `yaml:",inline"`
			}
			if err := dec.Decode(&object); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if object.APIVersion == "" || object.Kind == "" || object.Metadata["name"] == "" {
				t.Errorf("%s: object %d has no apiVersion, kind or name", name, n+1)
			}
		}
		if n == 0 {
			t.Errorf("%s has no object", name)
		}
	}
}
