"""The torch engine and, where installed, SGLang on this machine's GPU: random weights in real shapes, or a model's folder.

For models of 1B and 8B parameters: step times by load, as a profile for the planner; what a decode step costs if the
lengths in its batch are mixed, at the same number of tokens (CascadeInfer, figure 2); and the simulator's forecast, made
from the profile, against a replay at 0.4 to 0.9 of what the profile says can be served. Nothing is downloaded.

A command takes at most LIMIT_S seconds, shared by shapes, engines and measurements; what does not fit is left out, and
counted in the result. Without a GPU it ends with the exit status NO_GPU_STATUS. SGLang is used if this interpreter has it, or
the one that PENSTOCK_SGLANG_PYTHON names. `--device cpu --shape tiny` runs the same on a CPU.
"""

import itertools
import platform
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.gpu.measures import LOADS, TimeBudget, forecasts, mixed_batches, mixed_lengths, profiled
from benchmarks.gpu.real_model import exactness, rates
from benchmarks.gpu.shapes import SHAPES, Shape
from benchmarks.gpu.subjects import Subject, TorchSubject, sglang_python, sglang_subject, torch_subject
from benchmarks.public_data import GpuMissing
from penstock.planner_service.files.profiles import write_profile
from penstock.services.domain.errors import InvalidRequest

LIMIT_S = 570.0  # of a command, in seconds
PROFILE_SHARE, MIXED_SHARE = 0.4, 0.3  # of an engine's time, and of what is left then
ENGINES = ("torch", "sglang")
SEED = 3


def run(_rounds: int) -> None:
    """Both real shapes on the GPU."""
    measure((SHAPES["1b"], SHAPES["8b"]), ENGINES, "cuda")


def measure(
    shapes: Sequence[Shape], engines: Sequence[str], device: str, limit_s: float = LIMIT_S, name: str = "gpu"
) -> dict[str, Any]:
    """Measure; write results/<name>.json and a profile for each engine and shape.

    Raises:
        GpuMissing: The device is a GPU, and there is none.
    """
    machine = _machine(device)
    total = TimeBudget(limit_s)
    pairs = list(itertools.product(shapes, _usable(engines, device)))
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        for i, (shape, engine) in enumerate(pairs):
            budget = total.stage(1 / (len(pairs) - i))
            with _started(shape, engine, device, Path(folder)) as subject:
                row = _measured(subject, shape, machine, budget, name)
            if shape.folder is not None:
                row["exactness"] = exactness(shape, device)
            rows.append(row)
            print(_line(row), flush=True)
            result = {
                "device": device,
                "gpu": machine,
                "seed": SEED,
                "limit_s": limit_s,
                "loads": LOADS,
                "engines": rows,
            }
            print(report.write(name, result), flush=True)
    return result


def _usable(engines: Sequence[str], device: str) -> list[str]:
    if "sglang" in engines and sglang_python(device) is None:
        print("SGLang is not installed: left out", flush=True)
        return [engine for engine in engines if engine != "sglang"]
    return list(engines)


def _machine(device: str) -> str:
    """The device's name.

    Raises:
        GpuMissing: The device is a GPU, and there is none.
    """
    if device == "cpu":
        return f"{platform.machine()} cpu"
    import torch

    if not torch.cuda.is_available():
        raise GpuMissing("needs a GPU that torch can use; `--device cpu --shape tiny` runs without one")
    return str(torch.cuda.get_device_name(device))


def _started(shape: Shape, engine: str, device: str, folder: Path) -> AbstractContextManager[Subject]:
    if engine == "torch":
        return torch_subject(shape, device, folder, SEED)
    python = sglang_python(device)
    assert python is not None
    return sglang_subject(shape, device, folder, python)


def _measured(subject: Subject, shape: Shape, machine: str, budget: TimeBudget, name: str) -> dict[str, Any]:
    """All measurements of one engine with one shape."""
    row: dict[str, Any] = {"shape": shape.name, "engine": subject.name}
    if isinstance(subject, TorchSubject):
        row |= rates(subject, SEED, budget)
    stage = budget.stage(PROFILE_SHARE)
    samples = subject.samples(SEED, lambda: stage.over)
    try:
        profile = profiled(subject, (shape.name, machine), samples)
    except InvalidRequest as error:
        return row | {"skipped": f"too little time for a profile: {error}"}
    report.RESULTS.mkdir(exist_ok=True)
    path = report.RESULTS / f"{name}_profile_{shape.name}_{subject.name}.json"
    write_profile(path, profile)
    replica = profile.replica
    mixed = mixed_lengths(subject, shape, replica, SEED, budget.stage(MIXED_SHARE))
    loads = forecasts(subject.serve, shape, replica, SEED, budget)
    return row | {
        "profile": path.name,
        "samples": len(samples),
        "fit_error": profile.mean_error,
        "held_out_error": profile.held_out_error,
        "kv_tokens": replica.kv_tokens,
        "mixed_lengths": mixed,
        "mixed_lengths_left_out": len(mixed_batches(shape, replica.lane_tokens, replica.limits.max_running))
        - len(mixed),
        "forecasts": loads,
        "forecasts_left_out": len(LOADS) - len(loads),
    }


def _line(row: dict[str, Any]) -> str:
    about = f"{row['shape']} {row['engine']}"
    if "skipped" in row:
        return f"{about}: {row['skipped']}"
    ratios = [one["ratio"] for one in row["mixed_lengths"] if one["ratio"] is not None]
    mixed = f"mixed lengths {min(ratios):.2f} to {max(ratios):.2f} times" if ratios else "no mixed lengths"
    errors = [abs(error) for one in row["forecasts"] for error in one["error"].values() if error is not None]
    forecast = f"forecasts off by {sum(errors) / len(errors):.1%} on average" if errors else "no forecasts"
    return f"{about}: held-out error of step times {row['held_out_error']:.1%}, {mixed}, {forecast}"
