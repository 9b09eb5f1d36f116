"""The QoE model's error on batches of the real torch engine that it was not fitted to (CascadeInfer, section 6.5).

Per model of the shipped family: requests are kept in flight over exponential length buckets and batch sizes 1, 2, 4, ...;
the model is fitted, and predicts the requests of passes with other lengths and prompts, and of mixed batches with sizes in
between. The baseline is a constant, the mean cost of the fitted requests.

Two measures reduce the influence of the machine. Time is the CPU time of the engine's thread, so that other processes do not
count. And because the speed of a shared machine changes by half within seconds (the same batch takes 1.3 or 2.3 ms), a second
engine computes the same short reply every SLICE_S, and time is measured in units of its duration. `by_cpu_time` is the error
without this.
"""

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from benchmarks import report
from penstock.planner_service.files.profiles import fit_qoe, qoe_errors
from penstock.planner_service.simulator.workload import Floats
from penstock.services.clock import SystemClock
from penstock.services.domain.stages.qoe import BatchLoad
from penstock.types.prompts import TokenPrompt
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.types.workers import EngineFinished
from penstock.worker_service.engine.core import EngineCore
from penstock.worker_service.engine.qoe_profile import QoeCell, measure_qoe, profile_cells
from penstock.worker_service.engine.torch.engine import TorchEngineOptions, torch_core

MODELS = ("small", "medium", "large")
KV_TOKENS, MAX_RUNNING, MAX_STEP_TOKENS = 8_192, 32, 512
MIXED = (3, 6, 12, 24)  # batch sizes
MIXED_SHARE = (0.1, 0.9)  # range of the input's share of the final length
SEED = 7
SLICE_S = 0.05

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


class Pace:
    """CPU seconds of this thread, at the pace at which a second engine computes the same reply again and again."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        for _ in range(3):
            self._reply_s()  # its prompt is in the prefix cache then, the code is warm
        self._usual_s = statistics.median(self._reply_s() for _ in range(9))
        self._pace = 1.0
        self._now = self._slice = 0.0
        self._at = time.thread_time()

    def __call__(self) -> float:
        passed = time.thread_time() - self._at
        self._now += passed / self._pace
        self._slice += passed
        if self._slice > SLICE_S:
            self._pace, self._slice = self._reply_s() / self._usual_s, 0.0
        self._at = time.thread_time()
        return self._now

    def _reply_s(self) -> float:
        began = time.thread_time()
        prompt = list(range(3, 67))
        sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        self._core.add(GenerationRequest("pace", TokenPrompt(tuple(prompt)), sampling), prompt)
        while not any(isinstance(event, EngineFinished) for _, event in self._core.step()):
            pass
        return time.thread_time() - began


def passes_of(core: EngineCore, rounds: int, clock: Callable[[], float]) -> dict[str, Samples]:
    """Fitted, held-out and mixed batches, each `rounds` times, in turns by cell, so that all passes see the same machine."""
    cells = profile_cells(core)
    turns = [(kind, cell) for cell in cells for kind in ("fitted", "held_out")]
    turns += [("mixed", QoeCell(32, 1024, n, MIXED_SHARE)) for n in MIXED]
    samples: dict[str, Samples] = {"fitted": [], "held_out": [], "mixed": []}
    order = random.Random(SEED)
    for number in range(rounds):
        for i in order.sample(range(len(turns)), len(turns)):
            kind, cell = turns[i]
            samples[kind] += measure_qoe(core, [cell], seed=SEED + number * len(turns) + i, clock=clock)
    return samples


def errors_of(name: str, rounds: int) -> dict[str, Any]:
    """Relative errors of the fit to `rounds` passes on a model."""
    core = core_of(name)
    by_cpu_time = errors(passes_of(core, 1, time.thread_time))
    result = errors(passes_of(core, rounds, Pace(core_of(name))))
    return result | {"by_cpu_time": {kind: by_cpu_time[kind]["mean_error"] for kind in ("held_out", "mixed")}}


def errors(passes: dict[str, Samples]) -> dict[str, Any]:
    fitted = passes.pop("fitted")
    model = fit_qoe(fitted)
    mean = statistics.mean(cost for _, cost in fitted)
    result: dict[str, Any] = {"coefficients": model.coefficients, "requests": len(fitted)}
    for kind, samples in passes.items():
        wrong = qoe_errors(model, samples)
        costs = np.array([cost for _, cost in samples])
        result[kind] = {
            "requests": len(samples),
            "mean_error": float(np.abs(wrong).mean()),
            "p95_error": float(np.percentile(np.abs(wrong), 95)),
            "bias": float(wrong.mean()),
            "constant_mean_error": float(np.abs(mean / costs - 1).mean()),
            "errors": wrong.tolist(),
        }
    return result


def run(rounds: int) -> None:
    figures: dict[str, dict[str, Any]] = {}
    for name in MODELS:
        figures[name] = errors_of(name, rounds)
        for kind in ("held_out", "mixed"):
            part = figures[name][kind]
            print(
                f"{name:<7} {kind:<9} {part['requests']:>4} requests: mean error {part['mean_error']:.1%}, p95 "
                f"{part['p95_error']:.1%}, bias {part['bias']:+.1%}, a constant {part['constant_mean_error']:.1%}; "
                f"by CPU time {figures[name]['by_cpu_time'][kind]:.1%}",
                flush=True,
            )
    overall = statistics.mean(figures[name]["held_out"]["mean_error"] for name in MODELS)
    constant = statistics.mean(figures[name]["held_out"]["constant_mean_error"] for name in MODELS)
    path = report.write(
        "qoe",
        {
            "seed": SEED,
            "passes_fitted": rounds,
            "clock": "CPU time of the engine's thread, in units of the time of a reply that is computed repeatedly",
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
    axes.legend(frameon=False)
    return report.save("qoe", figure)
