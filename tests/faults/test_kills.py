"""Any one process is killed while requests run: nothing is lost, doubled or wrong. Real processes.

The replies that lose their workers are the torch engine's; the tier before it, whose answers are judged, is simulated.
What each death costs stands in docs/reference/faults.md.
"""

import asyncio
import functools
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fault_streams import is_whole, process_of, signal_process
from models.training import tasks
from penstock import (
    AsyncClient,
    AsyncPlannerClient,
    Escalated,
    MeshStatus,
    RetryPolicy,
    StructuredOutput,
)
from penstock.local.mesh import LocalMesh
from penstock.placement.mesh_input import MeshOptions
from penstock.services.mesh_schema.router import MeshRouter
from tests.conftest import FAMILY, write_mesh_file
from tests.support.read_stream import ReadStream

pytestmark = pytest.mark.slow

MAX_TOKENS = 250
LONG = StructuredOutput(regex="[a-z ]{600}")  # no reply may end early, so that a kill falls into the middle of it
SMALL = {"overhead_ms": 5.0, "token_us": 0.0, "context_token_ns": 0.0, "reply_tokens": 60}  # half a second
SILENCE_S = 4.0
LOAD_S = 40.0  # of a model
TRIES = 5  # of kills that may come too early or too late


@functools.cache
def prompts() -> list[str]:
    """Drawn when a test needs them: everyone who collects tests imports this module."""
    return [p.prompt for p in tasks.single_turns(300, seed=41) if len(p.reply) > 90][:12]


@pytest.fixture(scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalMesh]:
    folder = tmp_path_factory.mktemp("kills")
    tiers = [
        {"name": "small", "model": "sim", "simulated": SMALL, "threshold": 50},
        {"name": "large", "model": str(FAMILY / "small"), "engine": "torch", "workers": 2, "max_running": 16},
    ]
    router = {"replicas": 2, "grpc_port": 0, "http_port": 0, "worker_silence_s": SILENCE_S}
    async with LocalMesh(MeshOptions(write_mesh_file(folder, tiers, router=router), folder)) as running:
        yield running


def mesh_client(mesh: LocalMesh) -> AsyncClient:
    return AsyncClient(
        mesh.addresses.grpc[0], admin=mesh.addresses.admin[0], retry=RetryPolicy(attempts=1), timeout_s=400
    )


@pytest.fixture
async def client(mesh: LocalMesh) -> AsyncIterator[AsyncClient]:
    async with mesh_client(mesh) as made:
        yield made


OF_LARGE: dict[str, Any] = {"model": "large", "structured_output": LONG}
Texts = dict[tuple[str, str], str]
"""Every prompt's greedy text, by (tier, prompt)."""


@pytest.fixture(scope="module")
async def undisturbed(mesh: LocalMesh) -> Texts:
    asked = [(tier, prompt) for tier in ("small", "large") for prompt in prompts()]
    async with AsyncClient(mesh.addresses.grpc[0], admin=mesh.addresses.admin[0]) as client:
        replies = await asyncio.gather(
            *(client.generate(p, model=tier, temperature=0, max_tokens=MAX_TOKENS) for tier, p in asked)
        )
    return {key: reply.text for key, reply in zip(asked, replies, strict=True)}


@pytest.fixture(scope="module")
async def undisturbed_long(mesh: LocalMesh) -> Texts:
    async with AsyncClient(mesh.addresses.grpc[0], admin=mesh.addresses.admin[0]) as client:
        streams = await asyncio.gather(*(Stream(client, p, **OF_LARGE).run() for p in prompts()))
    assert min(stream.tokens for stream in streams) > MAX_TOKENS // 2
    return {(stream.finished.tier, stream.prompt): stream.text for stream in streams}


def kill(mesh: LocalMesh, name: str, number: signal.Signals = signal.SIGKILL) -> None:
    signal_process(mesh, name, number)


async def killed(mesh: LocalMesh, name: str) -> None:
    """Kill it, and return once the watcher has seen it."""
    process = mesh.watcher.watched[name].process
    assert process is not None
    kill(mesh, name)
    await process.wait()


