package authz

import (
	"fmt"
	"slices"
)

// User is an authenticated identity, as the ingress node's authenticator established it.
type User struct {
	Name   string
	UID    string
	Groups []string            // in the authenticator's order
	Extra  map[string][]string // keys as the authenticator made them
}

// AssertPolicy says which identities a peer may assert over Forward. The zero value allows all (DESIGN.md "Decided": a node of
// the control plane already holds the front-proxy key).
type AssertPolicy struct {
	// DeniedGroups refuses users that are in any of these groups.
	DeniedGroups []string
	// DeniedUsers refuses users of these names.
	DeniedUsers []string
}

// DeniedError reports an identity that a peer may not assert here.
type DeniedError struct {
	Peer   Peer
	User   string
	Reason string
}

// Error implements error.
func (e *DeniedError) Error() string {
	return fmt.Sprintf("%s %q may not assert user %q: %s", e.Peer.Role, e.Peer.Name, e.User, e.Reason)
}

// MayAssert is asked by the serving node before a forwarded request reaches its apiserver. It returns a *DeniedError, or nil.
func (p AssertPolicy) MayAssert(peer Peer, u *User) error {
	if peer.Role != RoleNode {
		return &DeniedError{peer, u.Name, "only nodes forward requests"}
	}
	if u.Name == "" {
		return &DeniedError{peer, u.Name, "the user name is empty"}
	}
	if slices.Contains(p.DeniedUsers, u.Name) {
		return &DeniedError{peer, u.Name, "the user is denied by configuration"}
	}
	for _, g := range u.Groups {
		if slices.Contains(p.DeniedGroups, g) {
			return &DeniedError{peer, u.Name, fmt.Sprintf("group %q is denied by configuration", g)}
		}
	}
	return nil
}
