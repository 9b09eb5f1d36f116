"""A cascade under SLOs in virtual time, and how many GPUs a trace needs at its SLOs. No I/O.

A request has one first-token deadline for all tiers. A tier gets what is left of it; a request that reaches a tier too late
is best effort there. The answer of a tier that is judged is held back until then, so that its first token is sent when the
answer has been judged, and its pace is that of the network; the last tier streams. Every tier's replicas run the SLO policy,
with hops between replicas of one shape. Reply lengths are known to admission.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.planner_service.deployment.search import Strategy
from penstock.planner_service.question.exclusions import SLOS, check_together, names_of_files
from penstock.planner_service.question.site import Demand, Site, replica_kinds
from penstock.planner_service.replay.slo_classes import WorkloadClass, check_classes, draw_classes
from penstock.planner_service.routing.quality import route
from penstock.planner_service.routing.solution import Unreachable
from penstock.planner_service.simulator import Replica, Workload
from penstock.planner_service.simulator.judged import Judged, Promises, SloReplicas, has_one_batch
from penstock.planner_service.simulator.workload import Bools, Floats, Ints
from penstock.services.domain.errors import invalid
from penstock.services.domain.slo.promises import MIN_REMAINDER_S
from penstock.types.deployments import ReplicaGroup
from penstock.types.simulated import SloAttainment

CAPACITY_PRECISION = 1.02  # the rate that misses the target is at most so many times the capacity
MAX_RATE_FACTOR = 1024.0  # a capacity is looked for up to so many times the trace's rate, and down to its inverse


def simulate_slos(
    site: Site,
    demand: Demand,
    thresholds: Sequence[float],
    strategies: Sequence[Strategy],
    classes: Sequence[WorkloadClass],
    seed: int,
) -> list[SloAttainment]:
    """What each class receives of a cascade, end to end.

    Raises:
        InvalidRequest: Bad classes; requests reach a tier without GPUs; a replica with pipeline stages or
            data-parallel attention; a judge whose load is stated, which is not simulated with SLOs.
    """
    check_classes(classes)
    check_together({SLOS, *names_of_files(site)})
    requests, routed = demand.requests, route(demand.requests, thresholds)
    of_class = draw_classes(classes, len(requests), seed)
    ttft_s, tpot_s = _asked(classes, of_class)
    due_s = demand.arrival_s + ttft_s
    reach_s, judged_s = demand.arrival_s.copy(), requests.judged_s(routed.processed, site.judge_s)
    held = requests.held(routed.processed)
    admitted, attained = np.ones(len(requests), np.bool_), np.zeros(len(requests), np.bool_)
    for tier, strategy in enumerate(strategies):
        chosen = np.flatnonzero(routed.processed[tier])
        if not len(chosen):
            continue
        if not strategy.replicas:
            raise invalid("thresholds", f"{len(chosen)} requests reach tier {site.tiers[tier]}, which has no GPUs")
        order = chosen[np.argsort(reach_s[chosen], kind="stable")]
        work = Workload(reach_s[order], requests.input_tokens[order], requests.output_tokens[order, tier])
        left_s = due_s[order] - reach_s[order]
        promises = Promises.of_one_phase(np.where(left_s > MIN_REMAINDER_S, left_s, math.inf), tpot_s[order])
        for rows, fleet in _fleets(work, strategy):
            judged, own = fleet.serve(work.subset(rows), promises.subset(rows)), order[rows]
            reach_s[own] = judged.finish_s + judged_s[tier, own]
            admitted[own] &= judged.admitted
            attained[own] = np.where(held[own], reach_s[own] <= due_s[own], judged.attained)
    asking = np.isfinite(ttft_s)
    admitted &= asking
    attained &= asking
    return [_of_class(one, of_class == i, admitted, attained) for i, one in enumerate(classes)]


def _asked(classes: Sequence[WorkloadClass], of_class: Ints) -> tuple[Floats, Floats]:
    """(N) time to first token, (N) time per output token of requests of these classes."""
    ttft_s = np.array([*(one.ttft_s for one in classes), math.inf])
    tpot_s = np.array([*(one.tpot_s for one in classes), math.inf])
    return ttft_s[of_class], tpot_s[of_class]


def _of_class(one: WorkloadClass, members: Bools, admitted: Bools, attained: Bools) -> SloAttainment:
    """What the members of a class receive; all of it where there are none."""
    count = int(members.sum())
    if one.best_effort:
        return SloAttainment(one.name, one.share, count)
    shares = (float(each[members].mean()) if count else 1.0 for each in (admitted, attained))
    return SloAttainment(one.name, one.share, count, one.ttft_s, one.tpot_s, *shares)


def _fleets(work: Workload, strategy: Strategy) -> Iterator[tuple[Ints, SloReplicas]]:
    """A tier's replicas: those of one shape are a fleet, with which requests it has, a share by its capacity."""
    means = float(work.input_tokens.mean()), float(work.output_tokens.mean())
    weights = np.array([replica.capacity_per_s(*means) * count for replica, count in strategy.replicas])
    turns = (np.arange(len(work)) + 0.5) / len(work)
    order = np.argsort((np.arange(len(work)) * 0.6180339887498949) % 1.0, kind="stable")  # spread evenly over time
    fleet_of = np.zeros(len(work), np.int64)
    fleet_of[order] = np.searchsorted(np.cumsum(weights / weights.sum()), turns, side="left")
    for number, (replica, count) in enumerate(strategy.replicas):
        rows = np.flatnonzero(np.minimum(fleet_of, len(strategy.replicas) - 1) == number)
        if len(rows):
            yield rows, SloReplicas(replica, count, hops=count - 1)


