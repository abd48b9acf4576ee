package front

import (
	"net/http"
	"sync"
	"time"
)

// stallWatch cuts off an answer whose client takes none of it for too long: it holds a buffer, a place among the peer's requests and a
// stream of the apiserver's (CASES S-09). A deadline set before each write would not do: on HTTP/2 it also ends a stream on which
// nothing is being written, such as a quiet watch.
//
// The zero stallWatch with rc and limit is ready; stop must be called before the handler returns.
type stallWatch struct {
	rc    *http.ResponseController
	limit time.Duration

	mu    sync.Mutex
	timer *time.Timer // started with the first write
	since time.Time   // begin of the write under way, zero if there is none
	over  bool
}

// during runs a write and returns its error, which is that of a deadline if the client took nothing of it within the limit.
func (s *stallWatch) during(write func() error) error {
	s.mu.Lock()
	s.since = time.Now()
	if s.timer == nil {
		s.timer = time.AfterFunc(s.limit, s.check)
	}
	s.mu.Unlock()
	err := write()
	s.mu.Lock()
	s.since = time.Time{}
	s.mu.Unlock()
	return err
}

func (s *stallWatch) check() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over {
		return
	}
	wait := s.limit
	if !s.since.IsZero() {
		if wait -= time.Since(s.since); wait <= 0 {
			_ = s.rc.SetWriteDeadline(time.Now()) // ends the write: net/http can, for both protocols
			return
		}
	}
	s.timer.Reset(wait)
}

func (s *stallWatch) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.over = true
	if s.timer != nil {
		s.timer.Stop()
	}
}
