"""Estimated step times against published measurements of engines, and the bands that plans state.

*Engines.* Every table `perf/*.csv` of the public data with the columns TABLE: throughput and inter-token latency of an engine
that is given all prompts at once. The planner's simulator runs each row on a roofline, of kernels alone and with the engine's
CPU (`EngineCpu`). What requests and prompts cost the CPU is fitted to the throughput of half of the models and judged on the
other half, both ways. What a step alone costs is the catalogue's: by one load it cannot be told apart. The band of a half is
where 9 of 10 further rows are expected; counted is how many rows of the other half are there.

*Kernels.* Vidur's and DistServe's step times, without an engine, over those of the roofline: the band of engines whose CPU is
hidden.

ShareGPT's lengths are quantiles of the 320 prompts that vLLM's benchmark_serving.py draws for Mistral 7B, and of what that
model answered (LambdaLabsML/vllm-benchmark publishes them with its results).
"""

import csv
import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize
from scipy.special import stdtrit

from benchmarks import report
from benchmarks.public_data import DATA, DataMissing, public
from benchmarks.published_tables import Wanted, import_distserve, import_vidur
from penstock.planner_service.files.catalogue import catalogue
from penstock.planner_service.files.hardware import engine_of_catalogue, gpu_of_catalogue, model_of_catalogue
from penstock.planner_service.simulator import EngineLimits, Replica, Workload, serve
from penstock.planner_service.simulator.workload import Floats
from penstock.question_files.errors import FileError
from penstock.services.domain.hardware import ClusterSpec, EngineSpec, ReplicaShape, Runtime, fit, roofline

TABLE = {
    "gpu",
    "tp",
    "model",
    "engine",
    "num_prompts_all_at_once",
    "output_tokens_per_s",
    "inter_token_latency_ms",
}
GPUS = {"A100-80GB-SXM": "a100-80gb", "H100-80GB-SXM": "h100", "H200-141GB-SXM": "h200", "B200": "b200"}
MODELS = {
    "Meta-Llama-3.1-8B-FP8": "llama-3.1-8b-fp8",
    "Meta-Llama-3.1-70B-Instruct-FP8": "llama-3.1-70b-fp8",
    "Hermes-3-Llama-3.1-405B-FP8": "llama-3.1-405b-fp8",
    "Mistral-7B-Instruct-v0.3": "mistral-7b",
    "Mistral-Nemo-Instruct-2407": "mistral-nemo-12b",
    "Mistral-Large-Instruct-2407": "mistral-large-123b",
    "Mixtral-8x7B-Instruct-v0.1": "mixtral-8x7b",
    "Mixtral-8x22B-Instruct-v0.1": "mixtral-8x22b",
}
# every twentieth of the lengths, in tokens
INPUTS = (4, 8, 10, 12, 18, 22, 28, 34, 46, 64, 84, 121, 184, 276, 344, 386, 433, 559, 699, 831, 964)
OUTPUTS = (1, 1, 1, 10, 14, 20, 27, 46, 65, 121, 178, 214, 247, 281, 317, 362, 398, 472, 545, 640, 966)
START_S = (1e-4, 1e-2)  # of a request and of a prompt, where their fit begins
SEED = 0  # that pairs prompts with answers
GPUS_PER_NODE = 8
MEMORY_SHARE = 0.95  # the tables' --gpu-memory-utilization
COVERED = 0.9  # of the rows, that a band is to hold
STEP_TOKENS = {"vllm-0.5": 512}  # where it is not the usual: its default for contexts over 32,768 tokens
VIDUR = {
    "meta-llama/Meta-Llama-3-8B": "llama-3.1-8b",
    "meta-llama/Meta-Llama-3-70B": "llama-3.1-70b",
    "meta-llama/Llama-2-7b-hf": "llama-2-7b",
    "meta-llama/Llama-2-70b-hf": "llama-2-70b",
    "codellama/CodeLlama-34b-Instruct-hf": "codellama-34b",
}
DISTSERVE = {"facebook/opt-13b": "opt-13b", "facebook/opt-66b": "opt-66b"}
DEGREES = (1, 2, 4, 8)
VIDUR_TABLES = ("vidur_linear_ops_a100_a40.csv.gz", "vidur_attention_a100.csv.gz", "vidur_collectives_a100_a40.csv.gz")


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table. engine: of the catalogue. tokens_per_s: of outputs; token_s: between two of a reply, mean."""

    gpu: str
    tp: int
    model: str
    engine: str
    prompts: int
    tokens_per_s: float
    token_s: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the simulator says of a row."""

    tokens_per_s: float
    token_s: float


def rows_of(path: Path) -> list[Row]:
    """The rows of a table; none where it has other columns.

    Raises:
        KeyError: A GPU or a model that is not known here.
    """
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if not set(reader.fieldnames or ()) >= TABLE:
            return []
        return [
            Row(
                GPUS[row["gpu"]],
                int(row["tp"]),
                MODELS[row["model"]],
                engine_named(row["engine"]),
                int(row["num_prompts_all_at_once"]),
                float(row["output_tokens_per_s"]),
                float(row["inter_token_latency_ms"]) / 1e3,
            )
            for row in reader
        ]


