"""/livez, /readyz and /health, and gRPC health: before the plan, while serving, without workers, while draining."""

import asyncio
import dataclasses
import os
import sys
from collections.abc import Mapping
from typing import Any

import aiohttp
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock import Tokens
from penstock.router_service.routing.readiness import TierState, readiness
from penstock.router_service.servicer import ROUTER_SERVICE
from penstock.services.domain.instances import InstanceRecord, Load, ModelCard, Role
from penstock.services.domain.mesh_view import MeshView
from penstock.services.runtime import Chassis
from penstock.types.mesh_status import Loading
from penstock.types.plans import Plan, TierPlan
from tests.conftest import ROOT, MeshFileMaker
from tests.support.held_engine import held_engines
from tests.support.mesh import TestMesh
from tests.support.services import RedisProcess
from tests.support.simulated_text import ENDLESS
from tests.support.waiting import until_answered

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
CARD = ModelCard("small", "m", "d", "torch", 100, 10, 16, 8)
WORKER = InstanceRecord("w", Role.WORKER, "host:1", 1.0, 1, 3.0, model=CARD)
PLAN = Plan(7, (TierPlan("small", "m", 50.0, 2), TierPlan("large", "n", None, 1)))


def test_a_router_is_ready_with_a_plan_and_an_instance_until_it_drains() -> None:
    view = MeshView(keep_expired={Role.WORKER})
    assert readiness(view, draining=False).problem == "no plan yet"
    view.connect([], PLAN, 0.0)
    state = readiness(view, draining=False)
    assert state.problem == "no tier has an instance"
    assert state.tiers == {"small": TierState(0, 0, 2), "large": TierState(0, 0, 1)}
    view.hear(WORKER, 1.0)
    assert readiness(view, draining=False).problem == "no tier has an instance; w does not answer at host:1"
    view.reach(WORKER)
    assert readiness(view, draining=False).problem == ""  # one tier is enough
    assert readiness(view, draining=True).problem == "draining"
    view.disconnect(2.0)
    state = readiness(view, draining=False)
    assert (state.problem, state.state_connected, state.plan_revision) == ("", False, 7)
    view.connect([], None, 3.0)
    view.alive(7.0)
    view.expire()
    state = readiness(view, draining=False)
    assert (state.problem, state.tiers["small"]) == ("", TierState(0, 1, 2))
    view.hear(dataclasses.replace(WORKER, sequence=2, draining=True), 8.0)
    assert readiness(view, draining=False).problem == "no tier has an instance"
    loads = Load(loading=Loading(0.4, 30.0))
    view.hear(dataclasses.replace(WORKER, instance_id="loading-v", model=None, load=loads, tier="large"), 8.0)
    problem = "no tier has an instance; large is loading: 40%, about 30 s left"
    assert readiness(view, draining=False).problem == problem


async def answers(router: Chassis) -> dict[str, tuple[int, Mapping[str, Any]]]:
    """Status and body of each route."""
    result = {}
    async with aiohttp.ClientSession(f"http://{router.http_address}") as session:
        for path in ("/livez", "/readyz", "/health"):
            async with session.get(path) as response:
                result[path] = (response.status, await response.json())
    return result


async def statuses(router: Chassis) -> tuple[int, ...]:
    return tuple(status for status, _ in (await answers(router)).values())


async def grpc_health(router: Chassis, service: str = "") -> int:
    async with aio.insecure_channel(router.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        response = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
    return int(response.status)


async def shows(router: Chassis, expected: tuple[int, ...] | int) -> bool:
    """Whether the routes have these statuses, or gRPC health this one."""
    return (await (grpc_health(router, ROUTER_SERVICE) if isinstance(expected, int) else statuses(router))) == expected


async def container_check(router: Chassis, *names: str) -> int | None:
    """Exit status of the images' health check."""
    environment = os.environ | {"PENSTOCK_GRPC_PORT": router.address.rpartition(":")[2]}
    check = await asyncio.create_subprocess_exec(
        sys.executable, str(ROOT / "deploy" / "healthcheck.py"), *names, env=environment
    )
    return await check.wait()


async def test_the_routes_and_grpc_health_follow_the_mesh(redis: RedisProcess, mesh_file: MeshFileMaker) -> None:
    async with TestMesh(mesh_file(), redis.url) as mesh:
        router = await mesh.start(Role.ROUTER, "router-0")
        assert await statuses(router) == (200, 503, 503)
        assert (await answers(router))["/readyz"][1]["status"] == "no plan yet"
        assert await grpc_health(router) == SERVING
        assert await grpc_health(router, ROUTER_SERVICE) == NOT_SERVING
        assert (await container_check(router), await container_check(router, ROUTER_SERVICE)) == (0, 1)
        await mesh.start(Role.PLANNER, "planner-0")
        await until_answered(lambda: shows(router, (200, 503, 200)))
        assert (await answers(router))["/readyz"][1]["status"] == "no tier has an instance"
        await mesh.start(Role.WORKER, "worker-0", tier="small")
        await until_answered(lambda: shows(router, (200, 200, 200)))
        await until_answered(lambda: shows(router, SERVING))
        assert await container_check(router, ROUTER_SERVICE) == 0
        assert (await answers(router))["/readyz"][1] == {
            "status": "ready",
            "draining": False,
            "plan_revision": 1,
            "state_connected": True,
            "unreadable": "",
            "loading": {},
            "unreached": {},
            "tiers": {
                "small": {"live": 1, "without_lease": 0, "planned": 1},
                "large": {"live": 0, "without_lease": 0, "planned": 1},
            },
        }
        await mesh.stop("worker-0")
        await until_answered(lambda: shows(router, (200, 503, 200)))
        await until_answered(lambda: shows(router, NOT_SERVING))


async def test_a_draining_router_says_so_while_its_requests_end(redis: RedisProcess, mesh_file: MeshFileMaker) -> None:
    """/health turns 503, /livez stays 200, gRPC health agrees; the reply under way comes to its end."""
    fast = {"overhead_ms": 1.0, "token_us": 1.0, "context_token_ns": 0.0, "reply_tokens": ENDLESS}
    async with TestMesh(mesh_file([{"name": "large", "model": "sim-held", "simulated": fast}]), redis.url) as mesh:
        await mesh.start(Role.PLANNER, "planner-0")
        router = await mesh.start(Role.ROUTER, "router-0", drain_s=120.0)
        await mesh.start(Role.WORKER, "worker-0", tier="large")
        await until_answered(lambda: shows(router, (200, 200, 200)))
        began, tokens = asyncio.Event(), 0

        async def read() -> None:
            nonlocal tokens
            async with mesh.client() as client:
                async for event in client.stream("hello", model="large", max_tokens=150, temperature=0):
                    if isinstance(event, Tokens):
                        tokens += len(event.token_ids)
                        began.set()

        with held_engines("sim-held"):
            reading = asyncio.create_task(read())
            await began.wait()
            stopping = asyncio.create_task(mesh.stop("router-0"))
            await until_answered(lambda: shows(router, (200, 503, 503)))
            state = await answers(router)
            assert (state["/readyz"][1]["status"], state["/health"][1]["status"]) == ("draining", "draining")
            assert await grpc_health(router) == await grpc_health(router, ROUTER_SERVICE) == NOT_SERVING
            assert not reading.done()
        await reading
        assert tokens == 150
        await stopping
