"""CASCADIA's table 2: the allocation of this planner compared with the paper's, for the same shares of requests that reach
each tier.

The paper gives shares, GPUs and (table 3) replicas, but neither its models' lengths nor its rates. Lengths are those of
judged MT-Bench answers (the paper's traces are drawn from MT-Bench); who escalates is drawn by seed, so that tiers differ in
number and not in kind. Two loads for each row:

- `paper`: the throughput that figure 6 shows, read off its axis (a bar is 1 / 1.2 of its axis, as table 4 confirms).
- `busy`: BUSY of what the paper's own deployment can serve, its tightest tier running full batches of mean lengths.

At each, the paper's replicas and ours are simulated on the same requests; ours are the deployment solver's for these shares.
And twice: with our K(N) for NVLink throughout a node, and with what table 1 shows, where four shards are hardly faster than
two.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.public_data import public
from penstock.planner_service.deployment.search import Strategy
from penstock.planner_service.files.measured import read_trace
from penstock.planner_service.planning.deployers import deployer_for
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.routing.deployer import Deployer
from penstock.planner_service.routing.quality import JudgedSample
from penstock.planner_service.simulator import Dispatch, serve
from penstock.planner_service.simulator.workload import Floats
from penstock.services.domain.hardware import ReplicaShape
from tests.support.inputs import read_quality, read_site

EXAMPLES = Path("examples")
REQUESTS, SEED, BUSY = 3000, 3, 0.8
TABLE_1_TP = (
    (1, 1.0),
    (2, 0.95),
    (4, 0.5),
    (8, 0.25),
)  # rates of (1, 4, 1) and (2, 2, 1) in table 1: 0.21 and 0.20 a replica

Parts = tuple[tuple[int, int, int], ...]  # (count, TP, PP) each


@dataclass(frozen=True, slots=True)
class Row:
    """Of tables 2 and 3, and of figure 6. shares: that reach each tier."""

    name: str
    shares: tuple[float, float, float]
    gpus: tuple[int, int, int]
    replicas: tuple[Parts, Parts, Parts]
    rate_per_s: float


ROWS = (
    Row("(90, 1)", (1, 0.94, 0.50), (4, 8, 20), (((4, 1, 1),), ((2, 4, 1),), ((1, 4, 3), (1, 8, 1))), 0.25),
    Row("(85, 1)", (1, 0.62, 0.21), (4, 12, 16), (((2, 2, 1),), ((6, 2, 1),), ((2, 8, 1),)), 0.46),
    Row("(80, 1)", (1, 0.54, 0.11), (6, 14, 12), (((6, 1, 1),), ((5, 2, 1), (1, 4, 1)), ((1, 4, 3),)), 1.01),
    Row("(80, 2)", (1, 0.31, 0.03), (8, 16, 8), (((6, 1, 1), (1, 2, 1)), ((8, 2, 1),), ((1, 8, 1),)), 1.33),
    Row("(80, 3)", (1, 0.23, 0.00), (18, 14, 0), (((10, 1, 1), (4, 2, 1)), ((2, 4, 1), (3, 2, 1)), ()), 2.62),
    Row("(70, 3)", (1, 0.05, 0.00), (24, 8, 0), (((16, 1, 1), (4, 2, 1)), ((4, 2, 1),), ()), 4.40),
)


def sample_of(rng: np.random.Generator) -> JudgedSample:
    """Prompts with MT-Bench's lengths, scored by their place in a drawn order: below a threshold of s are s % of them."""
    judged = read_quality(public("quality/mtbench_mixtral-gpt4.csv.gz"), ("small", "large"))
    rows = rng.integers(0, len(judged), REQUESTS)
    outputs = judged.output_tokens[rows][:, [0, 1, 1]]
    place = 100.0 * (rng.permutation(REQUESTS) + 0.5) / REQUESTS
    return JudgedSample(("small", "medium", "large"), judged.input_tokens[rows], outputs, np.stack([place] * 3, axis=1))


