"""What deciding and planning under SLOs cost a worker's thread, and how soon a request is answered during a step.

Admission: ten new requests in addition to 200 running ones of three paces, some of whose prompts are being computed, at three
levels of load: each decision takes a snapshot, solves the program, replays the steps and applies the release times. Planning:
the table's part (deadlines to tokens, and the commit after the step), and all of `plan_step` and `commit` of the batch
scheduler, compared with decode first. Thread time, so that other processes do not count; contention for caches still does.
Answers: ten requests at once ask an engine whose steps take 100 ms, with 200 running; wall time, as the caller sees it.
"""

import asyncio
import math
import random
import statistics
import time
from collections.abc import Callable
from contextlib import aclosing

import numpy as np

from benchmarks import report
from penstock.services.domain.latency import StepLatencyModel
from penstock.services.domain.slo.compiled.layout import Kv, StepModel, step_model
from penstock.services.domain.slo.compiled.table import RequestTable, TableRequest, decide
from penstock.types.prompts import TokenPrompt
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.types.slo import Slo, SloClass, SloPhase
from penstock.types.workers import Admitted
from penstock.worker_service.engine.loop import LoopEngine
from penstock.worker_service.engine.simulated.engine import SimulatedEngineOptions, simulated_engine
from penstock.worker_service.scheduling.batching import BatchLimits, BatchScheduler
from penstock.worker_service.scheduling.blocks import BlockPool
from penstock.worker_service.scheduling.policies import DecodeFirst, PolicyName
from penstock.worker_service.scheduling.sequence import Sequence, SequenceSlo
from penstock.worker_service.scheduling.slo_policy import SloPolicy
from penstock.worker_service.scheduling.steps import BatchPolicy

RUNNING, NEW, PACES_S = 200, 10, (0.05, 0.075, 0.1)
LATENCY = StepLatencyModel((0.0, 64.0, 512.0, 4096.0), (0.011, 0.012, 0.031, 0.21), 6e-8, 1e-9)
"""Of the kind of a 7B model on one A100: a step of 512 tokens takes 31 ms."""
MAX_STEP_TOKENS = 2048
DECISIONS, STEPS = 400, 400  # per round
STEP_S = 0.1  # of the engine that is asked during its steps
ANSWERED = 100  # requests that ask it, per round
SCENES = 40  # different sets of running requests
ACTIVE_PROMPTS = 6  # of those running
TIGHTNESS = (0.1, 0.3, 1.0)
"""Of the deadlines of new requests: from all prompts within 0.3 s, which is impossible, to 3 s."""


def running_table(rng: np.random.Generator, now_s: float) -> RequestTable:
    """200 admitted requests, a few with their prompts active; contexts and replies as in a chat workload."""
    table = RequestTable()
    for i in range(RUNNING):
        tpot_s = PACES_S[i % len(PACES_S)]
        decoding = i < RUNNING - ACTIVE_PROMPTS
        request = TableRequest(
            f"r{i}",
            pending_tokens=1 if decoding else int(rng.integers(20, 200)),
            output_tokens=int(rng.integers(20, 500)),
            due_s=now_s + (tpot_s if decoding else float(rng.uniform(1.0, 2.0))),
            tpot_s=tpot_s,
            context_tokens=int(rng.integers(100, 1600)) if decoding else 0,
            decoding=decoding,
        )
        table.append(request, SloClass.STANDARD)
    return table


def candidates(rng: np.random.Generator, now_s: float, tightness: float) -> list[TableRequest]:
    return [
        TableRequest(
            f"n{i}",
            pending_tokens=int(rng.integers(100, 1600)),
            output_tokens=int(rng.integers(50, 500)),
            due_s=now_s + float(rng.uniform(0.5, 3.0)) * tightness,
            tpot_s=PACES_S[int(rng.integers(len(PACES_S)))],
        )
        for i in range(NEW)
    ]


def timed_ms(work: Callable[[], object]) -> float:
    began = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - began) / 1e6


def decisions(model: StepModel, seed: int) -> tuple[list[float], dict[str, float]]:
    """Milliseconds of each decision; what was decided on average."""
    rng = np.random.default_rng(seed)
    tables = [running_table(rng, 0.0) for _ in range(SCENES)]
    unlimited = [decide(0.0, t.snapshot(), [], model, Kv(1e9, 0)) for t in tables]
    held = [round(decision.kv_tokens) for decision in unlimited]  # by those that run already
    took, admitted, replays = list[float](), list[int](), list[int]()
    for k in range(DECISIONS):
        table, new = tables[k % SCENES], candidates(rng, 0.0, TIGHTNESS[k % 3])
        kv = Kv(float(held[k % SCENES] + (8_000 if k % 2 else 100_000)), 0)  # binds in every other decision

        def work(table: RequestTable = table, new: list[TableRequest] = new, kv: Kv = kv) -> None:
            decision = decide(0.0, table.snapshot(), new, model, kv)
            table.apply(decision)
            admitted.append(sum(decision.admitted))
            replays.append(decision.replays)

        took.append(timed_ms(work))
    return took, {
        "admitted_of_10": statistics.fmean(admitted),
        "replays": statistics.fmean(replays),
        "most_replays": max(replays),
    }


def table_steps(model: StepModel, seed: int) -> list[float]:
    """Milliseconds of the table's plan and commit, per step."""
    rng = np.random.default_rng(seed)
    took, table, now_s = list[float](), running_table(rng, 0.0), 0.0
    for _ in range(STEPS):
        ends = 0.0

        def work(now_s: float = now_s) -> None:
            nonlocal ends
            planned_s = table.plan(now_s, model, Kv(math.inf, 0))
            ends = now_s + planned_s
            table.commit(ends)

        took.append(timed_ms(work))
        now_s = ends
    return took


