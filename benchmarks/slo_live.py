"""SLOs between real processes: a router and two torch workers of the shipped large model, per batch policy, side by side.

Three meshes run at once and get the same requests in turns; a mesh without requests uses no CPU. Arrivals are bursts (five to
fifteen requests at once, exponential pauses) or steady (Poisson). Clocks are the client's; the pace is judged over every
window of ten tokens. Goodput counts requests that attained both objectives, per second; a request that failed is a miss. What
no worker can keep is served as best effort.

The speed of a machine drifts, and with it what load and which objectives mean. So a run consists of short rounds, and every
cell of a round (arrivals, objectives, load) begins with measuring what holds now: the first token and a lone decode step of
an idle mesh, of which the objectives are multiples (3 and 5, or 5 and 10), and the rate that decode first sustains, of which
the load is a share. Before and after a cell a fixed piece of work is timed; cells during which it changed by more than a
quarter are left out. Policies are compared within a round; intervals are over rounds. Rounds continue until the time is
up, and results are written after each.
"""

import asyncio
import itertools
import random
import statistics
import time
import timeit
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from google.protobuf.duration_pb2 import Duration
from grpc import aio

from benchmarks import report, workload
from benchmarks.meshes import mesh_of
from benchmarks.spread import median_and_quartiles
from penstock.proto.common.v1 import common_pb2
from penstock.proto.router.v1 import router_pb2 as pb
from penstock.proto.router.v1 import router_pb2_grpc
from penstock.services.domain.slo.attainment import AttainmentTracker

MODEL = Path("models/family/large").resolve()
POLICIES = ("slo", "decode_first", "prefill_first")
SCALES = ((3.0, 5.0), (5.0, 10.0))
"""(times the idle first token, times a lone decode step)."""
LOADS = (0.8, 1.1)  # shares of the rate that decode first sustains without objectives
BURST = (5, 15)  # requests that arrive at once
PROMPT_CHARS, OUTPUT_TOKENS = (40, 900), (16, 96)
REQUESTS, QUICK_REQUESTS = 60, 30  # of one run
SUSTAINED_REQUESTS = 24  # at once
IDLE_SAMPLES, IDLE_TOKENS = 3, 32
LONGEST_S, QUICK_S = 1500.0, 150.0  # no round begins that would probably end later
MOST_DRIFT = 1.25  # of the fixed piece of work, within a cell
BOOTSTRAPS = 2000
MAX_RUNNING = 16
LIMIT_S = 300.0  # of one request


@dataclass(frozen=True, slots=True)
class Request:
    """arrival_s: after the start of the run."""

    arrival_s: float
    prompt: str
    output_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Objectives:
    """Seconds. The first token is due after ttft_base_s, and ttft_char_s for each character of the prompt."""

    ttft_base_s: float
    ttft_char_s: float
    tpot_s: float

    def ttft_s(self, request: Request) -> float:
        return self.ttft_base_s + self.ttft_char_s * len(request.prompt)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request as its client saw it. promised: whether a worker promised to keep its SLO."""

    attained: bool
    first_token_s: float
    promised: bool
    tokens: int


@asynccontextmanager
async def _mesh(policy: str) -> AsyncIterator[Any]:
    """A stub of the router of a mesh with this policy."""
    tier = {
        "name": "only",
        "model": str(MODEL),
        "workers": 2,
        "max_running": MAX_RUNNING,
        "max_queued": REQUESTS,
        "batch_policy": policy,
    }
    async with (
        mesh_of({"name": f"bench-{policy.replace('_', '-')}", "tiers": [tier]}) as mesh,
        aio.insecure_channel(mesh.addresses.grpc[0]) as channel,
    ):
        yield router_pb2_grpc.RouterServiceStub(channel)


def _duration(seconds: float) -> Duration:
    value = Duration()
    value.FromNanoseconds(round(seconds * 1e9))
    return value


async def _one(stub: Any, request: Request, objectives: Objectives | None, times_s: list[float]) -> Outcome:
    """Send one request now. times_s: to be filled with the time of each token, from now."""
    message = pb.GenerateRequest(
        model="only",
        prompt=common_pb2.Prompt(text=request.prompt),
        sampling=common_pb2.SamplingParams(
            temperature=0.8, seed=request.seed, max_tokens=request.output_tokens, ignore_eos=True
        ),
    )
    if objectives is not None:
        message.slo.time_to_first_token.CopyFrom(_duration(objectives.ttft_s(request)))
        message.slo.phases.add(time_per_output_token=_duration(objectives.tpot_s))
    tracker = AttainmentTracker(None if objectives is None else objectives.ttft_s(request))
    began, promised = time.perf_counter(), False
    async for event in stub.Generate(message, timeout=LIMIT_S):
        kind = event.WhichOneof("event")
        if kind == "tier_admitted":
            promised = promised or event.tier_admitted.slo_kept
        elif kind == "tokens":
            now_s = time.perf_counter() - began
            for _ in event.tokens.frame.token_ids:
                tracker.token(now_s, None if objectives is None else objectives.tpot_s)
                times_s.append(now_s)
    complete = len(times_s) == request.output_tokens
    return Outcome(
        objectives is not None and complete and tracker.result().attained,
        times_s[0] if times_s else LIMIT_S,
        promised,
        len(times_s),
    )


async def _idle(stub: Any, draw: random.Random) -> Objectives:
    """What the mesh does without load: the time to the first token by the prompt's length, and a lone decode step."""
    short, long, gaps = list[float](), list[float](), list[float]()
    for i in range(IDLE_SAMPLES):
        for chars, firsts in ((PROMPT_CHARS[0], short), (PROMPT_CHARS[1], long)):
            times_s = list[float]()
            await _one(stub, Request(0.0, _prompt(draw, chars), IDLE_TOKENS, i), None, times_s)
            firsts.append(times_s[0])
            gaps.append((times_s[-1] - times_s[0]) / (len(times_s) - 1))
    slope = max(0.0, statistics.median(long) - statistics.median(short)) / (PROMPT_CHARS[1] - PROMPT_CHARS[0])
    return Objectives(statistics.median(short) - slope * PROMPT_CHARS[0], slope, statistics.median(gaps))


