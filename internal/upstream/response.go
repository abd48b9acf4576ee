package upstream

import (
	"net/http"

	"github.com/mvp-mesh/mvp-node/internal/authz"
)

// CleanResponse deletes from the header of a response what concerns only the connection to the apiserver. A "Connection: close"
// of an apiserver that shuts down must not end the client's connection, which leads to a node that stays (CASES E-04). It is
// for responses without protocol upgrade.
func CleanResponse(h http.Header) { authz.StripHopByHop(h) }
