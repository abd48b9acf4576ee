package stream_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"testing"
	"time"
)

// quick is how long the word of an end may take through the mesh (CASES S-07).
const quick = time.Second

// session is an upgraded stream with both of its ends in hand.
type session struct{ client, server *pipe }

// sessions opens upgraded streams through a mesh.
type sessions struct {
	m     *mesh
	taken chan *pipe
}

func newSessions(t *testing.T, m *mesh) *sessions {
	s := &sessions{m, make(chan *pipe)}
	m.servers["b"].on("s07", func(w http.ResponseWriter, r *http.Request) {
		p := accept(t, w, r)
		s.taken <- p // the connection is the test's now
	})
	return s
}

func (s *sessions) open(t *testing.T, w way) session {
	t.Helper()
	done := make(chan *pipe, 1)
	go func() { done <- <-s.taken }()
	client := w.upgrade(t, "/api/v1/namespaces/s07/pods/p/portforward?ports=80")
	server := arrived(t, done, 5*time.Second, "the apiserver's end")
	t.Cleanup(func() { server.NetConn().Close() })
	return session{client, server}
}

// endOf reads to the end and tells what it was, and when. What came before must be text.
func endOf(t *testing.T, p *pipe, who, text string) error {
	t.Helper()
	start := time.Now()
	_ = p.SetReadDeadline(start.Add(10 * time.Second))
	got, err := io.ReadAll(p)
	took := time.Since(start)
	if errors.Is(err, os.ErrDeadlineExceeded) || took > quick {
		t.Errorf("%s saw the end after %v: %v", who, took, err)
	}
	if string(got) != text && (err == nil || len(got) > 0) {
		t.Errorf("%s read %q before the end, want %q", who, got, text)
	}
	return err
}

// closedBelow checks that not only TLS has ended but the connection.
func closedBelow(t *testing.T, p *pipe, who string) {
	t.Helper()
	raw := p.NetConn()
	_ = raw.SetReadDeadline(time.Now().Add(quick))
	for {
		_, err := raw.Read(make([]byte, 1024))
		if errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("the TCP connection of %s lives on", who)
		}
		if err != nil {
			return
		}
	}
}

// TestS07EndsArePassedOn: CASES S-07. When one side of an upgraded stream closes or resets, or a hop between them dies, the other side is closed
// within a second, after all that was sent before; a failure does not pass for an orderly end.
func TestS07EndsArePassedOn(t *testing.T) {
	m := newMesh(t, setup{})
	s := newSessions(t, m)
	type side func(session) (dies, lives *pipe)
	apiserver := side(func(s session) (*pipe, *pipe) { return s.server, s.client })
	client := side(func(s session) (*pipe, *pipe) { return s.client, s.server })
	for _, tc := range []struct {
		name  string
		of    side
		die   func(p *pipe)
		clean bool
	}{
		{"apiserver closes", apiserver, func(p *pipe) { p.Close() }, true},
		{"apiserver resets", apiserver, (*pipe).Reset, false},
		{"client closes", client, func(p *pipe) { p.Close() }, true},
		{"client resets", client, (*pipe).Reset, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m.eachPath(t, func(t *testing.T, w way) {
				open := s.open(t, w)
				dies, lives := tc.of(open)
				_, _ = io.WriteString(lives, "unasked")
				_, _ = io.WriteString(dies, "last words")
				text := "last words"
				if !tc.clean {
					// A reset destroys what was not delivered, so this must be first.
					got := make([]byte, len(text))
					if _, err := io.ReadFull(lives, got); err != nil || string(got) != text {
						t.Fatalf("%q, %v", got, err)
					}
					text = ""
				} else {
					unread := make([]byte, len("unasked")) // or the kernel makes a reset of the close
					if _, err := io.ReadFull(dies, unread); err != nil {
						t.Fatal(err)
					}
				}
				tc.die(dies)
				if err := endOf(t, lives, "the other side", text); tc.clean != (err == nil) {
					t.Errorf("the other side sees the end as %v", err)
				}
				closedBelow(t, lives, "the other side")
				lives.Close()
				m.noTunnels(t)
			})
		})
	}
	hops := []struct {
		name    string
		relay   *relay
		forward bool
	}{{"mesh", m.meshRelay["b"], true}, {"apiserver's connection", m.apiRelay["b"], false}}
	for _, hop := range hops {
		for _, how := range []ending{orderly, reset} {
			t.Run(fmt.Sprintf("%s %v", hop.name, how), func(t *testing.T) {
				m.eachPath(t, func(t *testing.T, w way) {
					if hop.forward && w.path() == "local" {
						return
					}
					open := s.open(t, w)
					_, _ = io.WriteString(open.server, "hello")
					hello := make([]byte, 5)
					if _, err := io.ReadFull(open.client, hello); err != nil {
						t.Fatal(err)
					}
					hop.relay.cut(how)
					for who, p := range map[string]*pipe{"client": open.client, "apiserver": open.server} {
						err := endOf(t, p, who, "")
						// What TLS takes for an orderly end, the close of TCP between two records, is the one exception.
						if natural := hop.name != "mesh" && how == orderly; err == nil && !natural && !(who == "apiserver" && hop.name != "mesh") {
							t.Errorf("the %s takes the death of a hop for an orderly end", who)
						}
						closedBelow(t, p, who)
					}
					open.client.Close()
					open.server.Close()
					m.noTunnels(t)
				})
			})
		}
	}
}

