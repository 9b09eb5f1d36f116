"""The QoE model's error on batches of the real torch engine that it was not fitted to (CascadeInfer, section 6.5).

Per model of the shipped family: requests are kept in flight over exponential length buckets and batch sizes 1, 2, 4, ...;
the model is fitted, and predicts the requests of a second pass with other lengths and prompts, and those of batches that
mix short and long at sizes in between. Held against a constant, the mean cost of the fitted requests. Time is the engine
thread's CPU time: what else the machine does must not count.
"""

import random
import statistics
import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from benchmarks import report
from planner_service.profiles import fit_qoe, qoe_errors
from planner_service.simulator.workload import Floats
from services.clock import SystemClock
from services.domain.stages import BatchLoad
from worker_service.engine.core import EngineCore
from worker_service.engine.torch import TorchEngineOptions
from worker_service.engine.torch.engine import torch_core
from worker_service.qoe_profile import QoeCell, measure_qoe, profile_cells

MODELS = ("small", "medium", "large")
KV_TOKENS, MAX_RUNNING, MAX_STEP_TOKENS = 32_768, 32, 512
MIXED = (3, 6, 12, 24)  # batch sizes
SEED = 7

Samples = list[tuple[BatchLoad, float]]


def core_of(model: str) -> EngineCore:
    options = TorchEngineOptions(
        Path("models/family") / model,
        model,
        kv_tokens=KV_TOKENS,
        max_running=MAX_RUNNING,
        max_queued=MAX_RUNNING,
        max_step_tokens=MAX_STEP_TOKENS,
        threads=1,
    )
    return torch_core(options, SystemClock())[0]


def requests_of(core: EngineCore, cells: list[QoeCell], seed: int) -> Samples:
    shuffled = random.Random(seed).sample(cells, len(cells))
    return [(s.load, s.cost_s) for s in measure_qoe(core, shuffled, seed=seed, clock=time.thread_time)]


def errors_of(core: EngineCore, rounds: int) -> dict[str, Any]:
    """Relative errors of the fit to `rounds` passes."""
    cells = profile_cells(core)
    fitted = [sample for i in range(rounds) for sample in requests_of(core, cells, SEED + i)]
    model = fit_qoe(fitted)
    mean = statistics.mean(cost for _, cost in fitted)
    mixed = [QoeCell(32, 1024, n) for n in MIXED]
    passes = {"held_out": requests_of(core, cells, SEED + 100), "mixed": requests_of(core, mixed, SEED + 200)}
    found: dict[str, Any] = {"coefficients": model.coefficients, "requests": len(fitted)}
    for name, samples in passes.items():
        errors = qoe_errors(model, samples)
        costs = np.array([cost for _, cost in samples])
        found[name] = {
            "requests": len(samples),
            "mean_error": float(np.abs(errors).mean()),
            "p95_error": float(np.percentile(np.abs(errors), 95)),
            "bias": float(errors.mean()),
            "constant_mean_error": float(np.abs(mean / costs - 1).mean()),
            "errors": errors.tolist(),
        }
    return found


def run(rounds: int) -> None:
    figures = {}
    for name in MODELS:
        figures[name] = found = errors_of(core_of(name), rounds)
        for kind in ("held_out", "mixed"):
            part = found[kind]
            print(
                f"{name:<7} {kind:<9} {part['requests']:>4} requests: mean error {part['mean_error']:.1%}, p95 "
                f"{part['p95_error']:.1%}, a constant {part['constant_mean_error']:.1%}",
                flush=True,
            )
    overall = statistics.mean(figures[name]["held_out"]["mean_error"] for name in MODELS)
    constant = statistics.mean(figures[name]["held_out"]["constant_mean_error"] for name in MODELS)
    path = report.write(
        "qoe",
        {
            "seed": SEED,
            "passes_fitted": rounds,
            "clock": "CPU time of the engine's thread",
            "mean_error": overall,
            "constant_mean_error": constant,
            "published": {"mean_error": 0.089, "constant_mean_error": 0.64},
            "models": figures,
        },
    )
    plot = _plot({name: np.array(figures[name]["held_out"]["errors"]) for name in MODELS}, overall)
    print(f"held-out mean error {overall:.1%} (published 8.9 %), a constant {constant:.1%} (64 %)\n{path}\n{plot}")


def _plot(errors: dict[str, Floats], overall: float) -> Path:
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    bins = np.linspace(-0.5, 0.5, 51)
    for colour, (name, values) in zip(report.COLOURS, errors.items(), strict=False):
        axes.hist(
            np.clip(values, -0.5, 0.5), bins, density=True, histtype="step", linewidth=2, color=colour, label=name
        )
    axes.set_xlabel("relative error of a held-out request's predicted time per token")
    axes.set_ylabel("density")
    axes.set_title(f"QoE model on the torch engine: mean error {overall:.1%}", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path = report.RESULTS / "qoe.svg"
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path
