package discovery

import (
	"testing"
	"time"
)

func TestSchedule(t *testing.T) {
	t0 := time.Unix(1000, 0)
	at := func(s *schedule) time.Duration { return s.next().Sub(t0) }
	const ms, sec = time.Millisecond, time.Second
	s := newSchedule(30*sec, t0)
	want := func(what string, d time.Duration) {
		t.Helper()
		if got := at(s); got != d {
			t.Errorf("%s: next reading at %s, want %s", what, got, d)
		}
	}
	want("at the start", 0)
	s.done(t0, t0.Add(10*ms), true)
	want("after a reading", 30*sec+10*ms)

	// A change is followed at once, but not sooner than the gap allows, and then by its echoes.
	s.changed(t0.Add(5 * sec))
	want("after a change", 5*sec)
	s.done(t0.Add(5*sec), t0.Add(5*sec+10*ms), true)
	want("first echo", 5*sec+500*ms)
	s.changed(t0.Add(5*sec + 20*ms))
	want("another change right after a reading", 5*sec+10*ms+minGap)
	// A change during a reading is not taken for seen by it.
	s.changed(t0.Add(5*sec + 300*ms))
	s.done(t0.Add(5*sec+250*ms), t0.Add(5*sec+350*ms), true)
	want("change during a reading", 5*sec+350*ms+500*ms)
	for _, end := range []time.Duration{6 * sec, 7 * sec, 10 * sec} {
		s.done(t0.Add(end), t0.Add(end+ms), true)
	}
	want("all echoes over", 40*sec+ms)

	// Failures are followed sooner and sooner less.
	start := 50 * sec
	for _, d := range []time.Duration{200 * ms, 400 * ms, 800 * ms, 1600 * ms, 3200 * ms, 5 * sec, 5 * sec} {
		s.done(t0.Add(start), t0.Add(start), false)
		want("after a failure", start+d)
		start += d
	}
	s.done(t0.Add(start), t0.Add(start), true)
	want("after success", start+30*sec)
	s.done(t0.Add(start), t0.Add(start), false)
	want("the next failure starts anew", start+200*ms)

	// Long readings are not done all the time, however much changes.
	s.done(t0.Add(100*sec), t0.Add(102*sec), true)
	s.changed(t0.Add(102 * sec))
	want("after a reading of 2 s", 112*sec)
	s.done(t0.Add(200*sec), t0.Add(210*sec), true)
	s.changed(t0.Add(210 * sec))
	want("after a reading of 10 s", 225*sec)
}

// A flood of changes makes one reading per gap, and a change is never forgotten.
func TestScheduleFlood(t *testing.T) {
	now := time.Unix(1000, 0)
	s := newSchedule(30*time.Second, now)
	readings := 0
	end := now.Add(10 * time.Second)
	for now.Before(end) {
		s.changed(now)
		if !s.next().After(now) {
			readings++
			s.done(now, now.Add(time.Millisecond), true)
		}
		now = now.Add(10 * time.Millisecond)
	}
	if readings < 40 || readings > 51 {
		t.Errorf("%d readings in 10 s of changes, want about 50", readings)
	}
	if d := s.next().Sub(now); d > minGap {
		t.Errorf("the last change is followed after %s", d)
	}
}
