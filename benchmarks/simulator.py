"""The simulator against the torch engine: the same requests in real time and in virtual time.

A profile of the engine is measured and fitted first, on batches of its own; then, over a grid of loads, lengths and chunk
sizes that the fit has not seen, requests with random prompts arrive at the engine in real time. Compared are p50 and p95 of
time to first token and time per output token, and throughput.
"""

import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from planner_service.profiles import fit_latency
from planner_service.simulator import EngineLimits, Replica, Served, Workload, serve
from planner_service.simulator import report as reported
from services.clock import SystemClock
from services.domain.hardware import ReplicaShape
from services.domain.latency import StepLatencyModel
from services.domain.requests import GenerationRequest, SamplingParams, TokenFrame, TokenPrompt
from worker_service.engine.core import EngineCore
from worker_service.engine.torch import TorchEngineOptions
from worker_service.engine.torch.engine import torch_core
from worker_service.profile import measure

MODEL = Path("models/family/large")
KV_TOKENS, MAX_RUNNING = 32_768, 32
REQUESTS = 80
LENGTHS = {"chat": ((30, 120), (60, 160)), "documents": ((250, 900), (10, 60))}  # prompt, reply: from, to
CHUNKS = (128, 512)
LOADS = (0.4, 0.7, 0.9)  # of the capacity that the simulator sees
SEED = 11


def core_for(chunk: int) -> EngineCore:
    options = TorchEngineOptions(
        MODEL,
        "large",
        kv_tokens=KV_TOKENS,
        max_running=MAX_RUNNING,
        max_queued=10_000,
        max_step_tokens=chunk,
        threads=1,
    )
    return torch_core(options, SystemClock())[0]


def workload(kind: str, rate: float, rng: np.random.Generator) -> Workload:
    (p0, p1), (o0, o1) = LENGTHS[kind]
    arrivals = np.cumsum(rng.exponential(1 / rate, REQUESTS))
    return Workload(arrivals - arrivals[0], rng.integers(p0, p1, REQUESTS), rng.integers(o0, o1, REQUESTS))


def run_engine(core: EngineCore, work: Workload, seed: int) -> Served:
    """Real time: requests are added when they are due, steps follow each other without a pause."""
    rng, vocab = random.Random(seed), core.tokenizer.vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(n)] for n in work.input_tokens.tolist()]
    first, finish = np.zeros(len(work)), np.zeros(len(work))
    steps, began, due = core.steps, time.perf_counter(), 0
    while due < len(work) or not core.idle:
        now = time.perf_counter() - began
        while due < len(work) and work.arrival_s[due] <= now:
            sampling = SamplingParams(temperature=0.0, max_output_tokens=int(work.output_tokens[due]), ignore_eos=True)
            core.add(GenerationRequest(str(due), TokenPrompt(tuple(prompts[due])), sampling), prompts[due])
            due += 1
        if core.idle:
            time.sleep(max(0.0, work.arrival_s[due] - (time.perf_counter() - began)))
            continue
        events = core.step()
        now = time.perf_counter() - began
        for name, event in events:
            if isinstance(event, TokenFrame):
                r = int(name)
                first[r] = first[r] or now
                finish[r] = now
    return Served(first, finish, np.zeros(len(work), np.int64), 0.0, core.steps - steps, 0)


def compared(real: dict[str, float], simulated: dict[str, float]) -> dict[str, float]:
    """Relative errors."""
    return {name: abs(simulated[name] - real[name]) / real[name] for name in real}


def figures_of(work: Workload, served: Served) -> dict[str, float]:
    found = reported(work, served)
    return {
        "ttft_p50": found.ttft.p50,
        "ttft_p95": found.ttft.p95,
        "tpot_p50": found.tpot.p50,
        "tpot_p95": found.tpot.p95,
        "output_tokens_per_s": found.output_tokens_per_s,
    }


def replica(latency: StepLatencyModel, chunk: int) -> Replica:
    return Replica(ReplicaShape(1, 1), latency, KV_TOKENS, EngineLimits(MAX_RUNNING, chunk, 16))


def run(rounds: int) -> None:
    """`rounds` is how often the profile is measured; the grid is run once."""
    samples = [sample for i in range(rounds) for sample in measure(core_for(512), seed=i)]
    latency, fit_error = fit_latency([(s.load, s.seconds) for s in samples])
    print(f"profile: {len(samples)} samples, mean error of the fit {fit_error:.1%}", flush=True)
    cells: list[dict[str, Any]] = []
    for chunk in CHUNKS:
        core = core_for(chunk)
        for kind, ((p0, p1), (o0, o1)) in LENGTHS.items():
            for load in LOADS:
                rng = np.random.default_rng([SEED, chunk, len(kind), int(load * 100)])
                one = replica(latency, chunk)
                rate = load * one.capacity_per_s((p0 + p1) / 2, (o0 + o1) / 2)
                work = workload(kind, rate, rng)
                real, simulated = figures_of(work, run_engine(core, work, SEED)), figures_of(work, serve(work, [one]))
                errors = compared(real, simulated)
                cells.append(
                    {"chunk": chunk, "lengths": kind, "load": load, "rate_per_s": rate}
                    | {"engine": real, "simulator": simulated, "error": errors}
                )
                said = "  ".join(f"{name} {value:.1%}" for name, value in errors.items())
                print(f"chunk {chunk:<4} {kind:<10} load {load}  {said}", flush=True)
    names = list(cells[0]["error"])
    mean = {name: statistics.mean(cell["error"][name] for cell in cells) for name in names}
    path = report.write(
        "simulator",
        {
            "model": str(MODEL),
            "seed": SEED,
            "requests": REQUESTS,
            "fit_error": fit_error,
            "mean_error": mean,
            "mean_error_overall": statistics.mean(mean.values()),
            "cells": cells,
        },
    )
    series = {
        f"chunk {chunk}": [_spread([100 * c["error"][name] for c in cells if c["chunk"] == chunk]) for name in names]
        for chunk in CHUNKS
    }
    plot = report.bars(
        "simulator", "Simulator against the torch engine", [n.replace("_", " ") for n in names], series, "error, %"
    )
    print(f"mean error {statistics.mean(mean.values()):.1%}: {mean}\n{path}\n{plot}")


def _spread(values: list[float]) -> tuple[float, float, float]:
    return statistics.mean(values), min(values), max(values)
