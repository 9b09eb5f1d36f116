"""The simulator against the torch engine: the same requests in the engine's time and in virtual time.

Over a grid of loads, lengths and chunk sizes, requests with random prompts arrive at the engine. Compared are p50 and p95 of
time to first token and time per output token, and throughput. The simulator's step times come from a profile on batches of
its own, which knows nothing of the grid. Two things keep the machine out of the comparison, as far as it goes:
- The engine's time is the CPU time of its one thread, and waiting for the next arrival is skipped: what other processes take
  of the machine does not count.
- The machine's speed drifts within seconds. So the profile is not taken before the run but in turns with it: every SLICE_S
  the engine's time is held and steps of a second engine are profiled for PROFILE_SHARE as long.
Each cell is run `rounds` times. The latency model's shape is fitted to the profiles of all runs of an engine, that is, of a
chunk size; how fast the machine is in one run is a factor on it, the seconds that the run's own part of the profile took over
those that the shape says. The simulator foretells every run, and the medians of what it foretells are compared with the
medians of what was measured. Nothing that is compared is used to make the forecast.

Two more replays show the causes of errors. The worker's scheduler under the step times as they were measured, one
by one, must end every request when the engine did: the schedule has no part in the error. And the simulator with the latency
model fitted to the run's own steps, which is no forecast (`form`): what is left is what such a model cannot say, steps that
take longer by chance included. `spread_of_rounds` is how far the engine is from itself.
"""

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.stepwise import replay
from penstock.planner_service.simulator import EngineLimits, Replica, Served, Workload, serve
from penstock.planner_service.simulator import report as reported
from penstock.planner_service.simulator.workload import Floats
from penstock.services.clock import Clock
from penstock.services.domain.hardware import ReplicaShape
from penstock.services.domain.latency import StepLatencyModel, StepLoad
from penstock.services.domain.latency_fit import STALL, fit_latency
from penstock.types.prompts import TokenPrompt
from penstock.types.replies import TokenFrame
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.worker_service.engine.core import EngineCore
from penstock.worker_service.engine.profile import timed_steps
from penstock.worker_service.engine.torch.engine import TorchEngineOptions, torch_core

MODEL = Path("models/family/medium")
KV_TOKENS, MAX_RUNNING = 32_768, 32
REQUESTS = 80
LENGTHS = {"chat": ((30, 120), (60, 160)), "documents": ((250, 900), (10, 60))}  # prompt, reply: from, to
CHUNKS = (128, 512)
LOADS = (0.4, 0.7, 0.9)  # of the capacity that the simulator sees
SEED = 11
SLICE_S = 0.05
PROFILE_SHARE = 0.5

Sample = tuple[StepLoad, float]


class EngineTime(Clock):
    """Seconds of a clock, less those while it was held, and the idle seconds that were skipped.

    read: the clock; by default the CPU time of this thread.
    """

    def __init__(self, read: Callable[[], float] = time.thread_time) -> None:
        self._read = read
        self._offset = -read()

    def now(self) -> float:
        return self._read() + self._offset

    def wall(self) -> float:
        return self.now()

    def sleep(self, seconds: float) -> None:
        self._offset += max(0.0, seconds)

    @contextmanager
    def held(self) -> Iterator[None]:
        at = self.now()
        yield
        self._offset = at - self._read()


@dataclass
class Run:
    """One run of a cell. steps: load and seconds of each, from the end of the one before or the arrival it waited for.

    schedule_off_s: by how much any request ended elsewhere when the scheduler was replayed under these seconds.
    """

    served: Served
    steps: list[Sample]
    profile: list[Sample]
    schedule_off_s: float


@dataclass
class Cell:
    """One setting of the grid."""

    chunk: int
    lengths: str
    load: float
    work: Workload
    rate_per_s: float
    runs: list[Run] = field(default_factory=list)


def core_for(chunk: int, clock: Clock) -> EngineCore:
    options = TorchEngineOptions(
        MODEL,
        "large",
        kv_tokens=KV_TOKENS,
        max_running=MAX_RUNNING,
        max_queued=10_000,
        max_step_tokens=chunk,
        threads=1,
    )
    return torch_core(options, clock)[0]


def workload(kind: str, rate: float, rng: np.random.Generator) -> Workload:
    (p0, p1), (o0, o1) = LENGTHS[kind]
    arrivals = np.cumsum(rng.exponential(1 / rate, REQUESTS))
    return Workload(arrivals - arrivals[0], rng.integers(p0, p1, REQUESTS), rng.integers(o0, o1, REQUESTS))


def profiled(core: EngineCore, seed: int) -> Iterator[Sample]:
    """Profile steps without end."""
    for again in itertools.count():
        yield from timed_steps(core, seed=seed + again, now=time.thread_time)


