package mesh

import (
	"context"
	"fmt"
	"slices"

	"github.com/mvp-mesh/mvp-node/internal/authz"
	mvpv1 "github.com/mvp-mesh/mvp-node/proto/mvp/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/peer"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	reflectionv1alpha "google.golang.org/grpc/reflection/grpc_reflection_v1alpha"
	"google.golang.org/grpc/status"
)

var (
	nodesOnly = []authz.Role{authz.RoleNode}
	everyone  = []authz.Role{authz.RoleNode, authz.RoleOperator}
)

// access lists the roles that may call each method. A method without a line can be called by nobody, and a server that registers
// one does not start; a test holds that no line is without a method.
var access = map[string][]authz.Role{
	mvpv1.ForwardService_Forward_FullMethodName: nodesOnly,

	mvpv1.MeshService_GetCatalog_FullMethodName: everyone,
	mvpv1.MeshService_GetView_FullMethodName:    everyone,
	mvpv1.MeshService_DumpGossip_FullMethodName: everyone,
	mvpv1.MeshService_Explain_FullMethodName:    everyone,

	healthv1.Health_Check_FullMethodName: everyone,
	healthv1.Health_List_FullMethodName:  everyone,
	healthv1.Health_Watch_FullMethodName: everyone,

	reflectionv1.ServerReflection_ServerReflectionInfo_FullMethodName:      everyone,
	reflectionv1alpha.ServerReflection_ServerReflectionInfo_FullMethodName: everyone,
}

// methodsOf lists the full names of all methods that are registered.
func methodsOf(info map[string]grpc.ServiceInfo) []string {
	var out []string
	for service, si := range info {
		for _, m := range si.Methods {
			out = append(out, "/"+service+"/"+m.Name)
		}
	}
	slices.Sort(out)
	return out
}

// mayCall gives the peer of a call if its role may call the method, else a gRPC status.
func mayCall(ctx context.Context, tls authz.MeshTLS, method string) (authz.Peer, error) {
	p, err := peerOf(ctx, tls)
	if err != nil {
		return authz.Peer{}, status.Error(codes.Unauthenticated, err.Error())
	}
	if !slices.Contains(access[method], p.Role) {
		return authz.Peer{}, status.Errorf(codes.PermissionDenied, "%s %q may not call %s", p.Role, p.Name, method)
	}
	return p, nil
}

// peerOf reads the identity anew for each call, so that a name that was taken off the allow list cannot go on using the connection
// it has.
func peerOf(ctx context.Context, tls authz.MeshTLS) (authz.Peer, error) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return authz.Peer{}, fmt.Errorf("call without a connection")
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok {
		return authz.Peer{}, fmt.Errorf("connection without TLS")
	}
	return tls.PeerFromTLS(info.State)
}

type peerKey struct{}

// PeerFromContext is who calls, as the certificate of the connection proves it; for handlers behind the chain of a Server. The
// error says that there is no caller, which is a bug.
func PeerFromContext(ctx context.Context) (authz.Peer, error) {
	p, ok := ctx.Value(peerKey{}).(authz.Peer)
	if !ok {
		return authz.Peer{}, fmt.Errorf("mesh: no peer in this context")
	}
	return p, nil
}
