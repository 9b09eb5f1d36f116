"""The overhead of a worker on SGLang: the same streams directly from a server and through a worker.

The shipped large model on a CPU. Three ways are taken in turns in one run, with new prompts each time, so that the prefix
cache has no effect:

- `server`: an SGLang server that returns text, as direct clients need;
- `worker`: a worker, which decodes the text itself, with its own server that only handles tokens;
- `worker's server`: that server called directly, without text.

Throughput is measured twice: with everything on the same cores, where the worker and the client take time from the model,
and with a separate core for the model's process, similar to a GPU. The time to the first token is measured in those
runs, where it is mostly waiting, and for a single stream, compared with the time of an empty RPC to the same worker.
"""

import asyncio
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks import report
from benchmarks.contenders import KV_TOKENS, one_tier_mesh, worker_address
from benchmarks.spread import median_and_quartiles, median_and_range
from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.proto.worker.v1 import worker_pb2_grpc
from penstock.router_service.clients.reply_multiplexer import MultiplexerPool
from penstock.router_service.clients.worker_client import WorkerClient
from penstock.services.channels import ChannelPool
from penstock.services.processes import free_port
from penstock.types.prompts import TokenPrompt
from penstock.types.replies import TokenFrame
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.worker_service.engine.sglang.launch import command, environment
from tests.conftest import FAMILY
from tests.support.sglang import CPU_LAUNCH, cpu_shape, running

PROMPT_TOKENS = 48
AT_ONCE, STREAMS, TOKENS = 32, 64, 64  # where throughput is measured
FIRSTS, FIRST_TOKENS = 24, 4  # a round's streams, one after the other, where the time to the first token is measured
VOCAB = 256
BASES = ("server", "worker's server")  # what the worker is compared with

Way = Callable[[list[int], str, int], Awaitable[tuple[float, int]]]  # (seconds to the first token, tokens)


def directly(session: aiohttp.ClientSession, url: str) -> Way:
    """Like a client of SGLang: server-sent events with every token."""

    async def one(prompt: list[int], name: str, tokens: int) -> tuple[float, int]:
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
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


def through_worker(workers: WorkerClient, address: str) -> Way:
    """Like a router."""

    async def one(prompt: list[int], name: str, tokens: int) -> tuple[float, int]:
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        request = GenerationRequest(request_id=name, prompt=TokenPrompt(tuple(prompt)), sampling=sampling)
        began, first, got = time.perf_counter(), 0.0, 0

        def count(frame: TokenFrame) -> None:
            nonlocal first, got
            first = first or time.perf_counter() - began
            got += len(frame.token_ids)

        await workers.generate(address, request, timeout_s=600.0, metadata=(), on_event=lambda _: None, on_tokens=count)
        return first, got

    return one


async def throughput(way: Way, rng: random.Random) -> tuple[float, float]:
    """Tokens per second, 32 streams at once, and the median of their milliseconds to the first token."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> tuple[float, int]:
        async with places:
            return await way(prompt_of(rng), f"r{number}-{rng.random()}", TOKENS)

    began = time.perf_counter()
    results = await asyncio.gather(*(one(i) for i in range(STREAMS)))
    took = time.perf_counter() - began
    tokens = sum(count for _, count in results)
    assert tokens == STREAMS * TOKENS
    return tokens / took, 1000 * statistics.median(first for first, _ in results)


def prompt_of(rng: random.Random) -> list[int]:
    """A new prompt."""
    return [rng.randrange(VOCAB) for _ in range(PROMPT_TOKENS)]


@contextmanager
def separate_core(models: Collection[int], processes: Collection[int]) -> Iterator[None]:
    """Bind the models' processes, of which one computes at a time, to the first core, and all others to the rest."""
    cores = sorted(os.sched_getaffinity(0))
    try:
        for pid in processes:
            _bind(pid, cores[:1] if pid in models else cores[1:])
        yield
    finally:
        for pid in processes:
            _bind(pid, cores)


def _bind(pid: int, cores: list[int]) -> None:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