async def _sustained_per_s(stub: Any, seed: int) -> float:
    requests = _requests(SUSTAINED_REQUESTS, seed)
    _, took_s = await _run(stub, requests, None)
    return len(requests) / took_s


def _work_s() -> float:
    """Wall time of a fixed piece of work: the least of three, so that a moment's disturbance does not count."""
    return min(timeit.repeat("sum(i * i for i in range(100_000))", number=1, repeat=3))


def _prompt(draw: random.Random, chars: int) -> str:
    """Held-out questions, one after the other, cut to a length."""
    text = ""
    while len(text) < chars:
        text += " ".join(workload.questions(8, draw.randrange(10**6))) + " "
    return text[:chars]


def _requests(count: int, seed: int) -> list[Request]:
    """Requests without arrivals."""
    draw = random.Random(seed)
    return [
        Request(0.0, _prompt(draw, draw.randint(*PROMPT_CHARS)), draw.randint(*OUTPUT_TOKENS), i) for i in range(count)
    ]


def _arrivals(requests: Sequence[Request], rate: float, bursty: bool, seed: int) -> list[Request]:
    """The requests at so many per second on average."""
    draw, at_s, timed = random.Random(seed), 0.0, list[Request]()
    while len(timed) < len(requests):
        size = draw.randint(*BURST) if bursty else 1
        timed += [replace(request, arrival_s=at_s) for request in requests[len(timed) : len(timed) + size]]
        at_s += draw.expovariate(rate / size)
    return timed


async def _run(stub: Any, requests: Sequence[Request], objectives: Objectives | None) -> tuple[list[Outcome], float]:
    """Send the requests at their times; the outcomes, and the seconds until the last one has ended."""
    loop = asyncio.get_running_loop()
    began_s = loop.time() + 0.1

    async def one(request: Request) -> Outcome:
        await asyncio.sleep(max(0.0, began_s + request.arrival_s - loop.time()))
        try:
            return await _one(stub, request, objectives, [])
        except aio.AioRpcError:
            return Outcome(False, LIMIT_S, False, 0)

    outcomes = await asyncio.gather(*(one(request) for request in requests))
    return outcomes, loop.time() - began_s


def _row(outcomes: Sequence[Outcome], requests: Sequence[Request], rate: float) -> dict[str, Any]:
    """Goodput is the offered rate times the share of requests that attained their objectives."""
    attained, promised = sum(o.attained for o in outcomes), sum(o.promised for o in outcomes)
    return {
        "attained": attained / len(requests),
        "goodput_per_s": rate * attained / len(requests),
        "promised": promised / len(requests),
        "promises_attained": sum(o.attained for o in outcomes if o.promised) / promised if promised else None,
        "complete": sum(o.tokens == r.output_tokens for o, r in zip(outcomes, requests, strict=True)),
        "first_token_s": median_and_quartiles([o.first_token_s for o in outcomes]),
    }


@dataclass(frozen=True, slots=True)
class Cell:
    """Arrivals and objectives. scale: see SCALES. load: share of the sustained rate."""

    bursty: bool
    scale: tuple[float, float]
    load: float


