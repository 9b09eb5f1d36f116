"""The baselines of the cascade benchmark, tuned with the same search: one model alone, and a load-based cascade.

The load-based cascade represents CascadeServe as CASCADIA describes and tunes it (section 4.1): replicas by load, parallelism
and routing tuned to the rate, without regard to lengths or to which requests escalate. It uses mean lengths, the shares that
escalate at given thresholds, and the required mean quality:

1. of all thresholds that meet the quality, it chooses those with the lowest load of the busiest tier, where GPUs are given
   to the busiest tier replica by replica;
2. it then chooses the parallelism of each tier, the same for all its replicas, by simulating requests of mean length that
escalate
   at random.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.planner_service.deployment.search import NOTHING, Strategy
from penstock.planner_service.planning.deployers import deployer_for
from penstock.planner_service.planning.plan_cascade import plan_cascade
from penstock.planner_service.question.planning_options import Options
from penstock.planner_service.question.site import Demand, Site, replica_kinds
from penstock.planner_service.replay.cascade_simulation import run_cascade
from penstock.planner_service.routing.end_to_end import EndToEnd
from penstock.planner_service.routing.quality import SKIPPED, JudgedSample, all_qualities, route
from penstock.planner_service.simulator import Dispatch, Replica, Workload, serve
from penstock.planner_service.simulator.workload import Bools, Floats
from penstock.services.acceptance.pipeline import NO_RULES
from penstock.types.planning import Objective
from penstock.types.rules import AcceptanceRules, RuleOptions


@dataclass(frozen=True, slots=True)
class System:
    """Thresholds, what runs on each tier, and what its routing has in addition to thresholds."""

    thresholds: tuple[float, ...]
    strategies: tuple[Strategy, ...]
    rules: AcceptanceRules = NO_RULES

    @property
    def gpus(self) -> list[int]:
        return [strategy.gpus for strategy in self.strategies]


def ours(
    site: Site,
    demand: Demand,
    min_quality: float,
    *,
    best_answer: bool = False,
    long_answers: bool = False,
    rules: AcceptanceRules | None = None,
) -> System:
    """The planner's, for the end-to-end p95. best_answer: replies are the best answers. long_answers: see RuleOptions. rules:
    that the routing has, whatever these say; None: they say."""
    options = Options(
        min_quality=min_quality,
        objective=Objective.END_TO_END,
        allow_overload=True,
        rules=RuleOptions(long_answers=long_answers and rules is None),
    )
    plan = plan_cascade(site, demand.under(rules or AcceptanceRules(best_answer=best_answer)), options)
    chosen = rules or dataclasses.replace(plan.rules, best_answer=best_answer)
    return System(plan.thresholds, tuple(tier.strategy for tier in plan.tiers), chosen)


def redeployed(site: Site, demand: Demand, thresholds: tuple[float, ...], rules: AcceptanceRules = NO_RULES) -> System:
    """This routing with what the deployment solver chooses for `demand`, for the end-to-end p95."""
    demand = demand.under(rules)

    def total_s(at: Sequence[float], strategies: Sequence[Strategy]) -> float:
        return float(np.percentile(run_cascade(site, demand, at, strategies, Dispatch.CAPACITY).total_s, 95))

    deployer = deployer_for(site, demand, gpus=None, dispatch=Dispatch.CAPACITY)[0]
    deployment = EndToEnd(deployer, demand.judged, site.judge_s, total_s).deployed(thresholds)
    assert deployment is not None
    return System(thresholds, deployment.strategies, rules)


def alone(site: Site, demand: Demand, tier: int) -> System:
    """One tier's model on all GPUs, its replicas chosen by our parallelism search."""
    thresholds = tuple(SKIPPED if t < tier else 0.0 for t in range(len(site.tiers) - 1))
    return redeployed(site, demand, thresholds)


