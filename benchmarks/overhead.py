"""The overhead of the mesh: the same streams from the worker itself, through the router, and through the OpenAI API.

The simulated engine has almost no latency of its own, so that the way is measured. The three ways are measured in turns. CPU
time is that of the router's process. Then the router's CPU time under load, of the version before the data path was rebuilt
and of this one, in turns (`router_cost`), and that of other routers (`peers`).
"""

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from grpc import aio

from benchmarks import peers, report, router_cost
from benchmarks.contenders import one_tier_mesh, worker_address
from benchmarks.cpu_time import cpu_s
from benchmarks.spread import median_and_range
from penstock import AsyncClient, Tokens
from penstock.local.mesh import LocalMesh
from penstock.proto.common.v1 import common_pb2
from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.proto.worker.v1 import worker_pb2_grpc

TOKENS = 64
STREAMS = 400
CONCURRENCY = (1, 16)
FAST = {"overhead_ms": 0.2, "token_us": 1.0, "context_token_ns": 0.0, "reply_tokens": TOKENS}

Way = Callable[[], Awaitable[float]]  # one stream; returns seconds to its first token


def through_worker(stub: Any) -> Way:
    async def one() -> float:
        sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=TOKENS)
        prompt = common_pb2.Prompt(text="hello")
        began, first = time.perf_counter(), 0.0
        async for event in stub.Generate(pb.GenerateRequest(request_id=f"{began}", prompt=prompt, sampling=sampling)):
            if event.HasField("tokens") and not first:
                first = time.perf_counter() - began
        return first

    return one


def through_router(client: AsyncClient) -> Way:
    async def one() -> float:
        began, first = time.perf_counter(), 0.0
        stream = client.stream("hello", model="only", temperature=0.0, max_tokens=TOKENS)
        async for event in stream:
            if isinstance(event, Tokens) and not first:
                first = time.perf_counter() - began
        return first

    return one


def through_gateway(session: aiohttp.ClientSession, url: str) -> Way:
    body = {
        "model": "only",
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
        "temperature": 0,
        "max_tokens": TOKENS,
    }

    async def one() -> float:
        began, first = time.perf_counter(), 0.0
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                delta = json.loads(line[6:])["choices"][0]["delta"] if not first else {}
                if delta.get("content"):
                    first = time.perf_counter() - began
        return first

    return one


async def measured(way: Way, concurrency: int, mesh: LocalMesh) -> dict[str, float]:
    places = asyncio.Semaphore(concurrency)

    async def one() -> float:
        async with places:
            return await way()

    pid = mesh.watcher.watched["router-0"].pid
    assert pid is not None
    cpu, began = cpu_s(pid), time.perf_counter()
    first = sorted(await asyncio.gather(*(one() for _ in range(STREAMS))))
    took = time.perf_counter() - began
    return {
        "first_token_p50_ms": 1000 * statistics.median(first),
        "first_token_p95_ms": 1000 * first[int(0.95 * len(first))],
        "streams_per_s": STREAMS / took,
        "router_cpu_ms_per_stream": 1000 * (cpu_s(pid) - cpu) / STREAMS,
    }


async def measure(rounds: int) -> dict[str, Any]:
    rows: dict[str, dict[str, list[dict[str, float]]]] = {}
    async with (
        one_tier_mesh("sim", 64, engine="simulated", simulated=FAST, max_queued=512) as mesh,
        aio.insecure_channel(worker_address(mesh)) as channel,
        AsyncClient(mesh.addresses.grpc, admin=mesh.addresses.admin) as client,
        aiohttp.ClientSession() as session,
    ):
        ways = {
            "worker": through_worker(worker_pb2_grpc.WorkerServiceStub(channel)),
            "router": through_router(client),
            "gateway": through_gateway(session, f"http://{mesh.addresses.http[0]}"),
        }
        for way in ways.values():
            await asyncio.gather(*(way() for _ in range(20)))  # warm
        for number in range(rounds):
            for n in CONCURRENCY:
                for name, way in ways.items():
                    one = await measured(way, n, mesh)
                    rows.setdefault(name, {}).setdefault(str(n), []).append(one)
                    line = "  ".join(f"{key} {value:.2f}" for key, value in one.items())
                    print(f"round {number + 1}  {name:<8}{n:>3} at once  {line}", flush=True)
    return {"tokens_per_stream": TOKENS, "streams": STREAMS, "rounds": rounds, "ways": rows}


def run(rounds: int) -> None:
    figures = asyncio.run(measure(rounds))
    path = report.write(
        "overhead", {**figures, "router_cost": router_cost.measure(rounds), "peers": peers.measure(rounds)}
    )
    groups = [f"{n} at once" for n in CONCURRENCY]
    series = {}
    for name, by_concurrency in figures["ways"].items():
        values = [[one["first_token_p50_ms"] for one in by_concurrency[str(n)]] for n in CONCURRENCY]
        series[name] = [median_and_range(v) for v in values]
    plot = report.bars("overhead", "Time to the first token by the way taken", groups, series, "ms, median")
    print(f"{path}\n{plot}")
