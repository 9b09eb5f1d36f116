"""The systems that are compared: workers by tier and a routing, each tuned to the same demand on the same workers. No I/O.

- largest: the last tier on all workers.
- load_based: thresholds and workers by mean lengths and load alone, as `benchmarks.cascade_systems` tunes them.
- random: each request goes to a tier drawn by lot. It may cost as much engine time per request as our plan, judging included,
  and has the best mean quality at that cost; its workers are those with the least simulated p95.
- plan: what `penstock plan` says.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from benchmarks import cascade_systems
from penstock.planner_service.deployment.search import Strategy
from penstock.planner_service.question.demand import draw_demand
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.replay.cascade_simulation import run_cascade
from penstock.planner_service.routing.quality import SKIPPED, JudgedSample, Routed, route
from penstock.planner_service.simulator import Dispatch, Replica, Workload, serve
from penstock.planner_service.simulator.workload import Floats
from penstock.services.domain.hardware import ReplicaShape
from penstock.types.rules import AcceptanceRules

ONE_WORKER = ReplicaShape(1, 1)
PERCENTILE = 95
COST_TOLERANCE = 1e-9
FORECAST_DRAWS = 20  # of prompts, for the same arrivals


@dataclass(frozen=True, slots=True)
class System:
    """workers: by tier. thresholds: of all tiers but the last; SKIPPED for a tier that is not used.

    shares: of the requests, by tier, if the client names the tier of each; None if the mesh routes them. skip_below: by
    predicted scores, of all tiers but the last; empty without a skip rule.
    """

    name: str
    workers: tuple[int, ...]
    thresholds: tuple[float, ...]
    shares: tuple[float, ...] | None = None
    skip_below: tuple[float | None, ...] = ()

    def routed(self, judged: JudgedSample) -> Routed:
        """Where the mesh sends prompts."""
        return route(
            judged.under(AcceptanceRules(skip_below=tuple(self.skip_below))) if self.skip_below else judged,
            self.thresholds,
        )

    def models(self, tiers: Sequence[str], count: int, seed: int) -> list[str]:
        """The model that each of `count` requests names."""
        if self.shares is None:
            return ["cascade"] * count
        return random.Random(seed).choices(tiers, self.shares, k=count)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the simulator predicts for one run, on average over the prompts that may be drawn.

    quality: mean of the accepted answers. attained: share of the requests within the SLO. engine_s: engine time per
    request, judging included. seconds: from the first arrival to the last answer.
    """

    p50_s: float
    p95_s: float
    attained: float
    answers_per_s: float
    quality: float
    engine_s: float


def largest(tiers: int, workers: int) -> System:
    """The last tier on all workers."""
    counts = (0,) * (tiers - 1) + (workers,)
    return System("largest", counts, (SKIPPED,) * (tiers - 1), (0.0,) * (tiers - 1) + (1.0,))


def load_based(site: Site, demand: Demand, min_quality: float, seed: int) -> System:
    """The load-based cascade."""
    tuned = cascade_systems.load_based(site, demand, min_quality, seed)
    return System("load_based", tuple(tuned.gpus), tuned.thresholds)


def of_plan(figures: dict[str, Any]) -> System:
    """The system of a plan file's content."""
    thresholds = tuple(SKIPPED if h is None else float(h) for h in figures["thresholds"])
    workers = tuple(sum(replica["count"] for replica in tier["replicas"]) for tier in figures["tiers"])
    return System("plan", workers, thresholds, skip_below=tuple(figures.get("skip_below", ())))


def random_router(site: Site, demand: Demand, cost_s: float, workers: int, seed: int) -> System:
    """The random router that costs at most `cost_s` of engine time per request."""
    judged = demand.judged
    shares = mixture(engine_seconds(site, judged), judged.quality.mean(axis=0).tolist(), cost_s)
    skipped = (SKIPPED,) * (len(shares) - 1)
    candidates = [System("random", counts, skipped, shares) for counts in allocations(shares, workers)]
    return min(candidates, key=lambda system: _p95_s(simulated_s(site, demand, system, seed)))


def mixture(costs: Sequence[float], qualities: Sequence[float], cost: float) -> tuple[float, ...]:
    """Shares of the tiers with the highest mean quality at a mean cost of at most `cost`.

    An optimum of this linear program has at most two tiers. If all tiers cost more, the cheapest has all requests.
    """
    best = (-1.0, 0.0, (0.0,) * len(costs))
    for i, low in enumerate(costs):
        for j, high in enumerate(costs):
            share = 1.0 if high <= low else min(1.0, max(0.0, (cost - low) / (high - low)))  # of tier j
            shares = [0.0] * len(costs)
            shares[i] += 1 - share
            shares[j] += share
            mean = low + share * (high - low)
            if mean > cost + COST_TOLERANCE and mean > min(costs) + COST_TOLERANCE:
                continue
            best = max(best, (share * qualities[j] + (1 - share) * qualities[i], -mean, tuple(shares)))
    return best[2]


