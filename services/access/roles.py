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


def _rpcs(service: str, **rpcs: Set[CallerRole]) -> dict[str, Set[CallerRole]]:
    return {f"/{service}/{rpc}": roles for rpc, roles in rpcs.items()}


PERMISSIONS: Mapping[str, Set[CallerRole]] = {
    **_rpcs("penstock.router.v1.RouterService", Generate=_CLIENT, ListModels=_CLIENT),
    **_rpcs(
        "penstock.router.v1.MeshService",
        GetStatus=_ADMIN,
        WatchStatus=_ADMIN,
        ListTraces=_ADMIN,
        MoveReply=_ADMIN,
        GetUsage=_ADMIN,
        ListServedRequests=_ADMIN,
        ListSampledPrompts=_ADMIN,
    ),
    **_rpcs("penstock.router.v1.RouterProcessService", GetCounters=_ROUTER, MoveOwnReply=_ROUTER),
    **_rpcs(
        "penstock.worker.v1.WorkerService",
        Generate=_ROUTER | {CallerRole.JUDGE},  # a judge whose scorer is a tier of the mesh
        GenerateMany=_ROUTER,
        Abort=_ROUTER | _ADMIN,
        GetInfo=SERVICES | _ADMIN,
        GetLoad=SERVICES | _ADMIN,
        Drain=_ADMIN,
        Tokenize=_ROUTER,
        Detokenize=_ROUTER,
        PlaceBid=_ROUTER,
        ConfirmBid=_ROUTER,
        MigrateOut=_ROUTER,
        MigrateIn=frozenset({CallerRole.WORKER}),
    ),
    **_rpcs("penstock.judge.v1.JudgeService", Score=_ROUTER | _ADMIN, ListScorers=_ROUTER | _ADMIN),
    **_rpcs(
        "penstock.planner.v1.PlannerService",
        GetPlan=_ADMIN,
        SetPlan=_ADMIN,
        WatchPlan=_ADMIN,
        ListPlans=_ADMIN,
        PlanCascade=_ADMIN,
        SimulateDeployment=_ADMIN,
        PlanStages=_ADMIN,
    ),
    **_rpcs("grpc.health.v1.Health", Check=EVERY_ROLE, Watch=EVERY_ROLE, List=EVERY_ROLE),
    **_rpcs("grpc.reflection.v1alpha.ServerReflection", ServerReflectionInfo=_ADMIN),
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