async def _cell(stubs: dict[str, Any], cell: Cell, number: int, count: int) -> list[dict[str, Any]]:
    """Measure what holds now, then every policy in turn; a row per policy."""
    draw, work_s = random.Random(f"{number} {cell}"), _work_s()
    idle = await _idle(stubs["decode_first"], draw)
    sustained = await _sustained_per_s(stubs["decode_first"], number)
    first, pace = cell.scale
    objectives = Objectives(first * idle.ttft_base_s, first * idle.ttft_char_s, pace * idle.tpot_s)
    rate = cell.load * sustained
    requests = _arrivals(_requests(count, 100 + number), rate, cell.bursty, number)
    rows = list[dict[str, Any]]()
    for policy in draw.sample(POLICIES, len(POLICIES)):
        outcomes, _ = await _run(stubs[policy], requests, objectives)
        rows.append({"round": number, **asdict(cell), "policy": policy, **_row(outcomes, requests, rate)})
    drift = _work_s() / work_s
    about = {
        "idle_first_token_s": idle.ttft_base_s + idle.ttft_char_s * PROMPT_CHARS[1],
        "idle_decode_step_s": idle.tpot_s,
        "sustained_per_s": sustained,
        "work_s": work_s,
        "drift": drift,
        "counts": 1 / MOST_DRIFT <= drift <= MOST_DRIFT,
    }
    shares = ", ".join(f"{row['policy']} {row['attained']:.2f}" for row in rows)
    print(f"  round {number} {cell}: attained {shares}; drift {drift:.2f}", flush=True)
    return [{**row, **about} for row in rows]


async def measure(name: str, count: int, loads: Sequence[float], limit_s: float, rounds: int) -> dict[str, Any]:
    """Rounds until the time is up, at most so many; writes what there is after each."""
    rows, began_s, longest_s = list[dict[str, Any]](), time.monotonic(), 0.0
    figures = dict[str, Any]()
    async with AsyncExitStack() as stack:
        stubs = {policy: await stack.enter_async_context(_mesh(policy)) for policy in POLICIES}
        for policy in POLICIES:  # every worker's first steps; and of the slo policy the length of replies
            await _run(stubs[policy], _requests(48, 0), None)
        for number in range(rounds):
            round_s = time.monotonic()
            if number and round_s - began_s + longest_s > limit_s:
                break
            cells = [Cell(*values) for values in itertools.product((True, False), SCALES, loads)]
            for cell in random.Random(number).sample(cells, len(cells)):
                rows += await _cell(stubs, cell, number, count)
            longest_s = max(longest_s, time.monotonic() - round_s)
            figures = {
                "requests_per_run": count,
                "loads": loads,
                "rounds": number + 1,
                "cells_left_out": sum(not row["counts"] for row in rows) // len(POLICIES),
                "comparison": [comparison(rows, *values) for values in itertools.product((True, False), SCALES)],
                "rows": rows,
            }
            report.write(name, figures)
    return figures


def comparison(rows: Sequence[dict[str, Any]], bursty: bool, scale: tuple[float, float]) -> dict[str, Any]:
    """The goodput of the slo policy over that of the best other one: of each round the best over its loads, as a share of
    what was sustained then, summed over the rounds; with a 95 % interval by drawing rounds."""
    rounds = list[dict[str, float]]()
    for number in sorted({row["round"] for row in rows}):
        own = [
            row
            for row in rows
            if row["counts"] and (row["round"], row["bursty"], tuple(row["scale"])) == (number, bursty, scale)
        ]
        if own:
            shares = [(row["policy"], row["goodput_per_s"] / row["sustained_per_s"]) for row in own]
            rounds.append({policy: max(share for name, share in shares if name == policy) for policy in POLICIES})
    ratio = _over_best_other(rounds)
    draw = random.Random(7)
    drawn = sorted(
        one
        for _ in range(BOOTSTRAPS if rounds else 0)
        if (one := _over_best_other([draw.choice(rounds) for _ in rounds])) is not None
    )
    spread = (drawn[len(drawn) // 40], drawn[-1 - len(drawn) // 40]) if drawn else None
    message = "the others attained nothing"
    if ratio is not None and spread is not None:
        message = f"{ratio:.2f}x ({spread[0]:.2f} to {spread[1]:.2f}) the best other policy"
    print(f"{'bursts' if bursty else 'steady'}, {scale}: {message}", flush=True)
    means = {policy: statistics.fmean(one[policy] for one in rounds) for policy in POLICIES} if rounds else {}
    return {
        "bursty": bursty,
        "scale": scale,
        "over_best_other": ratio,
        "interval": spread,
        "goodput_over_sustained": means,
    }


def _over_best_other(rounds: Sequence[dict[str, float]]) -> float | None:
    """None where no other policy attained anything."""
    others = max((sum(one[policy] for one in rounds) for policy in POLICIES if policy != "slo"), default=0.0)
    return sum(one["slo"] for one in rounds) / others if others > 0 else None


def run(rounds: int) -> None:
    """As many rounds as fit in 25 minutes; `rounds` is not used."""
    del rounds
    asyncio.run(measure("slo_live", REQUESTS, LOADS, LONGEST_S, 99))


def run_quick(_rounds: int) -> None:
    """One load, fewer requests, for two and a half minutes; written to results/slo_live_quick.json."""
    asyncio.run(measure("slo_live_quick", QUICK_REQUESTS, LOADS[:1], QUICK_S, 99))
