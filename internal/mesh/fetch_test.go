package mesh

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	"github.com/mvp-mesh/mvp-node/internal/catalog"
	mvpv1 "github.com/mvp-mesh/mvp-node/proto/mvp/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

func TestFetch(t *testing.T) {
	w := newWorld(t)
	b := w.start("b")
	f := NewFetcher(w.pool("a"))
	want := testCatalog(t, "v1.36.0")

	c, generation, digest, err := f.Fetch(t.Context(), "b", b.member.Address, catalog.Digest{})
	if err != nil || c == nil || generation != 7 || digest != want.Digest() || c.Digest() != want.Digest() {
		t.Fatalf("%v %d %v %v", c, generation, digest, err)
	}
	c, generation, digest, err = f.Fetch(t.Context(), "b", b.member.Address, want.Digest())
	if err != nil || c != nil || generation != 7 || digest != want.Digest() {
		t.Errorf("with the current digest: %v %d %v %v", c, generation, digest, err)
	}
	c, _, digest, err = f.Fetch(t.Context(), "b", b.member.Address, catalog.Digest{1})
	if err != nil || c == nil || digest != want.Digest() {
		t.Errorf("with an old digest: %v %v %v", c, digest, err)
	}
	if _, _, _, err := f.Fetch(t.Context(), "c", b.member.Address, catalog.Digest{}); err == nil || !strings.Contains(err.Error(), "tls handshake") {
		t.Errorf("under another name: %v", err)
	}
	if _, _, _, err := f.Fetch(t.Context(), "b", "", catalog.Digest{}); err == nil {
		t.Error("without an address")
	}
}

func TestFetchUnknown(t *testing.T) {
	w := newWorld(t)
	b := w.start("b", func(o *Options) { o.Catalog = func() (*catalog.Catalog, uint64) { return nil, 0 } })
	_, _, _, err := NewFetcher(w.pool("a")).Fetch(t.Context(), "b", b.member.Address, catalog.Digest{})
	if status.Code(err) != codes.Unavailable {
		t.Errorf("error %v", err)
	}
}

// liar is a MeshService that answers what it is told.
type liar struct {
	mvpv1.UnimplementedMeshServiceServer
	answer func() *mvpv1.GetCatalogResponse
}

func (l *liar) GetCatalog(context.Context, *mvpv1.GetCatalogRequest) (*mvpv1.GetCatalogResponse, error) {
	return l.answer(), nil
}

// serveLiar starts a liar with the certificate of a node.
func (w *world) serveLiar(name string, l *liar) (address string) {
	w.t.Helper()
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		w.t.Fatal(err)
	}
	s := grpc.NewServer(grpc.Creds(credentials.NewTLS(w.tls(name).Server(alpn, authz.RoleNode))))
	mvpv1.RegisterMeshServiceServer(s, l)
	done := make(chan error, 1)
	go func() { done <- s.Serve(lis) }()
	w.t.Cleanup(func() { s.Stop(); <-done })
	return lis.Addr().String()
}

