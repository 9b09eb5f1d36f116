"""Mixed load for half an hour while a random process is killed every 20 s: lost requests and growth of memory.

Real processes on the shipped models: two routers, two workers per tier of two tiers, two judges, a planner, Redis. Clients,
each with one request at a time: gRPC streams of the cascade and of the large tier, SSE streams, unstreamed OpenAI replies,
and clients that disconnect in the middle. The victims are drawn with a seed, except one process of each kind that exists
twice: these survive the run, and their memory is measured. The slope of memory is a least-squares line
over a process's readings once `WARM_S` have passed.
"""

import asyncio
import random
import signal
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks import report
from benchmarks.fault_streams import (
    StreamResult,
    grpc_stream,
    rss_bytes,
    signal_process,
    sse_stream,
    summary,
    until_whole,
)
from benchmarks.meshes import mesh_of
from models.training import tasks
from penstock import AsyncClient, PenstockError
from penstock.local.mesh import LocalMesh

FAMILY = Path("models/family").resolve()
SECONDS, QUICK_SECONDS = 1800.0, 180.0
KILL_EVERY_S = 20.0
READ_EVERY_S = 5.0
WARM_S = 120.0
CLIENTS = ("grpc cascade",) * 6 + ("grpc large",) * 3 + ("sse cascade",) * 3 + ("whole",) * 2 + ("leaves",) * 2
VICTIMS = ("router-1", "worker-small-1", "worker-large-1", "judge-1", "planner-0", "redis")
MAX_TOKENS = 250
TIMEOUT_S = 240.0
SEED = 7


def mesh_content() -> dict[str, Any]:
    """Two tiers of shipped models, everything but planner and Redis twice."""
    return {
        "name": "soak",
        "tiers": [
            {"name": "small", "model": str(FAMILY / "small"), "workers": 2, "threshold": 30},
            {"name": "large", "model": str(FAMILY / "large"), "workers": 2},
        ],
        "judge": {
            "replicas": 2,
            "scorers": [{"name": "judge-model", "kind": "judge-model", "model": str(FAMILY / "judge")}],
            "default_scorer": "judge-model",
        },
        "router": {"replicas": 2, "grpc_port": 0, "http_port": 0},
    }


class Soak:
    """The clients, the killer and the readings of memory."""

    def __init__(self, mesh: LocalMesh, session: aiohttp.ClientSession, seconds: float) -> None:
        self._mesh, self._session, self._ends_s = mesh, session, time.monotonic() + seconds
        self._began_s = time.monotonic()
        self.results: dict[str, list[StreamResult]] = defaultdict(list)
        self.kills: Counter[str] = Counter()
        self.memory: dict[str, list[tuple[float, float]]] = defaultdict(list)  # process/pid -> (seconds, bytes)

    async def run(self, prompts: Sequence[str]) -> None:
        """Until the time has passed and every request has ended."""
        async with asyncio.TaskGroup() as group:
            killer, reader = group.create_task(self._kill()), group.create_task(self._read_memory())
            async with asyncio.TaskGroup() as clients:
                for number, kind in enumerate(CLIENTS):
                    clients.create_task(self._client(number, kind, prompts))
            killer.cancel()
            reader.cancel()

    async def _client(self, number: int, kind: str, prompts: Sequence[str]) -> None:
        draw = random.Random(f"{SEED} {number}")
        async with AsyncClient(
            self._mesh.addresses.grpc, admin=self._mesh.addresses.admin, timeout_s=TIMEOUT_S
        ) as client:
            while time.monotonic() < self._ends_s:
                result = StreamResult(draw.choice(prompts))
                match kind:
                    case "grpc cascade":
                        await grpc_stream(client, max_tokens=MAX_TOKENS)(result.prompt, result)
                    case "grpc large":
                        await grpc_stream(client, model="large", max_tokens=MAX_TOKENS)(result.prompt, result)
                    case "sse cascade":
                        await self._sse(number, result)
                    case "whole":
                        await self._whole(number, result)
                    case _:
                        await self._leaving(client, result, draw.randrange(1, 20))
                self.results[kind].append(result)

    async def _sse(self, number: int, result: StreamResult) -> None:
        urls = [f"http://{address}" for address in self._mesh.addresses.http]
        body = {"model": "cascade", "max_tokens": MAX_TOKENS}
        await sse_stream(self._session, urls, number, body)(result.prompt, result)

    async def _whole(self, number: int, result: StreamResult) -> None:
        """An OpenAI reply in one piece, retried like OpenAI's client: after a broken connection, 429 and 5xx."""
        body = {"model": "cascade", "max_tokens": MAX_TOKENS, "temperature": 0}
        message = {"messages": [{"role": "user", "content": result.prompt}]}
        for attempt in range(8):
            urls = self._mesh.addresses.http
            url = f"http://{urls[(number + attempt) % len(urls)]}/v1/chat/completions"
            try:
                async with self._session.post(url, json=body | message) as response:
                    answer = await response.json()
                    if response.status == 200:
                        result.text = answer["choices"][0]["message"]["content"]
                        result.tier, result.error = answer["penstock"]["tier"], ""
                        return
                    result.error = f"HTTP {response.status}: {answer['error']['message']}"
                    if response.status < 429:
                        return
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                result.error = f"{type(error).__name__}: {error}"
            await asyncio.sleep(0.5)

    async def _leaving(self, client: AsyncClient, result: StreamResult, after: int) -> None:
        """Leave the stream after some events."""
        try:
            events = 0
            async for _ in client.stream(result.prompt, model="large", temperature=0, max_tokens=MAX_TOKENS):
                events += 1
                if events >= after:
                    break
        except PenstockError as error:
            result.error = f"{type(error).__name__}: {error}"

    async def _kill(self) -> None:
        draw = random.Random(SEED)
        while True:
            await asyncio.sleep(KILL_EVERY_S)
            victim = draw.choice(VICTIMS)
            if time.monotonic() < self._ends_s and self._mesh.watcher.watched[victim].pid is not None:
                signal_process(self._mesh, victim, signal.SIGKILL)
                self.kills[victim] += 1

    async def _read_memory(self) -> None:
        while True:
            now = time.monotonic() - self._began_s
            for name, entry in self._mesh.watcher.watched.items():
                if entry.pid is not None and (size := rss_bytes(entry.pid)):
                    self.memory[f"{name}/{entry.pid}"].append((now, size))
            await asyncio.sleep(READ_EVERY_S)


