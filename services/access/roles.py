"""Which role may call which RPC. No I/O.

With certificates, the role of a caller is the one in its certificate. Without them, it is what the listener trusts its
callers to be: the client listener serves clients, the administrative listener administrators, and the listener between
services the services. Both are checked against one table.
"""

import enum
from collections.abc import Mapping, Set


class CallerRole(enum.Enum):
    """The role in which a caller acts."""

    CLIENT = "client"
    ROUTER = "router"
    WORKER = "worker"
    JUDGE = "judge"
    PLANNER = "planner"
    ADMIN = "admin"


SERVICES = frozenset({CallerRole.ROUTER, CallerRole.WORKER, CallerRole.JUDGE, CallerRole.PLANNER})
EVERY_ROLE = frozenset(CallerRole)


class Listener(enum.Enum):
    """What a server listens for."""

    CLIENT = "client"
    """Inference, from anywhere: a router's gRPC and HTTP ports."""
    INTERNAL = "internal"
    """Calls between the services of a mesh."""
    ADMIN = "admin"
    """Administration."""

    @property
    def trusted_roles(self) -> Set[CallerRole]:
        """The roles that callers without a certificate may act in."""
        return _TRUSTED[self]


_TRUSTED: Mapping[Listener, Set[CallerRole]] = {
    Listener.CLIENT: frozenset({CallerRole.CLIENT}),
    Listener.INTERNAL: SERVICES,
    Listener.ADMIN: frozenset({CallerRole.ADMIN}),
}

_ROUTER = frozenset({CallerRole.ROUTER})
_ADMIN = frozenset({CallerRole.ADMIN})
_CLIENT = frozenset({CallerRole.CLIENT})
_MESH, _WORKER = "penstock.router.v1.MeshService", "penstock.worker.v1.WorkerService"


def _rpcs(roles: Set[CallerRole], service: str, rpcs: str) -> dict[str, Set[CallerRole]]:
    return {f"/{service}/{rpc}": roles for rpc in rpcs.split()}


PERMISSIONS: Mapping[str, Set[CallerRole]] = {
    **_rpcs(_CLIENT, "penstock.router.v1.RouterService", "Generate ListModels"),
    **_rpcs(_ADMIN, _MESH, "GetStatus WatchStatus ListTraces MoveReply"),
    **_rpcs(_ADMIN, _MESH, "GetUsage ListServedRequests ListSampledPrompts"),
    **_rpcs(_ROUTER, "penstock.router.v1.RouterProcessService", "GetCounters MoveOwnReply"),
    **_rpcs(_ROUTER | {CallerRole.JUDGE}, _WORKER, "Generate"),  # a judge whose scorer is a tier of the mesh
    **_rpcs(_ROUTER, _WORKER, "GenerateMany Tokenize Detokenize PlaceBid ConfirmBid MigrateOut"),
    **_rpcs(_ROUTER | _ADMIN, _WORKER, "Abort"),
    **_rpcs(SERVICES | _ADMIN, _WORKER, "GetInfo GetLoad"),
    **_rpcs(_ADMIN, _WORKER, "Drain"),
    **_rpcs(frozenset({CallerRole.WORKER}), _WORKER, "MigrateIn"),
    **_rpcs(_ROUTER | _ADMIN, "penstock.judge.v1.JudgeService", "Score ListScorers"),
    **_rpcs(_ADMIN, "penstock.planner.v1.PlannerService", "GetPlan SetPlan WatchPlan ListPlans"),
    **_rpcs(_ADMIN, "penstock.planner.v1.PlannerService", "PlanCascade SimulateDeployment PlanStages"),
    **_rpcs(EVERY_ROLE, "grpc.health.v1.Health", "Check Watch List"),
    **_rpcs(_ADMIN, "grpc.reflection.v1alpha.ServerReflection", "ServerReflectionInfo"),
}
"""The roles that may call each RPC (`/package.Service/Method`). An RPC that is not listed may not be called."""


def may_call(method: str, roles: Set[CallerRole]) -> bool:
    """Whether a caller that may act in any of `roles` may call an RPC."""
    return not roles.isdisjoint(PERMISSIONS.get(method, frozenset()))


def listening_host(host: str, *, authenticated: bool, open_access: bool) -> str:
    """The address to listen on: loopback instead of any other host where callers are not authenticated.

    authenticated: callers need an API key or a certificate. open_access: the operator has allowed callers without.
    """
    return host if authenticated or open_access or is_loopback(host) else LOOPBACK


LOOPBACK = "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach a listener at this host."""
    return host in ("localhost", "::1", "[::1]") or host.startswith("127.")
