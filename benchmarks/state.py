"""What the state of the mesh costs with many instances that all publish and all follow it, through one Redis.

Of N workers of one tier in four length stages, every one publishes its load and follows its tier; routers and a planner
follow everything. Redis, one instance's Registrar, one worker's MeshFeed, one router's and the planner's are processes of
their own, whose CPU is measured. So is a probe, which reads a few instances all the time: how long a short command waits. A
further process, the crowd, has a connection for each of the other workers and routers. It sends what `InstanceStore` would,
at the same intervals, and does not decode the replies: it is in place of thousands of machines, so its CPU is no cost of the
mesh. How many commands it could not send in time is reported.

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
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import redis
from redis.asyncio import Redis
from redis.connection import Connection as RedisConnection

from benchmarks import report
from benchmarks.cpu_time import cpu_s
from benchmarks.spread import percentile
from penstock.local import redis_server as local_redis
from penstock.services import open_files
from penstock.services.background import end
from penstock.services.domain.instances import InstanceRecord, Load, ModelCard, Role
from penstock.services.domain.mesh_view import PULL_INTERVAL_S, MeshView
from penstock.services.domain.stages.places import MAX_NEIGHBOURS, neighbours
from penstock.services.mesh_schema.stages import MeshStages
from penstock.services.processes import free_port
from penstock.services.settings import ServiceSettings
from penstock.services.state.connection import StateUnavailable, connect
from penstock.services.state.feed import HEADS_PER_PULL, MeshFeed
from penstock.services.state.instances import InstanceStore, Pull
from penstock.services.state.keys import Keys, tier_group
from penstock.services.state.registry import Registrar
from penstock.types.mesh_status import StagePlace
from tests.support.services import redis_server


@dataclass(frozen=True, slots=True)
class Pace:
    """How often workers publish and look at their tier, and routers and planner read, in seconds; and the lease."""

    publish_s: float = ServiceSettings.model_fields["publish_interval_s"].default
    look_s: float = MeshStages.model_fields["look_s"].default
    pull_s: float = PULL_INTERVAL_S
    lease_s: float = ServiceSettings.model_fields["lease_s"].default


USUAL = Pace()
SLOW = Pace(2.5, 5.0, 1.0, 15.0)
"""What docs/how-to/operations.md advises for 10,000 workers."""
RUNS = ((100, USUAL, 10.0), (300, USUAL, 10.0), (1000, USUAL, 10.0), (10_000, SLOW, 40.0))
"""Instances, pace, and for how many seconds they are measured."""
TARGET_INSTANCES = 1000
ROUTERS = 16
MAX_CLIENTS = 19_000  # one process may open 20,000 files on the machine that this was measured on
RUNNING, QUEUED = 24, 4  # sequences per instance
STAGES = 4
WARM_S, SAMPLE_S, PROBE_S = 2.0, 0.1, 0.05
LATE_S = 0.1
"""A command that the crowd sends later than this has not been in time."""
TARGET_P99_S, TARGET_REDIS, TARGET_SIDE = 1.0, 1.0, 0.25
SEED = 1
LOADS = 8
FIRST_SEQUENCE = 1_000_000_000
KEYS = Keys("benchmark-state")
GROUP = tier_group("only")
CARD = ModelCard("only", "model", "digest", "torch", 131_072, 8192, 16, 64)
SIDES = ("publisher", "worker", "router", "planner", "probe")


def _record(number: int, lease_s: float) -> InstanceRecord:
    stage = number % STAGES
    return InstanceRecord(
        f"worker-only-{number:04}",
        Role.WORKER,
        f"10.0.0.{number % 250}:5{number:04}",
        1.0,
        1,
        lease_s,
        model=CARD,
        place=StagePlace(stage, 1024 * stage, 1024 * (stage + 1)),
    )


def _load(draw: random.Random) -> Load:
    lengths = [draw.randrange(16, 32_768) for _ in range(RUNNING + QUEUED)]
    inputs = tuple(length // 2 for length in lengths)
    return Load(tuple(lengths[:RUNNING]), tuple(lengths[RUNNING:]), draw.randrange(8192), draw.random() * 5000, inputs)


class _Crowd:
    """Workers and routers as connections: each sends its commands when they are due."""

    def __init__(self, port: int, store: InstanceStore, workers: Sequence[int], routers: int, pace: Pace) -> None:
        self._store, self._pace = store, pace
        self._pack: Callable[[list[Any]], list[bytes]] = RedisConnection().pack_commands  # type: ignore[no-untyped-call]
        self._draw = random.Random(SEED)
        self._loads = [_load(self._draw) for _ in range(LOADS)]
        self._published: dict[tuple[int, int, bool], tuple[bytes, bytes]] = {}
        self._ids = [[f"worker-only-{i:04}" for i in workers if i % STAGES == stage] for stage in range(STAGES)]
        self._heads_every = max(1, -(-len(workers) // HEADS_PER_PULL))
        self._renew_every = max(1, round(pace.lease_s / 3 / pace.publish_s))
        self._selector = selectors.DefaultSelector()
        self._unsent: dict[socket.socket, bytes] = {}
        self._due: list[tuple[float, int, int, socket.socket, str]] = []
        self._interval_s = {"publish": pace.publish_s, "follow": pace.look_s, "pull": pace.pull_s}
        self.sent = self.late = 0
        connections = [(number, _connected(port)) for number in [*workers, *(-1 for _ in range(routers))]]
        now = time.monotonic()
        for number, connection in connections:
            self._selector.register(connection, selectors.EVENT_READ)
            for kind in ("publish", "follow") if number >= 0 else ("pull",):
                first = now + self._draw.random() * self._interval_s[kind]
                heapq.heappush(self._due, (first, len(self._due), number, connection, kind))

    def run(self, seconds: float) -> None:
        """Send what is due for so long, and read what comes."""
        until, turns = time.monotonic() + seconds, len(self._due)
        while (now := time.monotonic()) < until:
            while self._due[0][0] <= now:
                due_s, turn, number, connection, kind = heapq.heappop(self._due)
                self.sent += 1
                self.late += now - due_s > LATE_S
                self._send(connection, self._commands(kind, number, turn // turns))
                heapq.heappush(self._due, (due_s + self._interval_s[kind], turn + turns, number, connection, kind))
            for key, events in self._selector.select(max(0.0, min(self._due[0][0], until) - time.monotonic())):
                connection = key.fileobj  # type: ignore[assignment]
                if events & selectors.EVENT_WRITE:
                    self._send(connection, b"")
                with contextlib.suppress(BlockingIOError):
                    if connection.recv(1 << 20).startswith((b"-NOSCRIPT", b"-ERR")):
                        raise RuntimeError("the store refuses a command of the crowd")

    def _commands(self, kind: str, number: int, turn: int) -> bytes:
        if kind == "publish":
            before, after = self._publication(number, turn % LOADS, turn % self._renew_every == 0)
            return b"%s%d%s" % (before, FIRST_SEQUENCE + turn, after)
        if kind == "pull":
            return self._packed(self._store.pull_commands([GROUP]))
        here, after_here = self._ids[number % STAGES], self._ids[(number + 1) % STAGES]
        first, half = number + turn, MAX_NEIGHBOURS // 2
        sample = [ids[(first + i) % len(ids)] for ids in (here, after_here) for i in range(min(half, len(ids)))]
        groups = [GROUP] if turn % self._heads_every == 0 else []
        return self._packed(self._store.pull_commands(groups, heads=True, group=GROUP, instance_ids=sample))

    def _publication(self, number: int, load: int, renew: bool) -> tuple[bytes, bytes]:
        """What the store is sent before and after the sequence number, whose count of digits is always the same."""
        key = number, load, renew
        if key not in self._published:
            record = _record(number, self._pace.lease_s)
            record = replace(record, sequence=FIRST_SEQUENCE, load=self._loads[(number + load) % LOADS])
            packed = self._packed([self._store.publish_command(record, renew=renew)])
            before, after = packed.split(b"%d" % FIRST_SEQUENCE)
            self._published[key] = before, after
        return self._published[key]

    def _packed(self, commands: list[Any]) -> bytes:
        return b"".join(self._pack(commands))

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


def _connected(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setblocking(False)
    return connection


def _crowd(url: str, port: int, instances: int, pace: Pace, stop: Any, pipe: Connection) -> None:
    async def load_scripts() -> None:
        client = connect(url)
        await InstanceStore(client, KEYS).publish(_record(1, pace.lease_s))
        await client.aclose()

    open_files.raise_limit()
    asyncio.run(load_scripts())
    crowd = _Crowd(port, InstanceStore(connect(url), KEYS), range(1, instances), ROUTERS, pace)
    while not stop.is_set():
        crowd.run(0.5)
    pipe.send({"sent": crowd.sent, "late": crowd.late})


class _TimedStore(InstanceStore):
    """Notes how long each read takes until its entries are there, in seconds, and how many fail."""

    def __init__(self, redis: Redis) -> None:
        super().__init__(redis, KEYS)
        self.reads_s: list[float] = []
        self.failed = 0

    async def pull(self, *args: Any, **options: Any) -> Pull:
        began = time.perf_counter()
        try:
            pulled = await super().pull(*args, **options)
        except StateUnavailable:
            self.failed += 1
            raise
        self.reads_s.append(time.perf_counter() - began)
        return pulled


@dataclass(slots=True)
class _Seen:
    """What one side has seen, in seconds. known: the fewest instances that it knew at a time."""

    reads_s: list[float]
    ages_s: list[float] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)
    known: int = 0
    failed: int = 0


def _side(name: str, url: str, instances: int, pace: Pace, seconds: float, pipe: Connection) -> None:
    """One publisher, worker, router, planner or probe, as it is in a service."""

    async def run() -> None:
        draw, client, view = random.Random(SEED), connect(url), MeshView()
        loads, turn, store = [_load(draw) for _ in range(LOADS)], 0, _TimedStore(client)
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
            store.reads_s.clear()
            failed = store.failed
            seen = _Seen(store.reads_s, known=instances)
            until = loop.time() + seconds
            while loop.time() < until:
                expected_s = loop.time()
                await asyncio.sleep(SAMPLE_S)
                seen.lags_s.append(loop.time() - expected_s - SAMPLE_S)
                known = [record for record in view.instances() if record.load is not None]
                seen.ages_s += [view.heard_ago_s(record.instance_id, loop.time()) for record in known]
                seen.known = min(seen.known, len(view.instances()))
            seen.failed = store.failed - failed
            pipe.send(seen)
            await asyncio.to_thread(pipe.recv)  # the others have not seen everything yet

        async def probe() -> None:
            ids = [f"worker-only-{number:04}" for number in range(1, 1 + MAX_NEIGHBOURS)]
            while True:
                with contextlib.suppress(StateUnavailable):
                    await store.pull((), group=GROUP, instance_ids=ids)
                await asyncio.sleep(PROBE_S)

        if name == "publisher":
            record = _record(0, pace.lease_s)
            async with Registrar(
                client, KEYS, record, interval_s=pace.publish_s, load=load, place=lambda: record.place
            ):
                await measured()
        elif name == "probe":
            reading = asyncio.create_task(probe())
            await measured()
            await end(reading)
        else:
            own: dict[str, Any] = {"interval_s": pace.pull_s}
            if name == "worker":
                own = {"interval_s": pace.look_s, "group": GROUP, "sample": sample}
            feed = MeshFeed(client, KEYS, view, **own)
            feed._store = store
            async with feed:
                async with asyncio.timeout(120):
                    while len(view.instances()) < instances:
                        await asyncio.sleep(0.05)
                await measured()
        await client.aclose()

    asyncio.run(run())


def _counted(url: str) -> dict[str, Any]:
    """What Redis says of itself."""
    with redis.Redis.from_url(url) as client:
        info: dict[str, Any] = client.info()
        return info


def measure(instances: int, pace: Pace, seconds: float) -> dict[str, Any]:
    """One run: times in seconds, CPU as shares of one core."""
    spawn, port = multiprocessing.get_context("spawn"), free_port()
    open_files.raise_limit()
    with (
        tempfile.TemporaryDirectory() as folder,
        redis_server(local_redis.find(), port, Path(folder), "--maxclients", str(MAX_CLIENTS)) as server,
    ):
        stop, pipes = spawn.Event(), {name: spawn.Pipe() for name in ("crowd", *SIDES)}
        crowd = spawn.Process(target=_crowd, args=(server.url, port, instances, pace, stop, pipes["crowd"][1]))
        sides = {
            name: spawn.Process(target=_side, args=(name, server.url, instances, pace, seconds, pipes[name][1]))
            for name in SIDES
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
            before, counted, began = (
                {name: cpu_s(pid) for name, pid in pids.items()},
                _counted(server.url),
                time.monotonic(),
            )
            time.sleep(seconds - 1.0)
            wall_s, after = time.monotonic() - began, _counted(server.url)
            shares = {name: (cpu_s(pid) - before[name]) / wall_s for name, pid in pids.items()}
            seen: dict[str, _Seen] = {name: pipes[name][0].recv() for name in SIDES}
            for name in SIDES:
                pipes[name][0].send("end")
            stop.set()
            sent = pipes["crowd"][0].recv()
        finally:
            stop.set()
            for here, _ in pipes.values():
                here.close()
            for process in started:
                process.join()
    ages, whole_s, few_s = (
        seen["router"].ages_s,
        seen["router"].reads_s + seen["planner"].reads_s,
        seen["probe"].reads_s,
    )
    return {
        "instances": instances,
        **asdict(pace),
        "seconds": seconds,
        "routers_and_planner": ROUTERS + 2,
        "age_p50_s": percentile(ages, 50),
        "age_p99_s": percentile(ages, 99),
        "age_max_s": max(ages),
        "worker_sample_age_p99_s": percentile(seen["worker"].ages_s, 99),
        "router_loop_lag_p99_s": percentile(seen["router"].lags_s, 99),
        "least_known": min(seen[name].known for name in ("router", "planner")),
        "read_of_all_p50_s": percentile(whole_s, 50),
        "read_of_all_p99_s": percentile(whole_s, 99),
        "read_of_few_p50_s": percentile(few_s, 50),
        "read_of_few_p99_s": percentile(few_s, 99),
        "reads": {"all": len(whole_s), "few": len(few_s), "failed": sum(each.failed for each in seen.values())},
        "cpu_shares": {name: round(share, 3) for name, share in shares.items()},
        "redis": {
            "clients": after["connected_clients"],
            "memory_mb": round(after["used_memory"] / 1e6),
            "in_mb_per_s": round((after["total_net_input_bytes"] - counted["total_net_input_bytes"]) / wall_s / 1e6, 2),
            "out_mb_per_s": round(
                (after["total_net_output_bytes"] - counted["total_net_output_bytes"]) / wall_s / 1e6, 2
            ),
        },
        "crowd_commands": sent["sent"],
        "crowd_late_share": sent["late"] / max(1, sent["sent"]),
        "samples": len(ages),
    }


def run(rounds: int) -> None:
    rows = []
    for _ in range(rounds):
        for instances, pace, seconds in RUNS:
            row = measure(instances, pace, seconds)
            rows.append(row)
            print(json.dumps(row), flush=True)
    largest = [row for row in rows if row["instances"] == TARGET_INSTANCES]
    worst = {
        "age_p99_s": max(row["age_p99_s"] for row in largest),
        "redis": max(row["cpu_shares"]["redis"] for row in largest),
        "side": max(row["cpu_shares"][side] for row in largest for side in ("publisher", "worker", "router")),
    }
    targets = {"age_p99_s": TARGET_P99_S, "redis": TARGET_REDIS, "side": TARGET_SIDE}
    figures = {
        "sequences_per_instance": RUNNING + QUEUED,
        "seed": SEED,
        "targets": targets | {"instances": TARGET_INSTANCES},
        "worst": worst,
        "reached": all(worst[name] < target for name, target in targets.items()),
        "rows": rows,
    }
    print(report.write("state", figures))