def drive(
    core: EngineCore,
    clock: EngineTime,
    work: Workload,
    seed: int,
    after_step: Callable[[float], None] = lambda _: None,
) -> tuple[Floats, Floats, list[float]]:
    """Give an engine random prompts when they are due; waiting for the next one is skipped.

    after_step: called with the seconds of each step. Returns (N) seconds until the first and the last token of each request,
    both since the first arrival, and the seconds of each step, from the end of the one before or the arrival it waited for.
    """
    rng, vocab = random.Random(seed), core.tokenizer.vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(n)] for n in work.input_tokens.tolist()]
    first, finish = np.zeros(len(work)), np.zeros(len(work))
    seconds = list[float]()
    began, due = clock.now(), 0
    now = 0.0
    while due < len(work) or not core.idle:
        if core.idle and work.arrival_s[due] > now:
            clock.sleep(work.arrival_s[due] - now)
            now = float(work.arrival_s[due])
            began = clock.now() - now
        while due < len(work) and work.arrival_s[due] <= now:
            sampling = SamplingParams(temperature=0.0, max_tokens=int(work.output_tokens[due]), ignore_eos=True)
            core.add(GenerationRequest(str(due), TokenPrompt(tuple(prompts[due])), sampling), prompts[due])
            due += 1
        events = core.step()
        ended = clock.now() - began
        seconds.append(ended - now)
        now = ended
        for name, event in events:
            if isinstance(event, TokenFrame):
                r = int(name)
                first[r] = first[r] or now
                finish[r] = now
        after_step(seconds[-1])
    return first, finish, seconds


def run_engine(core: EngineCore, clock: EngineTime, work: Workload, profile: Iterator[Sample], seed: int) -> Run:
    """Requests are added when they are due, steps follow each other without a pause but for the profile's turns."""
    samples, turn = list[Sample](), 0.0

    def profile_in_turns(seconds: float) -> None:
        nonlocal turn
        turn += seconds
        if turn >= SLICE_S:
            with clock.held():
                while turn > 0:
                    samples.append(next(profile))
                    turn -= samples[-1][1] / PROFILE_SHARE

    first, finish, seconds = drive(core, clock, work, seed, profile_in_turns)
    served = Served(first, finish, np.zeros(len(work), np.int64), 0.0, len(seconds), 0)
    unit_replica = replica(StepLatencyModel.linear(1.0, 0.0, 0.0), core.limits.batch.max_step_tokens)
    upcoming = iter(seconds)
    # what each step computed: an instrument in the engine would cost time, so the schedule is replayed instead
    again, loads = replay(work, [unit_replica], np.zeros(len(work), np.int64), lambda *_: next(upcoming, 0.0))
    if len(loads) != len(seconds):
        raise RuntimeError(f"the schedule is not the engine's: {len(loads)} steps instead of {len(seconds)}")
    off = float(np.abs(again.finish_s - finish).max())
    return Run(served, list(zip(loads, seconds, strict=True)), samples, off)


def figures_of(work: Workload, served: Served) -> dict[str, float]:
    report = reported("", work, served)
    return {
        "ttft_p50": report.ttft_s.p50,
        "ttft_p95": report.ttft_s.p95,
        "tpot_p50": report.tpot_s.p50,
        "tpot_p95": report.tpot_s.p95,
        "output_tokens_per_s": report.output_tokens_per_s,
    }


def replica(latency: StepLatencyModel, chunk: int) -> Replica:
    return Replica(ReplicaShape(1, 1), latency, KV_TOKENS, EngineLimits(MAX_RUNNING, chunk, 16))


def grid() -> list[Cell]:
    """Rates come from a first profile of the machine, loads being shares of what the simulator says it can serve."""
    cells = []
    for chunk in CHUNKS:
        latency, error = fit_latency(list(timed_steps(core_for(chunk, EngineTime()), now=time.thread_time)))
        print(f"chunk {chunk}: mean error of the first profile's fit {error:.1%}", flush=True)
        for kind, ((p0, p1), (o0, o1)) in LENGTHS.items():
            for load in LOADS:
                rate = load * replica(latency, chunk).capacity_per_s((p0 + p1) / 2, (o0 + o1) / 2)
                rng = np.random.default_rng([SEED, chunk, len(kind), int(load * 100)])
                cells.append(Cell(chunk, kind, load, workload(kind, rate, rng), rate))
    return cells


def at_speed_of(samples: list[Sample], shape: StepLatencyModel) -> StepLatencyModel:
    """The model times one factor: the seconds of these samples over those it says, but for stalls."""
    pairs = [(seconds, shape.step_s(load)) for load, seconds in samples]
    without_stalls = [(seconds, model_s) for seconds, model_s in pairs if seconds < STALL * model_s]
    factor = sum(seconds for seconds, _ in without_stalls) / sum(model_s for _, model_s in without_stalls)
    return shape.scaled(factor)


