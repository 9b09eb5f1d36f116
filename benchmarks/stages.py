"""Replay of traces on 16 simulated instances: what length stages are worth where dispatch is good (CascadeInfer, 6).

Requests have the trace's lengths, in its order, and arrive as a Poisson process (section 6.1). Layouts are proposed on the
first half of each trace, and chosen and measured on the second. Contenders: round robin; dispatch and migration by free
memory, after Llumnix; least work (dispatch by pending work, nothing moves), which is how a tier without stages serves; the
layout with the best latencies of all that are proposed, whether `penstock stages` would use it or not. Instances are the
worker's batch scheduler on a roofline of a GPU; placement, refinement and bidding are the production code.

Reported: the rate that each sustains (requests in flight do not grow; long runs are the stretch of a trace repeated), and
at four fifths of what least work sustains: times to first token by length class, time per output token, tokens by class,
and how long it takes to drain. Attention over unlike lengths is up to 2.1 times as slow in the paper's figure 2, which is
not measured here: everything is done without it and with it, and one trace is swept between the two. Moves go over what
gRPC carried between two workers of one host; one trace, whose replies are long, is swept over bandwidths.

And whether the choice can be trusted (`choices`): on every trace, at three loads and under three conditions, the last of
which is the paper's, a layout is proposed and chosen with requests of the first half, as `penstock stages` does it, and
what it chose or rejected is replayed on the second half with arrivals of several seeds. Loads are shares of what least work
sustains on the second half. Only here does a layout also have to do no harm on the requests before those that choose it:
the second half alone is too short for that.
"""

import itertools
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from benchmarks import report
from benchmarks.cluster_policies import MemoryAware, RoundRobin
from benchmarks.public_data import public
from penstock.cli.stages import MEASURED_BANDWIDTH_GB_PER_S
from penstock.planner_service.files.measured import read_trace
from penstock.planner_service.files.profiles import qoe_errors
from penstock.planner_service.files.stage_replica import StageReplica, read_replica
from penstock.planner_service.simulator import Workload
from penstock.planner_service.simulator.cluster import Cluster, Moves
from penstock.planner_service.simulator.loop import serve_on
from penstock.planner_service.simulator.policies import LeastWork, Policy
from penstock.planner_service.simulator.staged import Staged
from penstock.planner_service.stages.partition import Problem, exponential_cuts
from penstock.planner_service.stages.profile import batches_of
from penstock.planner_service.stages.proposals import propose
from penstock.planner_service.stages.replay import (
    MARGIN,
    MIN_GAIN,
    PolicyOf,
    Replayer,
    count_replayed,
    figures_of,
    judge,
)
from penstock.planner_service.stages.sample import LengthSample, in_flight
from penstock.services.domain.stages.layout import StageLayout
from penstock.types.plans import QoeModel

TRACES = ("mooncake_conversation", "azure2023_conv", "azure2023_code_first_half", "servegen_m-small_sample_1h")
REASONING = "reasoning"  # azure2023_conv with long replies
MODEL, GPU, INSTANCES = "llama-3.2-3b", "h100", 16
BANDWIDTH_BYTES_PER_S = 1e9 * MEASURED_BANDWIDTH_GB_PER_S
MIXED = (0.0, 1.1)  # the attention term: none, and figure 2's worst case
MIXED_SWEEP = (0.275, 0.55, 0.825)
BANDWIDTH_SWEEP = (0.1e9, 0.63e9, 2e9, 25e9)
REQUESTS = 3000
LOAD, LOADS = 0.8, (0.5, 0.8, 0.95)  # of what least work sustains
CONDITIONS = ((0.0, BANDWIDTH_BYTES_PER_S), (1.1, BANDWIDTH_BYTES_PER_S), (1.1, 25e9))
"""Attention terms and bandwidths under which layouts are chosen. The last is what the paper has: 200 Gbit/s."""
SEEDS = (1, 2, 3)
CLASSES = (1024, 4096, 32_768)  # prompts shorter than these, and the others
SEED = 1