def scheduler_steps(policy: BatchPolicy, slos: bool) -> list[float]:
    """Milliseconds of plan_step and commit of the worker's scheduler with 200 decodes, per step."""
    scheduler = BatchScheduler(BatchLimits(RUNNING, MAX_STEP_TOKENS), BlockPool(RUNNING * 64, 16, reuse=False), policy)
    took, now_s = list[float](), 0.0
    for i in range(RUNNING):
        slo = SequenceSlo(1e6, PACES_S[i % len(PACES_S)], 800) if slos else None
        scheduler.add(Sequence(f"r{i}", [i] * 64, SamplingParams(), max_output_tokens=800, slo=slo))
        if i % 50 == 49:
            for _ in range(8):
                now_s = step(scheduler, now_s)
    if len(scheduler.running) != RUNNING:
        raise RuntimeError(f"{len(scheduler.running)} requests run, not {RUNNING}")
    for _ in range(STEPS):
        ends = now_s

        def work(now_s: float = now_s) -> None:
            nonlocal ends
            ends = step(scheduler, now_s)

        took.append(timed_ms(work))
        now_s = ends
    return took


def step(scheduler: BatchScheduler, now_s: float) -> float:
    scheduler.policy.decide(scheduler, now_s)
    plan = scheduler.plan_step(now_s=now_s)
    ends = now_s + LATENCY.base_s(plan.tokens)
    scheduler.commit(plan, {c.sequence.request_id: (7,) for c in plan.chunks if c.logits}, ends)
    return ends


async def answers(rounds: int) -> list[list[float]]:
    """Milliseconds from asking the engine to the answer, of ten requests at once, per round."""
    options = SimulatedEngineOptions(
        "slow",
        StepLatencyModel.linear(STEP_S, 0.0, 0.0),
        kv_tokens=400_000,
        max_running=2 * RUNNING,
        max_queued=2 * RUNNING,
        max_step_tokens=MAX_STEP_TOKENS,
        batch_policy=PolicyName.SLO,
        best_effort_reserve=0.05,
    )
    engine = simulated_engine(options)
    await engine.start()
    tasks = list[asyncio.Task[float]]()
    try:
        for i in range(RUNNING):
            tasks.append(asyncio.create_task(_answered_ms(engine, f"r{i}", 8000)))
        while len(engine.load().running_tokens) < RUNNING:
            await asyncio.sleep(STEP_S)
        took = list[list[float]]()
        for k in range(rounds):
            one = list[float]()
            for i in range(ANSWERED // NEW):
                await asyncio.sleep(STEP_S * random.Random(f"{k} {i}").random())
                new = [_answered_ms(engine, f"n{k}-{i}-{j}", 1) for j in range(NEW)]
                one += await asyncio.gather(*new)
            took.append(one)
        return took
    finally:
        await engine.close()
        await asyncio.gather(*tasks)


async def _answered_ms(engine: LoopEngine, name: str, output_tokens: int) -> float:
    """Milliseconds until the engine answers; returns when the reply has ended."""
    sampling = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    prompt = TokenPrompt(tuple(97 + (i * 7) % 26 for i in range(50)))
    slo = Slo(1000.0, (SloPhase(0, 10 * STEP_S),))
    began_s, answered_s = time.perf_counter(), 0.0
    async with aclosing(engine.generate(GenerationRequest(name, prompt, sampling, slo=slo))) as events:
        async for event in events:
            if isinstance(event, Admitted):
                answered_s = time.perf_counter() - began_s
    return 1e3 * answered_s


def row(name: str, rounds: list[list[float]]) -> dict[str, object]:
    """Percentiles over all rounds, and the p99 of each."""
    every = np.array([ms for one in rounds for ms in one])
    figures = {
        "name": name,
        "samples": len(every),
        "mean_ms": float(every.mean()),
        "p50_ms": float(np.percentile(every, 50)),
        "p99_ms": float(np.percentile(every, 99)),
        "p99_of_each_round_ms": [float(np.percentile(one, 99)) for one in rounds],
    }
    print(f"{name}: p50 {figures['p50_ms']:.3f} ms, p99 {figures['p99_ms']:.3f} ms", flush=True)
    return figures


def run(rounds: int) -> None:
    model = step_model(LATENCY, MAX_STEP_TOKENS, 0.05, places=RUNNING + 64)
    decisions(model, 0), table_steps(model, 0)  # compile
    decided = [decisions(model, seed) for seed in range(rounds)]
    for _, means in decided:
        print(f"  admitted {means['admitted_of_10']:.1f} of 10 with {means['replays']:.1f} replays", flush=True)
    rows = [
        row("admission of 10 with 200 running", [took for took, _ in decided]),
        row("table: plan and commit, 200", [table_steps(model, seed) for seed in range(rounds)]),
        row(
            "scheduler, slo: plan and commit, 200",
            [scheduler_steps(SloPolicy(LATENCY, 0.05), True) for _ in range(rounds)],
        ),
        row(
            "scheduler, decode first: plan and commit, 200",
            [scheduler_steps(DecodeFirst(), False) for _ in range(rounds)],
        ),
        row("answers during steps of 100 ms, 200 running", asyncio.run(answers(rounds))),
    ]
    about = {
        "running": RUNNING,
        "new": NEW,
        "paces_s": PACES_S,
        "clock": "thread time; of answers wall time",
        "decided": [m for _, m in decided],
    }
    print(report.write("slo_admission", {**about, "rows": rows}))
