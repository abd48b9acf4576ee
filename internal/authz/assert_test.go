package authz

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestMayAssert(t *testing.T) {
	node, operator := Peer{"cp-b", RoleNode}, Peer{"jane", RoleOperator}
	policy := AssertPolicy{DeniedGroups: []string{"system:masters", "ops"}, DeniedUsers: []string{"root"}}
	for _, tc := range []struct {
		name   string
		policy AssertPolicy
		peer   Peer
		user   User
		want   string // "" if it may
	}{
		{name: "anybody", policy: policy, peer: node, user: User{Name: "alice", Groups: []string{"dev", "system:authenticated"}}},
		{name: "no groups", policy: policy, peer: node, user: User{Name: "alice"}},
		// DESIGN.md "Decided": system:masters may travel by default.
		{name: "masters by default", peer: node, user: User{Name: "admin", Groups: []string{"system:masters"}}},
		{
			name: "a denied group", policy: policy, peer: node, user: User{Name: "admin", Groups: []string{"dev", "system:masters"}},
			want: `node "cp-b" may not assert user "admin": group "system:masters" is denied by configuration`,
		},
		{
			name: "a denied user", policy: policy, peer: node, user: User{Name: "root"},
			want: `node "cp-b" may not assert user "root": the user is denied by configuration`,
		},
		// Groups and names are compared as the apiserver does: exactly.
		{name: "names that only look alike", policy: policy, peer: node, user: User{Name: "Root", Groups: []string{"system:masters ", "OPS"}}},
		{
			name: "nobody", policy: policy, peer: node, user: User{Groups: []string{"dev"}},
			want: `node "cp-b" may not assert user "": the user name is empty`,
		},
		{
			name: "an operator", peer: operator, user: User{Name: "alice"},
			want: `operator "jane" may not assert user "alice": only nodes forward requests`,
		},
		{
			name: "no role", peer: Peer{Name: "x"}, user: User{Name: "alice"},
			want: `unknown "x" may not assert user "alice": only nodes forward requests`,
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := tc.policy.MayAssert(tc.peer, &tc.user)
			if tc.want == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			var denied *DeniedError
			if !errors.As(err, &denied) || err.Error() != tc.want {
				t.Fatalf("err = %v, want %s", err, tc.want)
			}
			if diff := cmp.Diff(&DeniedError{tc.peer, tc.user.Name, denied.Reason}, denied); diff != "" {
				t.Error(diff)
			}
		})
	}
}
