"""Workers and judges that nobody reaches at the address that they advertise: not ready, and not used."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import aiohttp
import pytest

from penstock import MeshStatus
from penstock.router_service.routing import address_probe
from penstock.router_service.routing.address_probe import AddressProbe
from penstock.router_service.routing.instance_pool import InstancePool
from penstock.services.background import end
from penstock.services.channels import ChannelPool
from penstock.services.domain.instances import InstanceRecord, ModelCard, Role
from penstock.services.domain.mesh_view import MeshView
from penstock.services.processes import free_port
from tests.conftest import MeshFileMaker
from tests.router.test_lease_probe import answering
from tests.support.mesh import TestMesh
from tests.support.services import RedisProcess
from tests.support.waiting import until

CARD = ModelCard("only", "m", "d", "torch", 100, 10, 16, 8)
ELSEWHERE = "127.0.0.2"
"""Of this machine, too, but nobody listens there."""


def record(address: str, epoch: float = 1.0, role: Role = Role.WORKER) -> InstanceRecord:
    return InstanceRecord("w", role, address, epoch, 1, 60.0, model=CARD if role is Role.WORKER else None)


@pytest.mark.parametrize("role", [Role.WORKER, Role.JUDGE])
async def test_who_answers_with_another_name_is_unreached_until_it_answers_with_its_own(
    role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address_probe, "TIMEOUT_S", 0.5)
    async with answering("other") as (wrong, _), answering("w") as (right, _), ChannelPool() as channels:
        view = MeshView()
        pool = InstancePool(view, ejection_s=60.0)
        probe = asyncio.create_task(AddressProbe(pool, channels).run())
        for epoch, closed in ((1.0, f"127.0.0.1:{free_port()}"), (2.0, wrong)):
            first = record(closed, epoch, role)
            view.hear(first, 0.0)
            pool.view_changed()
            await until(lambda: pool.is_ejected("w"))
            assert view.is_unreached(first)
            pool.readmit("w")
        moved = record(right, 3.0, role)
        view.hear(moved, 0.0)
        pool.view_changed()
        await until(lambda: not view.is_unreached(moved))
        assert not pool.is_ejected("w")
        await end(probe)


def test_a_restart_has_to_answer_again() -> None:
    view = MeshView()
    first, second = record("h:1"), record("h:2", 2.0)
    view.hear(first, 0.0)
    assert view.reached_workers("only") == []
    view.reach(first)
    assert view.reached_workers("only") == [first]
    view.hear(second, 1.0)
    view.reach(first)  # an answer of before
    assert view.is_unreached(second)
    assert not view.is_unreached(first)


def test_who_lost_its_lease_for_a_while_need_not_answer_again() -> None:
    view, first = MeshView(keep_expired={Role.WORKER}), record("h:1")
    view.connect([first], None, 0.0)
    view.reach(first)
    view.alive(first.lease_s + 1)
    assert view.expire() == ["w"]
    again = dataclasses.replace(first, sequence=2)
    view.hear(again, first.lease_s + 2)
    assert view.reached_workers("only") == [again]


@pytest.fixture
async def mesh(redis: RedisProcess, mesh_file: MeshFileMaker) -> AsyncIterator[TestMesh]:
    """Of one tier, without workers."""
    made = TestMesh(mesh_file([{"name": "only", "model": "sim"}]), redis.url)
    try:
        await made.start(Role.PLANNER, "planner-0")
        await made.start(Role.ROUTER, "router-0")
        yield made
    finally:
        await made.stop_all()


def states(status: MeshStatus) -> dict[str, str]:
    return {i.instance_id: i.state for i in status.instances if i.role == "worker"}


async def test_a_worker_at_an_address_that_nobody_reaches_is_not_ready_and_gets_nothing(mesh: TestMesh) -> None:
    """The router is not ready either while it has no other; it says which worker it does not reach, and where."""
    lost = await mesh.start(Role.WORKER, "worker-0", tier="only", advertise_host=ELSEWHERE)
    await mesh.until(lambda s: states(s) == {"worker-0": "unreached"})
    async with aiohttp.ClientSession(mesh.http) as session, session.get("/readyz") as response:
        assert response.status == 503
        problem = (await response.json())["status"]
        assert problem == f"no tier has an instance; worker-0 does not answer at {lost.address}"
    await mesh.start(Role.WORKER, "worker-1", tier="only")
    await mesh.until(lambda s: states(s) == {"worker-0": "unreached", "worker-1": "ready"})
    async with mesh.client() as client, aiohttp.ClientSession(mesh.http) as session:
        assert (await client.status()).tiers[0].live_instances == 1
        for _ in range(4):
            assert [t.instance_id for t in (await client.generate("hello", max_tokens=2)).tiers] == ["worker-1"]
        async with session.get("/readyz") as response:
            assert (response.status, (await response.json())["unreached"]) == (200, {"worker-0": lost.address})