// TestS07HalfClose: CASES S-07. A half-close is passed on as one, in either direction, and the other direction goes on for as long as it likes.
func TestS07HalfClose(t *testing.T) {
	m := newMesh(t, setup{})
	s := newSessions(t, m)
	for _, from := range []string{"client", "apiserver"} {
		t.Run(from, func(t *testing.T) {
			m.eachPath(t, func(t *testing.T, w way) {
				open := s.open(t, w)
				quiet, talks := open.client, open.server
				if from == "apiserver" {
					quiet, talks = talks, quiet
				}
				_, _ = io.WriteString(quiet, "that is all")
				if err := quiet.CloseWrite(); err != nil {
					t.Fatal(err)
				}
				if err := endOf(t, talks, "the other side", "that is all"); err != nil {
					t.Errorf("the other side sees a half-close as %v", err)
				}
				for i := range 5 {
					text := fmt.Sprintf("still talking %d;", i)
					if _, err := io.WriteString(talks, text); err != nil {
						t.Fatalf("after a half-close: %v", err)
					}
					got := make([]byte, len(text))
					_ = quiet.SetReadDeadline(time.Now().Add(5 * time.Second))
					if _, err := io.ReadFull(quiet, got); err != nil || string(got) != text {
						t.Fatalf("%q, %v", got, err)
					}
					time.Sleep(100 * time.Millisecond) // longer than the word of a whole close would take
				}
				// And a megabyte on top, at once with the end.
				go func() {
					_ = writeNoise(talks, noise("s07"), 1<<20)
					talks.Close()
				}()
				got := newChecked("s07")
				_ = quiet.SetReadDeadline(time.Now().Add(10 * time.Second))
				if n, err := io.Copy(got, quiet); err != nil || n != 1<<20 {
					t.Errorf("%d bytes, then %v", n, err)
				}
				quiet.Close()
				m.noTunnels(t)
			})
		})
	}
}

// TestS07PeerNodeStops: a node that is stopped does not leave upgraded streams behind that nobody ends.
func TestS07PeerNodeStops(t *testing.T) {
	m := newMesh(t, setup{drain: "500ms"})
	s := newSessions(t, m)
	open := s.open(t, way{m, "a", false})
	local := s.open(t, way{m, "b", false})
	go m.nodes["b"].stop()
	for who, p := range map[string]*pipe{
		"the client of a": open.client, "its apiserver": open.server, "the client of b": local.client, "that apiserver": local.server,
	} {
		_ = p.SetReadDeadline(time.Now().Add(5 * time.Second)) // the drain, then at once
		_, err := io.ReadAll(p)
		var ne net.Error
		if errors.As(err, &ne) && ne.Timeout() {
			t.Errorf("%s was left open", who)
		}
		closedBelow(t, p, who)
	}
	m.stop("b")
}