@dataclass(frozen=True, slots=True)
class Capacity:
    """The fewest GPUs of one shape with which a tier keeps the target, and the rate at which that many would just keep it.

    rate_per_s: of the trace. attainment: of all requests that ask for an SLO, at that rate. capacity_per_s: requests per
    second of all GPUs.
    """

    tier: str
    gpus: int
    replicas: tuple[ReplicaGroup, ...]
    rate_per_s: float
    target_attainment: float
    attainment: float
    capacity_per_s: float
    capacity_per_gpu_s: float
    requests: int
    seed: int
    slo: tuple[SloAttainment, ...]


def fewest_gpus(
    site: Site, tier: int, work: Workload, classes: Sequence[WorkloadClass], attainment: float, seed: int
) -> Capacity:
    """How many GPUs this trace needs at these SLOs, for one tier's model: over all shapes without pipeline stages and
    data-parallel attention.

    Raises:
        InvalidRequest: Bad classes; no class that asks for an SLO; an attainment out of range.
        Unreachable: The cluster's GPUs do not reach the attainment.
    """
    check_classes(classes)
    if all(one.best_effort for one in classes):
        raise invalid("slo", "at least one class must ask for a time to first token")
    if not 0 < attainment <= 1:
        raise invalid("attainment", f"must be over 0 and at most 1, not {attainment:g}")
    kinds, reason = replica_kinds(site, tier, site.gpus, work.longest_tokens + 1)
    kinds = [kind for kind in kinds if has_one_batch(kind.shape)]
    if not kinds:
        without = "without pipeline stages and data-parallel attention"
        raise Unreachable(f"no replica of {site.tiers[tier]} {without} fits: {reason}", 0.0)
    of_class = draw_classes(classes, len(work), seed)
    promises = Promises.of_one_phase(*_asked(classes, of_class))
    asking = np.isfinite(promises.ttft_s)

    def served(kind: Replica, count: int, factor: float = 1.0) -> Judged:
        faster = Workload(work.arrival_s / factor, work.input_tokens, work.output_tokens)
        return SloReplicas(kind, count, hops=count - 1).serve(faster, promises)

    best: tuple[int, float, Replica, int] | None = None
    nearest = 0.0
    for kind in kinds:
        cluster = site.type_of(kind.shape)
        assert cluster is not None
        most = min(cluster.gpus, cluster.gpus if best is None else best[0]) // kind.shape.gpus
        low, high = 0, most
        if most == 0:
            continue
        reached = served(kind, most).attainment(asking)
        nearest = max(nearest, reached)
        if reached < attainment:
            continue
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if served(kind, middle).attainment(asking) >= attainment else (middle, high)
        candidate = (high * kind.shape.gpus, -served(kind, high).attainment(asking), kind, high)
        best = candidate if best is None or candidate[:2] < best[:2] else best
    if best is None:
        raise Unreachable(
            f"{site.gpus} GPUs attain {nearest:.1%} of the SLOs of this trace, not {attainment:.1%}", nearest
        )
    _, _, kind, count = best
    factor = 1.0
    while factor < MAX_RATE_FACTOR and served(kind, count, factor * 2).attainment(asking) >= attainment:
        factor *= 2
    high_factor = factor * 2
    while high_factor / factor > CAPACITY_PRECISION:
        middle_factor = math.sqrt(factor * high_factor)
        reaches = served(kind, count, middle_factor).attainment(asking) >= attainment
        factor, high_factor = (middle_factor, high_factor) if reaches else (factor, middle_factor)
    judged = served(kind, count)
    by_class = tuple(
        _of_class(one, of_class == i, judged.admitted & asking, judged.attained) for i, one in enumerate(classes)
    )
    gpus, per_s = count * kind.shape.gpus, factor * work.rate_per_s
    reached = judged.attainment(asking)
    rates = (work.rate_per_s, attainment, reached, per_s, per_s / gpus)
    return Capacity(site.tiers[tier], gpus, (kind.shape.times(count),), *rates, len(work), seed, by_class)