async def until(client: AsyncClient, condition: Callable[[MeshStatus], bool]) -> None:
    async with asyncio.timeout(300):
        async for status in client.watch_status(0.2):
            if condition(status):
                return


def whole(mesh: LocalMesh) -> Callable[[MeshStatus], bool]:
    """Every process is there and none is ejected."""
    return lambda status: is_whole(mesh, status)


class Stream(ReadStream):
    """One greedy request, read to its end."""

    def __init__(self, client: AsyncClient, prompt: str, **options: Any) -> None:
        super().__init__(prompt)
        self._client, self._options = client, options

    async def run(self) -> "Stream":
        return await self.read(self._client.stream(self.prompt, temperature=0, max_tokens=MAX_TOKENS, **self._options))

    @property
    def unjudged(self) -> bool:
        return any(isinstance(e, Escalated) and e.reason == "judge_unavailable" for e in self.events)


def assert_undisturbed(streams: Sequence[Stream], undisturbed: Texts) -> None:
    assert [s.text for s in streams] == [undisturbed[s.finished.tier, s.prompt] for s in streams]


async def kill_amid(streams: list[Stream], action: Callable[[Stream], None]) -> list[Stream]:
    """Start all streams; act on one that has tokens, once a third of them have; return them all, ended."""
    tasks_ = [asyncio.create_task(stream.run()) for stream in streams]
    while sum(1 for stream in streams if stream.tokens) < len(streams) // 3:
        await asyncio.sleep(0.002)
    action(min((stream for stream in streams if stream.tokens), key=lambda stream: stream.tokens))
    return list(await asyncio.gather(*tasks_))


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=lambda fault: fault.name)
async def test_a_worker_that_dies_or_is_stuck_costs_no_token_of_its_streams(
    mesh: LocalMesh, client: AsyncClient, undisturbed_long: Texts, fault: signal.Signals
) -> None:
    """One that is stopped holds its connections and says nothing: it is left for another."""
    before = (await client.status()).failovers
    for _ in range(TRIES):  # where this process gets no CPU, the replies may end before the fault
        await until(client, whole(mesh))
        victim = list[str]()

        def strike(stream: Stream, victim: list[str] = victim) -> None:
            victim.append(process_of(mesh, stream.instances[-1]))
            kill(mesh, victim[0], fault)

        streams = await kill_amid([Stream(client, prompt, **OF_LARGE) for prompt in prompts()], strike)
        if fault is signal.SIGSTOP:
            kill(mesh, victim[0], signal.SIGCONT)
        assert_undisturbed(streams, undisturbed_long)
        if (await client.status()).failovers > before:
            break
    else:
        pytest.fail("no fault came in the middle of a reply")
    assert (await client.status()).failed == 0
    await until(client, whole(mesh))


async def test_a_killed_judge_sends_answers_to_the_largest_tier(
    mesh: LocalMesh, client: AsyncClient, undisturbed: Texts
) -> None:
    await until(client, whole(mesh))
    usual = await asyncio.gather(*(Stream(client, p).run() for p in prompts()[:6]))
    assert not any(stream.unjudged for stream in usual)
    for _ in range(TRIES):  # it is started again at once: where the streams get less CPU than it, it judges them
        await until(client, whole(mesh))
        await killed(mesh, "judge-0")
        streams = await asyncio.gather(*(Stream(client, p).run() for p in prompts()[:6]))
        if any(stream.unjudged for stream in streams):
            break
    else:
        pytest.fail("the judge was back before an answer was complete")
    assert_undisturbed(streams, undisturbed)
    for stream in streams:  # said openly: the summary has no score where none was given
        if stream.unjudged:
            assert stream.finished.tier == "large"
            assert stream.finished.tiers[0].score is None
    await until(client, whole(mesh))
    again = await asyncio.gather(*(Stream(client, p).run() for p in prompts()[:6]))
    assert [stream.finished.tier for stream in again] == [stream.finished.tier for stream in usual]