def engine_named(name: str) -> str:
    """The engine of the catalogue: of several, the one with the longest name that `name` begins with.

    Raises:
        KeyError: None.
    """
    known = [engine for engine in catalogue("engines") if name.startswith(engine)]
    if not known:
        raise KeyError(name)
    return max(known, key=len)


def workload(prompts: int) -> Workload:
    """So many prompts at once, with ShareGPT's lengths."""
    places, twentieths = (np.arange(prompts) + 0.5) / prompts, np.linspace(0, 1, len(INPUTS))
    inputs, outputs = (np.rint(np.interp(places, twentieths, lengths)) for lengths in (INPUTS, OUTPUTS))
    draw = np.random.default_rng(SEED)
    return Workload(np.zeros(prompts), draw.permutation(inputs).astype(int), draw.permutation(outputs).astype(int))


def estimate(row: Row, engine: EngineSpec) -> Estimate:
    """Simulate a row.

    Raises:
        ValueError: The model does not fit on the GPUs.
    """
    gpu = gpu_of_catalogue(row.gpu)
    gpu = dataclasses.replace(gpu, memory_bytes=gpu.memory_bytes / 1e9 * 2**30)  # engines count in GiB
    cluster, model = ClusterSpec(gpu, 1, GPUS_PER_NODE, 25e9), model_of_catalogue(row.model)
    shape, runtime, work = (
        ReplicaShape(row.tp, 1),
        Runtime(memory_share=MEMORY_SHARE, engine=engine),
        workload(row.prompts),
    )
    room = fit(model, shape, cluster, runtime, work.longest_tokens)
    if not room.ok:
        raise ValueError(room.reason)
    limits = EngineLimits(max_step_tokens=STEP_TOKENS.get(row.engine, EngineLimits().max_step_tokens))
    served = serve(work, [Replica(shape, roofline(model, shape, cluster, runtime), room.kv_tokens, limits)])
    tokens = work.output_tokens
    between_s = (served.finish_s - served.first_s).sum() / (tokens - 1).sum()
    return Estimate(float(tokens.sum() / served.finish_s.max()), float(between_s))


def fitted(rows: Sequence[Row], known: EngineSpec) -> EngineSpec:
    """The engine with the CPU time of requests and prompts by which throughput is off the least, and with its band.

    known: with its CPU time of a step.
    """

    def at(logarithms: Floats) -> EngineSpec:
        request_s, prompt_s = (float(seconds) for seconds in np.exp(logarithms))
        cpu = dataclasses.replace(known.cpu, request_s=request_s, prompt_s=prompt_s)
        return dataclasses.replace(known, cpu=cpu)

    def error(logarithms: Floats) -> float:
        engine = at(logarithms)
        return sum(abs(math.log(estimate(row, engine).tokens_per_s / row.tokens_per_s)) for row in rows)

    engine = at(minimize(error, np.log(START_S), method="Nelder-Mead").x)
    times = [estimate(row, engine).tokens_per_s / row.tokens_per_s for row in rows]
    fast, slow = band(times, len({row.model for row in rows}))
    return dataclasses.replace(engine, fast=fast, slow=slow)


def band(times: Sequence[float], models: int) -> tuple[float, float]:
    """Where a further row lies with a probability of COVERED, by Student's t of the logarithms.

    times: the estimate that each row takes. models: of the rows; those of one model are off alike, and count as one.
    """
    logarithms = np.log(times)
    half = stdtrit(models - 1, (1 + COVERED) / 2) * np.std(logarithms, ddof=1) * np.sqrt(1 + 1 / models)
    return float(np.exp(logarithms.mean() - half)), float(np.exp(logarithms.mean() + half))


def figures(rows: Sequence[Row], engine: EngineSpec) -> dict[str, Any]:
    """How far an engine's estimates are off rows, and how many of these lie in its band."""
    ones = [estimate(row, engine) for row in rows]
    throughput = [one.tokens_per_s / row.tokens_per_s - 1 for one, row in zip(ones, rows, strict=True)]
    tokens = [one.token_s / row.token_s - 1 for one, row in zip(ones, rows, strict=True)]
    covered = [engine.fast <= 1 + error <= engine.slow for error in throughput]
    return {
        "throughput_error_median": float(np.median(np.abs(throughput))),
        "throughput_error_worst": float(np.max(np.abs(throughput))),
        "times_too_fast": [float(1 + np.quantile(throughput, q)) for q in (0, 0.5, 1)],
        "inter_token_error_median": float(np.median(np.abs(tokens))),
        "in_band": sum(covered),
        "rows": [  # without the tables' figures, which may have no licence
            {"gpu": row.gpu, "tp": row.tp, "model": row.model, "times_too_fast": 1 + error, "in_band": inside}
            for row, error, inside in zip(rows, throughput, covered, strict=True)
        ],
    }


