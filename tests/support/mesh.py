"""A whole mesh inside the test's event loop: real services, real gRPC, a real Redis."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpc import aio

from penstock import AsyncClient, RetryPolicy
from penstock.judge_service.compose import compose as judge
from penstock.planner_service.compose import compose as planner
from penstock.proto.judge.v1 import judge_pb2_grpc
from penstock.proto.worker.v1 import worker_pb2_grpc
from penstock.router_service.compose import compose as router
from penstock.services.domain.instances import Role
from penstock.services.mesh_file import load_mesh_file
from penstock.services.runtime import Chassis
from penstock.worker_service.compose import compose as worker
from tests.support.measured import metrics_page
from tests.support.services import serving

if TYPE_CHECKING:
    Stub = worker_pb2_grpc.WorkerServiceAsyncStub
    JudgeStub = judge_pb2_grpc.JudgeServiceAsyncStub
else:
    Stub, JudgeStub = worker_pb2_grpc.WorkerServiceStub, judge_pb2_grpc.JudgeServiceStub

COMPOSE = {Role.WORKER: worker, Role.JUDGE: judge, Role.PLANNER: planner, Role.ROUTER: router}


@dataclass
class TestMesh:
    """Parts that can be started and stopped one by one."""

    __test__ = False

    mesh_file: Path
    redis_url: str
    parts: dict[str, Chassis] = field(default_factory=dict)
    _stacks: dict[str, AsyncExitStack] = field(default_factory=dict)

    async def start(self, role: Role, name: str, **settings: Any) -> Chassis:
        """Start a part under a name of the test's own; a second start under that name is a restart."""
        stack = AsyncExitStack()
        context = serving(role, COMPOSE[role], self.mesh_file, self.redis_url, instance_id=name, **settings)
        self.parts[name] = await stack.enter_async_context(context)
        self._stacks[name] = stack
        return self.parts[name]

    async def stop(self, name: str) -> None:
        """Stop a part as SIGTERM would."""
        self.parts.pop(name)
        await self._stacks.pop(name).aclose()

    async def __aenter__(self) -> "TestMesh":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop_all()

    async def stop_all(self) -> None:
        for name in sorted(self._stacks, key=lambda name: not name.startswith("router")):
            await self.stop(name)

    @property
    def router(self) -> Chassis:
        return self.parts["router-0"]

    def client(self, **options: Any) -> AsyncClient:
        """An SDK client to all routers; it does not retry unless told to."""
        routers = [chassis for name, chassis in sorted(self.parts.items()) if name.startswith("router")]
        addresses, admin = [router.address for router in routers], [router.admin_address for router in routers]
        defaults: dict[str, Any] = {"retry": RetryPolicy(attempts=1), "timeout_s": 120, "silence_s": 120}
        return AsyncClient(addresses, admin=admin, **defaults | options)

    @property
    def http(self) -> str:
        return f"http://{self.router.http_address}"

    async def metrics(self, name: str = "router-0") -> str:
        """A part's page of metrics."""
        return await asyncio.to_thread(metrics_page, self.parts[name].telemetry.metrics_address)

    async def until(self, condition: Callable[[Any], bool], timeout_s: float = 120) -> None:
        """Wait until the router's status meets a condition."""
        async with self.client() as client, asyncio.timeout(timeout_s):
            async for status in client.watch_status(0.1):
                if condition(status):
                    return

    async def complete(self) -> None:
        """Wait until the router sees every part."""
        names = set(self.parts)
        await self.until(lambda s: s.plan_revision > 0 and names <= {i.instance_id for i in s.instances})


@asynccontextmanager
async def served_worker(
    mesh_file: Path, redis_url: str, *, tier: str = "only", **settings: Any
) -> AsyncIterator[tuple[Stub, Chassis]]:
    """A worker of a tier without the rest of its mesh, and a stub of it. settings: of the worker."""
    async with (
        serving(Role.WORKER, worker, mesh_file, redis_url, tier=tier, **settings) as chassis,
        aio.insecure_channel(chassis.address) as channel,
    ):
        yield worker_pb2_grpc.WorkerServiceStub(channel), chassis


@asynccontextmanager
async def served_judge(mesh_file: Path, redis_url: str) -> AsyncIterator[tuple[JudgeStub, Chassis]]:
    """A judge without the rest of its mesh, and a stub of it."""
    async with (
        serving(Role.JUDGE, judge, mesh_file, redis_url) as chassis,
        aio.insecure_channel(chassis.address) as channel,
    ):
        yield judge_pb2_grpc.JudgeServiceStub(channel), chassis


@asynccontextmanager
async def running_mesh(
    mesh_file: Path, redis_url: str, *, routers: int = 1, mesh: TestMesh | None = None, **settings: Any
) -> AsyncIterator[TestMesh]:
    """The mesh that a file describes, complete. mesh: one to start it in. settings: of every service."""
    file = load_mesh_file(mesh_file)
    async with mesh or TestMesh(mesh_file, redis_url) as mesh:
        await mesh.start(Role.PLANNER, "planner-0", **settings)
        for i in range(routers):
            await mesh.start(Role.ROUTER, f"router-{i}", **settings)
        for i in range(file.judge.replicas):
            await mesh.start(Role.JUDGE, f"judge-{i}", **settings)
        for tier in file.tiers:
            for i in range(tier.workers):
                await mesh.start(Role.WORKER, f"worker-{tier.name}-{i}", tier=tier.name, **settings)
        await mesh.complete()
        yield mesh
