"""Length stages in a running mesh: four workers of one model, with long and short replies that move between stages.

The same requests, with the same seeds, run twice through one router: without stages, then with two stages whose boundaries
the workers refine. The text must be the same, every token must arrive once, and the number of moves is in the output. Gaps
are the times between two frames as seen by the client; frames gather tokens for 20 ms.
"""

import asyncio
import dataclasses
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from grpc import aio

from benchmarks import report, workload
from benchmarks.meshes import CONFIDENCE, mesh_of
from benchmarks.spread import percentile
from penstock import AsyncClient, AsyncPlannerClient, Stage
from penstock.local.mesh import LocalMesh
from penstock.proto.common.v1 import common_pb2
from penstock.proto.router.v1 import router_pb2 as pb
from penstock.proto.router.v1 import router_pb2_grpc
from penstock.types.plans import QoeModel

MODEL = Path("models/family/small").resolve()
WORKERS, STREAMS, CONCURRENCY = 4, 200, 32
STAGES = (Stage(0, 256, 2), Stage(256, 2048, 2))
QOE = (0.0, 1e-3, 0.0, 0.0, 1e-5)  # by tokens attended to; a fitted model would move the boundaries elsewhere
REFINE_S, LOOK_S = 2.0, 0.2
SHORT, LONG, LONG_SHARE = (32, 128), (512, 1200), 0.25
SEED = 1


@dataclasses.dataclass
class Reply:
    """What a client saw. gaps, moved_gaps: between two frames, in seconds; the latter where the reply changed instances."""

    text: str = ""
    tokens: int = 0
    gaps: list[float] = dataclasses.field(default_factory=list)
    moved_gaps: list[float] = dataclasses.field(default_factory=list)
    changes: list[str] = dataclasses.field(default_factory=list)


CONTENT = {
    "name": "bench",
    "tiers": [{"name": "only", "model": str(MODEL), "workers": WORKERS, "max_running": CONCURRENCY}],
    "judge": CONFIDENCE,
    "stages": {"look_s": LOOK_S, "refine_s": REFINE_S},
}


async def _one(stub: Any, prompt: str, number: int, tokens: int) -> Reply:
    sampling = common_pb2.SamplingParams(temperature=0.8, seed=number, max_tokens=tokens, ignore_eos=True)
    reply, last_at, moved = Reply(), 0.0, False
    async for event in stub.Generate(
        pb.GenerateRequest(model="only", prompt=common_pb2.Prompt(text=prompt), sampling=sampling)
    ):
        match event.WhichOneof("event"):
            case "tokens":
                frame, now = event.tokens.frame, time.perf_counter()
                if frame.offset != reply.tokens:
                    raise RuntimeError(f"a frame at {frame.offset}, where {reply.tokens} was due")
                if last_at:
                    (reply.moved_gaps if moved else reply.gaps).append(now - last_at)
                last_at, moved = now, False
                reply.text += frame.text
                reply.tokens += len(frame.token_ids)
            case "instance_changed":
                reply.changes.append(event.instance_changed.reason)
                moved = True
    if reply.tokens != tokens:
        raise RuntimeError(f"{reply.tokens} tokens where {tokens} were asked for")
    return reply


async def _drive(address: str, prompts: list[str], lengths: list[int]) -> tuple[list[Reply], float]:
    places = asyncio.Semaphore(CONCURRENCY)
    async with aio.insecure_channel(address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)

        async def one(number: int) -> Reply:
            async with places:
                return await _one(stub, prompts[number], number, lengths[number])

        began = time.perf_counter()
        replies = await asyncio.gather(*(one(number) for number in range(len(prompts))))
        return replies, time.perf_counter() - began


