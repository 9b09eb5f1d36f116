"""What the state of the mesh costs with many instances that all publish and all follow it, through one Redis.

Of N workers of one tier in four length stages, every one publishes its load and follows its tier; routers follow everything.
Redis, one instance's Registrar, one worker's MeshFeed and one router's MeshFeed are processes of their own, whose CPU is
measured. A further process, the crowd, has a connection for each of the other workers and routers. It sends what
`InstanceStore` would, at the same intervals, and does not decode the replies: it is in place of a thousand machines, so
its CPU is no cost of the mesh. How many commands it could not send in time is reported.

The age of a record is the time since its instance wrote it, by the store's clock: at best half of the interval between two
publications on average, and half of that between two pulls.
"""

import asyncio
import contextlib
import heapq
import json
import multiprocessing
import random
import selectors
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from redis.connection import Connection as RedisConnection

from benchmarks import report
from benchmarks.spread import percentile
from penstock.local import redis_server as local_redis
from penstock.local.cpu_time import cpu_s
from penstock.services.domain.instances import InstanceRecord, Load, ModelCard, Role
from penstock.services.domain.mesh_view import PULL_INTERVAL_S, MeshView
from penstock.services.domain.stages.places import MAX_NEIGHBOURS, neighbours
from penstock.services.mesh_schema import MeshStages
from penstock.services.processes import free_port
from penstock.services.settings import ServiceSettings
from penstock.services.state import InstanceStore, MeshFeed, Registrar, connect
from penstock.services.state.feed import HEADS_PER_PULL
from penstock.services.state.keys import Keys, tier_group
from penstock.types.mesh_status import StagePlace
from tests.support.services import redis_server

INSTANCES = (100, 300, 1000)
ROUTERS = 16
PUBLISH_S: float = ServiceSettings.model_fields["publish_interval_s"].default
LEASE_S: float = ServiceSettings.model_fields["lease_s"].default
LOOK_S: float = MeshStages.model_fields["look_s"].default
RUNNING, QUEUED = 24, 4  # sequences per instance
STAGES = 4
WARM_S, MEASURED_S, SAMPLE_S = 2.0, 10.0, 0.1
LATE_S = 0.1
"""A command that the crowd sends later than this has not been in time."""
TARGET_P99_S, TARGET_REDIS, TARGET_SIDE = 1.0, 1.0, 0.25
SEED = 1
KEYS = Keys("benchmark-state")
GROUP = tier_group("only")
CARD = ModelCard("only", "model", "digest", "torch", 131_072, 8192, 16, 64)
SIDES = ("publisher", "worker", "router")


def _record(number: int) -> InstanceRecord:
    stage = number % STAGES
    return InstanceRecord(
        f"worker-only-{number:04}",
        Role.WORKER,
        f"10.0.0.{number % 250}:5{number:04}",
        1.0,
        1,
        LEASE_S,
        model=CARD,
        place=StagePlace(stage, 1024 * stage, 1024 * (stage + 1)),
    )


