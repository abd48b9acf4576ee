package config

import (
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	"github.com/mvp-mesh/mvp-node/internal/route"
)

// Default is the configuration that an empty file would give, were no field required. Everything that has a default has it
// here, but for what follows from other fields (see complete).
func Default() *Config {
	h := authz.DefaultHeaderNames()
	return &Config{
		Mode: route.Enabled,
		Front: Front{
			Authentication: Authentication{
				Anonymous:     true,             // as kube-apiserver
				TokenCacheTTL: 10 * time.Second, // as k8s.io/apiserver's delegating authenticator
			},
			RequestTimeout:       60 * time.Second, // as kube-apiserver
			StallTimeout:         5 * time.Minute,
			MaxHeaderBytes:       64 << 10,
			MaxConcurrentStreams: 100, // as kube-apiserver since the rapid-reset attacks (CASES I-10)
		},
		APIServer: APIServer{
			RequestHeaders: RequestHeaders{User: h.User, UID: h.UID, Group: h.Group, ExtraPrefixes: h.ExtraPrefix},
		},
		Routing: Routing{LocalOutage: true},
		View: View{
			StaleGrace:         5 * time.Minute, // a reboot of a control-plane host
			UnknownCatalogHold: time.Minute,
		},
		Admin:   Admin{Address: "127.0.0.1:9444"},
		Logging: Logging{Level: "info", Format: "text"},
		Shutdown: Shutdown{
			// Two failed probes of a load balancer that asks every two seconds; kube-proxy and keepalived are quicker.
			Delay: 5 * time.Second,
			// Half of requestTimeout: almost no request takes longer, and kubelet's and systemd's patience ends.
			DrainTimeout: 30 * time.Second,
		},
	}
}

// complete fills in the defaults that follow from other fields, and makes file names relative to dir, the folder of the
// configuration file, as kubelet does.
func (c *Config) complete(dir string) {
	if c.Mesh.AdvertiseAddress == "" {
		c.Mesh.AdvertiseAddress = c.Mesh.Address
	}
	if c.Gossip.AdvertiseAddress == "" {
		c.Gossip.AdvertiseAddress = c.Gossip.Address
	}
	c.APIServer.URL = strings.TrimRight(c.APIServer.URL, "/")
	eachFile(reflect.ValueOf(c).Elem(), func(v reflect.Value) {
		if s := v.String(); s != "" && !filepath.IsAbs(s) {
			v.SetString(filepath.Join(dir, s))
		}
	})
}

// eachFile calls f for every field that is tagged as the name of a file.
func eachFile(v reflect.Value, f func(reflect.Value)) {
	for field, value := range v.Fields() {
		switch {
		case !field.IsExported():
		case field.Type.Kind() == reflect.Struct:
			eachFile(value, f)
		case hasTag(field, "file"):
			f(value)
		}
	}
}

func hasTag(f reflect.StructField, word string) bool {
	return slices.Contains(strings.Split(f.Tag.Get("config"), ","), word)
}
