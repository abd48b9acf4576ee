package front

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	authenticationv1 "k8s.io/api/authentication/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	utilerrors "k8s.io/apimachinery/pkg/util/errors"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apiserver/pkg/apis/apiserver"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/authenticatorfactory"
	"k8s.io/apiserver/pkg/authentication/serviceaccount"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/authorization/authorizerfactory"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/client-go/kubernetes"
)

// reviewBackoff bounds how long a TokenReview or SubjectAccessReview is tried again inside one request: three tries within
// about a second. A client waits meanwhile, and its own retry does the rest.
var reviewBackoff = wait.Backoff{Duration: 100 * time.Millisecond, Factor: 2, Jitter: 0.2, Steps: 3}

// AuthenticationOptions say who may come in.
type AuthenticationOptions struct {
	// ClientCA verifies client certificates; nil switches them off.
	ClientCA dynamiccertificates.CAContentProvider
	// Client does TokenReviews at the local apiserver; nil switches bearer tokens off.
	Client kubernetes.Interface
	// CacheTTL is how long the verdict on a token is believed; kube-apiserver's own default is 10 s.
	CacheTTL time.Duration
	// Anonymous admits requests without credentials as system:anonymous.
	Anonymous bool
}

// NewAuthenticator builds kube-apiserver's delegating authenticator: client certificates, then bearer tokens (also inside
// Sec-WebSocket-Protocol), then anonymous. A bad credential is never taken for none.
func NewAuthenticator(o AuthenticationOptions) (authenticator.Request, error) {
	c := authenticatorfactory.DelegatingAuthenticatorConfig{
		Anonymous:                          &apiserver.AnonymousAuthConfig{Enabled: o.Anonymous},
		TokenAccessReviewTimeout:           10 * time.Second,
		WebhookRetryBackoff:                &reviewBackoff,
		CacheTTL:                           o.CacheTTL,
		ClientCertificateCAContentProvider: o.ClientCA,
	}
	if o.Client != nil {
		c.TokenAccessReviewClient = o.Client.AuthenticationV1()
	}
	a, _, err := c.New()
	if err != nil {
		return nil, fmt.Errorf("build authenticator: %w", err)
	}
	return a, nil
}

// NewAuthorizer builds the SubjectAccessReview client that is asked before a request leaves the node. Verdicts are cached: an
// allow for 10 s, a deny for 5 s, so that a new binding is seen soon and a client that keeps asking costs little.
func NewAuthorizer(client kubernetes.Interface) (authorizer.UnconditionalAuthorizer, error) {
	a, err := authorizerfactory.DelegatingAuthorizerConfig{
		SubjectAccessReviewClient: client.AuthorizationV1(),
		AllowCacheTTL:             10 * time.Second,
		DenyCacheTTL:              5 * time.Second,
		WebhookRetryBackoff:       &reviewBackoff,
	}.New()
	if err != nil {
		return nil, fmt.Errorf("build authorizer: %w", err)
	}
	return a, nil
}

// backendFailed tells "nobody could check the credential" from "the credential is bad". The first must not read as 401, or
// clients throw good credentials away. A TokenReview that was answered gives a plain error with the apiserver's words; one that
// was not gives an API, network or context error.
func backendFailed(err error) bool {
	if agg, ok := errors.AsType[utilerrors.Aggregate](err); ok {
		for _, e := range agg.Errors() {
			if backendFailed(e) {
				return true
			}
		}
		return false
	}
	if _, ok := errors.AsType[*apierrors.StatusError](err); ok {
		return true
	}
	if _, ok := errors.AsType[*url.Error](err); ok {
		return true
	}
	if _, ok := errors.AsType[net.Error](err); ok {
		return true
	}
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)
}

// userOf copies what matters of a user.Info.
func userOf(u user.Info) *authz.User {
	return &authz.User{Name: u.GetName(), UID: u.GetUID(), Groups: u.GetGroups(), Extra: u.GetExtra()}
}

// reviewedUser is the identity whose access is reviewed before a forward: the client's, or the one it impersonates. Whether it
// may impersonate is for the serving apiserver to say, which sees both (CASES I-06); this only keeps the local boundary.
func reviewedUser(r *http.Request, u *authz.User) user.Info {
	as := r.Header.Get(authenticationv1.ImpersonateUserHeader)
	if as == "" {
		return &user.DefaultInfo{Name: u.Name, UID: u.UID, Groups: u.Groups, Extra: u.Extra}
	}
	extra := make(map[string][]string)
	for name, values := range r.Header {
		if key, ok := strings.CutPrefix(name, authenticationv1.ImpersonateUserExtraHeaderPrefix); ok {
			key = strings.ToLower(key)
			if plain, err := url.PathUnescape(key); err == nil {
				key = plain
			}
			extra[key] = append(extra[key], values...)
		}
	}
	return &user.DefaultInfo{
		Name: as, UID: r.Header.Get(authenticationv1.ImpersonateUIDHeader), Extra: extra,
		Groups: impersonatedGroups(as, r.Header[authenticationv1.ImpersonateGroupHeader]),
	}
}

// impersonatedGroups are the groups that kube-apiserver gives to an impersonated user (k8s.io/apiserver
// pkg/endpoints/filters/impersonation): those asked for, or else a service account's own, and what every user is in. A review
// with others would deny what is bound to these, or allow what is not.
func impersonatedGroups(name string, asked []string) []string {
	groups := slices.Clone(asked)
	if len(asked) == 0 {
		if namespace, _, err := serviceaccount.SplitUsername(name); err == nil {
			groups = serviceaccount.MakeGroupNames(namespace)
		}
	}
	switch {
	case slices.Contains(groups, user.AllUnauthenticated):
	case name == user.Anonymous:
		groups = append(groups, user.AllUnauthenticated)
	case !slices.Contains(groups, user.AllAuthenticated):
		groups = append(groups, user.AllAuthenticated)
	}
	return groups
}
