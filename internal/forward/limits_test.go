package forward

import (
	"testing"
	"time"
)

// The budget is a burst, then a tenth of the requests and three a second, and never more than the burst.
func TestBudget(t *testing.T) {
	now := time.Unix(1000, 0)
	b := newBudget(now)
	taken := func(tries int) int {
		n := 0
		for range tries {
			if b.take(now) {
				n++
			}
		}
		return n
	}
	if n := taken(500); n != budgetBurst {
		t.Errorf("%d of a burst", n)
	}
	b.requests.Add(200)
	if n := taken(500); n != 20 {
		t.Errorf("%d for 200 requests", n)
	}
	now = now.Add(2 * time.Second)
	if n := taken(500); n != 6 {
		t.Errorf("%d for two seconds", n)
	}
	now = now.Add(-time.Hour) // a clock that steps back gives and takes nothing
	if n := taken(10); n != 0 {
		t.Errorf("%d for a step back", n)
	}
	b.requests.Add(1 << 20)
	now = now.Add(24 * time.Hour)
	if n := taken(500); n != budgetBurst {
		t.Errorf("%d after a day", n)
	}
}
