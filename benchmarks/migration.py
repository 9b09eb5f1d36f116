"""Migration of replies between workers: the pauses seen by a client, and a check that its reply does not change.

Four worker processes of one shipped model, a router process, 200 streams of short and long replies, greedy and sampled, with
different concurrency. Every stream is read twice: without moves, and moved to another worker every few tokens. Workers send
every token at once (no coalescing), so that the time between two tokens is a decode step and a transfer.
"""

import asyncio
import itertools
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpc import aio

from benchmarks import report
from benchmarks.meshes import CONFIDENCE, mesh_of
from benchmarks.spread import median_and_range
from models.training import tasks
from penstock import AsyncClient, InstanceChanged, Move, RetryPolicy, TierStarted, Tokens
from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.proto.worker.v1 import worker_pb2_grpc
from penstock.services.domain.instances import Role

FAMILY = Path("models/family").resolve()
MODEL = "large"
WORKERS = 4
STREAMS = 200
AT_ONCE = (4, 8, 16)
MOVE_EVERY = 24  # tokens
MAX_TOKENS = 250
SEED = 5


@dataclass(frozen=True, slots=True)
class Asked:
    name: str
    prompt: str
    temperature: float


@dataclass(slots=True)
class Seen:
    """One stream as seen by a client. gaps, stalls: seconds between two tokens, without and with a move in between."""

    text: str = ""
    tokens: int = 0
    whole: bool = True
    gaps: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)