def _family(root: int) -> dict[int, int]:
    """A process and its descendants, with the CPU clock ticks of each."""
    parents, ticks = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            fields, pid = stat.read_text().rpartition(")")[2].split(), int(stat.parent.name)
            parents[pid], ticks[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return {pid: ticks[pid] for pid in family}


@contextmanager
def server_without(switches: Collection[str], log: Path) -> Iterator[str]:
    """A server as a worker starts it, less these switches; yields its base URL."""
    port = free_port()
    shape = cpu_shape(FAMILY / "medium", flags=CPU_LAUNCH["flags"], max_running=AT_ONCE, kv_tokens=KV_TOKENS)
    argv = command(shape, port)
    if missing := set(switches).difference(argv):
        raise ValueError(f"switches: workers do not set {', '.join(missing)}")
    with running([part for part in argv if part not in switches], environment(shape), port, log) as url:
        yield url


async def busiest(way: Way, rng: random.Random) -> int:
    """The process that computes most while streams run, which they also warm up: the model's."""
    before = _family(os.getpid())
    await throughput(way, rng)
    after = _family(os.getpid())
    return max(after, key=lambda pid: after[pid] - before.get(pid, 0))


async def measure(rounds: int) -> dict[str, Any]:
    port, rng = free_port(), random.Random(9)
    rates: dict[str, dict[str, list[float]]] = {"shared": {}, "own core": {}}
    crowded: dict[str, dict[str, list[float]]] = {"shared": {}, "own core": {}}
    firsts: dict[str, list[float]] = {}

    async def at_once(how: str, name: str, way: Way) -> None:
        rate, first_ms = await throughput(way, rng)
        rates[how].setdefault(name, []).append(rate)
        crowded[how].setdefault(name, []).append(first_ms)

    sglang = CPU_LAUNCH | {"port": port, "flags": list(CPU_LAUNCH["flags"])}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
        url = stack.enter_context(server_without(["--skip-tokenizer-init"], folder / "server.log"))
        mesh = await stack.enter_async_context(
            one_tier_mesh(str(FAMILY / "medium"), AT_ONCE, engine="sglang", sglang=sglang)
        )
        channels = await stack.enter_async_context(ChannelPool())
        sessions = await stack.enter_async_context(MultiplexerPool(channels))
        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        address = worker_address(mesh)
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channels.get(address))
        ways = {
            "server": directly(session, url),
            "worker": through_worker(WorkerClient(channels, sessions, 60.0), address),
            "worker's server": directly(session, f"http://127.0.0.1:{port}"),
        }
        orders = list(itertools.permutations(ways.items()))
        models = {await busiest(way, rng) for way in ways.values()}
        processes = _family(os.getpid())
        for number in range(rounds):
            in_turn = orders[number % len(orders)]
            for name, way in in_turn:
                await at_once("shared", name, way)
            with separate_core(models, processes):
                for name, way in in_turn:
                    await at_once("own core", name, way)
            for i in range(FIRSTS):
                for name, way in orders[i % len(orders)]:
                    took, _ = await way(prompt_of(rng), f"f{number}-{i}-{rng.random()}", FIRST_TOKENS)
                    firsts.setdefault(name, []).append(1000 * took)
                began = time.perf_counter()
                await stub.GetInfo(pb.GetInfoRequest())
                firsts.setdefault("empty RPC", []).append(1000 * (time.perf_counter() - began))
            line = {how: "/".join(f"{by[name][-1]:.0f}" for name in ways) for how, by in rates.items()}
            waits = {how: "/".join(f"{by[name][-1]:.0f}" for name in ways) for how, by in crowded.items()}
            names = "/".join(ways)
            print(f"round {number + 1}  {names}: tokens/s {line}  first token, ms {waits}", flush=True)
            print(f"    one stream alone: {added(firsts)}", flush=True)
    return {
        "model": "large",
        "prompt_tokens": PROMPT_TOKENS,
        "throughput": {
            "at_once": AT_ONCE,
            "streams": STREAMS,
            "tokens_per_stream": TOKENS,
            "tokens_per_s": rates,
            "first_token_p50_ms": crowded,
        },
        "first_token": {"at_once": 1, "streams": FIRSTS * rounds, "ms": firsts},
        "rounds": rounds,
        "seed": 9,
        "worker_over": {base: {how: ratio(by, base) for how, by in rates.items()} for base in BASES},
        "first_token_p50_ms_added_at_32": {
            base: {how: difference(by, base) for how, by in crowded.items()} for base in BASES
        },
        "first_token_p50": added(firsts),
    }


def ratio(by_way: dict[str, list[float]], base: str) -> dict[str, float]:
    """Of the worker's throughput to a server's, over rounds."""
    return spread_of_ratios(by_way["worker"], by_way[base])


def difference(by_way: dict[str, list[float]], base: str) -> dict[str, float]:
    """Of the worker's milliseconds to a server's, over rounds."""
    spread = spread_of_differences(by_way["worker"], by_way[base])
    return {"server_median": statistics.median(by_way[base])} | spread


def spread_of_ratios(ours: list[float], theirs: list[float]) -> dict[str, float]:
    return median_and_quartiles([one / other for one, other in zip(ours, theirs, strict=True)])


def spread_of_differences(ours: list[float], theirs: list[float]) -> dict[str, float]:
    return median_and_quartiles([one - other for one, other in zip(ours, theirs, strict=True)])


def added(firsts: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Milliseconds: medians of each way, and of what the worker adds to either server."""
    return {
        "medians": {name: round(statistics.median(of), 2) for name, of in firsts.items()},
        "worker_adds": {base: round(difference(firsts, base)["median"], 2) for base in BASES},
    }


def run(rounds: int) -> None:
    figures = asyncio.run(measure(rounds))
    path = report.write("sglang_overhead", figures)
    print(figures["worker_over"], figures["first_token_p50"], figures["first_token_p50_ms_added_at_32"])
    rates = figures["throughput"]["tokens_per_s"]
    series = {name: [median_and_range(by[name]) for by in rates.values()] for name in ("server", "worker")}
    title = "SGLang on a CPU, 32 streams: itself, and wrapped by a worker"
    groups = ["all on the same cores", "a core for the model"]
    plot = report.bars("sglang_overhead", title, groups, series, "tokens/s, median")
    print(f"{path}\n{plot}")