def slopes(memory: dict[str, list[tuple[float, float]]]) -> dict[str, dict[str, float]]:
    """Per process that lived for most of the run: MiB once warm and at the end, and MiB per hour by a least-squares line."""
    longest = max(readings[-1][0] for readings in memory.values())
    result: dict[str, dict[str, float]] = {}
    for name, readings in memory.items():
        warm = [(at, size) for at, size in readings if at >= min(WARM_S, longest / 3)]
        if len(warm) < 3 or readings[-1][0] - readings[0][0] < 0.9 * longest:
            continue
        line = statistics.linear_regression([at for at, _ in warm], [size for _, size in warm])
        result[name.partition("/")[0]] = {
            "first_mib": round(warm[0][1] / 2**20, 1),
            "last_mib": round(warm[-1][1] / 2**20, 1),
            "mib_per_hour": round(line.slope * 3600 / 2**20, 2),
        }
    return result


async def texts(mesh: LocalMesh, prompts: Sequence[str]) -> dict[tuple[str, str], str]:
    """(tier, prompt) -> the greedy text, undisturbed."""
    expected: dict[tuple[str, str], str] = {}
    async with AsyncClient(mesh.addresses.grpc, admin=mesh.addresses.admin, timeout_s=TIMEOUT_S) as client:
        for tier in ("small", "large"):
            results = [StreamResult(prompt) for prompt in prompts]
            stream = grpc_stream(client, model=tier, max_tokens=MAX_TOKENS)
            for at in range(0, len(results), 32):
                await asyncio.gather(*(stream(r.prompt, r) for r in results[at : at + 32]))
            expected |= {(tier, r.prompt): r.text for r in results}
    return expected


async def measure(seconds: float) -> dict[str, Any]:
    prompts = [p.prompt for p in tasks.single_turns(400, seed=SEED)]
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with mesh_of(mesh_content(), any_ports=False) as mesh, aiohttp.ClientSession(timeout=timeout) as session:
        await until_whole(mesh)
        expected = await texts(mesh, prompts)
        soak = Soak(mesh, session, seconds)
        await soak.run(prompts)
        await until_whole(mesh)
    by_kind = {
        kind: summary(results, lambda r: expected.get((r.tier, r.prompt)) if r.tier else None, 0.0)
        for kind, results in soak.results.items()
    }
    for kind, figures in by_kind.items():
        print(kind, {key: value for key, value in figures.items() if key != "errors" or value}, flush=True)
    memory = slopes(soak.memory)
    for name, figures in memory.items():
        print(f"{name:<18}{figures}", flush=True)
    totals = {
        key: sum(f[key] for f in by_kind.values()) for key in ("streams", "lost", "doubled", "wrong", "asked_again")
    }
    print({"kills": dict(soak.kills), **totals}, flush=True)
    return {
        "seconds": seconds,
        "seed": SEED,
        "kills": dict(soak.kills),
        **totals,
        "clients": by_kind,
        "memory": memory,
    }


def run(_: int) -> None:
    """One run of half an hour, regardless of the number of rounds."""
    print(report.write("soak", asyncio.run(measure(SECONDS))))


def run_quick(_: int) -> None:
    """Three minutes."""
    print(report.write("soak", asyncio.run(measure(QUICK_SECONDS))))