def workload() -> list[Asked]:
    """As many short replies as long ones, in a shuffled order; every second one sampled with a seed."""
    problems = tasks.single_turns(30 * STREAMS, seed=SEED)
    short = [p.prompt for p in problems if len(p.reply) < 60][: STREAMS // 2]
    long = [p.prompt for p in problems if len(p.reply) > 90][: STREAMS - len(short)]
    prompts = [*short, *long]
    assert len(prompts) == STREAMS
    random.Random(SEED).shuffle(prompts)
    return [Asked(f"stream-{i}", prompt, 0.8 * (i % 2)) for i, prompt in enumerate(prompts)]


async def read(client: AsyncClient, request: Asked, workers: Sequence[str], *, moving: bool) -> Seen:
    """One stream to its end, moved as often as it can be."""
    observed, at, last, changed, move_at = Seen(), "", 0.0, False, MOVE_EVERY
    choose = random.Random(f"{SEED} {request.name}")
    moves: list[asyncio.Task[Move]] = []
    stream = client.stream(
        request.prompt,
        temperature=request.temperature,
        seed=SEED,
        max_tokens=MAX_TOKENS,
        request_id=f"{request.name}-{'moved' if moving else 'still'}",
    )
    async for event in stream:
        match event:
            case TierStarted():
                at = event.instance_id
            case InstanceChanged():
                at, changed = event.to_instance_id, True
            case Tokens() if event.token_ids:
                now = time.perf_counter()
                observed.whole = observed.whole and event.offset == observed.tokens
                if last:
                    (observed.stalls if changed else observed.gaps).append(now - last)
                last, changed = now, False
                observed.tokens += len(event.token_ids)
                observed.text += event.text
                if moving and observed.tokens >= move_at and all(move.done() for move in moves):
                    move_at = observed.tokens + MOVE_EVERY
                    target = choose.choice([w for w in workers if w != at])
                    moves.append(asyncio.create_task(client.move(f"{request.name}-moved", target)))
            case Tokens():
                observed.text += event.text
    for move in moves:
        try:
            observed.moves.append(await move)
        except Exception as error:  # the stream ended before the router looked
            observed.moves.append(Move(f"{error}"))
    return observed


async def read_all(
    client: AsyncClient, work: Sequence[Asked], workers: Sequence[str], at_once: int, *, moving: bool
) -> list[Seen]:
    places = asyncio.Semaphore(at_once)

    async def one(request: Asked) -> Seen:
        async with places:
            return await read(client, request, workers, moving=moving)

    return await asyncio.gather(*(one(request) for request in work))


async def probe(addresses: Sequence[str], stop: asyncio.Event) -> tuple[list[float], dict[str, float]]:
    """Round trips to the workers while they work, and each one's mean time of a step, in seconds."""
    trips: list[float] = []
    steps: dict[str, float] = {}

    async def one(address: str) -> None:
        async with aio.insecure_channel(address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            began, first = time.perf_counter(), (await stub.GetLoad(pb.GetLoadRequest())).step_count
            load = None
            while not stop.is_set():
                at = time.perf_counter()
                load = await stub.GetLoad(pb.GetLoadRequest())
                trips.append(time.perf_counter() - at)
                await asyncio.sleep(0.1)
            if load is not None and load.step_count > first:
                steps[address] = (time.perf_counter() - began) / (load.step_count - first)

    await asyncio.gather(*(one(address) for address in addresses))
    return trips, steps


def spread(values: Sequence[float]) -> dict[str, float]:
    """p50, p99 and the greatest, in milliseconds."""
    ordered = sorted(values)
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in at.items()}


async def measure(rounds: int) -> dict[str, Any]:
    work, results = workload(), list[dict[str, Any]]()
    os.environ["PENSTOCK_FRAME_INTERVAL_MS"] = "0"  # for the processes started below
    content = {
        "name": "bench-migration",
        "tiers": [{"name": "only", "model": str(FAMILY / MODEL), "workers": WORKERS}],
        "judge": CONFIDENCE,
    }
    async with (
        mesh_of(content) as mesh,
        AsyncClient(
            mesh.addresses.grpc, admin=mesh.addresses.admin, retry=RetryPolicy(attempts=1), timeout_s=300
        ) as client,
    ):
        records = mesh.view.instances(Role.WORKER)
        workers, addresses = [r.instance_id for r in records], [r.address for r in records]
        for number, at_once in itertools.product(range(rounds), AT_ONCE):
            stop = asyncio.Event()
            still = await read_all(client, work, workers, at_once, moving=False)
            probing = asyncio.create_task(probe(addresses, stop))
            moved = await read_all(client, work, workers, at_once, moving=True)
            stop.set()
            trips, steps = await probing
            result = {"at_once": at_once, **summary(still, moved, trips, steps)}
            result["failovers"] = (await client.status()).failovers
            results.append(result)
            line = "  ".join(f"{key} {result[key]}" for key in ("moves", "refused", "same_text", "failovers"))
            print(f"round {number + 1}  {at_once} at once  {line}")
            for key in (
                "stall_ms",
                "move_adds_ms",
                "token_gap_ms",
                "undisturbed_token_gap_ms",
                "source_stall_ms",
                "round_trip_ms",
            ):
                print(f"  {key:<26}" + "  ".join(f"{k} {v:7.1f}" for k, v in result[key].items()), flush=True)
    return {
        "model": MODEL,
        "workers": WORKERS,
        "streams": STREAMS,
        "move_every_tokens": MOVE_EVERY,
        "seed": SEED,
        "rounds": results,
    }


def summary(
    still: Sequence[Seen], moved: Sequence[Seen], trips: Sequence[float], steps: dict[str, float]
) -> dict[str, Any]:
    """A stall is the time between the last token of a reply at one worker and the first at the next, as seen by the client.

    It includes the decode step of the new token. The time added by a move is the stall minus the median gap of the same
    reply.
    """
    moves = [move for observed in moved for move in observed.moves]
    done = [move for move in moves if move.refusal is None]
    stalls = [s for observed in moved for s in observed.stalls]
    added = [s - statistics.median(observed.gaps) for observed in moved if observed.gaps for s in observed.stalls]
    gaps = [g for observed in moved for g in observed.gaps]
    allowed_ms = spread(gaps)["p99"] + spread(trips)["p99"]
    reasons: dict[str, int] = {}
    for move in moves:
        if move.refusal is not None:
            reasons[move.refusal] = reasons.get(move.refusal, 0) + 1
    return {
        "moves": len(done),
        "refused": len(moves) - len(done),
        "refusals": reasons,
        "streams_moved": sum(1 for observed in moved if observed.stalls),
        "same_text": sum(1 for a, b in zip(still, moved, strict=True) if a.text == b.text and a.tokens == b.tokens),
        "every_token_once": sum(1 for observed in moved if observed.whole),
        "tokens": sum(observed.tokens for observed in moved),
        "sent_bytes": sum(move.sent_bytes for move in done),
        "stall_ms": spread(stalls),
        "move_adds_ms": spread(added),
        "token_gap_ms": spread(gaps),
        "undisturbed_token_gap_ms": spread([g for observed in still for g in observed.gaps]),
        "source_stall_ms": spread([move.stall_s for move in done]),
        "decode_step_ms": 1000 * statistics.mean(steps.values()),
        "round_trip_ms": spread(trips),
        "stall_in_decode_steps_p50": spread(stalls)["p50"] / spread(gaps)["p50"],
        "allowed_p99_ms": allowed_ms,
        "stall_p99_within_a_step_and_a_round_trip": spread(stalls)["p99"] <= allowed_ms,
        "added_p99_within_a_step_and_a_round_trip": spread(added)["p99"] <= allowed_ms,
    }


def run(rounds: int) -> None:
    figures = asyncio.run(measure(rounds))
    path = report.write("migration", figures)
    kinds = {
        "between two tokens": "token_gap_ms",
        "across a move": "stall_ms",
        "what a move adds": "move_adds_ms",
        "round trip": "round_trip_ms",
    }
    places = [(at_once, p) for p in ("p50", "p99") for at_once in AT_ONCE]
    series: dict[str, list[tuple[float, float, float]]] = {}
    for label, key in kinds.items():
        values = [
            [result[key][p] for result in figures["rounds"] if result["at_once"] == at_once] for at_once, p in places
        ]
        series[label] = [median_and_range(v) for v in values]
    groups = [f"{p}, {at_once} at once" for at_once, p in places]
    plot = report.bars("migration", "Time between tokens", groups, series, "ms")
    print(f"{path}\n{plot}")
