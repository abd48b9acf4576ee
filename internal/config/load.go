package config

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"go.yaml.in/yaml/v3"
)

// maxFile bounds the file. A configuration with a thousand members has about 30 KiB.
const maxFile = 1 << 20

// Load reads and checks the configuration file and the certificates that it names. If anything is wrong with them the error is
// an *Error with all of it.
func Load(path string) (*Config, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("configuration file: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, fmt.Errorf("configuration file: %w", err)
	}
	if len(data) > maxFile {
		return nil, fmt.Errorf("configuration file %s is larger than %d bytes", path, maxFile)
	}
	c := parse(data, path)
	c.checkFiles(time.Now())
	if err := c.src.err(); err != nil {
		return nil, err
	}
	return c, nil
}

// Parse reads a configuration and checks what can be checked without looking at any other file. Names of files in it are taken
// relative to the folder of filename, which need not exist. If anything is wrong the error is an *Error with all of it.
func Parse(data []byte, filename string) (*Config, error) {
	c := parse(data, filename)
	if err := c.src.err(); err != nil {
		return nil, err
	}
	return c, nil
}

// Check looks at the files that the configuration names: whether certificates, keys and authorities can be read, are valid at
// the time now, belong together, and keep apart those who must be kept apart. If anything is wrong the error is an *Error with
// all of it.
func (c *Config) Check(now time.Time) error {
	// A copy, so that one Config can be checked again and again, and by several callers at once.
	d := *c
	d.src = source{file: c.src.file, lines: c.src.lines}
	d.checkFiles(now)
	return d.src.err()
}

func parse(data []byte, filename string) *Config {
	c := Default()
	c.src = source{file: filename, lines: map[string]int{}, visited: map[string]bool{}, bad: map[string]bool{}}
	decode(data, c)
	c.complete(filepath.Dir(filename))
	if !c.src.bad[""] && c.src.good("apiVersion", "kind") {
		c.validate()
	}
	return c
}

// YAML writes the configuration with every default filled in; Parse reads it back to the same.
func (c *Config) YAML() ([]byte, error) {
	return yaml.Marshal(c)
}