def _load(draw: random.Random) -> Load:
    lengths = [draw.randrange(16, 32_768) for _ in range(RUNNING + QUEUED)]
    inputs = tuple(length // 2 for length in lengths)
    return Load(tuple(lengths[:RUNNING]), tuple(lengths[RUNNING:]), draw.randrange(8192), draw.random() * 5000, inputs)


class _Crowd:
    """Workers and routers as connections: each sends its commands when they are due."""

    def __init__(self, host: str, port: int, store: InstanceStore, workers: Sequence[int], routers: int) -> None:
        self._store = store
        self._pack: Callable[[list[Any]], list[bytes]] = RedisConnection().pack_commands  # type: ignore[no-untyped-call]
        self._draw = random.Random(SEED)
        self._loads = [_load(self._draw) for _ in range(64)]
        self._ids = [[_record(i).instance_id for i in workers if i % STAGES == stage] for stage in range(STAGES)]
        self._heads_every = max(1, -(-len(workers) // HEADS_PER_PULL))
        self._selector = selectors.DefaultSelector()
        self._unsent: dict[socket.socket, bytes] = {}
        self._due: list[tuple[float, int, int, socket.socket, str]] = []
        self.sent = self.late = 0
        now = time.monotonic()
        for number in [*workers, *(-1 for _ in range(routers))]:
            connection = socket.create_connection((host, port))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ)
            for kind, interval_s in (
                (("publish", PUBLISH_S), ("follow", LOOK_S)) if number >= 0 else (("pull", PULL_INTERVAL_S),)
            ):
                first = now + self._draw.random() * interval_s
                heapq.heappush(self._due, (first, len(self._due), number, connection, kind))

    def run(self, seconds: float) -> None:
        """Send what is due for so long, and read what comes."""
        until, turns = time.monotonic() + seconds, len(self._due)
        while (now := time.monotonic()) < until:
            while self._due[0][0] <= now:
                due_s, turn, number, connection, kind = heapq.heappop(self._due)
                self.sent += 1
                self.late += now - due_s > LATE_S
                self._send(connection, b"".join(self._pack(self._commands(kind, number, turn // turns))))
                interval_s = {"publish": PUBLISH_S, "follow": LOOK_S, "pull": PULL_INTERVAL_S}[kind]
                heapq.heappush(self._due, (due_s + interval_s, turn + turns, number, connection, kind))
            for key, events in self._selector.select(max(0.0, min(self._due[0][0], until) - time.monotonic())):
                connection = key.fileobj  # type: ignore[assignment]
                if events & selectors.EVENT_WRITE:
                    self._send(connection, b"")
                with contextlib.suppress(BlockingIOError):
                    if connection.recv(1 << 20).startswith((b"-NOSCRIPT", b"-ERR")):
                        raise RuntimeError("the store refuses a command of the crowd")

    def _commands(self, kind: str, number: int, turn: int) -> list[Any]:
        if kind == "publish":
            load = self._loads[(number + turn) % len(self._loads)]
            record = replace(_record(number), sequence=turn + 2, load=load)
            return [self._store.publish_command(record, renew=turn % round(LEASE_S / 3 / PUBLISH_S) == 0)]
        if kind == "pull":
            return self._store.pull_commands([GROUP])
        here, after = self._ids[number % STAGES], self._ids[(number + 1) % STAGES]
        first, half = number + turn, MAX_NEIGHBOURS // 2
        sample = [ids[(first + i) % len(ids)] for ids in (here, after) for i in range(min(half, len(ids)))]
        groups = [GROUP] if turn % self._heads_every == 0 else []
        return self._store.pull_commands(groups, heads=True, group=GROUP, instance_ids=sample)

    def _send(self, connection: socket.socket, data: bytes) -> None:
        data = self._unsent.pop(connection, b"") + data
        try:
            rest = data[connection.send(data) :]
        except BlockingIOError:
            rest = data
        if rest:
            self._unsent[connection] = rest
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if rest else 0)
        if self._selector.get_key(connection).events != events:
            self._selector.modify(connection, events)


def _crowd(url: str, port: int, instances: int, stop: Any, pipe: Connection) -> None:
    async def register() -> None:
        redis = connect(url)
        store = InstanceStore(redis, KEYS)
        for number in range(1, instances):
            await store.publish(_record(number))
        await redis.aclose()

    asyncio.run(register())
    crowd = _Crowd("127.0.0.1", port, InstanceStore(connect(url), KEYS), range(1, instances), ROUTERS)
    while not stop.is_set():
        crowd.run(0.5)
    pipe.send({"sent": crowd.sent, "late": crowd.late})


def _side(name: str, url: str, instances: int, pipe: Connection) -> None:
    """One publisher, worker or router, as it is in a service. A follower sends the ages of what it knows."""

    async def run() -> None:
        draw, redis, view = random.Random(SEED), connect(url), MeshView()
        loads, turn = [_load(draw) for _ in range(64)], 0
        loop = asyncio.get_running_loop()

        def load() -> Load:
            nonlocal turn
            turn += 1
            return loads[turn % len(loads)]

        def sample() -> list[str]:
            nonlocal turn
            turn += 1
            others = {record.instance_id: record.place for record in view.instances()}
            return neighbours(others, "worker-only-0000", 0, turn)

        async def measured() -> None:
            await asyncio.sleep(WARM_S)
            pipe.send("warm")
            ages: list[float] = []
            lags: list[float] = []
            until = loop.time() + MEASURED_S
            while loop.time() < until:
                expected_s = loop.time()
                await asyncio.sleep(SAMPLE_S)
                lags.append(loop.time() - expected_s - SAMPLE_S)
                known = [record for record in view.instances() if record.load is not None]
                ages += [view.heard_ago_s(record.instance_id, loop.time()) for record in known]
            pipe.send((ages, lags))

        if name == "publisher":
            async with Registrar(
                redis, KEYS, _record(0), interval_s=PUBLISH_S, load=load, place=lambda: _record(0).place
            ):
                await measured()
        else:
            own: dict[str, Any] = {"interval_s": LOOK_S, "group": GROUP, "sample": sample} if name == "worker" else {}
            async with MeshFeed(redis, KEYS, view, **own):
                async with asyncio.timeout(120):
                    while len(view.instances()) < instances:
                        await asyncio.sleep(0.05)
                await measured()
        await redis.aclose()

    asyncio.run(run())


def measure(instances: int) -> dict[str, Any]:
    """One run: ages in seconds, CPU as shares of one core."""
    spawn, port = multiprocessing.get_context("spawn"), free_port()
    with tempfile.TemporaryDirectory() as folder, redis_server(local_redis.find(), port, Path(folder)) as server:
        stop, pipes = spawn.Event(), {name: spawn.Pipe() for name in ("crowd", *SIDES)}
        crowd = spawn.Process(target=_crowd, args=(server.url, port, instances, stop, pipes["crowd"][1]))
        sides = {
            name: spawn.Process(target=_side, args=(name, server.url, instances, pipes[name][1])) for name in SIDES
        }
        started = [crowd, *sides.values()]
        for process in started:
            process.start()
        for _, there in pipes.values():
            there.close()  # so that a process that fails ends the wait
        try:
            for name in SIDES:
                assert pipes[name][0].recv() == "warm"
            pids = {"redis": server.pid, **{name: process.pid or 0 for name, process in sides.items()}}
            before, began = {name: cpu_s(pid) for name, pid in pids.items()}, time.monotonic()
            time.sleep(MEASURED_S - 1.0)
            wall_s = time.monotonic() - began
            shares = {name: (cpu_s(pid) - before[name]) / wall_s for name, pid in pids.items()}
            seen = {name: pipes[name][0].recv() for name in SIDES}
            stop.set()
            sent = pipes["crowd"][0].recv()
        finally:
            stop.set()
            for process in started:
                process.join()
    ages = seen["router"][0]
    return {
        "instances": instances,
        "worker_subscribers": instances,
        "router_subscribers": ROUTERS + 1,
        "age_p50_s": percentile(ages, 50),
        "age_p99_s": percentile(ages, 99),
        "age_max_s": max(ages),
        "worker_sample_age_p99_s": percentile(seen["worker"][0], 99),
        "router_loop_lag_p99_s": percentile(seen["router"][1], 99),
        "cpu_shares": {name: round(share, 3) for name, share in shares.items()},
        "crowd_commands": sent["sent"],
        "crowd_late_share": sent["late"] / max(1, sent["sent"]),
        "samples": len(ages),
    }


def run(rounds: int) -> None:
    rows = []
    for _ in range(rounds):
        for instances in INSTANCES:
            row = measure(instances)
            rows.append(row)
            print(json.dumps(row), flush=True)
    largest = [row for row in rows if row["instances"] == max(INSTANCES)]
    worst = {
        "age_p99_s": max(row["age_p99_s"] for row in largest),
        "redis": max(row["cpu_shares"]["redis"] for row in largest),
        "side": max(row["cpu_shares"][side] for row in largest for side in SIDES),
    }
    targets = {"age_p99_s": TARGET_P99_S, "redis": TARGET_REDIS, "side": TARGET_SIDE}
    figures = {
        "publish_s": PUBLISH_S,
        "router_pull_s": PULL_INTERVAL_S,
        "worker_pull_s": LOOK_S,
        "sequences_per_instance": RUNNING + QUEUED,
        "seed": SEED,
        "targets": targets,
        "worst": worst,
        "reached": all(worst[name] < target for name, target in targets.items()),
        "rows": rows,
    }
    print(report.write("state", figures))
