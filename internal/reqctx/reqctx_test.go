package reqctx

import (
	"context"
	"testing"

	"github.com/mvp-mesh/mvp-node/internal/authz"
)

func TestWithFrom(t *testing.T) {
	if r, ok := From(context.Background()); ok || r != nil {
		t.Errorf("From(empty) = %v, %v", r, ok)
	}
	outer, inner := &Request{AuditID: "1"}, &Request{AuditID: "2", User: &authz.User{Name: "jane"}}
	ctx := With(context.Background(), outer)
	if r, ok := From(ctx); !ok || r != outer {
		t.Errorf("From = %v, %v", r, ok)
	}
	// A later one hides an earlier one, and only below where it was put.
	if r, ok := From(With(ctx, inner)); !ok || r != inner {
		t.Errorf("From = %v, %v", r, ok)
	}
	if r, _ := From(ctx); r != outer {
		t.Errorf("From = %v", r)
	}
}

// Another package's key of the same shape is another key.
func TestKeyIsPrivate(t *testing.T) {
	type key struct{}
	ctx := context.WithValue(context.Background(), key{}, &Request{})
	if _, ok := From(ctx); ok {
		t.Error("found a Request under a foreign key")
	}
}

// Every request reads it several times; it must not cost memory.
func TestFromDoesNotAllocate(t *testing.T) {
	ctx := With(context.Background(), &Request{})
	if n := testing.AllocsPerRun(100, func() { From(ctx) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
