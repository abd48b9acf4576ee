package pki

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

const (
	certMode fs.FileMode = 0o644
	keyMode  fs.FileMode = 0o600
)

// ExistsError says that a file was not written because there is one of that name already. A certificate or key is
// never overwritten: the old one may be the only copy of something the cluster depends on.
type ExistsError struct {
	Path string
}

func (e *ExistsError) Error() string {
	return fmt.Sprintf("%s exists already and is not overwritten; move it away first", e.Path)
}

// Is makes errors.Is(err, fs.ErrExist) true.
func (e *ExistsError) Is(target error) bool { return target == fs.ErrExist }

// LoadCA reads an authority from the files that [WritePair] wrote, or from any pair of PEM files.
func LoadCA(certFile, keyFile string) (*CA, error) {
	cert, err := os.ReadFile(certFile)
	if err != nil {
		return nil, fmt.Errorf("CA certificate: %w", err)
	}
	key, err := os.ReadFile(keyFile)
	if err != nil {
		return nil, fmt.Errorf("CA key: %w", err)
	}
	ca, err := ParseCA(cert, key)
	if err != nil {
		return nil, fmt.Errorf("%s and %s: %w", certFile, keyFile, err)
	}
	return ca, nil
}

// WritePair writes a certificate (mode 0644) and its key (mode 0600), and makes the folders they go to (mode 0700, as
// kubeadm does). Both files appear, each whole, or neither does; only a crash between the last two steps can leave the
// key without the certificate. A file that is already there is left as it is and reported as an [ExistsError].
func WritePair(certFile, keyFile string, pair Pair) error {
	// Both names are looked at before anything is written, so that the usual mistake, running the command again, has no
	// effect at all. The links below decide; this look alone would leave a gap between looking and writing.
	for _, name := range []string{certFile, keyFile} {
		if _, err := os.Lstat(name); err == nil {
			return &ExistsError{Path: name}
		} else if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	tempKey, err := writeTemp(keyFile, pair.KeyPEM, keyMode)
	if err != nil {
		return err
	}
	defer os.Remove(tempKey)
	tempCert, err := writeTemp(certFile, pair.CertPEM, certMode)
	if err != nil {
		return err
	}
	defer os.Remove(tempCert)

	// A hard link is the rename that fails when the target exists.
	if err := link(tempKey, keyFile); err != nil {
		return err
	}
	if err := link(tempCert, certFile); err != nil {
		return errors.Join(err, os.Remove(keyFile))
	}
	return nil
}

// writeTemp writes data to a new hidden file beside name and returns its path. On an error nothing is left.
func writeTemp(name string, data []byte, mode fs.FileMode) (string, error) {
	dir := filepath.Dir(name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", fmt.Errorf("folder for %s: %w", name, err)
	}
	f, err := os.CreateTemp(dir, "."+filepath.Base(name)+".*") // mode 0600 from the start
	if err != nil {
		return "", fmt.Errorf("writing %s: %w", name, err)
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Chmod(mode)
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return "", errors.Join(fmt.Errorf("writing %s: %w", name, err), os.Remove(f.Name()))
	}
	return f.Name(), nil
}

func link(from, to string) error {
	err := os.Link(from, to)
	if errors.Is(err, fs.ErrExist) {
		return &ExistsError{Path: to}
	}
	if err != nil {
		return fmt.Errorf("writing %s: %w", to, err)
	}
	return nil
}
