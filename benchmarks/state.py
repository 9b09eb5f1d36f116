"""The age of a router's state of the mesh while many instances publish their load into one Redis.

Three processes: Redis, one that publishes for all instances (every 200 ms each, spread evenly, every record changed), and
one router's MeshFeed that follows. The publisher sends what each instance's Registrar would, for many instances in one
round trip: it represents a thousand machines, so its own CPU share is not a cost of the mesh. The age of a snapshot is the
time since the record that the view holds was published: on average half the interval at best.
"""

import asyncio
import json
import multiprocessing
import os
import random
import tempfile
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.spread import percentile
from penstock.local import redis_server as local_redis
from services.domain.instances import InstanceRecord, Load, ModelCard, Role
from services.domain.mesh_view import MeshView
from services.domain.stages.places import StagePlace
from services.processes import free_port
from services.state import MeshFeed, connect
from services.state.keys import Keys
from services.state.registry import publish
from services.testing import redis_server

INSTANCES = (100, 300, 1000)
INTERVAL_S = 0.2
TICK_S = 0.01
RUNNING, QUEUED = 24, 4  # sequences per instance
WARM_S, MEASURED_S, SAMPLE_S = 2.0, 10.0, 0.1
TARGET_P99_S = 1.0
SEED = 1
KEYS = Keys("benchmark-state")
CARD = ModelCard("only", "model", "digest", "torch", 131_072, 8192, 16, 64)


def _records(instances: int) -> list[InstanceRecord]:
    return [
        InstanceRecord(f"worker-only-{i:04}", Role.WORKER, f"10.0.0.{i % 250}:5{i:04}", 0.0, 0, 3.0, model=CARD)
        for i in range(instances)
    ]


def _load(draw: random.Random) -> Load:
    lengths = [draw.randrange(16, 32_768) for _ in range(RUNNING + QUEUED)]
    inputs = tuple(length // 2 for length in lengths)
    return Load(tuple(lengths[:RUNNING]), tuple(lengths[RUNNING:]), draw.randrange(8192), draw.random() * 5000, inputs)


def _publish(url: str, instances: int, stop: Any) -> None:
    """Every instance's record every INTERVAL_S, spread over the interval; the epoch is the time of publication."""

    async def run() -> None:
        draw, redis, records = random.Random(SEED), connect(url), _records(instances)
        loads = [_load(draw) for _ in range(64)]
        turns = round(INTERVAL_S / TICK_S)
        loop, turn = asyncio.get_running_loop(), 0
        due = loop.time()
        while not stop.is_set():
            async with redis.pipeline(transaction=False) as pipe:
                for i in range(turn % turns, instances, turns):
                    load = loads[(i + turn) % len(loads)]
                    place = StagePlace(i % 4, 1024 * (i % 4), 1024 * (i % 4 + 1) + turn % 50)
                    publish(pipe, KEYS, replace(records[i], epoch=time.time(), sequence=turn, load=load, place=place))
                await pipe.execute()
            turn += 1
            due += TICK_S
            await asyncio.sleep(max(0.0, due - loop.time()))
        await redis.aclose()

    asyncio.run(run())


def _follow(url: str, instances: int, connection: Connection) -> None:
    """A router's feed: ages of all snapshots, sampled, and the CPU used meanwhile."""

    async def run() -> None:
        redis, view = connect(url), MeshView()
        async with MeshFeed(redis, KEYS, view):
            async with asyncio.timeout(60):
                while len(view.instances()) < instances:
                    await asyncio.sleep(0.05)
            await asyncio.sleep(WARM_S)
            connection.send("warm")
            ages: list[float] = []
            lags: list[float] = []
            loop = asyncio.get_running_loop()
            until = loop.time() + MEASURED_S
            while loop.time() < until:
                expected_s = loop.time()
                await asyncio.sleep(SAMPLE_S)
                lags.append(loop.time() - expected_s - SAMPLE_S)
                now = time.time()
                ages += [now - record.epoch for record in view.instances()]
            connection.send((ages, lags))
        await redis.aclose()

    asyncio.run(run())


def _cpu_s(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(instances: int) -> dict[str, Any]:
    """One run: ages in seconds, CPU as shares of one core."""
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        redis_server(local_redis.find(), free_port(), Path(folder)) as server,
    ):
        stop, (here, there) = spawn.Event(), spawn.Pipe()
        publisher = spawn.Process(target=_publish, args=(server.url, instances, stop))
        follower = spawn.Process(target=_follow, args=(server.url, instances, there))
        publisher.start()
        follower.start()
        there.close()  # so that a follower that fails ends the wait
        try:
            assert here.recv() == "warm"
            pids = {"redis": server.pid, "publisher": publisher.pid or 0, "router": follower.pid or 0}
            before, began = {name: _cpu_s(pid) for name, pid in pids.items()}, time.monotonic()
            ages, lags = here.recv()
            wall_s = time.monotonic() - began
            shares = {name: (_cpu_s(pid) - before[name]) / wall_s for name, pid in pids.items()}
        finally:
            stop.set()
            follower.join()
            publisher.join()
    return {
        "instances": instances,
        "records_per_s": instances / INTERVAL_S,
        "age_p50_s": percentile(ages, 50),
        "age_p99_s": percentile(ages, 99),
        "age_max_s": max(ages),
        "router_loop_lag_p99_s": percentile(lags, 99),
        "cpu_shares": {name: round(share, 3) for name, share in shares.items()},
        "samples": len(ages),
    }


def run(rounds: int) -> None:
    rows = []
    for _ in range(rounds):
        for instances in INSTANCES:
            row = measure(instances)
            rows.append(row)
            print(json.dumps(row), flush=True)
    worst = max(row["age_p99_s"] for row in rows if row["instances"] == max(INSTANCES))
    figures = {
        "interval_s": INTERVAL_S,
        "sequences_per_instance": RUNNING + QUEUED,
        "seed": SEED,
        "target_p99_s": TARGET_P99_S,
        "worst_p99_s": worst,
        "reached": worst < TARGET_P99_S,
        "rows": rows,
    }
    print(report.write("state", figures))
