"""Source, target and router of a move are killed at every message of it: real processes, real kills, one reply each.

All cases run at once in one mesh, each with a victim of its own. The engine is the simulated one: what dies is the process,
and what moves is its KV, whoever computes it. Every interleaving of the machines is tests/worker/test_migration_machines.py.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest

from penstock import AsyncClient, InstanceChanged, InstanceStatus, MeshStatus, Move, RetryPolicy, TierStarted, Tokens
from penstock.client.errors import PenstockError
from services.background import end
from services.domain import Role
from services.testing import RedisProcess
from tests.conftest import ROOT
from tests.support.mesh import TestMesh

SOURCE = (
    *("send:Opening", "receive:Accepted", "send:Chunk", "receive:Received", "send:RoundCopied", "send:Closing"),
    *("receive:Committed", "send:HandedOver", "send:MovedOut"),
)
TARGET = (
    *("receive:Opening", "send:Accepted", "receive:Chunk", "send:Received", "receive:Closing", "send:Committed"),
    "send:Admitted",
)
ROUTER = ("receive:WorkerAlive", "receive:RoundCopied", "receive:WorkerHandedOver")
HOME, OTHER = "worker-home", "worker-other"  # outlive them all
TOKENS = 8000  # more than anybody waits for: a reply ends when its case has seen enough
GROWTH = 50  # tokens, some blocks' worth
SLOW = {"overhead_ms": 3.0, "token_us": 0.0, "context_token_ns": 0.0, "reply_tokens": 1_000_000}


def named(kind: str, points: tuple[str, ...]) -> dict[str, str]:
    return {f"{kind}-{point.replace(':', '-').lower()}": point for point in points}


SOURCES, TARGETS, ROUTERS = named("worker-source", SOURCE), named("worker-target", TARGET), named("router", ROUTER)


class Victims:
    """The processes that will die, and those that have."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.killed: set[str] = set()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            name, how = line.decode().split()
            if how == "killed":
                self.killed.add(name)

    async def all_of(self, names: Iterable[str]) -> None:
        """Return once all of these are dead; TimeoutError if a point was not reached."""
        async with asyncio.timeout(10):
            while not self.killed.issuperset(names):
                await asyncio.sleep(0.01)

    async def end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        await self._reading


@pytest.fixture(scope="module")
def module_mesh_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import yaml

    folder = tmp_path_factory.mktemp("moves")
    tier: dict[str, object] = {
        "name": "only",
        "model": "sim",
        "engine": "simulated",
        "simulated": SLOW,
        "max_running": 64,
    }
    tier |= {"workers": 1, "max_context_tokens": 8192 + 64, "kv_tokens": 65_536}
    file = folder / "mesh.yaml"
    content = {
        "name": "test-move-kills",
        "tiers": [tier],
        "judge": {"scorers": [{"name": "confidence", "kind": "confidence"}], "default_scorer": "confidence"},
        # nearly all workers die at once: replies lose several, one after the other, before they get anywhere
        "router": {"grpc_port": 0, "http_port": 0, "max_attempts": 64, "max_deaths": 64},
    }
    file.write_text(yaml.safe_dump(content))
    return file


