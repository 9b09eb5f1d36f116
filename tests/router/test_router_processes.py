"""Several processes of one router serve as one: what one is asked, it answers for all. In the test's own event loop."""

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from grpc import aio

from penstock import AsyncPlannerClient
from penstock.proto.common.v1 import common_pb2
from penstock.proto.router.v1 import router_pb2 as pb
from penstock.proto.router.v1 import router_pb2_grpc
from penstock.router_service.siblings.client import COUNTERS_AGE_S, Siblings
from penstock.router_service.siblings.counters import total
from penstock.services.domain.instances import Role
from penstock.services.health import is_serving
from penstock.services.process_slot import ProcessSlot
from penstock.services.shared_port import SharedPort
from penstock.types.mesh_status import ProcessCounters
from tests.conftest import write_mesh_file
from tests.support.held_engine import held_engines
from tests.support.mesh import TestMesh
from tests.support.services import RedisProcess
from tests.support.waiting import until_answered

COUNT = 2
WAIT_S = 60.0  # limit of each wait for a condition
HELD = "held"  # a tier whose replies a test may hold after their first token
SLOW = {"overhead_ms": 5.0, "token_us": 0.0, "context_token_ns": 0.0, "reply_tokens": 10_000}
MAX_TRIES = 100  # connections until one is at a given process: each is with probability 1/2


@dataclass
class Group:
    """A mesh whose router has two processes. ports: gRPC, HTTP and the administrative listener's."""

    mesh: TestMesh
    slots: list[ProcessSlot]
    ports: tuple[SharedPort, SharedPort, SharedPort]

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.ports[1].port}"

    async def start(self, index: int) -> None:
        names = ("grpc_port", "http_port", "admin_port")
        ports = {name: port.port for name, port in zip(names, self.ports, strict=True)}
        await self.mesh.start(Role.ROUTER, name(index), slot=self.slots[index], drain_s=60.0, **ports)

    @asynccontextmanager
    async def channel_at(self, index: int, *, admin: bool = False) -> AsyncIterator[aio.Channel]:
        """A connection to the process with this index. admin: to its administrative listener."""
        port = self.ports[2 if admin else 0].port
        for _ in range(MAX_TRIES):
            options = [("grpc.use_local_subchannel_pool", 1)]
            async with aio.insecure_channel(f"127.0.0.1:{port}", options) as channel:
                if await is_serving(channel, name(index), 10):
                    yield channel
                    return
        pytest.fail(f"no connection reached process {index}")

    async def status_of(self, index: int) -> pb.MeshStatus:
        async with self.channel_at(index, admin=True) as channel:
            response = await router_pb2_grpc.MeshServiceStub(channel).GetStatus(pb.GetStatusRequest())
        status: pb.MeshStatus = response.status
        return status


def name(index: int) -> str:
    return f"router.{index}"


def request(request_id: str, tokens: int = 100, model: str = "only") -> pb.GenerateRequest:
    sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=tokens)
    return pb.GenerateRequest(
        model=model, prompt=common_pb2.Prompt(text="hello"), sampling=sampling, request_id=request_id
    )


async def generate(
    channel: aio.Channel,
    request_id: str,
    tokens: int = 100,
    model: str = "only",
    started: asyncio.Event | None = None,
) -> str:
    """The whole text; fails where the stream does not finish. started: set at its first token."""
    text, finished = "", False
    async for event in router_pb2_grpc.RouterServiceStub(channel).Generate(request(request_id, tokens, model)):
        text += event.tokens.frame.text
        finished = finished or event.HasField("finished")
        if started is not None and event.HasField("tokens"):
            started.set()
    assert finished
    return text