async def test_a_killed_planner_leaves_the_plan_in_force(mesh: LocalMesh, client: AsyncClient) -> None:
    await until(client, whole(mesh))
    revision = (await client.status()).plan_revision
    await killed(mesh, "planner-0")
    replies = await asyncio.gather(*(client.generate(p, temperature=0) for p in prompts()[:6]))
    assert len(replies) == 6
    await until(client, whole(mesh))
    planners = [i for i in (await client.status()).instances if i.role == "planner"]
    async with AsyncPlannerClient(min(planners, key=lambda i: i.age_s).admin_address) as asked:
        assert (await asked.get_plan()).revision == revision
        made = await asked.set_plan(await asked.get_plan())
    assert made.revision == revision + 1
    await until(client, lambda s: s.plan_revision == made.revision)


async def test_without_redis_the_mesh_serves_on_its_last_picture(
    mesh: LocalMesh, client: AsyncClient, undisturbed: Texts
) -> None:
    await until(client, whole(mesh))
    revision = (await client.status()).plan_revision
    kill(mesh, "redis", signal.SIGSTOP)  # away, and not even refusing connections
    await until(client, lambda s: not s.connected)
    streams = await asyncio.gather(*(Stream(client, p).run() for p in prompts()[:6]))
    assert_undisturbed(streams, undisturbed)
    await killed(mesh, "redis")
    await until(client, whole(mesh))
    assert (await client.status()).plan_revision == revision
    assert_undisturbed([await Stream(client, prompts()[0]).run()], undisturbed)


async def test_a_killed_router_costs_a_client_of_two_routers_nothing(
    mesh: LocalMesh, client: AsyncClient, undisturbed_long: Texts
) -> None:
    await until(client, whole(mesh))
    victim = next(i for i in (await client.status()).instances if i.address == mesh.addresses.grpc[0])
    name = next(n for n, w in mesh.watcher.watched.items() if str(w.pid) == victim.instance_id.rpartition("-")[2])
    async with AsyncClient(mesh.addresses.grpc, admin=mesh.addresses.admin, timeout_s=400) as both:
        streams = await kill_amid(
            [Stream(both, prompt, **OF_LARGE) for prompt in prompts()], lambda _: kill(mesh, name)
        )
    assert_undisturbed(streams, undisturbed_long)


@pytest.mark.timeout(600)
async def test_a_reply_waits_for_the_only_worker_of_its_tier_while_it_loads(tmp_path: Path) -> None:
    """For longer than `tier_wait_s`, up to its deadline, and goes on with the same text. Status tells how far it is."""
    simulated = SMALL | {"overhead_ms": 20.0, "load_s": 0.5}
    router = {"grpc_port": 0, "http_port": 0}
    tiers = [{"name": "large", "model": "sim", "simulated": simulated}]
    path = write_mesh_file(tmp_path, tiers, router=router, judge={"replicas": 0})
    async with LocalMesh(MeshOptions(path, tmp_path)) as mesh, mesh_client(mesh) as client:
        async with AsyncClient(
            mesh.addresses.grpc[0], timeout_s=400
        ) as patient:  # the router may not know the plan yet
            undisturbed = await Stream(patient, "x", **OF_LARGE).run()
        path.write_text(path.read_text().replace("load_s: 0.5", f"load_s: {LOAD_S}"))  # from its next start on
        stream = Stream(client, "x", **OF_LARGE)
        reply = asyncio.create_task(stream.run())
        while not stream.tokens:
            await asyncio.sleep(0.002)
        began_s = time.monotonic()
        await killed(mesh, "worker-large-0")

        def far(status: MeshStatus) -> bool:
            return any(i.loading and i.tier == "large" and 0 < i.loading.share < 1 for i in status.instances)

        await until(client, far)
        await reply
    assert time.monotonic() - began_s > LOAD_S > MeshRouter().tier_wait_s
    assert (stream.text, stream.tokens) == (undisturbed.text, undisturbed.tokens)