@dataclass(frozen=True, slots=True)
class Scene:
    """One trace: what layouts are proposed on, what is replayed, on what."""

    name: str
    past: Workload
    future: Workload
    measured: StageReplica

    @property
    def top(self) -> int:
        return max(self.past.longest_tokens, self.future.longest_tokens) + 1

    def at(self, work: Workload, rate: float, seed: int = SEED) -> Workload:
        """The requests of a part, arriving as a Poisson process."""
        arrivals = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, len(work)))
        return Workload(arrivals - arrivals[0], work.input_tokens, work.output_tokens)

    def moves(self, mixed: float, bandwidth: float = BANDWIDTH_BYTES_PER_S) -> Moves:
        return Moves(self.measured.kv_bytes_per_token, bandwidth, mixed)

    def replayer(self, mixed: float, bandwidth: float = BANDWIDTH_BYTES_PER_S, rate: float | None = None) -> Replayer:
        means = float(self.future.input_tokens.mean()), float(self.future.output_tokens.mean())
        first = rate or 0.5 * INSTANCES * self.measured.replica.capacity_per_s(*means)
        work = self.at(self.future, first)
        return Replayer(work, self.measured.replica, INSTANCES, self.moves(mixed, bandwidth))

    def layouts(self, rate: float, bandwidth: float = BANDWIDTH_BYTES_PER_S) -> list[StageLayout]:
        past, replica, qoe = self.at(self.past, rate), self.measured.replica, self.measured.qoe
        sample = in_flight(past, count_replayed(past, replica, self.moves(0.0, bandwidth), INSTANCES))
        return propose(past, sample, qoe, replica, INSTANCES, self.top, self.moves(0.0, bandwidth))


def scene(name: str) -> Scene:
    """A public trace; or `REASONING`: the prompts of a chat trace with replies drawn by us, median 2,000 tokens."""
    work = read_trace(public(f"traces/{TRACES[1] if name == REASONING else name}.csv.gz"))
    if name == REASONING:
        replies = np.random.default_rng(SEED).lognormal(np.log(2000), 1.0, len(work))
        outputs = np.clip(replies, 50, 16_384).astype(np.int64)
        work = Workload(work.arrival_s, work.input_tokens, outputs)
    half = len(work) // 2
    past, future = work.subset(np.arange(half)), work.subset(np.arange(half, min(len(work), half + REQUESTS)))
    return Scene(name, past, future, read_replica(None, MODEL, GPU, past))


def by_class(work: Workload, served: Cluster) -> list[dict[str, float]]:
    """Requests by length of prompt. tokens_served: output tokens made before the last arrival, over all of the class."""
    arrival, bounds = work.arrival_s - work.arrival_s[0], [0, *CLASSES, np.inf]
    ttft, figures = served.first_s - arrival, []
    span = np.maximum(served.finish_s - served.first_s, 1e-9)
    tokens_made = work.output_tokens * np.clip((arrival[-1] - served.first_s) / span, 0, 1)
    for low, high in itertools.pairwise(bounds):
        of_class = (work.input_tokens >= low) & (work.input_tokens < high)
        if not of_class.any():
            continue
        figures.append(
            {
                "from_input_tokens": float(low),
                "requests": int(of_class.sum()),
                "ttft_mean_s": float(ttft[of_class].mean()),
                "ttft_p95_s": float(np.percentile(ttft[of_class], 95)),
                "tokens_served": float(tokens_made[of_class].sum() / work.output_tokens[of_class].sum()),
            }
        )
    return figures


def staged(layout: StageLayout, qoe: QoeModel) -> PolicyOf:
    def policy(cluster: Cluster) -> Policy:
        return Staged(cluster, layout, qoe)

    return policy


def replay(name: str, mixed: float) -> dict[str, Any]:
    """Every contender on one trace: what it sustains, and what requests feel at `LOAD`."""
    of = scene(name)
    measured = of.measured
    rate = LOAD * of.replayer(mixed).sustained_per_s(LeastWork)
    replayer = of.replayer(mixed, rate=rate)
    layouts = of.layouts(rate)
    verdict = judge(replayer.work, measured.replica, replayer.moves, measured.qoe, INSTANCES, layouts)
    contenders: dict[str, PolicyOf] = {"round robin": RoundRobin, "memory-aware": MemoryAware, "least work": LeastWork}
    if verdict.layout is not None:
        contenders["stages"] = staged(verdict.layout, measured.qoe)
    rows = dict[str, Any]()
    for contender, policy in contenders.items():
        served = serve_on(Cluster(replayer.work, [measured.replica] * INSTANCES, replayer.moves), policy)
        rows[contender] = {
            **asdict(figures_of(served)),
            "sustained_per_s": replayer.sustained_per_s(policy),
            "classes": by_class(replayer.work, served),
            "moved": served.moved,
        }
        row = rows[contender]
        print(
            f"  {of.name} mixed {mixed:g}: {contender:<12} sustains {row['sustained_per_s']:6.1f}/s; at {rate:.1f}/s "
            f"TTFT p50 {row['ttft_p50_s']:7.3f} p95 {row['ttft_p95_s']:7.3f} s, TPOT {1000 * row['tpot_s']:6.2f} ms, drain "
            f"{row['drain_s']:6.1f} s",
            flush=True,
        )
    print(f"  {verdict.sentence}", flush=True)
    return {"rate_per_s": rate, "mixed": mixed, "verdict": _verdict(verdict), "contenders": rows}