async def _lay_out(mesh: LocalMesh, client: AsyncClient) -> None:
    async with AsyncPlannerClient(mesh.addresses.planner) as planner:
        plan = await planner.get_plan()
        tier = dataclasses.replace(plan.tiers[0], stages=STAGES, qoe=QoeModel(*QOE))
        await planner.set_plan(dataclasses.replace(plan, tiers=(tier,)))
    expected = [stage.instances for stage in STAGES]
    async for status in client.watch_status(0.1):
        current = Counter(i.place.stage for i in status.instances if i.place is not None)
        if [current[stage] for stage in range(len(STAGES))] == expected:
            return


async def _boundaries(client: AsyncClient, readings: list[tuple[float, dict[str, int]]]) -> None:
    """Record the boundary of each instance of a stage but the last, periodically."""
    began = time.perf_counter()
    async for status in client.watch_status(0.25):
        places = {i.instance_id: i.place for i in status.instances if i.place is not None}
        ends = {name: place.to_tokens for name, place in places.items() if place.stage < len(STAGES) - 1}
        readings.append((round(time.perf_counter() - began, 2), ends))


def _percentiles(values: list[float]) -> dict[str, float]:
    return {"count": len(values), "p50_s": percentile(values, 50) or 0.0, "p99_s": percentile(values, 99) or 0.0}


def _summary(replies: list[Reply], seconds: float) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "tokens_per_s": sum(r.tokens for r in replies) / seconds,
        "changes": dict(Counter(reason for r in replies for reason in r.changes)),
        "gaps": _percentiles([gap for r in replies for gap in r.gaps]),
        "gaps_at_moves": _percentiles([gap for r in replies for gap in r.moved_gaps]),
    }


async def measure() -> dict[str, Any]:
    draw = random.Random(SEED)
    prompts = workload.questions(STREAMS, SEED)
    lengths = [draw.randint(*(LONG if draw.random() < LONG_SHARE else SHORT)) for _ in prompts]
    boundaries: list[tuple[float, dict[str, int]]] = []
    async with mesh_of(CONTENT) as mesh, AsyncClient(mesh.addresses.grpc, admin=mesh.addresses.admin) as client:
        (address,) = mesh.addresses.grpc
        await _drive(address, prompts[:8], [16] * 8)  # every worker's first steps
        still, still_s = await _drive(address, prompts, lengths)
        await _lay_out(mesh, client)
        watch = asyncio.create_task(_boundaries(client, boundaries))
        moved, moved_s = await _drive(address, prompts, lengths)
        watch.cancel()
        status = await client.status()
    return {
        "same_text": sum(a.text == b.text for a, b in zip(still, moved, strict=True)),
        "streams": len(prompts),
        "migrations": status.migrations,
        "advice_unmet": status.advice_unmet,
        "failovers": status.failovers,
        "without_stages": _summary(still, still_s),
        "with_stages": _summary(moved, moved_s),
        "boundaries": boundaries,
    }


def _plot(boundaries: list[tuple[float, dict[str, int]]]) -> Path:
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for i, name in enumerate(sorted({name for _, ends in boundaries for name in ends})):
        points = [(at, ends[name]) for at, ends in boundaries if name in ends]
        axes.step(*zip(*points, strict=True), where="post", label=name, color=report.COLOURS[i % len(report.COLOURS)])
    axes.set_xlabel("seconds")
    axes.set_ylabel("tokens")
    axes.set_title("Where each instance of the first stage ends", loc="left")
    axes.legend(frameon=False)
    return report.save("stage_moves", figure)


def run(rounds: int) -> None:
    rows = []
    for _ in range(rounds):
        rows.append(asyncio.run(measure()))
        print(json.dumps({name: value for name, value in rows[-1].items() if name != "boundaries"}), flush=True)
    settings = {
        "workers": WORKERS,
        "concurrency": CONCURRENCY,
        "stages": [dataclasses.asdict(stage) for stage in STAGES],
        "refine_s": REFINE_S,
        "seed": SEED,
    }
    print(f"{report.write('stage_moves', {**settings, 'rows': rows})}\n{_plot(rows[-1]['boundaries'])}")
