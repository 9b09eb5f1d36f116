"""A mesh of 1,000 simulated workers, live on one machine for ten minutes: what status, feed, placement and `top` cost.

Redis, planner, judge, a router and one worker are processes of `penstock up`. The other workers are whole ones, too, with
their listeners, engine and record, but many in one process. In place of a thousand machines there are two cores: workers
publish every `PUBLISH_S`, look at their tier every `LOOK_S` and have the lease `LEASE_S`; `state` measures the usual rate.

STREAMS clients read one reply after the other. At the end a process with many workers is killed. This process has a feed of
its own, whose ages are measured, and places a request by it every `PROBE_S`, which a router would do as it does.
"""

import asyncio
import contextlib
import fcntl
import json
import multiprocessing
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from typing import Any

import yaml

from benchmarks import report
from benchmarks.cpu_time import cpu_s
from benchmarks.fault_streams import rss_bytes
from benchmarks.meshes import CONFIDENCE, mesh_of
from benchmarks.spread import percentile
from penstock import AsyncClient, Finished, InstanceChanged, PenstockError, TierStarted, Tokens
from penstock.local.mesh import LocalMesh
from penstock.router_service.routing.instance_pool import InstancePool
from penstock.router_service.routing.placement import Placed
from penstock.services import open_files
from penstock.services.domain.instances import Role
from penstock.services.state import connection
from penstock.worker_service.compose import compose
from tests.support.services import serving

TIER = "only"
WORKERS, PROCESSES = 999, 8
MEASURED_S, AFTER_KILL_S = 600.0, 60.0
STREAMS, TOKENS, STEP_MS, PROMPTS = 50, 40, 250.0, 500
LEASE_S, LOOK_S, PUBLISH_S = 30.0, 120.0, 1.0
STATUS_S, PROBE_S, TIMEOUT_S = 1.0, 0.1, 300.0
SCREEN = (50, 160)
REDRAWN = b"\x1b[H"
"""What begins every screen of `top`: the cursor goes to the first line."""
STYLE = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]")


def mesh_content() -> dict[str, Any]:
    pace = {"overhead_ms": STEP_MS, "token_us": 1.0, "context_token_ns": 0.0, "reply_tokens": 1_000_000}
    room = {"max_running": 8, "max_queued": 8, "kv_tokens": 8192, "engine": "simulated", "simulated": pace}
    return {
        "name": "scale",
        "tiers": [{"name": TIER, "model": "sim", **room}],
        "judge": CONFIDENCE,
        "router": {"grpc_port": 0, "http_port": 0},
        "stages": {"look_s": LOOK_S},
    }


def _crowd(mesh_file: Path, redis_url: str, numbers: range, pipe: Connection) -> None:
    """Run these workers until the process is killed. Sends how many serve."""

    async def run() -> None:
        async with AsyncExitStack() as stack:
            settings: dict[str, Any] = {
                "tier": TIER,
                "lease_s": LEASE_S,
                "publish_interval_s": PUBLISH_S,
                "trace_keep": 0,
            }
            for number in numbers:
                await stack.enter_async_context(
                    serving(
                        Role.WORKER, compose, mesh_file, redis_url, instance_id=f"worker-{TIER}-{number:04}", **settings
                    )
                )
            pipe.send(len(numbers))
            await asyncio.Event().wait()

    open_files.raise_limit()
    # A hundred workers share this event loop: what it is late for is no silence of Redis.
    connection.CONNECT_TIMEOUT_S = connection.COMMAND_TIMEOUT_S = TIMEOUT_S
    asyncio.run(run())


@dataclass(slots=True)
class Reader:
    """A client that reads replies one after the other. texts: by prompt. placed: replies by the worker they began at."""

    texts: dict[str, set[str]] = field(default_factory=dict)
    placed: Counter[str] = field(default_factory=Counter)
    first_token_s: list[float] = field(default_factory=list)
    replies: int = 0
    moved: int = 0
    doubled: int = 0
    errors: list[str] = field(default_factory=list)

    async def read(self, client: AsyncClient, first: int, over: asyncio.Event) -> None:
        number = first
        while not over.is_set():
            number += 1
            try:
                await self._once(client, f"question {number % PROMPTS}")
            except PenstockError as error:
                self.errors.append(f"{type(error).__name__}: {error}"[:200])

    async def _once(self, client: AsyncClient, prompt: str) -> None:
        began, text, tokens = time.monotonic(), "", 0
        async for event in client.stream(prompt, temperature=0, max_tokens=TOKENS):
            match event:
                case TierStarted():
                    self.placed[event.instance_id] += 1
                case Tokens():
                    if not tokens:
                        self.first_token_s.append(time.monotonic() - began)
                    self.doubled += event.offset != tokens
                    tokens += len(event.token_ids)
                    text += event.text
                case InstanceChanged():
                    self.moved += 1
                case Finished():
                    self.replies += 1
        self.texts.setdefault(prompt, set()).add(text)


