"""Workers and judges that do not answer: those without a lease, and those that nobody reaches at their address."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from grpc import aio

from penstock import MeshStatus
from penstock.router_service import compose
from penstock.router_service.clients.reply_multiplexer import MultiplexerPool
from penstock.router_service.clients.worker_client import WorkerClient
from penstock.router_service.routing import health_probes
from penstock.router_service.routing.health_probes import HealthProbes
from penstock.router_service.routing.instance_pool import InstancePool
from penstock.router_service.routing.placement import NotPlaced, Placed
from penstock.services.background import end
from penstock.services.channels import ChannelPool
from penstock.services.domain.instances import InstanceRecord, Load, ModelCard, Role
from penstock.services.domain.mesh_view import MeshView
from penstock.services.health import Health, is_serving
from penstock.services.processes import free_port
from penstock.types.prompts import TextPrompt
from penstock.types.replies import TokenFrame
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from tests.conftest import MeshFileMaker
from tests.support.mesh import COMPOSE, TestMesh
from tests.support.services import RedisProcess, serving
from tests.support.waiting import until

CARD = ModelCard("only", "m", "d", "torch", 100, 10, 16, 8)
LEASE_S = 1.0


def expired_view(address: str) -> MeshView:
    """A worker "w" whose lease has ended."""
    view = MeshView(keep_expired={Role.WORKER})
    view.connect([InstanceRecord("w", Role.WORKER, address, 1.0, 1, LEASE_S, model=CARD)], None, 0.0)
    view.alive(2 * LEASE_S)
    assert view.expire() == ["w"]
    return view


@asynccontextmanager
async def answering(instance_id: str) -> AsyncIterator[tuple[str, Health]]:
    """A server that answers for the health of one instance: its address, and that health."""
    server = aio.server()
    health = Health(server, instance_id)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await health.set_serving(True)
    try:
        yield f"127.0.0.1:{port}", health
    finally:
        await server.stop(0)


@asynccontextmanager
async def probing(address: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[InstancePool]:
    monkeypatch.setattr(health_probes, "INTERVAL_S", 0.01)
    monkeypatch.setattr(health_probes, "TIMEOUT_S", 60.0)
    pool = InstancePool(expired_view(address), ejection_s=60.0)
    async with ChannelPool() as channels:
        task = asyncio.create_task(HealthProbes(pool, channels).check_expired())
        try:
            yield pool
        finally:
            await end(task)


async def test_who_answers_stays_the_last_resort_until_it_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    async with answering("w") as (address, health), probing(address, monkeypatch) as pool:
        checks = 0

        async def counted(channel: aio.Channel, instance_id: str, timeout_s: float) -> bool | None:
            nonlocal checks
            result = await is_serving(channel, instance_id, timeout_s)
            checks += 1
            return result

        monkeypatch.setattr("penstock.services.health.is_serving", counted)
        await until(lambda: checks >= 3)
        placed = pool.place("only", "r", 10)
        assert isinstance(placed, Placed)
        assert placed.record.instance_id == "w"
        await health.enter_graceful_shutdown()
        await until(lambda: pool.view.find("w") is None)


async def test_another_process_at_the_address_gets_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with answering("somebody-else") as (address, _), probing(address, monkeypatch) as pool:
        await until(lambda: pool.view.find("w") is None)
        assert pool.place("only", "r", 10) == NotPlaced(full=False)


async def test_who_does_not_answer_is_ejected_and_then_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_probes, "FORGET_AFTER_S", 3600.0)
    async with probing(f"127.0.0.1:{free_port()}", monkeypatch) as pool:
        await until(lambda: pool.is_ejected("w"))
        assert pool.view.find("w") is not None
        assert pool.place("only", "r", 10) == NotPlaced(full=False)
        monkeypatch.setattr(health_probes, "FORGET_AFTER_S", 0.0)
        await until(lambda: pool.view.find("w") is None)


async def test_a_channel_with_replies_is_not_swept_though_the_view_has_forgotten_its_instance(
    redis: RedisProcess, mesh_file: MeshFileMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compose, "CHANNEL_SWEEP_S", 0.01)
    simulated = {"overhead_ms": 10.0, "reply_tokens": 1000}
    file = mesh_file([{"name": "only", "model": "sim", "engine": "simulated", "simulated": simulated}])
    sampling = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    async with (
        serving(Role.WORKER, COMPOSE[Role.WORKER], file, redis.url, tier="only") as worker,
        ChannelPool() as channels,
        MultiplexerPool(channels) as sessions,
    ):
        sweep = asyncio.create_task(compose._sweep(channels, MeshView(), sessions))
        try:
            client = WorkerClient(channels, sessions, silence_s=30.0)
            request = GenerationRequest("r", TextPrompt("hello"), sampling)
            tokens = 0

            def count(frame: TokenFrame) -> None:
                nonlocal tokens
                tokens += len(frame.token_ids)

            await client.generate(
                worker.address, request, timeout_s=60.0, metadata=(), on_event=lambda _: None, on_tokens=count
            )
            assert tokens == 50
            assert sessions.in_use() == set()
            channel = channels.get(worker.address)
            await until(lambda: channels.get(worker.address) is not channel)
        finally:
            await end(sweep)


async def test_instances_without_a_lease_are_the_last_resort() -> None:
    """A leased one first; then, where it is full or ejected, one without."""
    view = expired_view("host:1")
    pool = InstancePool(view, ejection_s=60.0)

    def chosen() -> str | NotPlaced:
        result = pool.place("only", "r", 10)
        return result.record.instance_id if isinstance(result, Placed) else result

    full = Load(running_tokens=(1,) * CARD.max_requests)
    leased = InstanceRecord("a", Role.WORKER, "host:2", 1.0, 1, LEASE_S, model=CARD, load=Load())
    assert chosen() == "w"
    view.hear(leased, 3.0)
    assert chosen() == "a"
    view.hear(dataclasses.replace(leased, sequence=2, load=full), 3.0)
    assert chosen() == "w"
    pool.eject("w")
    assert chosen() == NotPlaced(full=True)  # a place at the leased one is waited for
    pool.eject("a")
    assert chosen() == NotPlaced(full=False)


async def test_judges_without_a_lease_stand_in_where_none_has_one() -> None:
    def names(view: MeshView) -> list[str]:
        return [judge.instance_id for judge in InstancePool(view, ejection_s=60.0).judges()]

    view = MeshView(keep_expired={Role.JUDGE})
    view.connect([InstanceRecord("j", Role.JUDGE, "host:1", 1.0, 1, LEASE_S)], None, 0.0)
    view.alive(2 * LEASE_S)
    view.expire()
    assert names(view) == ["j"]
    view.hear(InstanceRecord("k", Role.JUDGE, "host:2", 1.0, 1, LEASE_S), 3.0)
    assert names(view) == ["k"]


ELSEWHERE = "127.0.0.2"
"""Of this machine, too, but nobody listens there."""


def record(address: str, epoch: float = 1.0, role: Role = Role.WORKER) -> InstanceRecord:
    return InstanceRecord("w", role, address, epoch, 1, 60.0, model=CARD if role is Role.WORKER else None)


@pytest.mark.parametrize("role", [Role.WORKER, Role.JUDGE])
async def test_who_answers_with_another_name_is_unreached_until_it_answers_with_its_own(
    role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_probes, "NEW_TIMEOUT_S", 0.5)
    async with answering("other") as (wrong, _), answering("w") as (right, _), ChannelPool() as channels:
        view = MeshView()
        pool = InstancePool(view, ejection_s=60.0)
        probe = asyncio.create_task(HealthProbes(pool, channels).check_new())
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
    async with TestMesh(mesh_file([{"name": "only", "model": "sim"}]), redis.url) as made:
        await made.start(Role.PLANNER, "planner-0")
        await made.start(Role.ROUTER, "router-0")
        yield made


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
