package fake

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"

	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"
	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func reply(w http.ResponseWriter, code int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(v) // a client that is gone
}

// discovery answers in the aggregated form.
func (s *Server) discovery(w http.ResponseWriter, r *http.Request) {
	if accept := r.Header.Get("Accept"); !strings.Contains(accept, "APIGroupDiscoveryList") || !strings.Contains(accept, "v=v2") {
		reply(w, http.StatusNotAcceptable, metav1.Status{})
		return
	}
	verbs := []string{"create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"}
	list := apidiscoveryv2.APIGroupDiscoveryList{TypeMeta: metav1.TypeMeta{APIVersion: "apidiscovery.k8s.io/v2", Kind: "APIGroupDiscoveryList"}}
	for gv, resources := range s.o.Serves {
		group, version, found := strings.Cut(gv, "/")
		if !found {
			group, version = "", gv
		}
		if (group == "") != (r.URL.Path == "/api") {
			continue
		}
		v := apidiscoveryv2.APIVersionDiscovery{Version: version, Freshness: apidiscoveryv2.DiscoveryFreshnessCurrent}
		for _, name := range resources {
			name, sub, isSub := strings.Cut(name, "/")
			i := slices.IndexFunc(v.Resources, func(r apidiscoveryv2.APIResourceDiscovery) bool { return r.Resource == name })
			if i < 0 {
				i = len(v.Resources)
				v.Resources = append(v.Resources, apidiscoveryv2.APIResourceDiscovery{
					Resource: name, Scope: apidiscoveryv2.ScopeNamespace, Verbs: verbs,
					ResponseKind: &metav1.GroupVersionKind{Group: group, Version: version, Kind: name},
				})
			}
			if isSub {
				v.Resources[i].Subresources = append(v.Resources[i].Subresources, apidiscoveryv2.APISubresourceDiscovery{Subresource: sub, Verbs: verbs})
			}
		}
		list.Items = append(list.Items, apidiscoveryv2.APIGroupDiscovery{
			ObjectMeta: metav1.ObjectMeta{Name: group}, Versions: []apidiscoveryv2.APIVersionDiscovery{v},
		})
	}
	w.Header().Set("Content-Type", "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList")
	_ = json.NewEncoder(w).Encode(list)
}

// watched gives the informers of a node an empty list that never changes.
func (s *Server) watched(w http.ResponseWriter, r *http.Request) {
	switch q := r.URL.Query(); {
	case q.Has("sendInitialEvents"):
		reply(w, http.StatusUnprocessableEntity, metav1.Status{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: metav1.StatusFailure, Reason: metav1.StatusReasonInvalid, Code: 422,
		})
	case q.Get("watch") != "":
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush()
		select {
		case <-r.Context().Done():
		case <-s.hold:
		}
	default:
		reply(w, http.StatusOK, map[string]any{
			"apiVersion": "v1", "kind": "List", "metadata": map[string]any{"resourceVersion": "1"}, "items": []any{},
		})
	}
}

// tokenReview knows the tokens of the options.
func (s *Server) tokenReview(w http.ResponseWriter, r *http.Request) {
	var review authenticationv1.TokenReview
	if err := json.NewDecoder(r.Body).Decode(&review); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	if u, ok := s.o.Tokens[review.Spec.Token]; ok {
		review.Status = authenticationv1.TokenReviewStatus{Authenticated: true, User: userInfo(u), Audiences: review.Spec.Audiences}
	}
	reply(w, http.StatusCreated, review)
}

// accessReview allows everything: what is allowed is not this package's subject.
func (s *Server) accessReview(w http.ResponseWriter, r *http.Request) {
	var review map[string]any
	if err := json.NewDecoder(r.Body).Decode(&review); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	review["status"] = map[string]any{"allowed": true}
	reply(w, http.StatusCreated, review)
}

func userInfo(u User) authenticationv1.UserInfo {
	info := authenticationv1.UserInfo{Username: u.Name, UID: u.UID, Groups: u.Groups}
	for k, vs := range u.Extra {
		if info.Extra == nil {
			info.Extra = map[string]authenticationv1.ExtraValue{}
		}
		info.Extra[k] = vs
	}
	return info
}

func writeReview(w io.Writer, u User) {
	_ = json.NewEncoder(w).Encode(authenticationv1.SelfSubjectReview{
		TypeMeta: metav1.TypeMeta{APIVersion: "authentication.k8s.io/v1", Kind: "SelfSubjectReview"},
		Status:   authenticationv1.SelfSubjectReviewStatus{UserInfo: userInfo(u)},
	})
}

const (
	extraPrefix     = "X-Remote-Extra-"
	credentialIDKey = "authentication.kubernetes.io/credential-id"
)

// identity is who sent a request, as kube-apiserver's authenticators have it: by a front proxy's headers, by certificate, by token, or
// anonymous (k8s.io/apiserver pkg/authentication/request).
func (s *Server) identity(r *http.Request) User {
	if len(r.TLS.PeerCertificates) > 0 {
		cert := r.TLS.PeerCertificates[0]
		if cert.Subject.CommonName == frontProxyName {
			return proxied(r.Header)
		}
		sum := sha256.Sum256(cert.Raw)
		return User{
			Name: cert.Subject.CommonName, Groups: append(slices.Clone(cert.Subject.Organization), "system:authenticated"),
			Extra: map[string][]string{credentialIDKey: {"X509SHA256=" + hex.EncodeToString(sum[:])}},
		}
	}
	if token, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer "); ok {
		if u, ok := s.o.Tokens[token]; ok {
			u.Groups = append(slices.Clone(u.Groups), "system:authenticated")
			return u
		}
	}
	return User{Name: "system:anonymous", Groups: []string{"system:unauthenticated"}}
}

func proxied(h http.Header) User {
	u := User{Name: h.Get("X-Remote-User"), UID: h.Get("X-Remote-Uid"), Groups: h["X-Remote-Group"]}
	for name, values := range h {
		if key, ok := strings.CutPrefix(name, extraPrefix); ok {
			key = strings.ToLower(key)
			if plain, err := url.PathUnescape(key); err == nil {
				key = plain
			}
			if u.Extra == nil {
				u.Extra = map[string][]string{}
			}
			u.Extra[key] = append(u.Extra[key], values...)
		}
	}
	return u
}
