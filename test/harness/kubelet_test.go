//go:build linux

package harness

import (
	"context"
	"errors"
	"io"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestParseLogOptions(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for _, c := range []struct {
		query string
		want  logOptions
		err   string // part of the error's text
	}{
		{"", logOptions{tail: -1, limit: -1}, ""},
		{"follow=true&timestamps=true&tailLines=0&limitBytes=7", logOptions{follow: true, timestamps: true, limit: 7}, ""},
		{"sinceSeconds=60", logOptions{since: now.Add(-time.Minute), tail: -1, limit: -1}, ""},
		{"sinceTime=2026-01-02T00:00:00Z", logOptions{since: now.Truncate(24 * time.Hour), tail: -1, limit: -1}, ""},
		{"follow=perhaps", logOptions{}, "follow"},
		{"tailLines=-1", logOptions{}, "tailLines"},
		{"limitBytes=x", logOptions{}, "limitBytes"},
		{"sinceTime=yesterday", logOptions{}, "sinceTime"},
		{"previous=true", logOptions{}, "previous terminated container not found"},
	} {
		query, err := url.ParseQuery(c.query)
		if err != nil {
			t.Fatal(err)
		}
		got, err := parseLogOptions(query, now)
		switch {
		case c.err != "":
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%q: got the error %v, want one about %s", c.query, err, c.err)
			}
		case err != nil:
			t.Errorf("%q: %v", c.query, err)
		default:
			if diff := cmp.Diff(c.want, got, cmp.AllowUnexported(logOptions{})); diff != "" {
				t.Errorf("%q (-want +got):\n%s", c.query, diff)
			}
		}
	}
}

func TestContainerLog(t *testing.T) {
	l := newContainerLog()
	l.add("one", "two")
	l.add("three")
	for _, c := range []struct {
		name string
		o    logOptions
		want string
	}{
		{"all", logOptions{tail: -1, limit: -1}, "one\ntwo\nthree\n"},
		{"the end", logOptions{tail: 2, limit: -1}, "two\nthree\n"},
		{"more than there is", logOptions{tail: 9, limit: -1}, "one\ntwo\nthree\n"},
		{"none", logOptions{tail: 0, limit: -1}, ""},
		{"cut off", logOptions{tail: -1, limit: 6}, "one\ntw"},
		{"from tomorrow", logOptions{tail: -1, limit: -1, since: time.Now().Add(24 * time.Hour)}, ""},
	} {
		var got strings.Builder
		l.read(t.Context(), c.o, func(line string) error {
			got.WriteString(line)
			return nil
		})
		if got.String() != c.want {
			t.Errorf("%s: got %q, want %q", c.name, got.String(), c.want)
		}
	}
}

// A follower gets each line as it comes, and ends with its context or when it cannot write.
func TestFollowContainerLog(t *testing.T) {
	for _, end := range []string{"context", "write"} {
		l := newContainerLog()
		l.add("one")
		ctx, cancel := context.WithCancel(t.Context())
		lines, refuse := make(chan string), make(chan struct{})
		var reading sync.WaitGroup
		reading.Go(func() {
			l.read(ctx, logOptions{follow: true, tail: -1, limit: -1}, func(line string) error {
				select {
				case lines <- line:
					return nil
				case <-refuse:
					return errors.New("gone")
				}
			})
		})
		for _, want := range []string{"one\n", "two\n"} {
			if got := <-lines; got != want {
				t.Errorf("got %q, want %q", got, want)
			}
			l.add("two")
		}
		if end == "context" {
			<-lines
			cancel()
		} else {
			close(refuse)
		}
		reading.Wait()
		cancel()
	}
}

// What comes in is part of the log, and comes out; so does what the main process says meanwhile.
func TestAttachContainer(t *testing.T) {
	l := newContainerLog()
	l.add("before")
	in, stdin := io.Pipe()
	stdout, out := io.Pipe()
	var input, attached sync.WaitGroup
	attached.Go(func() {
		if err := l.attach(t.Context(), in, out, &input); err != nil {
			t.Errorf("attach: %v", err)
		}
		_ = out.Close()
	})
	if _, err := io.WriteString(stdin, "hello\nwor"); err != nil {
		t.Fatal(err)
	}
	first := make([]byte, len("hello\n"))
	if _, err := io.ReadFull(stdout, first); err != nil {
		t.Fatal(err)
	}
	l.add("said")
	said := make([]byte, len("said\n")) // and only then the rest of the line that has begun
	if _, err := io.ReadFull(stdout, said); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(stdin, "ld"); err != nil {
		t.Fatal(err)
	}
	if err := stdin.Close(); err != nil {
		t.Fatal(err)
	}
	rest, err := io.ReadAll(stdout)
	attached.Wait()
	input.Wait()
	lines, _ := l.now()
	got := string(first) + string(said) + string(rest)
	if want := "hello\nsaid\nworld\n"; err != nil || got != want || len(lines) != 4 {
		t.Errorf("got %q and %d lines, %v; want %q and 4", got, len(lines), err, want)
	}
}

func TestGroup(t *testing.T) {
	var g group
	if !g.enter() {
		t.Fatal("an open group lets nobody in")
	}
	ended := make(chan struct{})
	go func() {
		g.closeAndWait()
		close(ended)
	}()
	for g.enter() { // until it is closed
		g.leave()
	}
	select {
	case <-ended:
		t.Error("it did not wait for the one inside")
	default:
	}
	g.leave()
	<-ended
}
