"""A router is stopped (SIGSTOP) under streams, and goes on later. Real processes.

Its clients do not wait for it; on waking it does not take its own absence for the silence of others.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator

import pytest

from benchmarks.fault_streams import until_whole
from penstock import AsyncClient, Client, Event, RetryPolicy
from penstock.local.mesh import LocalMesh
from penstock.placement.mesh_input import MeshOptions
from tests.conftest import write_mesh_file
from tests.support.present import present
from tests.support.read_stream import ReadStream
from tests.support.simulated_text import ENDLESS, simulated_texts

pytestmark = pytest.mark.slow

SILENCE_S = 2.0  # of the clients
WORKER_SILENCE_S, LEASE_S = 5.0, 5.0  # more than a process waits for the CPU on a busy machine
STOPPED_S = 11.5  # longer than both, and than some limit of gRPC's own would be
TOKENS = 120  # of a reply: 7 s
PROMPTS = [f"question {number}" for number in range(12)]


@pytest.fixture(scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalMesh]:
    folder = tmp_path_factory.mktemp("stuck")
    simulated = {"overhead_ms": 60.0, "token_us": 1.0, "context_token_ns": 0.0, "reply_tokens": ENDLESS}
    tier = {"simulated": simulated, "workers": 2, "max_running": 64}
    tiers = [{"name": "small", "model": "s", "threshold": 0, **tier}, {"name": "large", "model": "l", **tier}]
    router = {"replicas": 2, "grpc_port": 0, "http_port": 0, "heartbeat_s": 0.2, "worker_silence_s": WORKER_SILENCE_S}
    file = write_mesh_file(folder, tiers, router=router)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_LEASE_S", str(LEASE_S))
        async with LocalMesh(MeshOptions(file, folder)) as running:
            await until_whole(running)
            yield running


class Stream(ReadStream):
    """One greedy request, read to its end; and how long the longest wait for one of its events was."""

    def __init__(self, prompt: str) -> None:
        super().__init__(prompt)
        self.longest_gap_s, self._last_s = 0.0, time.monotonic()

    def see(self, event: Event) -> None:
        now = time.monotonic()
        self.longest_gap_s, self._last_s = max(self.longest_gap_s, now - self._last_s), now
        super().see(event)

    async def run(self, client: AsyncClient, model: str) -> "Stream":
        return await self.read(client.stream(self.prompt, model=model, temperature=0, max_tokens=TOKENS))

    def run_blocking(self, client: Client, model: str) -> "Stream":
        for event in client.stream(self.prompt, model=model, temperature=0, max_tokens=TOKENS):
            self.see(event)
        return self


async def test_a_stopped_router_stalls_nobody_for_longer_than_the_silence_limit_and_blames_nobody_when_it_wakes(
    mesh: LocalMesh,
) -> None:
    """Streams of live and of held answers end elsewhere while it is stopped; some clients wait for it, which then goes on
    with their streams."""
    both = list(mesh.addresses.grpc)
    async with (
        AsyncClient(both, admin=mesh.addresses.admin, timeout_s=120, silence_s=SILENCE_S) as client,
        AsyncClient(both[0], timeout_s=600, silence_s=600, keepalive_s=600, retry=RetryPolicy(attempts=1)) as patient,
    ):
        before = await client.status()
        stuck = next(i for i in before.instances if i.address == both[0])
        name = next(n for n, w in mesh.watcher.watched.items() if str(w.pid) == stuck.instance_id.rpartition("-")[2])
        log = present(mesh.watcher.watched[name].spec.log)
        pid = present(mesh.watcher.watched[name].pid)
        log_before = await asyncio.to_thread(log.read_text)
        streams, held, waiting = ([Stream(prompt) for prompt in PROMPTS] for _ in range(3))
        blocking = [Stream(prompt) for prompt in PROMPTS[:4]]
        with Client(both, timeout_s=120, silence_s=SILENCE_S) as other:
            tasks = [asyncio.create_task(stream.run(client, "large")) for stream in streams]
            tasks += [asyncio.create_task(stream.run(client, "cascade")) for stream in held]
            tasks += [asyncio.create_task(asyncio.to_thread(s.run_blocking, other, "large")) for s in blocking]
            stay = [asyncio.create_task(stream.run(patient, "large")) for stream in waiting]
            live = [*streams, *blocking, *waiting]
            async with asyncio.timeout(120):
                while sum(1 for stream in live if stream.tokens) < len(live):
                    await asyncio.sleep(0.01)
            at_work = [stream for stream in (*streams, *blocking) if stream.tokens < TOKENS]
            assert at_work, "all had ended before the router was stopped"
            stopped_s = time.monotonic()
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(
                    max(0.0, stopped_s + STOPPED_S - time.monotonic())
                )  # it must be stopped for so long
            finally:
                os.kill(pid, signal.SIGCONT)
            await asyncio.gather(*tasks)
            await asyncio.gather(*stay)

        texts = simulated_texts(dict.fromkeys(PROMPTS, TOKENS))
        for stream in (*streams, *blocking, *waiting):
            assert stream.text == texts[stream.prompt]
        assert {stream.prompt: len(stream.text) > 0 for stream in held} == dict.fromkeys(PROMPTS, True)
        assert not any(stream.changes for stream in waiting), "the stopped router moved its own requests"
        assert max(stream.longest_gap_s for stream in at_work) >= SILENCE_S * 0.9
        async with AsyncClient(both[0], admin=stuck.admin_address, timeout_s=60) as asking:
            after = await asking.status()
        assert after.router_id == stuck.instance_id
        assert (after.failovers, after.failed) == (0, 0)
        assert all(instance.state == "ready" for instance in after.instances)
        said = (await asyncio.to_thread(log.read_text)).removeprefix(log_before)
        assert "was suspended for" in said
        for word in ("lease expired", "silent", "failed", "Traceback"):
            assert word not in said, said
