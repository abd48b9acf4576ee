package pki

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

var testPair = Pair{CertPEM: []byte("cert"), KeyPEM: []byte("key")}

// names lists what is in a folder, hidden files too.
func names(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, entry := range entries {
		all = append(all, entry.Name())
	}
	return all
}

func TestWritePair(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new", "folder")
	cert, key := filepath.Join(dir, "a.crt"), filepath.Join(dir, "a.key")
	if err := WritePair(cert, key, testPair); err != nil {
		t.Fatal(err)
	}
	for _, file := range []struct {
		path, want string
		mode       fs.FileMode
	}{{cert, "cert", 0o644}, {key, "key", 0o600}} {
		data, err := os.ReadFile(file.path)
		if err != nil || string(data) != file.want {
			t.Errorf("%s: %q, %v", file.path, data, err)
		}
		info, err := os.Stat(file.path)
		if err != nil || info.Mode().Perm() != file.mode {
			t.Errorf("%s: mode %v, %v, want %v", file.path, info.Mode().Perm(), err, file.mode)
		}
	}
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("folder: %v, %v", info.Mode(), err)
	}
	if got := names(t, dir); !slices.Equal(got, []string{"a.crt", "a.key"}) {
		t.Errorf("folder has %q", got)
	}
}

func TestWritePairNeverOverwrites(t *testing.T) {
	for _, existing := range []string{"a.crt", "a.key"} {
		t.Run(existing, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, existing)
			if err := os.WriteFile(path, []byte("old"), 0o600); err != nil {
				t.Fatal(err)
			}
			err := WritePair(filepath.Join(dir, "a.crt"), filepath.Join(dir, "a.key"), testPair)
			exists := (*ExistsError)(nil)
			if !errors.As(err, &exists) || exists.Path != path || !errors.Is(err, fs.ErrExist) {
				t.Errorf("got %v, want an ExistsError for %s", err, path)
			}
			if err == nil || !strings.Contains(err.Error(), path) {
				t.Errorf("error %v does not name %s", err, path)
			}
			if data, _ := os.ReadFile(path); string(data) != "old" {
				t.Errorf("%s was changed to %q", path, data)
			}
			if got := names(t, dir); !slices.Equal(got, []string{existing}) {
				t.Errorf("folder has %q", got)
			}
		})
	}
}

func TestWritePairLeavesNothingHalf(t *testing.T) {
	dir := t.TempDir()
	// The certificate's folder cannot be made: there is a file of that name.
	if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := WritePair(filepath.Join(dir, "file", "a.crt"), filepath.Join(dir, "a.key"), testPair); err == nil {
		t.Fatal("no error")
	}
	if got := names(t, dir); !slices.Equal(got, []string{"file"}) {
		t.Errorf("folder has %q", got)
	}
}

// Two runs of "certs issue" at the same moment: one wins, and what is there is its pair and not a mixture.
func TestWritePairConcurrently(t *testing.T) {
	dir := t.TempDir()
	var writers sync.WaitGroup
	results := make([]error, 8)
	for i := range results {
		writers.Go(func() {
			own := []byte{byte('a' + i)}
			results[i] = WritePair(filepath.Join(dir, "a.crt"), filepath.Join(dir, "a.key"), Pair{CertPEM: own, KeyPEM: own})
		})
	}
	writers.Wait()
	won := 0
	for _, err := range results {
		if err == nil {
			won++
		} else if !errors.Is(err, fs.ErrExist) {
			t.Errorf("unexpected error: %v", err)
		}
	}
	cert, _ := os.ReadFile(filepath.Join(dir, "a.crt"))
	key, _ := os.ReadFile(filepath.Join(dir, "a.key"))
	if won != 1 || string(cert) != string(key) || len(cert) != 1 {
		t.Errorf("%d won; certificate %q, key %q", won, cert, key)
	}
	if got := names(t, dir); !slices.Equal(got, []string{"a.crt", "a.key"}) {
		t.Errorf("folder has %q", got)
	}
}

func TestLoadCA(t *testing.T) {
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "ca.crt"), filepath.Join(dir, "ca.key")
	if _, err := LoadCA(cert, key); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without files: %v", err)
	}
	if err := WritePair(cert, key, meshCA(t).Pair()); err != nil {
		t.Fatal(err)
	}
	ca, err := LoadCA(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	if cluster, err := ca.Cluster(); cluster != "demo" || err != nil {
		t.Errorf("Cluster() = %q, %v", cluster, err)
	}
}
