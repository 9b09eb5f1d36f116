"""CASCADIA's table 1: Llama 3 70B at 1,600 input and 16 output tokens, in seven configurations, by our simulator.

The paper names neither the GPUs' links nor the load. We take Vidur's measured step times of Llama 3 70B on A100-80GB whose
GPUs are linked in pairs (and, to compare, by a switch), keep every replica busy, and compare throughput after one scale
factor (least squares of logarithms).

Twice: as it is; and with a second constant, what each pipeline stage spends on its hand-over per token, which the paper takes
from a profile of its machine. That constant and the scale are then fitted on the two configurations FITTED alone, so that
five say how good they are.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.public_data import public
from benchmarks.published_tables import Wanted, import_vidur
from penstock.planner_service.files.hardware import gpu_of_catalogue, model_of_catalogue
from penstock.planner_service.simulator import Dispatch, EngineLimits, Replica, Workload, serve
from penstock.services.domain.hardware import ClusterSpec, ReplicaShape, Runtime, roofline
from penstock.services.domain.latency_fit import mean_error

Config = tuple[int, int, int]  # DP, TP, PP
MEASURED: dict[Config, float] = {
    (1, 4, 1): 0.21,
    (1, 2, 2): 0.26,
    (1, 1, 4): 0.27,
    (2, 1, 2): 0.33,
    (2, 2, 1): 0.40,
    (2, 4, 1): 0.41,
    (2, 2, 2): 0.55,
}
PAPERS = dict(zip(MEASURED, (0.219, 0.280, 0.287, 0.347, 0.408, 0.437, 0.559), strict=True))
FITTED: tuple[Config, Config] = ((2, 2, 1), (1, 2, 2))
INPUT, OUTPUT, REQUESTS = 1600, 16, 400
TOPOLOGIES = ("a100_pairwise_nvlink", "a100_dgx")
MODEL = "meta-llama/Meta-Llama-3-70B"


def replicas(topology: str) -> tuple[dict[tuple[int, int], Replica], dict[str, dict[str, float]]]:
    """(replicas by TP and PP, by name how far the fit and a roofline are off the table)."""
    tables = ("vidur_linear_ops_a100_a40.csv.gz", "vidur_attention_a100.csv.gz", "vidur_collectives_a100_a40.csv.gz")
    paths = [public(f"perf/{name}") for name in tables]
    # an "80 GB" A100 has 80 GiB; two of them hold this model by little
    gpu = dataclasses.replace(gpu_of_catalogue("a100-80gb"), memory_bytes=80 * 2**30)
    cluster, model = ClusterSpec(gpu, 1, 8, 25e9), model_of_catalogue("llama-3.1-70b")
    by_shape, errors = {}, {}
    for shape in dict.fromkeys(ReplicaShape(tp, pp) for _, tp, pp in MEASURED):
        profile = import_vidur(paths, Wanted(MODEL, model, shape, cluster, Runtime(), EngineLimits(), topology))
        by_shape[shape.tp, shape.pp] = profile.replica
        assert profile.held_out_error is not None
        off = mean_error(roofline(model, shape, cluster, Runtime()), profile.samples)
        errors[str(shape)] = {"held_out_error": profile.held_out_error, "roofline_error": off}
    return by_shape, errors


def estimate(by_shape: dict[tuple[int, int], Replica], handover_s: float) -> dict[Config, float]:
    """Requests per second of each configuration. handover_s: what every stage of a pipeline spends on a token in addition."""
    work = Workload(np.zeros(REQUESTS), np.full(REQUESTS, INPUT), np.full(REQUESTS, OUTPUT))
    rates = {}
    for dp, tp, pp in MEASURED:
        replica = by_shape[tp, pp]
        if pp > 1 and handover_s:
            latency = replica.latency
            knots = tuple(y + pp * handover_s * x for x, y in zip(latency.knot_tokens, latency.knot_s, strict=True))
            replica = dataclasses.replace(replica, latency=dataclasses.replace(latency, knot_s=knots))
        served = serve(work, [replica] * dp, Dispatch.ROUND_ROBIN)
        rates[dp, tp, pp] = REQUESTS / float(served.finish_s.max())
    return rates


def scaled(rates: dict[Config, float], by: tuple[Config, ...]) -> tuple[float, dict[Config, float]]:
    """(the factor that brings `rates` nearest to what was measured over the configurations `by`, the rates so scaled)."""
    factor = math.exp(sum(math.log(MEASURED[c] / rates[c]) for c in by) / len(by))
    return factor, {config: rate * factor for config, rate in rates.items()}


def fit_handover_s(by_shape: dict[tuple[int, int], Replica]) -> float:
    """The hand-over with which the two FITTED configurations compare as measured, by bisection."""
    first, second = FITTED
    ratio, low, high = MEASURED[second] / MEASURED[first], 0.0, 1e-3
    for _ in range(30):
        middle = (low + high) / 2
        rates = estimate(by_shape, middle)
        low, high = (middle, high) if rates[second] / rates[first] > ratio else (low, middle)
    return (low + high) / 2


def figures(rates: dict[Config, float], by: tuple[Config, ...]) -> dict[str, Any]:
    factor, estimates = scaled(rates, by)
    errors = {config: estimates[config] / MEASURED[config] - 1 for config in MEASURED}
    ranks = sorted(MEASURED, key=lambda config: estimates[config])
    compared = [abs(e) for config, e in errors.items() if len(by) == len(MEASURED) or config not in by]
    return {
        "scale": factor,
        "rows": [
            {
                "dp_tp_pp": list(config),
                "measured": MEASURED[config],
                "papers_estimate": PAPERS[config],
                "ours": estimates[config],
                "error": errors[config],
            }
            for config in MEASURED
        ],
        "largest_error": max(map(abs, errors.values())),
        "mean_error_outside_the_fit": sum(compared) / len(compared),
        "order_is_right": ranks == sorted(MEASURED, key=lambda config: MEASURED[config]),
    }


def run(_: int) -> None:
    """Nothing here is random or timed: one round is all."""
    result: dict[str, Any] = {"model": MODEL, "input_tokens": INPUT, "output_tokens": OUTPUT, "requests": REQUESTS}
    for topology in TOPOLOGIES:
        by_shape, errors = replicas(topology)
        handover_s = fit_handover_s(by_shape)
        result[topology] = {
            "import": errors,
            "one_scale": figures(estimate(by_shape, 0.0), tuple(MEASURED)),
            "with_handover": {"handover_s_per_token": handover_s, "fitted_on": [list(c) for c in FITTED]}
            | figures(estimate(by_shape, handover_s), FITTED),
        }
        for name in ("one_scale", "with_handover"):
            part = result[topology][name]
            line = "  ".join(
                f"{tuple(row['dp_tp_pp'])} {row['ours']:.3f} ({row['error']:+.0%})" for row in part["rows"]
            )
            order = "order right" if part["order_is_right"] else "order wrong"
            print(f"{topology}, {name}: largest error {part['largest_error']:.1%}, {order}\n  {line}", flush=True)
    path = report.write("table1", result)
    best = result[TOPOLOGIES[0]]
    series = {"measured (paper)": list(MEASURED.values()), "paper's estimate": list(PAPERS.values())}
    series["ours, one scale"] = [row["ours"] for row in best["one_scale"]["rows"]]
    series["ours, and a hand-over cost"] = [row["ours"] for row in best["with_handover"]["rows"]]
    plot = report.bars(
        "table1",
        "Llama 3 70B, 1,600 in and 16 out: seven configurations (DP, TP, PP)",
        [str(config) for config in MEASURED],
        {label: [(value, value, value) for value in values] for label, values in series.items()},
        "requests/s",
    )
    print(f"{path}\n{plot}")
