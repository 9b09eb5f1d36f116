"""What a worker adds to the SGLang server it wraps: the same streams from the server itself and through the worker.

One worker with a server of its own on the shipped large model, on a CPU. The two ways are taken in turns in one run, with
fresh prompts each time, so that the prefix cache helps neither. Server, worker and client share the machine's cores: on a
GPU host the worker's part is not taken from the model.
"""

import asyncio
import json
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from grpc import aio

from benchmarks import report
from benchmarks.contenders import one_tier_mesh, worker_address
from penstock.common.v1 import common_pb2
from penstock.worker.v1 import worker_pb2 as pb
from penstock.worker.v1 import worker_pb2_grpc
from services.processes import free_port
from tests.conftest import FAMILY
from tests.support.sglang import CPU_LAUNCH

TOKENS, PROMPT_TOKENS = 64, 48
STREAMS = {1: 12, 32: 96}  # streams in all, by streams at once
VOCAB = 256

Way = Callable[[list[int], str], Awaitable[tuple[float, int]]]  # (seconds to the first token, tokens)


def directly(session: aiohttp.ClientSession, url: str) -> Way:
    """As a client of SGLang's own would: server-sent events, every token as it comes."""

    async def one(prompt: list[int], name: str) -> tuple[float, int]:
        sampling = {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True}
        body = {"rid": name, "input_ids": prompt, "sampling_params": sampling, "stream": True}
        began, first, got = time.perf_counter(), 0.0, 0
        async with session.post(f"{url}/generate", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    first = first or time.perf_counter() - began
                    got += len(json.loads(line[6:])["output_ids"])
        return first, got

    return one


def through_worker(stub: Any) -> Way:
    async def one(prompt: list[int], name: str) -> tuple[float, int]:
        sampling = common_pb2.SamplingParams(temperature=0.0, max_output_tokens=TOKENS, ignore_eos=True)
        asked = common_pb2.Prompt(token_ids=common_pb2.TokenIds(ids=prompt))
        began, first, got = time.perf_counter(), 0.0, 0
        async for event in stub.Generate(pb.GenerateRequest(request_id=name, prompt=asked, sampling=sampling)):
            if event.HasField("tokens"):
                first = first or time.perf_counter() - began
                got += len(event.tokens.token_ids)
        return first, got

    return one


async def measured(way: Way, at_once: int, rng: random.Random) -> dict[str, float]:
    places = asyncio.Semaphore(at_once)

    async def one(number: int) -> tuple[float, int]:
        prompt = [rng.randrange(VOCAB) for _ in range(PROMPT_TOKENS)]
        async with places:
            return await way(prompt, f"r{number}-{rng.random()}")

    began = time.perf_counter()
    found = await asyncio.gather(*(one(i) for i in range(STREAMS[at_once])))
    took = time.perf_counter() - began
    tokens = sum(got for _, got in found)
    assert tokens == STREAMS[at_once] * TOKENS
    return {
        "tokens_per_s": tokens / took,
        "first_token_p50_ms": 1000 * statistics.median(first for first, _ in found),
    }


async def measure(rounds: int) -> dict[str, Any]:
    port, rng = free_port(), random.Random(9)
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    sglang = CPU_LAUNCH | {"port": port, "flags": list(CPU_LAUNCH["flags"])}
    async with (
        one_tier_mesh(str(FAMILY / "large"), 32, engine="sglang", sglang=sglang) as mesh,
        aio.insecure_channel(worker_address(mesh)) as channel,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        ways = {
            "server": directly(session, f"http://127.0.0.1:{port}"),
            "worker": through_worker(worker_pb2_grpc.WorkerServiceStub(channel)),
        }
        for way in ways.values():
            await measured(way, 32, rng)  # warm
        for number in range(rounds):
            for n in STREAMS:
                for name, way in list(ways.items())[:: 1 if number % 2 else -1]:
                    one = await measured(way, n, rng)
                    found.setdefault(name, {}).setdefault(str(n), []).append(one)
                    said = "  ".join(f"{key} {value:.1f}" for key, value in one.items())
                    print(f"round {number + 1}  {name:<7}{n:>3} at once  {said}", flush=True)
    return {
        "model": "large",
        "tokens_per_stream": TOKENS,
        "prompt_tokens": PROMPT_TOKENS,
        "streams": {str(n): count for n, count in STREAMS.items()},
        "rounds": rounds,
        "seed": 9,
        "ways": found,
        "worker_over_server": {str(n): ratios(found, str(n)) for n in STREAMS},
    }


def ratios(found: dict[str, dict[str, list[dict[str, float]]]], n: str) -> dict[str, float]:
    """Medians over the rounds of what the worker adds."""
    pairs = list(zip(found["worker"][n], found["server"][n], strict=True))
    return {
        "tokens_per_s_ratio": statistics.median(w["tokens_per_s"] / s["tokens_per_s"] for w, s in pairs),
        "first_token_p50_added_ms": statistics.median(
            w["first_token_p50_ms"] - s["first_token_p50_ms"] for w, s in pairs
        ),
    }


def run(rounds: int) -> None:
    figures = asyncio.run(measure(rounds))
    path = report.write("sglang_overhead", figures)
    print(figures["worker_over_server"])
    series = {}
    for name, by_count in figures["ways"].items():
        values = [[one["tokens_per_s"] for one in by_count[str(n)]] for n in STREAMS]
        series[name] = [(statistics.median(v), min(v), max(v)) for v in values]
    title = "SGLang on a CPU: itself, and wrapped by a worker"
    plot = report.bars("sglang_overhead", title, [f"{n} at once" for n in STREAMS], series, "tokens/s, median")
    print(f"{path}\n{plot}")
