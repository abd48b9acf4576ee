package duplex

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"math/big"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pair is a TLS connection over loopback: the one end is the test's, the other is spliced.
func pair(t *testing.T) (outer, inner *tls.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	accepted := make(chan net.Conn, 1)
	go func() {
		c, _ := l.Accept()
		accepted <- c
	}()
	raw, err := net.Dial("tcp", l.Addr().String()) // the test's own end
	if err != nil {
		t.Fatal(err)
	}
	other := <-accepted
	outer = tls.Client(raw, &tls.Config{InsecureSkipVerify: true})
	inner = tls.Server(NewSocket(other), &tls.Config{Certificates: []tls.Certificate{testCertificate(t)}})
	shake := make(chan error, 1)
	go func() { shake <- inner.Handshake() }()
	if err := errors.Join(outer.Handshake(), <-shake); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		raw.Close()
		other.Close()
	})
	return outer, inner
}

var testCertificate = func() func(*testing.T) tls.Certificate {
	made := sync.OnceValues(func() (tls.Certificate, error) {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			return tls.Certificate{}, err
		}
		template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
		der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
		return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, err
	})
	return func(t *testing.T) tls.Certificate {
		t.Helper()
		c, err := made()
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
}()

// spliced is a client and an apiserver with a Splice between them.
type spliced struct {
	client, server *tls.Conn
	over           chan error
}

func splice(t *testing.T, stall time.Duration) *spliced {
	t.Helper()
	s := &spliced{over: make(chan error, 1)}
	var a, b *tls.Conn
	s.client, a = pair(t)
	s.server, b = pair(t)
	go func() {
		wait, err := Splice(OverTLS(a, nil, stall), OverTLS(b, nil, stall))
		wait()
		s.over <- err
	}()
	t.Cleanup(func() {
		s.client.NetConn().Close()
		s.server.NetConn().Close()
	})
	return s
}

// end waits for the Splice, within is the bound.
func (s *spliced) end(t *testing.T, within time.Duration) error {
	t.Helper()
	select {
	case err := <-s.over:
		return err
	case <-time.After(within):
		t.Fatalf("not over within %v", within)
		return nil
	}
}

func write(t *testing.T, c net.Conn, text string) {
	t.Helper()
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
}

func expect(t *testing.T, c net.Conn, text string) {
	t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
	got := make([]byte, len(text))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != text {
		t.Fatalf("read %q, %v, want %q", got, err, text)
	}
}

func expectEnd(t *testing.T, c net.Conn) {
	t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(time.Second)) // CASES S-07
	if n, err := c.Read(make([]byte, 1)); err != io.EOF {
		t.Fatalf("read %d bytes, %v, want the end within a second", n, err)
	}
}

// A half-close is passed on as one: the other direction goes on, and the end of that is the end of all.
func TestHalfClose(t *testing.T) {
	s := splice(t, 0)
	write(t, s.client, "all I say")
	if err := s.client.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	expect(t, s.server, "all I say")
	expectEnd(t, s.server)
	for range 3 {
		write(t, s.server, "answer")
		expect(t, s.client, "answer")
	}
	s.server.Close()
	expectEnd(t, s.client)
	s.client.Close()
	if err := s.end(t, time.Second); err != nil {
		t.Errorf("orderly end: %v", err)
	}
}

// CASES S-07: who closes altogether has the other side closed, with all of its bytes, within a second, though that side says nothing.
func TestCloseOfEitherSide(t *testing.T) {
	for name, of := range map[string]func(*spliced) (*tls.Conn, *tls.Conn){
		"client":    func(s *spliced) (*tls.Conn, *tls.Conn) { return s.client, s.server },
		"apiserver": func(s *spliced) (*tls.Conn, *tls.Conn) { return s.server, s.client },
	} {
		t.Run(name, func(t *testing.T) {
			s := splice(t, 0)
			closing, other := of(s)
			write(t, other, "unread")
			write(t, closing, "last words")
			closing.Close()
			expect(t, other, "last words")
			expectEnd(t, other)
			// Not a half-close: the TCP connection is at its end as well.
			_ = other.NetConn().SetReadDeadline(time.Now().Add(time.Second))
			if _, err := other.NetConn().Read(make([]byte, 1)); err != io.EOF {
				t.Errorf("below TLS: %v, want the end", err)
			}
			other.Close()
			if err := s.end(t, time.Second); err != nil {
				t.Errorf("orderly end: %v", err)
			}
		})
	}
}