async def ask(http: str, session: aiohttp.ClientSession) -> dict[str, Any]:
    body = {"model": "only", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "temperature": 0}
    async with session.post(f"{http}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        answer: dict[str, Any] = await response.json()
    return answer


@asynccontextmanager
async def empty_group(redis: RedisProcess, folder: Path) -> AsyncIterator[Group]:
    """A mesh whose parts are to be started."""
    tiers: list[dict[str, Any]] = [
        {"name": "only", "model": "sim", "threshold": 0, "workers": 2, "simulated": SLOW},
        {"name": HELD, "model": HELD, "simulated": SLOW},
    ]
    file = write_mesh_file(folder, tiers, router={"max_active": 31})
    ports = SharedPort("127.0.0.1", 0), SharedPort("127.0.0.1", 0), SharedPort("127.0.0.1", 0)
    with tempfile.TemporaryDirectory() as sockets:
        slots = [ProcessSlot("router", index, COUNT, sockets, "127.0.0.1:9") for index in range(COUNT)]
        running = Group(TestMesh(file, redis.url), slots, ports)
        try:
            yield running
        finally:
            await running.mesh.stop_all()
            for port in ports:
                port.close()


@pytest.fixture(scope="module")
async def group(redis: RedisProcess, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Group]:
    async with empty_group(redis, tmp_path_factory.mktemp("processes")) as running:
        await running.mesh.start(Role.PLANNER, "planner-0")
        for index in range(COUNT):
            await running.start(index)
        for index in range(2):
            await running.mesh.start(Role.WORKER, f"worker-only-{index}", tier="only")
        await running.mesh.start(Role.WORKER, "worker-held", tier=HELD)

        async def complete() -> bool:
            return [len((await running.status_of(i)).instances) for i in range(COUNT)] == [5, 5]

        await until_answered(complete)
        yield running


async def test_what_the_processes_count_adds_up_and_the_mesh_has_one_router(group: Group) -> None:
    before = await group.status_of(0)
    counts = (3, 5)
    for index, count in enumerate(counts):
        async with group.channel_at(index) as channel:
            await asyncio.gather(*(generate(channel, f"{index}-{i}") for i in range(count)))
    for asked in range(COUNT):
        status = await group.status_of(asked)
        assert status.router_id == "router"
        assert [(p.instance_id, p.answering) for p in status.processes] == [("router.0", True), ("router.1", True)]
        more = [now.finished - then.finished for now, then in zip(status.processes, before.processes, strict=True)]
        assert more == [3, 5]
        assert status.finished == before.finished + sum(counts)
        assert status.tiers[0].answered == status.finished
        assert status.active == 0
        assert status.ttft_p95.ToTimedelta().total_seconds() > 0
        routers = [instance for instance in status.instances if instance.role == "router"]
        assert [(r.instance_id, r.processes, r.state) for r in routers] == [("router", 2, pb.INSTANCE_STATE_READY)]
        assert not any(i.HasField("processes") for i in status.instances if i.role != "router")


async def test_a_new_plan_reaches_all_processes(group: Group) -> None:
    async with AsyncPlannerClient(group.mesh.parts["planner-0"].admin_address) as planner:
        revision = (await planner.set_plan(await planner.get_plan())).revision
    async with asyncio.timeout(WAIT_S):
        while [(await group.status_of(index)).plan_revision for index in range(COUNT)] != [revision] * COUNT:
            await asyncio.sleep(0.02)


async def test_however_many_ask_for_the_status_the_processes_ask_each_other_ten_times_a_second(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counters are read again once they are COUNTERS_AGE_S old, a tenth of a second; here by the test's own clock."""

    def set_age_limit(limit_s: float) -> None:
        monkeypatch.setattr("penstock.router_service.siblings.client.COUNTERS_AGE_S", limit_s)

    assert COUNTERS_AGE_S == 0.1
    async with Siblings(group.slots[0]) as siblings:
        set_age_limit(3600.0)
        first, *others = await asyncio.gather(*(siblings.counters() for _ in range(100)))
        assert first[1] is not None
        assert all(other is first for other in others)
        set_age_limit(0.0)
        leaving = asyncio.create_task(siblings.counters())
        await asyncio.sleep(0)  # it reads the counters again
        set_age_limit(3600.0)
        staying = asyncio.create_task(siblings.counters())
        await asyncio.sleep(0)
        leaving.cancel()  # its client has left: the others get their answer all the same
        assert (await staying)[1] is not None
        assert await staying is not first


async def test_both_faces_of_each_process_answer(group: Group) -> None:
    """HTTP connections reach all processes, and each answers; that gRPC does is shown above."""
    before = [process.finished for process in (await group.status_of(0)).processes]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        for _ in range(MAX_TRIES):
            assert (await ask(group.http, session))["choices"][0]["message"]["content"]
            if all(p.finished > count for p, count in zip((await group.status_of(0)).processes, before, strict=True)):
                break
        else:
            pytest.fail("all HTTP connections reached one process")


async def test_a_move_is_carried_out_by_the_process_that_streams_the_reply(group: Group) -> None:
    async with group.channel_at(0) as streaming, group.channel_at(1, admin=True) as other:
        mesh = router_pb2_grpc.MeshServiceStub(other)
        before = await generate(streaming, "before")
        text, offset, move = "", 0, None
        async for event in router_pb2_grpc.RouterServiceStub(streaming).Generate(request("moving")):
            if event.HasField("tier_started"):
                home = event.tier_started.instance_id
            if event.HasField("tokens"):
                assert event.tokens.frame.offset == offset
                offset += len(event.tokens.frame.token_ids)
                text += event.tokens.frame.text
                if move is None:
                    away = next(f"worker-only-{i}" for i in range(2) if f"worker-only-{i}" != home)
                    move = asyncio.ensure_future(
                        mesh.MoveReply(pb.MoveReplyRequest(request_id="moving", instance_id=away))
                    )
        assert move is not None
        assert (await move).HasField("moved")
        assert text == before
        for instance_id in ("worker-only-0", "nobody"):
            with pytest.raises(aio.AioRpcError) as refused:
                await mesh.MoveReply(pb.MoveReplyRequest(request_id="nothing", instance_id=instance_id))
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_while_one_process_drains_the_others_get_all_new_connections(group: Group) -> None:
    """It ends its streams; nothing is refused, though it is not gone yet; the sums say that it does not count."""
    before = (await group.status_of(1)).processes[1].finished
    with held_engines(HELD) as proceed:
        await _drain_while_others_serve(group, proceed)
    status = await group.status_of(1)
    assert [process.answering for process in status.processes] == [False, True]
    assert status.finished == status.processes[1].finished == before + 17
    await group.start(0)
    assert [process.answering for process in (await group.status_of(0)).processes] == [True, True]


async def _drain_while_others_serve(group: Group, proceed: threading.Event) -> None:
    """Stop process 0 while it has a stream, and use process 1 meanwhile. proceed: ends the stream."""
    async with (
        group.channel_at(0) as channel,
        aiohttp.ClientSession() as session,
        Siblings(group.slots[1]) as siblings,
    ):
        started = asyncio.Event()
        reading = asyncio.create_task(generate(channel, "long", 400, HELD, started))
        await started.wait()
        stopping = asyncio.create_task(group.mesh.stop(name(0)))
        async with asyncio.timeout(WAIT_S):
            # It listens no more, and this connection, which it has asked to be closed, has been opened at the other.
            while (process := (await siblings.counters())[0]) is None or process.listening:
                await asyncio.sleep(0.005)
            while not await is_serving(channel, name(1), 10):
                await asyncio.sleep(0.005)
        for i in range(8):
            await ask(group.http, session)
            await generate(channel, f"meanwhile-{i}", 2)
        assert not reading.done()
        proceed.set()
        text = await reading
        await stopping
        assert text == await generate(channel, "again", 400, HELD)


async def test_without_a_plan_one_process_listens_and_says_so_and_the_others_wait(
    redis: RedisProcess, tmp_path: Path
) -> None:
    async with empty_group(redis, tmp_path) as group, aiohttp.ClientSession() as session:
        await group.start(0)
        waiting = asyncio.create_task(group.start(1))
        async with Siblings(group.slots[0]) as siblings, asyncio.timeout(60):
            while (await siblings.counters())[1] is None:  # it is there, and does not listen
                await asyncio.sleep(0.05)
            assert not await siblings.any_listens()
        async with session.get(f"{group.http}/livez") as alive, session.get(f"{group.http}/readyz") as ready:
            assert (alive.status, ready.status) == (200, 503)
            assert (await ready.json())["status"] == "no plan yet"
        assert not waiting.done()
        await group.mesh.start(Role.PLANNER, "planner-0")
        async with asyncio.timeout(WAIT_S):
            await waiting
        async with Siblings(group.slots[0]) as siblings:
            assert await siblings.any_listens()


def test_a_total_is_of_all_parts_and_its_percentiles_of_all_their_requests() -> None:
    one = ProcessCounters(active=1, finished=3, ttft_s=(0.1, 0.2, 0.3), answered={"a": 2, "b": 1}, requests_per_s=0.5)
    two = ProcessCounters(waiting=4, failed=1, ttft_s=(0.9,), answered={"b": 5}, escalated={"a": 1}, requests_per_s=1.0)
    one = replace(one, accepted_draft_tokens={"b": 7}, rejected_draft_tokens={"b": 2})
    two = replace(two, accepted_draft_tokens={"b": 1, "c": 4})
    both = total([one, two])
    assert (both.accepted_draft_tokens, both.rejected_draft_tokens) == ({"b": 8, "c": 4}, {"b": 2})
    assert (both.active, both.waiting, both.finished, both.failed, both.requests_per_s) == (1, 4, 3, 1, 1.5)
    assert (both.answered, both.escalated) == ({"a": 2, "b": 6}, {"a": 1})
    assert (both.ttft_percentile(0.5), both.ttft_percentile(0.95)) == (0.3, 0.9)
    assert total([]).ttft_percentile(0.5) == 0.0
