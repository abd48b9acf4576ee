package forward_test

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/mvp-mesh/mvp-node/internal/route"
)

// BenchmarkSmallGet is a GET of a 2 KiB object through both ends and a TLS connection, before an apiserver that costs nothing.
// Allocations are those of both ends together.
func BenchmarkSmallGet(b *testing.B) {
	w := newWorld(b)
	object := strings.Repeat("x", 2<<10)
	s := w.serve("b", roundTripper(func(r *http.Request) (*http.Response, error) {
		return answer(r, 200, object), nil
	}))
	c := w.client("a")
	c.wire.off = true
	candidates := []*route.Member{s.member}
	req := newRequest(b, "GET", getPath, nil)
	req.Header.Set("Accept", "application/vnd.kubernetes.protobuf, application/json")
	req.Header.Set("User-Agent", "kubectl/v1.36.0 (linux/amd64) kubernetes/abcdef0")
	req.Header.Set("Accept-Encoding", "gzip")
	get := func() error {
		resp, _, err := c.RoundTrip(req, candidates)
		if err != nil {
			return err
		}
		_, err = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		return err
	}
	for _, mode := range []string{"serial", "parallel"} {
		b.Run(mode, func(b *testing.B) {
			b.ReportAllocs()
			if mode == "serial" {
				for b.Loop() {
					if err := get(); err != nil {
						b.Fatal(err)
					}
				}
				return
			}
			b.SetParallelism(16)
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					if err := get(); err != nil {
						b.Error(err)
						return
					}
				}
			})
		})
	}
}

// BenchmarkList is a LIST of 8 MiB.
func BenchmarkList(b *testing.B) {
	const size = 8 << 20
	w := newWorld(b)
	s := w.serve("b", roundTripper(func(r *http.Request) (*http.Response, error) {
		resp := answer(r, 200, "")
		resp.ContentLength, resp.Body = -1, io.NopCloser(pattern(1, size))
		return resp, nil
	}))
	c := w.client("a")
	c.wire.off = true
	req := newRequest(b, "GET", listPath, nil)
	b.SetBytes(size)
	b.ReportAllocs()
	for b.Loop() {
		resp, _, err := c.RoundTrip(req, []*route.Member{s.member})
		if err != nil {
			b.Fatal(err)
		}
		if n, err := io.Copy(io.Discard, resp.Body); n != size || err != nil {
			b.Fatal(n, err)
		}
		resp.Body.Close()
	}
}