// CASES S-05, S-07: a reset is passed on as something that no TLS stack takes for an orderly end, after what came before it.
func TestResetOfEitherSide(t *testing.T) {
	for name, of := range map[string]func(*spliced) (*tls.Conn, *tls.Conn){
		"client":    func(s *spliced) (*tls.Conn, *tls.Conn) { return s.client, s.server },
		"apiserver": func(s *spliced) (*tls.Conn, *tls.Conn) { return s.server, s.client },
	} {
		t.Run(name, func(t *testing.T) {
			s := splice(t, 0)
			resetting, other := of(s)
			write(t, resetting, "before")
			expect(t, other, "before")
			tcp := resetting.NetConn().(*net.TCPConn)
			_ = tcp.SetLinger(0)
			tcp.Close()
			_ = other.SetReadDeadline(time.Now().Add(time.Second))
			if _, err := other.Read(make([]byte, 64)); err == nil || err == io.EOF || errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("the other side read %v, want a failure that is none of time", err)
			}
			other.NetConn().Close()
			if err := s.end(t, time.Second); err == nil {
				t.Error("a reset passed for an orderly end")
			}
		})
	}
}

// CASES S-05: the writer ends at once, the reader is slow, and everything arrives.
func TestLastBytesArrive(t *testing.T) {
	for name, of := range map[string]func(*spliced) (*tls.Conn, *tls.Conn){
		"client":    func(s *spliced) (*tls.Conn, *tls.Conn) { return s.client, s.server },
		"apiserver": func(s *spliced) (*tls.Conn, *tls.Conn) { return s.server, s.client },
	} {
		t.Run(name, func(t *testing.T) {
			s := splice(t, time.Minute)
			from, to := of(s)
			data := make([]byte, 24<<20)
			_, _ = rand.Read(data)
			go func() {
				_, _ = from.Write(data)
				from.Close()
			}()
			var got bytes.Buffer
			buf := make([]byte, 1<<20)
			for {
				n, err := to.Read(buf)
				got.Write(buf[:n])
				if err == io.EOF {
					break
				}
				if err != nil {
					t.Fatalf("after %d bytes: %v", got.Len(), err)
				}
				time.Sleep(100 * time.Microsecond) // the slow reader is what is tested
			}
			if sha256.Sum256(got.Bytes()) != sha256.Sum256(data) {
				t.Errorf("%d bytes of %d, or others", got.Len(), len(data))
			}
			to.Close()
			if err := s.end(t, time.Second); err != nil {
				t.Error(err)
			}
		})
	}
}

// Somebody who went on writing to a side that closed loses nothing of what that side had said.
func TestWriterToAClosedSideStillReads(t *testing.T) {
	s := splice(t, 0)
	stop := make(chan struct{})
	var writing sync.WaitGroup
	writing.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				if _, err := s.client.Write(make([]byte, 16<<10)); err != nil {
					return
				}
			}
		}
	})
	answer := bytes.Repeat([]byte("x"), 1<<20)
	go func() {
		_, _ = s.server.Write(answer)
		s.server.Close() // with bytes unread: the kernel makes a reset of it
	}()
	got, err := io.ReadAll(s.client)
	if len(got) != len(answer) && err == nil {
		t.Errorf("%d of %d bytes, and an orderly end", len(got), len(answer))
	}
	t.Logf("%d of %d bytes, then %v", len(got), len(answer), err)
	close(stop)
	s.client.NetConn().Close()
	writing.Wait()
	_ = s.end(t, 5*time.Second) // orderly or not is the kernel's choice
}

// CASES S-09: who takes nothing for too long is cut off; one who is only silent is not.
func TestStall(t *testing.T) {
	s := splice(t, 300*time.Millisecond)
	write(t, s.client, "hello")
	expect(t, s.server, "hello")
	time.Sleep(time.Second) // silence, three times the limit
	write(t, s.client, "again")
	expect(t, s.server, "again")
	start := time.Now()
	for {
		// The client does not read, so that in the end nobody takes anything.
		if _, err := s.server.Write(make([]byte, 64<<10)); err != nil {
			break
		}
		if time.Since(start) > 30*time.Second {
			t.Fatal("a side that takes nothing holds the other for ever")
		}
	}
	if err := s.end(t, linger+5*time.Second); err == nil {
		t.Error("a stall passed for an orderly end")
	}
}
