"""Source, target and router of a move are killed at every message of it: real processes, real kills.

All cases run at once in one mesh, each with a victim of its own. The engine is the simulated one: what dies is the process,
and what moves is its KV, whichever engine computes it. Every interleaving of the state machines is in
tests/worker/test_migration_machines.py.

A move may be refused for reasons that pass: other transfers are active, or a process got no CPU for some seconds. So each
case moves its reply, or another one, until its victim has died.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from penstock import AsyncClient, InstanceChanged, InstanceStatus, MeshStatus, Move, RetryPolicy, TierStarted
from penstock.client.errors import PenstockError
from penstock.services.background import end
from penstock.services.domain.instances import Role
from tests.conftest import write_mesh_file
from tests.support.mesh import TestMesh
from tests.support.mortal_processes import Mortals, mortals
from tests.support.read_stream import ReadStream
from tests.support.services import RedisProcess
from tests.support.simulated_text import ENDLESS, simulated_texts

pytestmark = pytest.mark.slow

SOURCE = (
    *("send:TransferOpening", "receive:TransferAccepted", "send:KvChunk", "receive:ChunkReceived", "send:RoundCopied"),
    *("send:TransferClosing", "receive:TransferCommitted", "send:HandedOver"),
)
TARGET = (
    *("receive:TransferOpening", "send:TransferAccepted", "receive:KvChunk", "send:ChunkReceived"),
    *("receive:TransferClosing", "send:TransferCommitted", "send:Admitted"),
)
ROUTER = ("receive:Alive", "receive:RoundCopied", "receive:HandedOver")
HOME, OTHER = "worker-home", "worker-other"  # outlive the others
MAX_TOKENS = 8000  # of a reply, more than a minute: it is cancelled once its victim is dead
GROWTH_TOKENS = 50  # between two moves, some blocks: each move has something to send
FRAME_MS = 200.0  # few messages: what a starved process cannot read in time would pile up
SIMULATED = {"overhead_ms": 10.0, "token_us": 0.0, "context_token_ns": 0.0, "reply_tokens": ENDLESS}
LEASE_S = 120.0  # leases are not what is tested: they outlive the test even where a process gets no CPU for a while
LIMIT_S = 600.0  # for all victims to die


def named(kind: str, points: tuple[str, ...]) -> dict[str, str]:
    return {f"{kind}-{point.replace(':', '-').lower()}": point for point in points}


SOURCES, TARGETS, ROUTERS = named("worker-source", SOURCE), named("worker-target", TARGET), named("router", ROUTER)


@pytest.fixture(scope="module")
def module_mesh_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    room = {"max_running": 64, "max_context_tokens": MAX_TOKENS + 192, "kv_tokens": 262_144}
    # nearly all workers die at once: replies lose several, one after the other, before they get anywhere
    lives = {"max_attempts": 64, "max_deaths": 64, "worker_silence_s": LIMIT_S, "write_timeout_s": LIMIT_S}
    tier = {"name": "only", "model": "sim", "simulated": SIMULATED, **room}
    router = {"grpc_port": 0, "http_port": 0, **lives}
    return write_mesh_file(tmp_path_factory.mktemp("moves"), [tier], router=router)


@pytest.fixture(scope="module")
async def mesh(module_mesh_file: Path, redis: RedisProcess) -> AsyncIterator[tuple[TestMesh, Mortals]]:
    async with TestMesh(module_mesh_file, redis.url) as running:
        await running.start(Role.PLANNER, "planner-0", lease_s=LEASE_S)
        await running.start(Role.ROUTER, "router-0", lease_s=LEASE_S)
        await running.start(Role.WORKER, HOME, tier="only", lease_s=LEASE_S, frame_interval_ms=FRAME_MS)
        await running.start(Role.WORKER, OTHER, tier="only", lease_s=LEASE_S, frame_interval_ms=FRAME_MS)
        points, settings = SOURCES | TARGETS | ROUTERS, {"lease_s": LEASE_S, "frame_interval_ms": FRAME_MS}
        async with mortals(points, module_mesh_file, redis.url, http_port=0, **settings) as victims:
            await running.until(
                lambda s: {*points, HOME, OTHER} <= {i.instance_id for i in s.instances} and s.plan_revision > 0
            )
            yield running, victims


class Reply(ReadStream):
    """One reply, read as long as the context `reading` lasts."""

    def __init__(self, client: AsyncClient, name: str, move_by: AsyncClient | None = None) -> None:
        super().__init__(f"the reply {name} that a process is to lose")
        self._client, self.name, self._move_by = client, name, move_by or client
        self.instance = ""
        self._progress, self._over = asyncio.Condition(), False
        self._reading: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def reading(self) -> AsyncIterator["Reply"]:
        """Raises what ended the reply, if that was an error."""
        self._reading = asyncio.create_task(self._read())
        try:
            yield self
            if self._reading.done():
                self._reading.result()
        finally:
            await end(self._reading)

    @property
    def ended(self) -> bool:
        """Whether the reply is complete. Raises its error if it failed."""
        assert self._reading is not None
        if self._reading.done():
            self._reading.result()
        return self._reading.done()

    async def _read(self) -> None:
        try:
            stream = self._client.stream(
                self.prompt, temperature=0, max_tokens=MAX_TOKENS, request_id=self.name, timeout_s=LIMIT_S
            )
            async for event in stream:
                self.see(event)
                match event:
                    case TierStarted():
                        self.instance = event.instance_id
                    case InstanceChanged():
                        assert event.offset == self.tokens
                        self.instance = event.to_instance_id
                async with self._progress:
                    self._progress.notify_all()
        finally:
            self._over = True
            async with self._progress:
                self._progress.notify_all()

    async def grown(self) -> None:
        """Return once GROWTH_TOKENS more tokens have come, or the reply has ended."""
        due = self.tokens + GROWTH_TOKENS
        async with self._progress:
            await self._progress.wait_for(lambda: self.tokens >= due or self._over)

    async def move(self, instance_id: str) -> Move | PenstockError:
        try:
            return await self._move_by.move(self.name, instance_id)
        except PenstockError as error:
            return error


NewReply = Callable[[int], AbstractAsyncContextManager[Reply]]


async def kill_by_moves(victims: Mortals, victim: str, new_reply: NewReply, places: tuple[str, str]) -> list[Reply]:
    """Move replies from the first of two places to the second, and back, until the victim has died; return the replies."""
    origin, target = places
    replies: list[Reply] = []
    while victims.lives(victim):
        async with new_reply(len(replies)) as reply:
            replies.append(reply)
            await reply.grown()
            while victims.lives(victim) and not reply.ended:
                outcome = await reply.move(target if reply.instance == origin else origin)
                await reply.grown()
                if isinstance(outcome, PenstockError):  # its router no longer has it
                    break
            await reply.grown()  # what it lost comes from elsewhere
    return replies


def workers(status: MeshStatus) -> list[InstanceStatus]:
    return [i for i in status.instances if i.role == "worker"]


async def all_idle(mesh: TestMesh, victims: Mortals) -> None:
    """Return once no worker that lives runs anything or holds a block: nothing runs twice, no room is kept for nothing."""

    def idle(worker: InstanceStatus) -> bool:
        return worker.running == 0 and worker.free_kv_blocks == worker.kv_blocks

    await mesh.until(lambda s: all(idle(w) for w in workers(s) if w.instance_id not in victims.killed))


def check(replies: list[Reply]) -> None:
    """Each text is the beginning of what the engine computes undisturbed."""
    texts = simulated_texts({reply.prompt: reply.tokens for reply in replies if reply.tokens})
    assert {reply.prompt: reply.text for reply in replies if reply.tokens} == texts


async def gathered(victims: Mortals, cases: dict[str, "asyncio.Task[list[Reply]]"]) -> list[Reply]:
    """The replies of all cases once each victim has died."""
    _, pending = await asyncio.wait(cases.values(), timeout=LIMIT_S)
    await end(*pending)
    assert not pending, f"not killed within {LIMIT_S:g} s: {[name for name in cases if victims.lives(name)]}"
    return [reply for case in cases.values() for reply in case.result()]


async def test_a_worker_killed_at_any_message_of_a_move_costs_no_token(mesh: tuple[TestMesh, Mortals]) -> None:
    running, victims = mesh
    async with running.client(silence_s=LIMIT_S) as client:

        def case(name: str) -> "asyncio.Task[list[Reply]]":
            places = (name, HOME) if name in SOURCES else (HOME, name)
            return asyncio.create_task(
                kill_by_moves(victims, name, lambda i: Reply(client, f"{name}-{i}").reading(), places)
            )

        replies = await gathered(victims, {name: case(name) for name in (*SOURCES, *TARGETS)})
        await all_idle(running, victims)
    check(replies)


async def test_a_router_killed_at_any_message_of_a_move_costs_no_token(mesh: tuple[TestMesh, Mortals]) -> None:
    """Its client's next router goes on with the reply."""
    running, victims = mesh
    async with running.client() as client:
        instances = {i.instance_id: i for i in (await client.status()).instances}

    @asynccontextmanager
    async def new_reply(name: str, number: int) -> AsyncIterator[Reply]:
        own = instances[name]
        async with (
            AsyncClient(
                [own.address, running.router.address], retry=RetryPolicy(attempts=5), silence_s=LIMIT_S
            ) as client,
            AsyncClient(
                own.address, admin=own.admin_address, retry=RetryPolicy(attempts=1), silence_s=LIMIT_S
            ) as mover,
            Reply(client, f"{name}-{number}", mover).reading() as reply,
        ):
            yield reply

    def case(name: str) -> "asyncio.Task[list[Reply]]":
        return asyncio.create_task(kill_by_moves(victims, name, lambda i: new_reply(name, i), (HOME, OTHER)))

    replies = await gathered(victims, {name: case(name) for name in ROUTERS})
    await all_idle(running, victims)
    check(replies)