def allocations(shares: Sequence[float], workers: int) -> Iterator[tuple[int, ...]]:
    """All ways to give all workers to the tiers with requests, at least one to each; to the largest share if too few."""
    used = [tier for tier, share in enumerate(shares) if share > 0]
    if len(used) > workers:
        used = sorted(used, key=shares.__getitem__)[-workers:]

    def split(rest: int, tiers: Sequence[int]) -> Iterator[dict[int, int]]:
        if len(tiers) == 1:
            yield {tiers[0]: rest}
            return
        for count in range(1, rest - len(tiers) + 2):
            for more in split(rest - count, tiers[1:]):
                yield {tiers[0]: count, **more}

    for counts in split(workers, used):
        yield tuple(counts.get(tier, 0) for tier in range(len(shares)))


def engine_seconds(site: Site, judged: JudgedSample) -> list[float]:
    """Engine time of a mean request on each tier, with full batches."""
    mean_input = float(judged.input_tokens.mean())
    return [
        1 / replica.capacity_per_s(mean_input, float(outputs))
        for replica, outputs in zip(replicas(site), judged.output_tokens.mean(axis=0), strict=True)
    ]


def engine_s(site: Site, judged: JudgedSample, system: System) -> float:
    """Engine time per request, judging included."""
    costs = engine_seconds(site, judged)
    if system.shares is not None:
        return sum(share * cost for share, cost in zip(system.shares, costs, strict=True))
    processed = system.routed(judged).share_processed()
    return sum(share * cost for share, cost in zip(processed, costs, strict=True)) + site.judge_s * sum(processed[:-1])


def forecast(site: Site, judged: JudgedSample, arrival_s: Floats, system: System, slo_s: float, seed: int) -> Forecast:
    """What the simulator predicts for requests that arrive then, with prompts drawn from the judged sample."""
    quality = (
        system.routed(judged).quality
        if system.shares is None
        else sum(s * float(q) for s, q in zip(system.shares, judged.quality.mean(axis=0), strict=True))
    )
    cost_s = engine_s(site, judged, system)

    def drawn(number: int) -> Forecast:
        demand = draw_demand(judged, arrival_s, seed + number)
        felt_s = simulated_s(site, demand, system, seed + number)
        return Forecast(
            float(np.percentile(felt_s, 50)),
            _p95_s(felt_s),
            float((felt_s <= slo_s).mean()),
            len(felt_s) / float((arrival_s + felt_s).max()),
            quality,
            cost_s,
        )

    return Forecast(*np.mean([astuple(drawn(number)) for number in range(FORECAST_DRAWS)], axis=0).tolist())


def simulated_s(site: Site, demand: Demand, system: System, seed: int) -> Floats:
    """(N) seconds from each request's arrival to its answer."""
    each = replicas(site)
    if system.shares is None:
        strategies = [
            Strategy(((replica, count),), 0.0) if count else Strategy((), 0.0)
            for replica, count in zip(each, system.workers, strict=True)
        ]
        demand = demand.under(AcceptanceRules(skip_below=tuple(system.skip_below))) if system.skip_below else demand
        return run_cascade(site, demand, system.thresholds, strategies, Dispatch.CAPACITY).total_s
    requests, tiers = demand.requests, list(site.tiers)
    drawn = np.array([tiers.index(model) for model in system.models(tiers, len(requests), seed)])
    felt_s = np.zeros(len(requests))
    for tier, (replica, count) in enumerate(zip(each, system.workers, strict=True)):
        chosen = np.flatnonzero(drawn == tier)
        work = Workload(demand.arrival_s[chosen], requests.input_tokens[chosen], requests.output_tokens[chosen, tier])
        felt_s[chosen] = serve(work, [replica] * count).finish_s - work.arrival_s
    return felt_s


def replicas(site: Site) -> list[Replica]:
    """What one worker of each tier is.

    Raises:
        ValueError: A tier has no profile of one worker.
    """
    result = []
    for tier in range(len(site.tiers)):
        replica, reason = site.replica(tier, ONE_WORKER, 1)
        if replica is None:
            raise ValueError(reason)
        result.append(replica)
    return result


def _p95_s(felt_s: Floats) -> float:
    return float(np.percentile(felt_s, PERCENTILE))