def _verdict(verdict: Any) -> dict[str, Any]:
    """The changes one by one, as results have them."""
    figures = asdict(verdict)
    changes = figures.pop("changes")
    return {**figures, **changes._asdict(), "sentence": verdict.sentence}


def sweep_bandwidth(name: str) -> dict[str, Any]:
    """The verdict by bandwidth, without the attention term."""
    of = scene(name)
    rate = LOAD * of.replayer(0.0).sustained_per_s(LeastWork)
    verdicts = dict[str, Any]()
    for bandwidth in BANDWIDTH_SWEEP:
        replayer = of.replayer(0.0, bandwidth, rate)
        layouts = of.layouts(rate, bandwidth)
        measured = of.measured
        verdict = judge(replayer.work, measured.replica, replayer.moves, measured.qoe, INSTANCES, layouts)
        verdicts[f"{bandwidth:g}"] = _verdict(verdict)
        print(f"  {of.name} at {bandwidth / 1e9:g} GB/s: {verdict.sentence}", flush=True)
    return {"rate_per_s": rate, "verdicts": verdicts}


def choices(name: str, mixed: float, bandwidth: float) -> list[dict[str, Any]]:
    """By load: the layout that is chosen on the first half of a trace, and what it does on the second.

    Changes are shares of least work's figures, by seed. Where one stage is chosen they are those of the best that was
    rejected, and `harm` is 0, because nothing changes.
    """
    of = scene(name)
    measured, moves = of.measured, of.moves(mixed, bandwidth)
    sustained, rows = of.replayer(mixed, bandwidth).sustained_per_s(LeastWork), list[dict[str, Any]]()
    for load in LOADS:
        rate = load * sustained
        layouts, past = of.layouts(rate, bandwidth), of.at(of.past, rate)
        verdict = judge(past, measured.replica, moves, measured.qoe, INSTANCES, layouts)
        row: dict[str, Any] = {
            "trace": name,
            "mixed": mixed,
            "bandwidth_bytes_per_s": bandwidth,
            "load": load,
            "rate_per_s": rate,
            "chosen_on_the_first_half": _verdict(verdict),
        }
        if verdict.layout is not None:
            policy = staged(verdict.layout, measured.qoe)
            seeds = [_changes(of, moves, policy, rate, seed) for seed in SEEDS]
            middle = {figure: float(np.median([changes[figure] for changes in seeds])) for figure in seeds[0]}
            replayer = Replayer(of.at(of.future, rate), measured.replica, INSTANCES, moves)
            rate_change = replayer.sustained_per_s(policy) / sustained - 1
            worst = max(*middle.values(), -rate_change)
            row |= {
                "by_seed": seeds,
                "median": middle | {"sustained_rate": rate_change},
                "pays": worst <= MARGIN and min(*middle.values(), -rate_change) <= -MIN_GAIN,
                "harm": worst if verdict.favoured else 0.0,
            }
            row["agrees"] = row["pays"] is verdict.favoured
        else:
            row |= {"pays": False, "harm": 0.0, "agrees": True}
        rows.append(row)
    return rows


def _changes(of: Scene, moves: Moves, policy: PolicyOf, rate: float, seed: int) -> dict[str, float]:
    """What a layout changes on the second half of a trace, with arrivals of one seed: shares of least work's figures."""
    replayer = Replayer(of.at(of.future, rate, seed), of.measured.replica, INSTANCES, moves)
    ours, least = asdict(replayer.figures(policy)), asdict(replayer.figures(LeastWork))
    return {figure: ours[figure] / least[figure] - 1 for figure in ("ttft_p50_s", "ttft_p95_s", "tpot_s")}