def load_based(site: Site, demand: Demand, min_quality: float, seed: int) -> System:
    """See the module's docstring. `demand`: of what arrives, only the times and the mean lengths are looked at."""
    judged = demand.judged
    mean_input, mean_outputs = float(judged.input_tokens.mean()), judged.output_tokens.mean(axis=0).tolist()
    longest = (demand.requests.input_tokens[:, None] + demand.requests.output_tokens).max(axis=0).tolist()
    kinds = [replica_kinds(site, tier, site.cluster.gpus, longest[tier])[0] for tier in range(len(site.tiers))]
    best, per_s = [], []
    for able, output in zip(kinds, mean_outputs, strict=True):
        rates = [kind.capacity_per_s(mean_input, output) for kind in able]
        place = max(
            range(len(able)), key=[rate / k.shape.gpus for rate, k in zip(rates, able, strict=True)].__getitem__
        )
        best.append(able[place])
        per_s.append(rates[place])
    thresholds, gpus = least_busy(judged, min_quality, best, per_s, site.cluster.gpus)
    shares = route(judged, thresholds).share_processed()
    draw = np.random.default_rng(seed).random(len(demand.arrival_s))
    strategies = []
    for tier, (able, share, count) in enumerate(zip(kinds, shares, gpus, strict=True)):
        arrival_s = demand.arrival_s[draw < share]
        uniform = [(k, count // k.shape.gpus) for k in able if k.shape.gpus <= count]
        strategies.append(_least_p95(arrival_s, round(mean_input), round(mean_outputs[tier]), uniform))
    return System(thresholds, tuple(strategies))


def most_by_work(site: Site, judged: JudgedSample, min_quality: float) -> float:
    """Requests per second that no cascade of this quality exceeds by arithmetic.

    All GPUs are always busy, shared out over the tiers in any fraction, as the replicas that serve most per GPU; for the best
    of all thresholds, and the lengths of the requests that reach each tier with these.
    """
    kinds, most = kinds_for(site, judged), 0.0
    for thresholds in lowest_thresholds(judged, min_quality):
        most = max(most, site.cluster.gpus / gpu_s(judged, route(judged, thresholds).processed, kinds))
    return most


def kinds_for(site: Site, judged: JudgedSample) -> list[list[Replica]]:
    """By tier, the replicas that hold its longest request."""
    longest = (judged.input_tokens[:, None] + judged.output_tokens).max(axis=0).tolist()
    return [replica_kinds(site, tier, site.cluster.gpus, longest[tier])[0] for tier in range(len(site.tiers))]


def gpu_s(judged: JudgedSample, processed: Bools, kinds: Sequence[Sequence[Replica]]) -> float:
    """GPU seconds of a prompt by arithmetic, on the replicas of each tier that serve most per GPU. processed (C, N)."""
    total = 0.0
    for tier, chosen in enumerate(processed):
        if chosen.any():
            means = float(judged.input_tokens[chosen].mean()), float(judged.output_tokens[chosen, tier].mean())
            total += float(chosen.mean()) * min(k.shape.gpus / k.capacity_per_s(*means) for k in kinds[tier])
    return total


def lowest_thresholds(judged: JudgedSample, min_quality: float) -> list[tuple[float, ...]]:
    """Thresholds of that quality, of which none can be lowered; three tiers."""
    levels, qualities = all_qualities(judged)
    points = _lowest_able(qualities >= min_quality - 1e-9)
    return [tuple(float(levels[t][i]) for t, i in enumerate(point)) for point in points]


def least_busy(
    judged: JudgedSample, min_quality: float, kinds: Sequence[Replica], per_s: Sequence[float], gpus: int
) -> tuple[tuple[float, ...], list[int]]:
    """(thresholds, GPUs by tier) of that quality with which the busiest tier is least busy; three tiers.

    kinds, per_s: each tier's replica, and the requests per second that one serves.
    """
    best: tuple[float, tuple[float, ...], list[int]] | None = None
    for thresholds in lowest_thresholds(judged, min_quality):
        shares = route(judged, thresholds).share_processed()
        counts = [kind.shape.gpus if share else 0 for kind, share in zip(kinds, shares, strict=True)]
        if sum(counts) > gpus:
            continue
        while True:
            load = [
                share / (count / kind.shape.gpus * rate) if share else 0.0
                for share, count, kind, rate in zip(shares, counts, kinds, per_s, strict=True)
            ]
            busiest = max(range(len(load)), key=load.__getitem__)
            if sum(counts) + kinds[busiest].shape.gpus > gpus:
                break
            counts[busiest] += kinds[busiest].shape.gpus
        if best is None or max(load) < best[0]:
            best = (max(load), thresholds, counts)
    assert best is not None
    return best[1], best[2]


def _lowest_able(able: "np.ndarray[tuple[int, int], np.dtype[np.bool_]]") -> list[tuple[int, int]]:
    """For each level of the first threshold the least of the second that meets the target, and the second passed over."""
    rows, columns = able.shape
    lowest = [(i, int(able[i].argmax())) for i in range(rows) if able[i].any()]
    return list(dict.fromkeys([*lowest, *((i, columns - 1) for i in range(rows) if able[i, -1])]))


def _least_p95(arrival_s: Floats, inputs: int, outputs: int, uniform: Sequence[tuple[Replica, int]]) -> Strategy:
    if not len(arrival_s):
        return NOTHING
    work = Workload(arrival_s, np.full(len(arrival_s), inputs), np.full(len(arrival_s), outputs))
    candidates = []
    for place, (kind, count) in enumerate(uniform):
        served = serve(work, [kind] * count)
        candidates.append((float(np.percentile(served.finish_s - work.arrival_s, 95)), place))
    seconds, place = min(candidates)
    return Strategy((uniform[place],), seconds)