def tier_p95_s(deployer: Deployer, thresholds: tuple[float, float], strategies: list[Strategy]) -> list[float]:
    """By tier, each one's own p95; 0 without requests."""
    latencies_s = []
    for tier, (strategy, reached) in enumerate(zip(strategies, (101.0, *thresholds), strict=True)):
        work = deployer.workload(tier, deployer.sample.scores[:, 0] < reached)
        replicas = [replica for replica, count in strategy.replicas for _ in range(count)]
        served = serve(work, replicas, deployer.dispatch)
        latencies_s.append(float(np.percentile(served.finish_s - work.arrival_s, 95)) if len(work) else 0.0)
    return latencies_s


def published(site: Site, row: Row, longest: int) -> list[Strategy]:
    rows = []
    for tier, parts in enumerate(row.replicas):
        replicas = []
        for count, tp, pp in parts:
            replica, why = site.replica(tier, ReplicaShape(tp, pp), longest)
            assert replica is not None, why
            replicas.append((replica, count))
        rows.append(Strategy(tuple(replicas), 0.0))
    return rows


def deployer_at(site: Site, sample: JudgedSample, arrival_s: Floats) -> Deployer:
    return deployer_for(site, Demand(sample, sample, arrival_s), gpus=None, dispatch=Dispatch.CAPACITY)[0]


def compare(site: Site, row: Row, sample: JudgedSample, gaps: Floats) -> dict[str, Any]:
    """One row at both loads. gaps (N): times of arrival at one request per second."""
    thresholds = (100.0 * row.shares[1], 100.0 * row.shares[2])
    theirs = published(site, row, int((sample.input_tokens + sample.output_tokens.max(axis=1)).max()))

    mean_input, mean_outputs = float(sample.input_tokens.mean()), sample.output_tokens.mean(axis=0).tolist()
    capacity = float("inf")
    for strategy, output, share in zip(theirs, mean_outputs, row.shares, strict=True):
        if share:
            able = sum(count * replica.capacity_per_s(mean_input, output) for replica, count in strategy.replicas)
            capacity = min(capacity, able / share)
    loads: dict[str, Any] = {}
    result: dict[str, Any]
    for name, rate in (("paper", row.rate_per_s), ("busy", BUSY * capacity)):
        deployer = deployer_at(site, sample, gaps / rate)
        ours = deployer.deploy(thresholds)
        assert ours is not None
        result = {}
        for whose, strategies in (("theirs", theirs), ("ours", list(ours.strategies))):
            p95 = tier_p95_s(deployer, thresholds, strategies)
            result[whose] = {
                "gpus": [strategy.gpus for strategy in strategies],
                "replicas": [str(strategy) for strategy in strategies],
                "tier_p95_s": p95,
                "latency_p95_s": max(p95),
            }
        gain = result["theirs"]["latency_p95_s"] / result["ours"]["latency_p95_s"]
        loads[name] = {"rate_per_s": rate, "gain": gain, **result}
    return {"case": row.name, "shares": list(row.shares), "loads": loads}


def run(_: int) -> None:
    """Nothing here is timed: one round is all."""
    site = read_site(EXAMPLES / "cluster-4x8-h100.yaml", EXAMPLES / "deepseek-cascade.yaml")
    rng = np.random.default_rng(SEED)
    sample = sample_of(rng)
    trace = read_trace(public("traces/azure2023_conv.csv.gz")).arrival_s[:REQUESTS]
    gaps = (trace - trace[0]) * (REQUESTS - 1) / (trace[-1] - trace[0])
    slow_links = dataclasses.replace(site, runtime=dataclasses.replace(site.runtime, tp_efficiency=TABLE_1_TP))
    result: dict[str, Any] = {"seed": SEED, "requests": REQUESTS, "busy": BUSY}
    for links, where in (("nvlink", site), ("table1", slow_links)):
        result[links] = []
        for row in ROWS:
            compared = compare(where, row, sample, gaps)
            result[links].append(compared)
            for name, load in compared["loads"].items():
                sides = "   ".join(
                    f"{whose} {load[whose]['gpus']} {load[whose]['latency_p95_s']:.1f} s"
                    for whose in ("theirs", "ours")
                )
                print(
                    f"{links} {row.name} {name:<5} {load['rate_per_s']:6.2f}/s  {sides}  {load['gain']:.2f}x",
                    flush=True,
                )
                print("   " + " | ".join(load["ours"]["replicas"]), flush=True)
    print(report.write("table2", result))
