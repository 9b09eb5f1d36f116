"""A cascade whose thresholds give way under a burst, in virtual time, with the routers' own controller. No I/O.

The controller knows arrivals only: what is queued at workers is not known before tiers are simulated, one after another.
A mesh gives way earlier where queues grow.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.planner_service.deployment.search import Strategy
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.replay.cascade_simulation import CascadeRun, run_routed
from penstock.planner_service.routing.quality import JudgedSample, route
from penstock.planner_service.rules.burst_ladder import draws, tie_rule
from penstock.planner_service.simulator import Dispatch
from penstock.planner_service.simulator.workload import Bools, Floats, Ints
from penstock.services.acceptance.burst_control import ArrivalRate, BurstController
from penstock.types.rules import BurstLadder

WINDOW_S = 600.0
"""`router.burst_window_s` of a mesh file that says nothing else."""
OBSERVE_S = 0.1  # between two looks at the load, as routers do it


@dataclass(frozen=True, slots=True, eq=False)
class BurstRun:
    """cascade: the requests as they were served. steps (N): of the ladder, by request.

    scores (N): of the accepted answers. changes: of the step.
    """

    cascade: CascadeRun
    steps: Ints
    scores: Floats
    changes: int


def simulate_bursts(
    site: Site,
    demand: Demand,
    ladder: BurstLadder,
    strategies: Sequence[Strategy],
    dispatch: Dispatch,
    *,
    window_s: float = WINDOW_S,
    seed: int = 0,
) -> BurstRun:
    """Serve the requests with the step of the ladder that a router would choose for each. seed: of the draws for ties.

    Raises:
        InvalidRequest: Requests reach a tier that has no GPUs.
    """
    steps, changes = steps_taken(ladder, demand.arrival_s, window_s)
    processed, scores = route_by_steps(demand.requests, ladder, steps, seed)
    return BurstRun(run_routed(site, demand, processed, strategies, dispatch), steps, scores, changes)


def steps_taken(ladder: BurstLadder, arrival_s: Floats, window_s: float) -> tuple[Ints, int]:
    """((N) the step of each request, how often the step changed). arrival_s (N): ascending."""
    controller, arrivals = BurstController(ladder, window_s), ArrivalRate()
    steps, changes, observed_s = np.zeros(len(arrival_s), np.int64), 0, -np.inf
    began_s = float(arrival_s[0]) if len(arrival_s) else 0.0
    for i, at_s in enumerate((arrival_s - began_s).tolist()):
        arrivals.arrived(at_s)
        if at_s - observed_s >= OBSERVE_S:
            observed_s = at_s
            changes += controller.observe(at_s, arrivals.per_s(at_s), lambda _: 0) is not None
        steps[i], change = controller.take(at_s)
        changes += change is not None
    return steps, changes


def route_by_steps(requests: JudgedSample, ladder: BurstLadder, steps: Ints, seed: int = 0) -> tuple[Bools, Floats]:
    """((C, N) who reaches each tier, (N) score of the accepted answer), each request with the thresholds of its step."""
    drawn = draws(len(requests), len(requests.tiers), seed)
    processed = np.zeros((len(requests.tiers), len(requests)), np.bool_)
    scores = np.zeros(len(requests))
    for index in np.unique(steps):
        rows: Ints = np.flatnonzero(steps == index)
        rules, part = ladder.steps[int(index)].thresholds, requests.subset(rows)
        routed = route(part, [rule.score for rule in rules], tie_rule(rules, drawn[rows]))
        processed[:, rows] = routed.processed
        scores[rows] = part.scores[np.arange(len(rows)), routed.answered]
    return processed, scores