def row_of(cell: Cell, shape: StepLatencyModel) -> dict[str, Any]:
    """Errors are relative: `error` between medians over the rounds, the others the mean of the rounds' own."""
    reals = [figures_of(cell.work, run.served) for run in cell.runs]

    def simulated(latency: StepLatencyModel) -> dict[str, float]:
        return figures_of(cell.work, serve(cell.work, [replica(latency, cell.chunk)]))

    def medians(runs: list[dict[str, float]]) -> dict[str, float]:
        return {name: statistics.median(figures[name] for figures in runs) for name in runs[0]}

    def errors(runs: list[dict[str, float]]) -> dict[str, float]:
        pairs = list(zip(runs, reals, strict=True))
        return {
            name: statistics.mean(abs(figures[name] / real[name] - 1) for figures, real in pairs) for name in runs[0]
        }

    foretold = [simulated(at_speed_of(run.profile, shape)) for run in cell.runs]
    real, predicted = medians(reals), medians(foretold)
    return {
        "chunk": cell.chunk,
        "lengths": cell.lengths,
        "load": cell.load,
        "rate_per_s": cell.rate_per_s,
        "engine": real,
        "engine_rounds": reals,
        "simulator": predicted,
        "simulator_rounds": foretold,
        "error": {name: predicted[name] / real[name] - 1 for name in real},
        "error_of_rounds": errors(foretold),
        "error_without_speed": errors([simulated(shape)] * len(reals)),
        "error_form": errors([simulated(fit_latency(run.steps)[0]) for run in cell.runs]),
        "schedule_off_s": max(run.schedule_off_s for run in cell.runs),
        "spread_of_rounds": {n: (max(r[n] for r in reals) - min(r[n] for r in reals)) / real[n] for n in real},
    }


def run(rounds: int) -> None:
    """`rounds` is how often each cell is run and profiled."""
    cells = grid()
    profiles = {chunk: profiled(core_for(chunk, EngineTime()), SEED) for chunk in CHUNKS}
    for again in range(rounds):
        for cell in cells:
            clock = EngineTime()
            cell.runs.append(run_engine(core_for(cell.chunk, clock), clock, cell.work, profiles[cell.chunk], SEED))
        print(f"round {again + 1} of {rounds}", flush=True)
    publish(cells, rounds)


def publish(cells: list[Cell], rounds: int) -> None:
    """Forecasts, errors, JSON and plot of cells that were run."""
    shapes, fit_errors = {}, {}
    for chunk in CHUNKS:
        samples = [sample for cell in cells if cell.chunk == chunk for run in cell.runs for sample in run.profile]
        shapes[chunk], fit_errors[chunk] = fit_latency(samples)
        print(f"chunk {chunk}: {len(samples)} samples, mean error of the fit {fit_errors[chunk]:.1%}", flush=True)
    rows = [row_of(cell, shapes[cell.chunk]) for cell in cells]
    for row in rows:
        line = "  ".join(f"{name} {value:+.1%}" for name, value in row["error"].items())
        print(f"chunk {row['chunk']:<4} {row['lengths']:<10} load {row['load']}  {line}")
    names = list(rows[0]["error"])

    def mean(of: str) -> dict[str, float]:
        return {name: statistics.mean(abs(row[of][name]) for row in rows) for name in names}

    means = {
        of: mean(of) for of in ("error", "error_of_rounds", "error_without_speed", "error_form", "spread_of_rounds")
    }
    overall = {of: statistics.mean(values.values()) for of, values in means.items()}
    path = report.write(
        "simulator",
        {
            "model": str(MODEL),
            "seed": SEED,
            "rounds": rounds,
            "requests": REQUESTS,
            "fit_error": fit_errors,
            "mean": means,
            "mean_overall": overall,
            "schedule_off_s": max(row["schedule_off_s"] for row in rows),
            "cells": rows,
        },
    )
    series = {
        f"chunk {chunk}": [
            _spread([100 * abs(c["error"][name]) for c in rows if c["chunk"] == chunk]) for name in names
        ]
        for chunk in CHUNKS
    }
    plot = report.bars(
        "simulator", "Simulator against the torch engine", [n.replace("_", " ") for n in names], series, "error, %"
    )
    for of, values in means.items():
        print(f"{of}: {overall[of]:.1%} ({', '.join(f'{name} {value:.1%}' for name, value in values.items())})")
    print(f"{path}\n{plot}")


def _spread(values: list[float]) -> tuple[float, float, float]:
    return statistics.mean(values), min(values), max(values)