// A catalog is believed only if all of the answer fits together, and only if it could be one.
func TestFetchBelievesNothing(t *testing.T) {
	w := newWorld(t)
	good := func() *mvpv1.GetCatalogResponse {
		c := testCatalog(t, "v1.36.0")
		d := c.Digest()
		return &mvpv1.GetCatalogResponse{Node: "b", Generation: 1, Digest: d[:], Catalog: EncodeCatalog(c)}
	}
	have := testCatalog(t, "v1.36.0").Digest()
	var mismatch *MismatchError
	for _, tc := range []struct {
		name     string
		lie      func(*mvpv1.GetCatalogResponse)
		have     catalog.Digest
		mismatch bool
	}{
		{name: "another name", lie: func(r *mvpv1.GetCatalogResponse) { r.Node = "c" }, mismatch: true},
		{name: "another digest", lie: func(r *mvpv1.GetCatalogResponse) { r.Digest[0]++ }, mismatch: true},
		{name: "no digest", lie: func(r *mvpv1.GetCatalogResponse) { r.Digest = nil }, mismatch: true},
		{name: "another content", lie: func(r *mvpv1.GetCatalogResponse) { r.Catalog.ServerVersion = "v1.99.0" }, mismatch: true},
		{name: "nothing, though nothing is held", lie: func(r *mvpv1.GetCatalogResponse) { r.Catalog = nil }, mismatch: true},
		{name: "nothing, of another digest", lie: func(r *mvpv1.GetCatalogResponse) { r.Catalog, r.Digest[0] = nil, r.Digest[0]+1 }, have: have, mismatch: true},
		{name: "an unknown source", lie: func(r *mvpv1.GetCatalogResponse) { r.Catalog.GroupVersions[0].Source = 9 }},
		{name: "no source", lie: func(r *mvpv1.GetCatalogResponse) { r.Catalog.GroupVersions[0].Source = 0 }},
		{name: "a resource twice", lie: func(r *mvpv1.GetCatalogResponse) {
			gv := r.Catalog.GroupVersions[0]
			gv.Resources = append(gv.Resources, gv.Resources[0])
		}},
		{name: "more than fits", lie: func(r *mvpv1.GetCatalogResponse) {
			r.Catalog.GroupVersions[0].Resources[0].Kind = strings.Repeat("x", maxCatalogBytes+1) // a few KiB on the wire
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			address := w.serveLiar("b", &liar{answer: func() *mvpv1.GetCatalogResponse { r := good(); tc.lie(r); return r }})
			c, _, _, err := NewFetcher(w.pool("a")).Fetch(t.Context(), "b", address, tc.have)
			if err == nil || c != nil {
				t.Fatalf("believed: %v %v", c, err)
			}
			if got := errors.As(err, &mismatch); got != tc.mismatch {
				t.Errorf("error %v (%T)", err, err)
			}
		})
	}
}

// Catalogs travel compressed.
func TestFetchCompresses(t *testing.T) {
	var gvs []catalog.GroupVersion
	for i := range 500 {
		gvs = append(gvs, catalog.GroupVersion{
			GV: catalog.GV{Group: fmt.Sprintf("group%d.example.com", i), Version: "v1"}, Source: catalog.SourceBuiltin,
			Resources: []catalog.Resource{{Name: "widgets", Kind: "Widget", Namespaced: true, Verbs: catalog.ParseVerbs([]string{"get", "list"})}},
		})
	}
	large, err := catalog.New("v1.36.0", gvs)
	if err != nil {
		t.Fatal(err)
	}
	w := newWorld(t)
	b := w.start("b", func(o *Options) { o.Catalog = func() (*catalog.Catalog, uint64) { return large, 1 } })
	count := &countingDialer{}
	p := w.pool("a", func(o *PoolOptions) { o.Dial = count.dial })
	c, _, _, err := NewFetcher(p).Fetch(t.Context(), "b", b.member.Address, catalog.Digest{})
	if err != nil || c.Digest() != large.Digest() {
		t.Fatal(err)
	}
	if plain, wire := proto.Size(EncodeCatalog(large)), count.read.Load(); wire > int64(plain)/2 {
		t.Errorf("%d bytes read for a catalog of %d", wire, plain)
	}
}

// FuzzCatalog holds the decoder to what catalog.New promises, and to its own inverse.
func FuzzCatalog(f *testing.F) {
	seed, err := proto.Marshal(EncodeCatalog(testCatalog(f, "v1.36.0")))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(seed)
	f.Fuzz(func(t *testing.T, data []byte) {
		m := &mvpv1.Catalog{}
		if proto.Unmarshal(data, m) != nil {
			return
		}
		c, err := DecodeCatalog(m)
		if err != nil {
			return
		}
		again, err := DecodeCatalog(EncodeCatalog(c))
		if err != nil || again.Digest() != c.Digest() {
			t.Fatalf("not its own inverse: %v", err)
		}
		if !slices.IsSortedFunc(c.GroupVersions(), func(a, b catalog.GroupVersion) int {
			return strings.Compare(a.Group+"\x00"+a.Version, b.Group+"\x00"+b.Version)
		}) {
			t.Fatal("not sorted")
		}
	})
}
