"""Throughput on the shipped medium model: torch engine, its former version, continuous batching of transformers, SGLang.

One thread per engine, one engine at a time, in rounds of all, every second round in the opposite order; every engine
generates the same number of greedy tokens for the same prompts. The torch engine is called over gRPC with all tokens
streamed; both of its versions are started in the same way, and the CPU time of their workers is measured, too. The former
version is a commit, checked out next to this tree, in this tree's Python environment.
"""

import asyncio
import statistics
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from benchmarks import contenders, report
from benchmarks.contenders import Contender, PenstockWorker
from benchmarks.cpu_time import cpu_s
from benchmarks.router_cost import checked_out
from benchmarks.spread import median_and_range
from benchmarks.workload import workload
from tests.support import sglang

MODEL = Path("models/family/medium")
CONCURRENCY = (1, 8, 32)
WAVES = {1: 6, 8: 3, 32: 2}
OUTPUT_TOKENS = 128
SEED = 5
BEFORE = "e2d3213"  # the last commit before the compiled pass

Start = Callable[[Path], AbstractAsyncContextManager[Contender]]


def chosen(before: Path) -> dict[str, Start]:
    """The engines that can run here. before: the tree of the former version."""
    engines: dict[str, Start] = {
        "penstock": contenders.penstock_at(Path.cwd()),
        "before": contenders.penstock_at(before),
        "transformers": contenders.transformers_cb,
    }
    if sglang.installed():
        engines["sglang"] = contenders.sglang_cpu
    else:
        print("skipping SGLang, which is not installed: tests/support/sglang_cpu/install.sh installs it", flush=True)
    return engines


async def measure(rounds: int, before: Path) -> dict[str, Any]:
    works = {n: workload(MODEL, n, WAVES[n], OUTPUT_TOKENS, SEED) for n in CONCURRENCY}
    rates: dict[str, dict[int, list[float]]] = {}
    cpu_us: dict[str, dict[int, list[float]]] = {}
    engines = [*chosen(before).items()]
    for number in range(rounds):
        for name, start in engines if number % 2 == 0 else engines[::-1]:
            async with start(MODEL) as engine:
                await engine.seconds(workload(MODEL, 4, 1, 16, SEED + 1))  # warm
                for n, work in works.items():
                    began_s = cpu_s(engine.pid) if isinstance(engine, PenstockWorker) else 0.0
                    rate = work.tokens / await engine.seconds(work)
                    rates.setdefault(name, {}).setdefault(n, []).append(rate)
                    if isinstance(engine, PenstockWorker):
                        spent_us = 1e6 * (cpu_s(engine.pid) - began_s) / work.tokens
                        cpu_us.setdefault(name, {}).setdefault(n, []).append(spent_us)
                    print(f"round {number + 1}  {name:<14}{n:>3} at once  {rate:8.0f} tokens/s", flush=True)
    return {
        "model": str(MODEL),
        "seed": SEED,
        "before_commit": BEFORE,
        "output_tokens": OUTPUT_TOKENS,
        "prompts": {n: len(work.prompts) for n, work in works.items()},
        "threads_per_engine": 1,
        "rounds": rounds,
        "tokens_per_s": rates,
        "worker_cpu_us_per_token": cpu_us,
        "worker_cpu_of_before": {n: _ratios(cpu_us["penstock"][n], cpu_us["before"][n]) for n in works},
        "ratios_by_round": {
            f"penstock/{name}": {n: _ratios(rates["penstock"][n], rates[name][n]) for n in works}
            for name in rates
            if name != "penstock"
        },
        "ratio_of_medians": {
            f"penstock/{name}": {
                n: round(statistics.median(rates["penstock"][n]) / statistics.median(rates[name][n]), 2) for n in works
            }
            for name in rates
            if name != "penstock"
        },
    }


def _ratios(ours: list[float], theirs: list[float]) -> list[float]:
    return [round(own / other, 2) for own, other in zip(ours, theirs, strict=True)]


def run(rounds: int) -> None:
    with checked_out(BEFORE) as before:
        figures = asyncio.run(measure(rounds, before))
    path = report.write("engine", figures)
    series = {
        name: [median_and_range(rates[n]) for n in CONCURRENCY] for name, rates in figures["tokens_per_s"].items()
    }
    groups = [f"{n} at once" for n in CONCURRENCY]
    title = "Output tokens per second, shipped medium model, one CPU thread"
    plot = report.bars("engine", title, groups, series, "tokens per second")
    print(f"{figures['ratio_of_medians']}\nworker CPU of before: {figures['worker_cpu_of_before']}\n{path}\n{plot}")