def best_shapes(rows: Sequence[Row], engine: EngineSpec) -> tuple[int, int]:
    """(models whose shape with the most throughput per GPU is the measured one, models that have several shapes)."""
    shapes = defaultdict[tuple[str, str, int], list[Row]](list)
    for row in rows:
        shapes[row.gpu, row.model, row.prompts].append(row)
    right, several = 0, [group for group in shapes.values() if len(group) > 1]
    for group in several:
        measured = max(group, key=lambda row: row.tokens_per_s / row.tp)
        right += measured == max(group, key=lambda row: estimate(row, engine).tokens_per_s / row.tp)
    return right, len(several)


def engine_figures(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    """What is known of an engine by its tables."""
    known, pure = engine_of_catalogue(name), EngineSpec("kernels alone")
    models = sorted({row.model for row in rows})
    halves = models[::2], models[1::2]
    result: dict[str, Any] = {"models": models, "cpu": dataclasses.asdict(known.cpu), "band": [known.fast, known.slow]}
    result["kernels_alone"] = figures(rows, pure) | {"best_shapes": best_shapes(rows, pure)}
    result["catalogue"] = figures(rows, known) | {"best_shapes": best_shapes(rows, known)}
    result["held_out"] = []
    for own, other in (halves, halves[::-1]):
        engine = fitted([row for row in rows if row.model in own], known)
        held_out = figures([row for row in rows if row.model in other], engine)
        fit_of = {"fitted_on": own, "cpu": dataclasses.asdict(engine.cpu), "band": [engine.fast, engine.slow]}
        result["held_out"].append(fit_of | held_out)
    engine = fitted(rows, known)
    result["fitted_on_all"] = {"cpu": dataclasses.asdict(engine.cpu), "band": [engine.fast, engine.slow]}
    return result


def kernel_ratios() -> Iterable[tuple[str, Floats]]:
    """(table, model and TP, measured over estimated seconds of each step)."""
    cluster = ClusterSpec(dataclasses.replace(gpu_of_catalogue("a100-80gb"), memory_bytes=1e15), 1, GPUS_PER_NODE, 25e9)
    vidur = [public(f"perf/{name}") for name in VIDUR_TABLES]
    distserve = public("perf/distserve_a100_profiles.json")
    names = [("vidur", *names) for names in VIDUR.items()] + [("distserve", *names) for names in DISTSERVE.items()]
    for (table, called, name), tp in itertools.product(names, DEGREES):
        shape, model = ReplicaShape(tp, 1), model_of_catalogue(name)
        target = Wanted(called, model, shape, cluster, Runtime(), EngineLimits(), "a100_dgx")
        try:
            profile = import_vidur(vidur, target) if table == "vidur" else import_distserve(distserve, target)
        except FileError:  # has no such shape
            continue
        latency = roofline(model, shape, cluster, Runtime())
        yield (
            f"{table}: {name}, {shape}",
            np.array([seconds / latency.step_s(load) for load, seconds in profile.samples]),
        )


def kernels() -> dict[str, Any]:
    """The band of kernels, all tables' shapes with the same weight."""
    outside, by_shape, even = (1 - COVERED) / 2, {}, []
    for name, ratios in kernel_ratios():
        by_shape[name] = np.quantile(ratios, [outside, 0.5, 1 - outside]).tolist()
        even.append(np.quantile(ratios, np.linspace(0.005, 0.995, 100)))
    fast, median, slow = np.quantile(np.concatenate(even), [outside, 0.5, 1 - outside])
    return {"band": [fast, slow], "median": median, "shapes": by_shape}


def run(_: int) -> None:
    """Nothing here is random or timed: one round is all."""
    tables = {path.name: rows for path in sorted((DATA / "perf").glob("*.csv")) if (rows := rows_of(path))}
    if not tables:
        raise DataMissing(f"needs a table perf/*.csv in {DATA} with the columns {', '.join(sorted(TABLE))}")
    result: dict[str, Any] = {"kernels": kernels(), "tables": {}}
    print(f"kernels: measured {' to '.join(f'{x:.2f}' for x in result['kernels']['band'])} times as long", flush=True)
    for name, rows in tables.items():
        for engine in sorted({row.engine for row in rows}):
            part = engine_figures(engine, [row for row in rows if row.engine == engine])
            result["tables"][f"{name}: {engine}"] = part
            before, after, count = part["kernels_alone"], part["catalogue"], len(part["catalogue"]["rows"])
            print(
                f"{name}: {engine}, {count} rows: kernels alone {line(before)}; with its CPU {line(after)}", flush=True
            )
            for half in part["held_out"]:
                in_band = f"{half['in_band']} of {len(half['rows'])} in the band"
                print(f"  fitted on {', '.join(half['fitted_on'])}: others {line(half)}, {in_band}", flush=True)
    print(report.write("step_times", result))


def line(part: dict[str, Any]) -> str:
    return f"{part['throughput_error_median']:.0%} off (median; worst {part['throughput_error_worst']:.0%})"
