"""SLOs between real processes: a router and two torch workers of the shipped large model, per batch policy, side by side.

Three meshes run at once and get the same requests in turns, so that disturbances of the machine affect all policies alike; a
mesh without requests uses no CPU. Objectives follow from what the machine does without load: the first token within 3 (5)
times its idle time, by the length of the prompt, and a token every 5 (10) times a lone decode step. Arrivals are bursts (five
to fifteen requests at once, exponential pauses) or steady (Poisson), at several shares of the rate that the mesh sustains.
Clocks are the client's; the pace is judged over every window of ten tokens. Goodput counts requests that attained both
objectives, per second; a request that failed is a miss. What no worker can keep is served as best effort.
"""

import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from google.protobuf.duration_pb2 import Duration
from grpc import aio

from benchmarks import report, workload
from benchmarks.spread import median_and_quartiles
from penstock.local import LocalMesh, MeshOptions
from penstock.proto.common.v1 import common_pb2
from penstock.proto.router.v1 import router_pb2 as pb
from penstock.proto.router.v1 import router_pb2_grpc
from services.domain.slo import AttainmentTracker

MODEL = Path("models/family/medium").resolve()
POLICIES = ("slo", "decode_first", "prefill_first")
SCALES = ((3.0, 5.0), (5.0, 10.0))
"""(times the idle first token, times a lone decode step)."""
LOADS = (0.6, 0.9, 1.2)  # shares of the rate that decode first sustains without objectives
BURST = (5, 15)  # requests that arrive at once
PROMPT_CHARS, OUTPUT_TOKENS = (40, 900), (16, 96)
REQUESTS, QUICK_REQUESTS = 120, 40  # of one run
IDLE_SAMPLES = 8
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
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        tier = {
            "name": "only",
            "model": str(MODEL),
            "workers": 2,
            "max_running": MAX_RUNNING,
            "max_queued": REQUESTS,
            "batch_policy": policy,
        }
        file = Path(folder) / "mesh.yaml"
        file.write_text(yaml.safe_dump({"name": f"bench-{policy.replace('_', '-')}", "tiers": [tier]}))
        async with (
            LocalMesh(MeshOptions(file, Path(folder), any_ports=True, log_level="warning")) as mesh,
            aio.insecure_channel(mesh.grpc_addresses[0]) as channel,
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
            temperature=0.8, seed=request.seed, max_output_tokens=request.output_tokens, ignore_eos=True
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
    for i in range(IDLE_SAMPLES + 2):
        for chars, firsts in ((PROMPT_CHARS[0], short), (PROMPT_CHARS[1], long)):
            times_s = list[float]()
            await _one(stub, Request(0.0, _prompt(draw, chars), 64, i), None, times_s)
            if i >= 2:  # the first ones warm it up
                firsts.append(times_s[0])
                gaps.append((times_s[-1] - times_s[0]) / (len(times_s) - 1))
    slope = max(0.0, statistics.median(long) - statistics.median(short)) / (PROMPT_CHARS[1] - PROMPT_CHARS[0])
    return Objectives(statistics.median(short) - slope * PROMPT_CHARS[0], slope, statistics.median(gaps))


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


async def measure(seeds: int, count: int, loads: Sequence[float]) -> dict[str, Any]:
    rows = list[dict[str, Any]]()
    async with AsyncExitStack() as stack:
        stubs = {policy: await stack.enter_async_context(_mesh(policy)) for policy in POLICIES}
        idle = await _idle(stubs["decode_first"], random.Random(0))
        for policy in POLICIES:  # every worker's first steps; and of the slo policy the length of replies
            await _run(stubs[policy], _requests(48, 0), None)
        _, took_s = await _run(stubs["decode_first"], _requests(48, 1), None)
        sustained = 48 / took_s
        print(f"idle: first token {1000 * idle.ttft_base_s:.1f} ms + {1e6 * idle.ttft_char_s:.0f} us per character, ")
        print(f"a decode step {1000 * idle.tpot_s:.2f} ms; sustained {sustained:.1f} requests/s", flush=True)
        for seed, bursty, load, scale in itertools.product(range(seeds), (True, False), loads, SCALES):
            rate = load * sustained
            first, pace = scale
            objectives = Objectives(first * idle.ttft_base_s, first * idle.ttft_char_s, pace * idle.tpot_s)
            requests = _arrivals(_requests(count, 100 + seed), rate, bursty, seed)
            for policy in random.Random(f"{seed} {load} {scale}").sample(POLICIES, len(POLICIES)):
                outcomes, _ = await _run(stubs[policy], requests, objectives)
                about = {"seed": seed, "bursty": bursty, "load": load, "scale": scale, "policy": policy}
                rows.append({**about, **_row(outcomes, requests, rate)})
                print(f"  {about}: attained {rows[-1]['attained']:.2f}", flush=True)
    return {
        "idle": {
            "first_token_s": idle.ttft_base_s,
            "first_token_char_s": idle.ttft_char_s,
            "decode_step_s": idle.tpot_s,
        },
        "sustained_per_s": sustained,
        "requests_per_run": count,
        "comparison": [_comparison(rows, bursty, scale, seeds) for bursty in (True, False) for scale in SCALES],
        "rows": rows,
    }


def _comparison(rows: Sequence[dict[str, Any]], bursty: bool, scale: tuple[float, float], seeds: int) -> dict[str, Any]:
    """Over the loads of each seed, the best goodput of the slo policy over that of the best other policy."""
    ratios = list[float]()
    for seed in range(seeds):
        best = {
            policy: max(
                row["goodput_per_s"]
                for row in rows
                if (row["seed"], row["bursty"], row["scale"], row["policy"]) == (seed, bursty, scale, policy)
            )
            for policy in POLICIES
        }
        others = max(best[policy] for policy in POLICIES if policy != "slo")
        ratios.append(best["slo"] / others if others else float(best["slo"] > 0))
    spread = median_and_quartiles(ratios)
    print(f"{'bursts' if bursty else 'steady'}, {scale}: {spread['median']:.2f}x the best other policy", flush=True)
    return {"bursty": bursty, "scale": scale, "over_best_other": spread, "of_each_seed": ratios}


def run(rounds: int) -> None:
    print(report.write("slo_live", asyncio.run(measure(rounds, REQUESTS, LOADS))))


def run_quick(_rounds: int) -> None:
    """One seed, one load, fewer requests; written to results/slo_live_quick.json."""
    print(report.write("slo_live_quick", asyncio.run(measure(1, QUICK_REQUESTS, LOADS[1:2]))))
