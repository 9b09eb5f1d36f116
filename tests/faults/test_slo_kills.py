"""Requests with an SLO whose worker is stopped and killed, or that move: nothing lost or doubled, broken promises counted.

Real processes, the simulated engine: its steps are those of the SLO policy, and its replies are known in advance.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from benchmarks.fault_streams import signal_process, until_whole
from penstock import AsyncClient, NotFoundError, RetryPolicy, Slo, SloResult, TierAdmitted
from penstock.local.mesh import LocalMesh
from penstock.placement.mesh_input import MeshOptions
from tests.conftest import write_mesh_file
from tests.support.present import present
from tests.support.read_stream import ReadStream
from tests.support.simulated_text import ENDLESS, simulated_texts

pytestmark = pytest.mark.slow

MAX_TOKENS = 1500  # of a reply: seven seconds and more, so that a kill falls into the middle
EASY = Slo(500.0, time_per_output_token_s=50.0)
PACED = Slo(500.0, time_per_output_token_s=0.5)  # a hundred times a step: it is promised on a busy machine, too
STALL_S = 8.0  # more than a window of ten tokens at that pace, which no promise survives
PROMPTS = [f"prompt {i}" for i in range(8)]
LIMIT_S = 240.0
ROUNDS = 10  # until a kill has met a reply that was promised: one, unless this process gets no CPU for seconds


@pytest.fixture(scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalMesh]:
    folder = tmp_path_factory.mktemp("slo-kills")
    paced = {"overhead_ms": 5.0, "token_us": 0.0, "context_token_ns": 0.0, "reply_tokens": ENDLESS}
    tier = {"name": "only", "model": "sim", "simulated": paced, "workers": 2, "batch_policy": "slo"}
    router = {"grpc_port": 0, "http_port": 0}
    file = write_mesh_file(folder, [tier], router=router, judge={"replicas": 0})
    async with LocalMesh(MeshOptions(file, folder)) as running:
        yield running


@pytest.fixture
async def client(mesh: LocalMesh) -> AsyncIterator[AsyncClient]:
    retry, admin = RetryPolicy(attempts=1), mesh.addresses.admin[0]
    async with AsyncClient(mesh.addresses.grpc[0], admin=admin, retry=retry, timeout_s=LIMIT_S) as made:
        yield made


class Stream(ReadStream):
    """One greedy request with an SLO, read to its end."""

    async def run(self, client: AsyncClient, slo: Slo) -> "Stream":
        return await self.read(client.stream(self.prompt, temperature=0, max_tokens=MAX_TOKENS, slo=slo))

    @property
    def classes(self) -> list[str | None]:
        return [event.slo_class for event in self.events if isinstance(event, TierAdmitted)]

    @property
    def result(self) -> SloResult | None:
        return self.finished.slo


async def run_amid(client: AsyncClient, slo: Slo, fault: Callable[[], Awaitable[None]]) -> list[Stream]:
    """All streams, ended, with a fault once one has tokens."""
    streams = [Stream(prompt) for prompt in PROMPTS]
    tasks = [asyncio.create_task(stream.run(client, slo)) for stream in streams]
    while not any(stream.tokens for stream in streams):
        await asyncio.sleep(0.002)
    await fault()
    await asyncio.gather(*tasks)
    return streams


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    return simulated_texts(dict.fromkeys(PROMPTS, MAX_TOKENS))


async def test_a_worker_that_stalls_and_dies_breaks_promises_and_no_replies(
    mesh: LocalMesh, client: AsyncClient, expected: dict[str, str]
) -> None:
    """Every reply ends as it would have; each change of instance is followed by a class, and the counters agree with what
    the clients were told."""

    async def stall() -> None:
        signal_process(mesh, "worker-only-0", signal.SIGSTOP)
        await asyncio.sleep(STALL_S)
        signal_process(mesh, "worker-only-0", signal.SIGKILL)

    for _ in range(ROUNDS):  # where this process gets no CPU, the replies may end before the kill
        await until_whole(mesh)
        before = (await client.status()).slo
        streams = await run_amid(client, PACED, stall)
        assert {stream.prompt: stream.text for stream in streams} == expected
        for stream in streams:
            assert len(stream.classes) == 1 + len(stream.changes), "a class behind each change of instance"
            assert (present(stream.result).slo_class == "standard") is ("standard" in stream.classes)
        after = (await client.status()).slo
        promised = [s.result for s in streams if s.result is not None and s.result.slo_class == "standard"]
        assert after.attained - before.attained == sum(result.attained for result in promised)
        assert after.broken - before.broken == sum(not result.attained for result in promised)
        assert after.best_effort - before.best_effort == len(streams) - len(promised)
        if after.broken > before.broken:
            return
    pytest.fail("no promise was broken")


async def test_a_killed_worker_s_replies_keep_an_slo_that_leaves_time_for_it(
    mesh: LocalMesh, client: AsyncClient, expected: dict[str, str]
) -> None:
    """The remainder is enough: they are promised again elsewhere, and attained."""

    async def kill() -> None:
        signal_process(mesh, "worker-only-1", signal.SIGKILL)

    for _ in range(ROUNDS):
        await until_whole(mesh)
        streams = await run_amid(client, EASY, kill)
        assert {stream.prompt: stream.text for stream in streams} == expected
        for stream in streams:
            assert stream.classes == ["standard"] * (1 + len(stream.changes))
            assert present(stream.result).attained
        if any(stream.changes for stream in streams):
            return
    pytest.fail("no reply was running at the worker that was killed")


async def test_a_reply_that_moves_keeps_its_class(
    mesh: LocalMesh, client: AsyncClient, expected: dict[str, str]
) -> None:
    """The target decides on it when it arrives; its tokens come once, and its promise holds."""
    for _ in range(ROUNDS):  # a move may be refused for a reason that passes, or the reply may have ended
        await until_whole(mesh)
        stream = Stream(PROMPTS[0])
        task = asyncio.create_task(stream.run(client, EASY))
        while not stream.tokens:
            await asyncio.sleep(0.002)
        workers = [i for i in (await client.status()).instances if i.role == "worker" and i.state == "ready"]
        targets = [worker.instance_id for worker in workers if worker.instance_id != stream.instances[-1]]
        moved = None
        if targets and not task.done():
            try:
                moved = await asyncio.wait_for(client.move(stream.request_id, targets[0]), LIMIT_S)
            except NotFoundError:  # the reply has ended
                moved = None
        await task
        assert stream.text == expected[stream.prompt]
        assert present(stream.result).attained
        assert stream.classes == ["standard"] * (1 + len(stream.changes))
        if moved is not None and moved.refusal is None:
            assert len(stream.changes) == 1
            return
    pytest.fail("no move succeeded")
