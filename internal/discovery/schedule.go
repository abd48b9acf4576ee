package discovery

import "time"

// schedule says when discovery is read next. It has no clock: whoever drives it says what time it is.
type schedule struct {
	interval time.Duration
	due      time.Time   // of the next reading without a change
	echoes   []time.Time // readings that follow a change, soonest first
	earliest time.Time   // no reading before it
	retry    time.Duration
}

func newSchedule(interval time.Duration, now time.Time) *schedule {
	return &schedule{interval: interval, due: now, earliest: now}
}

// changed is told that something may have changed.
func (s *schedule) changed(now time.Time) {
	s.echoes = append(s.echoes[:0], now)
	for _, d := range echoes {
		s.echoes = append(s.echoes, now.Add(d))
	}
}

// done is told of a reading.
func (s *schedule) done(start, end time.Time, ok bool) {
	// What is due now was due when the reading began, unless it changed meanwhile: that reading may have missed it.
	for len(s.echoes) > 0 && !s.echoes[0].After(start) {
		s.echoes = s.echoes[1:]
	}
	s.earliest = end.Add(max(minGap, min(gapFactor*end.Sub(start), s.interval/2)))
	if ok {
		s.retry = 0
		s.due = end.Add(s.interval)
		return
	}
	s.retry = min(max(firstRetry, 2*s.retry), maxRetry)
	s.due = end.Add(s.retry)
}

// next is the time of the next reading.
func (s *schedule) next() time.Time {
	t := s.due
	if len(s.echoes) > 0 && s.echoes[0].Before(t) {
		t = s.echoes[0]
	}
	if t.Before(s.earliest) {
		t = s.earliest
	}
	return t
}
