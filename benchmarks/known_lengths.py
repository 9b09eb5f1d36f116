"""What knowing the lengths of replies is worth: their distribution against their mean, and, as the bound of both, exactly.

Lengths are known from the first half of a public trace and used on the second, whose requests come in random order as a
Poisson process. Two deployments in virtual time: Llama-3.2-3B on H100s by their data sheet, and OPT-13B on A100s by a
published profile, whose KV is what is short. Loads are shares of what each sustains with Penstock's own placement.

- Placement (`length_policies`): each way to use lengths, with each source of them, over placement as it serves. FORESIGHT
  is at the highest load only, where it matters most.
- Forecasts: simulations with the first half's requests, with their lengths and with the mean, over the second half's.
- Stages: costs on the second half of layouts made for the first half's lengths, for their mean, and for the second half's.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.length_policies import (
    ExactLength,
    ForkingCluster,
    Form,
    LengthDistribution,
    LengthSource,
    MeanLength,
    policy_of,
)
from benchmarks.public_data import public
from benchmarks.slo_scenarios import CODE, CONVERSATION
from benchmarks.slo_scenarios import replica as published_replica
from benchmarks.spread import interval
from benchmarks.stages import GPU, MODEL, scene
from penstock.planner_service.files.measured import read_trace
from penstock.planner_service.simulator import Replica, Workload
from penstock.planner_service.simulator.loop import serve_on
from penstock.planner_service.simulator.placed import STILL
from penstock.planner_service.simulator.policies import LeastWork
from penstock.planner_service.simulator.workload import Floats
from penstock.planner_service.stages.partition import layout_quality, plan_stages
from penstock.planner_service.stages.replay import PolicyOf, Replayer
from penstock.planner_service.stages.sample import LengthSample, count_in_flight, in_flight
from penstock.services.domain.stages.layout import StageLayout

TRACES = (CONVERSATION, CODE)
INSTANCES, STAGED_INSTANCES = 4, 16
LOADS = (0.5, 0.75, 0.9)
SEEDS = (1, 2, 3, 4, 5)
WARM_UP = 0.25
"""Of the requests of a run: those that fill the instances, whose latencies do not count."""
KV_BOUND = "opt-13b"
LONGEST_TOKENS = 8000
"""Longer requests are left out, so that both deployments serve the same."""
FIGURES = ("ttft_p50_s", "ttft_p95_s", "end_to_end_p50_s", "end_to_end_p95_s")


@dataclass(frozen=True, slots=True)
class Deployed:
    """Instances of one kind. requests: of each run."""

    name: str
    replica: Replica
    requests: int


def deployments() -> list[Deployed]:
    return [
        Deployed(f"{MODEL} on {GPU}", scene(CONVERSATION).measured.replica, 4000),
        Deployed(f"{KV_BOUND} on a100-80gb", published_replica(KV_BOUND), 2000),
    ]


def halves(trace: str) -> tuple[Workload, Workload]:
    """The first and the second half of a trace."""
    work = read_trace(public(f"traces/{trace}.csv.gz"))
    half, fits = len(work) // 2, work.input_tokens + work.output_tokens <= LONGEST_TOKENS
    first = np.arange(len(work)) < half
    return work.subset(first & fits), work.subset(~first & fits)


def drawn(work: Workload, rate: float, count: int, seed: int) -> Workload:
    """So many requests in random order, every one of them before any comes again, as a Poisson process."""
    rng = np.random.default_rng(seed)
    rounds = -(-count // len(work))
    chosen = np.concatenate([rng.permutation(len(work)) for _ in range(rounds)])[:count]
    arrivals = np.cumsum(rng.exponential(1 / rate, count))
    return Workload(arrivals - arrivals[0], work.input_tokens[chosen], work.output_tokens[chosen])


def with_mean_output(work: Workload) -> Workload:
    mean = round(float(work.output_tokens.mean()))
    return Workload(work.arrival_s, work.input_tokens, np.full(len(work), mean, np.int64))


def felt(work: Workload, on: Deployed, policy: PolicyOf) -> Floats:
    """(FIGURES) of a run."""
    served = serve_on(ForkingCluster(work, [on.replica] * INSTANCES, STILL), policy)
    counted = slice(int(WARM_UP * len(work)), None)
    ttft, whole = ((times - work.arrival_s)[counted] for times in (served.first_s, served.finish_s))
    return np.array([np.percentile(times, percent) for times in (ttft, whole) for percent in (50, 95)])


def over(values: list[Floats], base: list[Floats]) -> dict[str, Any]:
    """By figure, the mean ratio over runs with its interval."""
    ratios = np.array(values) / np.array(base)
    return {name: interval(ratios[:, i].tolist()) for i, name in enumerate(FIGURES)}


def candidates(past: Workload, work: Workload, load: float) -> dict[str, PolicyOf]:
    """By form and source."""
    sources: dict[str, LengthSource] = {
        "mean": MeanLength(past.output_tokens),
        "distribution": LengthDistribution(past.output_tokens),
        "exact": ExactLength(work.output_tokens),
    }
    forms = [form for form in Form if form is not Form.FORESIGHT or load == max(LOADS)]
    return {f"{form.value}, {name}": policy_of(source, form) for form in forms for name, source in sources.items()}


def placement(trace: str, on: Deployed) -> list[dict[str, Any]]:
    """By load: placement with lengths over that without, and forecasts over what they forecast."""
    past, future = halves(trace)
    first_per_s = INSTANCES * on.replica.capacity_per_s(*future.mean_tokens)
    sustained = Replayer(drawn(future, first_per_s, len(future), 0), on.replica, INSTANCES, STILL).sustained_per_s(
        LeastWork
    )
    rows = list[dict[str, Any]]()
    for load in LOADS:
        today, others, forecasts = list[Floats](), dict[str, list[Floats]](), dict[str, list[Floats]]()
        for seed in SEEDS:
            work = drawn(future, load * sustained, on.requests, seed)
            today.append(felt(work, on, LeastWork))
            for name, policy in candidates(past, work, load).items():
                others.setdefault(name, []).append(felt(work, on, policy))
            before = drawn(past, load * sustained, on.requests, seed)
            for name, forecast in (("distribution", before), ("mean", with_mean_output(before))):
                forecasts.setdefault(name, []).append(felt(forecast, on, LeastWork))
        row = {
            "trace": trace,
            "deployment": on.name,
            "load": load,
            "sustained_per_s": sustained,
            "today": dict(zip(FIGURES, np.mean(today, axis=0).tolist(), strict=True)),
            "over_today": {name: over(values, today) for name, values in others.items()},
            "forecast_over_today": {name: over(values, today) for name, values in forecasts.items()},
        }
        rows.append(row)
        _print(row)
    return rows


def _print(row: dict[str, Any]) -> None:
    print(f"{row['trace']}, {row['deployment']} at {row['load']:g} of {row['sustained_per_s']:.1f}/s: {row['today']}")
    for kind in ("over_today", "forecast_over_today"):
        for name, figures in row[kind].items():
            values = ", ".join(f"{f['mean']:.3f} ({f['low']:.3f} to {f['high']:.3f})" for f in figures.values())
            print(f"  {kind} {name:<24} {values}", flush=True)


def stages(trace: str) -> dict[str, Any]:
    """The cost of layouts for the sequences in flight of the second half, over that of one stage."""
    of = scene(trace)
    qoe, replica = of.measured.qoe, of.measured.replica
    move = of.moves(0.0)
    past, future = halves(trace)
    rate = max(LOADS) * STAGED_INSTANCES * replica.capacity_per_s(*future.mean_tokens)
    past, future = of.at(past, rate), of.at(future, rate)
    even = with_mean_output(past)
    top = max(work.longest_tokens for work in (past, future, even)) + 1

    def sample(work: Workload) -> LengthSample:
        return in_flight(work, count_in_flight(work, qoe, STAGED_INSTANCES, replica))

    held, costs = sample(future), dict[str, float]()
    single = layout_quality(StageLayout.single(STAGED_INSTANCES, top), held, qoe, move)
    for name, work in (("distribution", past), ("mean", even), ("exact", future)):
        plan = plan_stages(sample(work), qoe, STAGED_INSTANCES, top, move)
        costs[name] = layout_quality(plan.layout, held, qoe, move) / single
    print(f"{trace}: cost of stages over one stage {costs}", flush=True)
    return {"trace": trace, "cost_over_one_stage": costs}


def run(_: int) -> None:
    """Virtual time: repeats give the same figures."""
    rows = [row for on in deployments() for trace in TRACES for row in placement(trace, on)]
    figures = {
        "instances": INSTANCES,
        "seeds": SEEDS,
        "placement": rows,
        "stages": [stages(trace) for trace in TRACES],
    }
    print(report.write("known_lengths", figures))