@pytest.fixture(scope="module")
async def mesh(module_mesh_file: Path, redis: RedisProcess) -> AsyncIterator[tuple[TestMesh, Victims]]:
    made = TestMesh(module_mesh_file, redis.url)
    await made.start(Role.PLANNER, "planner-0")
    await made.start(Role.ROUTER, "router-0")
    await made.start(Role.WORKER, HOME, tier="only")
    await made.start(Role.WORKER, OTHER, tier="only")
    mortals = SOURCES | TARGETS | ROUTERS
    env = {
        "PENSTOCK_MESH_FILE": str(module_mesh_file),
        "PENSTOCK_REDIS_URL": redis.url,
        "PENSTOCK_TIER": "only",
        "PENSTOCK_LOG_LEVEL": "error",
        "PENSTOCK_HTTP_PORT": "0",
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.mortal", *(f"{name}={point}" for name, point in mortals.items())),
        env=os.environ | env,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    victims = Victims(process)
    try:
        await made.until(
            lambda s: {*mortals, HOME, OTHER} <= {i.instance_id for i in s.instances} and s.plan_revision > 0
        )
        yield made, victims
    finally:
        await victims.end()
        await made.stop_all()


class Reply:
    """One reply, read until the case has seen enough of it; every token must come once."""

    def __init__(self, client: AsyncClient, name: str, move_by: AsyncClient | None = None) -> None:
        self._client, self.name, self._move_by = client, name, move_by or client
        self.text, self.tokens, self.instance = "", 0, ""
        self._progress = asyncio.Condition()

    async def read(self, most: int = TOKENS) -> str:
        stream = self._client.stream(
            f"the reply that {self.name} is to lose", temperature=0, max_tokens=most, request_id=self.name
        )
        async for event in stream:
            async with self._progress:
                match event:
                    case TierStarted():
                        self.instance = event.instance_id
                    case InstanceChanged():
                        assert event.offset == self.tokens
                        self.instance = event.to_instance_id
                    case Tokens():
                        assert event.offset == self.tokens, "a token twice, or one missing"
                        self.tokens += len(event.token_ids)
                        self.text += event.text
                self._progress.notify_all()
        return self.text

    async def grown(self, tokens: int) -> None:
        """Return once so many more tokens have come."""
        due = self.tokens + tokens
        async with self._progress:
            await self._progress.wait_for(lambda: self.tokens >= due)

    async def at(self, instance_id: str, killed: set[str]) -> None:
        """Return once the reply is computed there, moving it if need be; or once that has met its end in another's move."""
        await self.grown(1)
        while self.instance != instance_id and instance_id not in killed:
            await self.move(instance_id)
            await self.grown(1)

    async def move(self, instance_id: str) -> Move | PenstockError:
        """Move it as soon as there is a place among the transfers."""
        while True:
            try:
                move = await self._move_by.move(self.name, instance_id)
            except PenstockError as error:
                return error
            if move.refusal is None or "under way" not in move.refusal:
                return move
            await self.grown(1)


async def check(client: AsyncClient, replies: list[Reply]) -> None:
    """The same replies undisturbed. Asked for afterwards: what they leave in prefix caches would not have to be sent."""
    texts = await asyncio.gather(*(Reply(client, reply.name).read(reply.tokens) for reply in replies))
    assert [reply.text for reply in replies] == texts


def workers(status: MeshStatus) -> list[InstanceStatus]:
    return [i for i in status.instances if i.role == "worker"]


async def all_idle(mesh: TestMesh) -> None:
    """Return once no worker that lives runs anything or holds a block: nothing runs twice, no room is kept for nothing."""
    await mesh.until(lambda s: all(w.running == 0 and w.free_kv_blocks == w.kv_blocks for w in workers(s)))


async def test_a_worker_killed_at_any_message_of_a_move_costs_no_token(mesh: tuple[TestMesh, Victims]) -> None:
    running, victims = mesh
    async with running.client() as client:

        async def one(name: str) -> Reply:
            reply = Reply(client, name)
            reading = asyncio.create_task(reply.read())
            origin, target = (name, HOME) if name in SOURCES else (HOME, name)
            try:
                await reply.at(origin, victims.killed)
                await reply.grown(GROWTH)
                if name not in victims.killed:
                    await reply.move(target)
                await reply.grown(GROWTH)
            finally:
                await end(reading)
            return reply

        names = [*SOURCES, *TARGETS]
        replies = await asyncio.gather(*(one(name) for name in names))
        await victims.all_of(names)
        await all_idle(running)
        await check(client, replies)


async def test_a_router_killed_at_any_message_of_a_move_costs_no_token(mesh: tuple[TestMesh, Victims]) -> None:
    running, victims = mesh
    await running.until(lambda s: {w.instance_id for w in workers(s)} == {HOME, OTHER})
    async with running.client() as client:
        instances = {i.instance_id: i for i in (await client.status()).instances}

        async def one(name: str) -> Reply:
            own = instances[name]
            both = [own.address, running.router.address]
            async with (
                AsyncClient(both, retry=RetryPolicy(attempts=5), timeout_s=60) as asking,
                AsyncClient(
                    own.address, admin=own.admin_address, retry=RetryPolicy(attempts=1), timeout_s=60
                ) as moving,
            ):
                reply = Reply(asking, name, moving)
                reading = asyncio.create_task(reply.read())
                try:
                    await reply.grown(GROWTH)
                    await reply.move(OTHER if reply.instance == HOME else HOME)
                    await reply.grown(GROWTH)
                finally:
                    await end(reading)
                return reply

        replies = await asyncio.gather(*(one(name) for name in ROUTERS))
        await victims.all_of(ROUTERS)
        await all_idle(running)
        await check(client, replies)