def _print_choices(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        choice = "stages" if row["chosen_on_the_first_half"]["favoured"] else "one stage"
        changes = ", ".join(f"{name} {change:+.0%}" for name, change in row.get("median", {}).items())
        print(
            f"  {row['trace']} load {row['load']:g} mixed {row['mixed']:g} at {row['bandwidth_bytes_per_s'] / 1e9:g} GB/s: "
            f"{choice} chosen; on the second half stages have {changes or 'no layout'}: "
            f"{'agrees' if row['agrees'] else 'DIFFERS'}",
            flush=True,
        )


def partition_times(rounds: int) -> dict[str, Any]:
    """Best of `rounds` (after one that compiles), seconds."""
    work = read_trace(public("traces/mooncake_conversation.csv.gz"))
    qoe = read_replica(None, MODEL, GPU, work).qoe
    move, times_by_instances = Moves(114_688, BANDWIDTH_BYTES_PER_S), dict[str, Any]()
    work = work.subset(work.input_tokens + work.output_tokens < 131_072)
    for instances, per_instance in ((16, 40), (128, 40), (1024, 40)):
        sample = in_flight(work, instances * per_instance)
        exact_s = min(_timed(sample, qoe, instances, move) for _ in range(rounds + 1))
        times_by_instances[str(instances)] = {"exact_s": exact_s, "sequences": len(sample.tokens)}
        print(f"{instances:>5} instances, 128K: {1000 * exact_s:.1f} ms", flush=True)
    return times_by_instances


def _timed(sample: LengthSample, qoe: QoeModel, instances: int, move: Moves) -> float:
    began = time.perf_counter()
    problem = Problem(sample, qoe, instances, move, exponential_cuts(131_072))
    problem.layout(problem.exact())
    return time.perf_counter() - began


def run(rounds: int) -> None:
    """`rounds` is how often partitions are timed; replays are deterministic."""
    partition = partition_times(rounds)
    names = (*TRACES, REASONING)
    terms = {name: (*MIXED, *MIXED_SWEEP) if name == TRACES[0] else MIXED for name in names}
    traces, chosen = dict[str, Any](), list[dict[str, Any]]()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        sweep = pool.submit(sweep_bandwidth, REASONING)  # what takes longest first: no core waits at the end
        choosing = {
            (name, condition): pool.submit(choices, name, *condition)
            for name in reversed(names)
            for condition in reversed(CONDITIONS)
        }
        replays = {name: [pool.submit(replay, name, term) for term in terms[name]] for name in names}
        for name in names:
            of = scene(name)
            fit_error = float(np.abs(qoe_errors(of.measured.qoe, batches_of(of.measured.replica, of.past))).mean())
            traces[name] = {
                "requests": len(of.future),
                "qoe_fit_error": fit_error,
                "replays": [one.result() for one in replays[name]],
            }
        sweeps = {"bandwidth": sweep.result()}
        for case in itertools.product(names, CONDITIONS):
            rows = choosing[case].result()
            _print_choices(rows)
            chosen += rows
    about = {
        "seed": SEED,
        "seeds_of_choices": SEEDS,
        "model": MODEL,
        "gpu": f"{GPU}, by its data sheet",
        "instances": INSTANCES,
        "bandwidth_bytes_per_s": BANDWIDTH_BYTES_PER_S,
        "mixed_from": "CascadeInfer, figure 2; not measured",
        "load": LOAD,
        "published_over_round_robin": {"ttft_lower": [0.67, 0.78], "tpot_lower": [0.30, 0.64], "throughput": 1.99},
    }
    path = report.write(
        "stages", {**about, "partition": partition, "traces": traces, "sweeps": sweeps, "choices": chosen}
    )
    print(f"{path}\n{_plot(traces)}")


def _plot(traces: dict[str, Any]) -> Path:
    """The sustained rate of each contender, relative to least work, by trace and attention term."""
    figure, axes = plt.subplots(1, len(MIXED), figsize=(12, 4), layout="constrained", sharey=True)
    kinds = ("round robin", "memory-aware", "least work", "stages")
    for panel, term in zip(axes, MIXED, strict=True):
        for i, (name, colour) in enumerate(zip(kinds, report.COLOURS, strict=False)):
            heights = []
            for trace in traces.values():
                rows = next(r["contenders"] for r in trace["replays"] if r["mixed"] == term)
                rate = rows.get(name, {"sustained_per_s": 0.0})["sustained_per_s"]
                heights.append(rate / max(rows["least work"]["sustained_per_s"], 1e-9))
            panel.bar(np.arange(len(traces)) + 0.2 * (i - 1.5), heights, 0.2, color=colour, label=name)
        panel.set_xticks(range(len(traces)), [name.replace("_", "\n") for name in traces], fontsize=8)
        slower = f"up to {1 + term:g} times" if term else "none"
        panel.set_title(f"cost of unlike lengths: {slower}", loc="left")
    axes[0].set_ylabel("sustained rate over least work")
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=len(kinds))
    figure.suptitle(f"{INSTANCES} instances: {MODEL} on {GPU} (simulated)", x=0.01, ha="left")
    return report.save("stages", figure)