class Top:
    """`penstock top` on a terminal of its own. screens: how often it was drawn; last: the lines of the last one."""

    def __init__(self, admin: str) -> None:
        terminal, there = pty.openpty()
        fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", *SCREEN, 0, 0))
        command = [sys.executable, "-m", "penstock.cli.main", "top", "--admin", admin]
        self.process = subprocess.Popen(
            command, stdin=there, stdout=there, stderr=there, env=os.environ | {"TERM": "xterm"}
        )
        os.close(there)
        self.screens, self.last = 0, list[str]()
        self._thread = Thread(target=self._read, args=(terminal,), daemon=True)
        self._thread.start()

    def _read(self, terminal: int) -> None:
        text = b""
        with contextlib.suppress(OSError):  # it has ended
            while part := os.read(terminal, 1 << 16):
                text += part
                *drawn, text = text.split(REDRAWN)
                self.screens += len(drawn)
                if drawn:
                    self.last = STYLE.sub("", drawn[-1].decode(errors="replace")).splitlines()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        self._thread.join()


@asynccontextmanager
async def crowds(mesh_file: Path, redis_url: str) -> AsyncIterator[list[BaseProcess]]:
    """Processes with all workers, which serve. They are killed at the end.

    Raises:
        EOFError: One has failed.
    """
    spawn, each = multiprocessing.get_context("spawn"), -(-WORKERS // PROCESSES)
    processes, pipes = list[BaseProcess](), list[Connection]()
    try:
        for first in range(0, WORKERS, each):
            here, there = spawn.Pipe()
            numbers = range(first, min(first + each, WORKERS))
            processes.append(spawn.Process(target=_crowd, args=(mesh_file, redis_url, numbers, there), daemon=True))
            processes[-1].start()
            there.close()  # so that a process that fails ends the wait
            pipes.append(here)
        for pipe in pipes:
            await asyncio.to_thread(pipe.recv)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


@dataclass(slots=True)
class Measured:
    """What was seen each second, in seconds. ready: workers in each status."""

    status_s: list[float] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    ages_s: list[float] = field(default_factory=list)
    place_s: list[float] = field(default_factory=list)
    lag_s: list[float] = field(default_factory=list)

    async def watch(self, client: AsyncClient, mesh: LocalMesh) -> None:
        """Ask for the status, and look at the ages of what the feed knows, until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            began = time.monotonic()
            status = await client.status()
            self.status_s.append(time.monotonic() - began)
            self.ready.append(sum((i.role, i.state) == ("worker", "ready") for i in status.instances))
            self.ages_s += [mesh.view.heard_ago_s(r.instance_id, loop.time()) for r in mesh.view.instances(Role.WORKER)]
            await asyncio.sleep(STATUS_S)

    async def place(self, mesh: LocalMesh) -> None:
        """Place requests by the feed of this process until it is cancelled."""
        pool, number = InstancePool(mesh.view, ejection_s=60.0), 0
        while True:
            due = time.monotonic() + PROBE_S
            await asyncio.sleep(PROBE_S)
            self.lag_s.append(time.monotonic() - due)
            began, number = time.perf_counter(), number + 1
            placed = pool.place(TIER, f"probe {number}", 100)
            self.place_s.append(time.perf_counter() - began)
            assert isinstance(placed, Placed)


async def _until_ready(client: AsyncClient, count: int) -> float:
    """Seconds until the router's status has so many ready workers."""
    began = time.monotonic()
    async for status in client.watch_status(0.25):
        if sum((i.role, i.state) == ("worker", "ready") for i in status.instances) == count:
            break
    return time.monotonic() - began


@asynccontextmanager
async def _background(*works: Any) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            if not task.cancel():
                task.result()  # it has failed
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure(seconds: float) -> dict[str, Any]:
    """One run. CPU as shares of one core."""
    async with AsyncExitStack() as stack:
        file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "mesh.yaml"
        file.write_text(yaml.safe_dump(mesh_content()))
        mesh = await stack.enter_async_context(mesh_of(mesh_content()))
        began = time.monotonic()
        processes = await stack.enter_async_context(crowds(file, mesh.redis_url_of("worker")))
        client = await stack.enter_async_context(
            AsyncClient(mesh.addresses.grpc, admin=mesh.addresses.admin, timeout_s=TIMEOUT_S)
        )
        await _until_ready(client, WORKERS + 1)
        start_s = time.monotonic() - began
        print(f"{WORKERS + 1} workers are ready after {start_s:.0f} s", flush=True)
        return {"start_s": start_s} | await _live(mesh, client, processes, seconds)


async def _live(
    mesh: LocalMesh, client: AsyncClient, processes: Sequence[BaseProcess], seconds: float
) -> dict[str, Any]:
    """Streams, status and `top` for so long, then the end of a process with its workers."""
    reader, measured, over = Reader(), Measured(), asyncio.Event()
    top = Top(mesh.addresses.admin[0])
    pids = {name: [mesh.watcher.watched[name].pid or 0] for name in ("redis", "router-0", "planner-0", "judge-0")}
    pids |= {"workers": [each.pid or 0 for each in processes], "top": [top.process.pid], "client": [os.getpid()]}
    try:
        streams = [asyncio.create_task(reader.read(client, i * PROMPTS // STREAMS, over)) for i in range(STREAMS)]
        before = {name: sum(map(cpu_s, each)) for name, each in pids.items()}
        began = time.monotonic()
        async with _background(measured.watch(client, mesh), measured.place(mesh)):
            await asyncio.sleep(seconds)
        wall_s = time.monotonic() - began
        shares = {name: (sum(map(cpu_s, each)) - before[name]) / wall_s for name, each in pids.items()}
        memory = {name: sum(map(rss_bytes, each)) for name, each in pids.items()}
        screens, last = top.screens, top.last
    finally:
        top.close()
    replies, lost = reader.replies, len(reader.errors)
    moved, placed = reader.moved, reader.placed.copy()
    first_token_s = [*reader.first_token_s]
    print(json.dumps({"replies": replies, "cpu_shares": shares}), flush=True)
    dead = processes[0]
    dead.kill()
    left = WORKERS + 1 - -(-WORKERS // PROCESSES)
    gone_s = await asyncio.wait_for(_until_ready(client, left), AFTER_KILL_S)
    over.set()
    await asyncio.gather(*streams)
    return {
        "seconds": wall_s,
        "streams": STREAMS,
        "replies": replies,
        "lost": lost,
        "doubled": reader.doubled,
        "texts_that_differ": sum(len(texts) > 1 for texts in reader.texts.values()),
        "moved_before_the_kill": moved,
        "workers_that_served": len(placed),
        "most_replies_of_a_worker": max(placed.values()),
        "first_token_p50_s": percentile(first_token_s, 50),
        "first_token_p99_s": percentile(first_token_s, 99),
        "status_p50_s": percentile(measured.status_s, 50),
        "status_p99_s": percentile(measured.status_s, 99),
        "status_max_s": max(measured.status_s),
        "ready_least": min(measured.ready),
        "age_p50_s": percentile(measured.ages_s, 50),
        "age_p99_s": percentile(measured.ages_s, 99),
        "age_max_s": max(measured.ages_s),
        "place_p50_s": percentile(measured.place_s, 50),
        "place_p99_s": percentile(measured.place_s, 99),
        "client_lag_p99_s": percentile(measured.lag_s, 99),
        "top_screens_per_s": screens / wall_s,
        "top_lines": len(last),
        "top_says_of_the_rest": next((line.strip() for line in last if "with less load" in line), ""),
        "cpu_shares": {name: round(share, 3) for name, share in shares.items()},
        "memory_mb": {name: round(size / 1e6) for name, size in memory.items()},
        "killed": {
            "workers": WORKERS + 1 - left,
            "gone_s": gone_s,
            "lost": len(reader.errors) - lost,
            "moved": reader.moved - moved,
            "errors": reader.errors[:3],
        },
    }


def run(rounds: int, seconds: float = MEASURED_S) -> None:
    rows = [asyncio.run(measure(seconds)) for _ in range(min(rounds, 1))]
    figures = {
        "workers": WORKERS + 1,
        "processes": PROCESSES,
        "lease_s": LEASE_S,
        "look_s": LOOK_S,
        "publish_s": PUBLISH_S,
        **rows[0],
    }
    print(json.dumps(figures))
    print(report.write("scale", figures))


def run_quick(rounds: int) -> None:
    run(rounds, 60.0)
