"""A whole cascade in virtual time: tier by tier, with what escalates and judging in between. No I/O.

Where answers are graded by a tier or a judge model, how long they wait for their grades depends on its load, and its load on
when they have them and escalate. So the tiers are simulated in several rounds, each with the waits of the round before it.
Grading requests go first, so the waits depend little on other requests, and settle soon (a test compares more rounds).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.planner_service.deployment.search import Strategy
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.routing.grading import Arrivals, TierLoad, tier_load
from penstock.planner_service.routing.quality import replies, route
from penstock.planner_service.simulator import Dispatch, Served, Workload, percentiles, report, serve
from penstock.planner_service.simulator.felt import Replies, felt_s, percentile_s
from penstock.planner_service.simulator.placed import serve_placed
from penstock.planner_service.simulator.workload import Bools, Floats
from penstock.services.domain.errors import invalid
from penstock.types.planned import Judging
from penstock.types.planning import Objective
from penstock.types.simulated import SimulatedTier

ROUNDS = 3


@dataclass(frozen=True, slots=True, eq=False)
class CascadeRun:
    """reports: of each tier's own requests; busy time and steps include grading. works: these requests, as they reach the
    tier. total_s (N): from a request's arrival to its final answer. grading: None where that loads nothing.

    replies: what users get. written_s (C, N): from the first to the last token of each tier's answer. latencies_s: of each
    tier's own requests, in the order of `works`.
    """

    reports: tuple[SimulatedTier, ...]
    works: tuple[Workload, ...]
    total_s: Floats
    grading: Judging | None
    replies: Replies
    written_s: Floats
    latencies_s: tuple[Floats, ...]

    def felt_s(self, objective: Objective) -> Floats:
        """The latency of each request that an objective other than the largest tier's means; see felt.felt_s."""
        return felt_s(objective, self.replies, self.total_s, self.written_s)

    def latency_s(self, objective: Objective, percentile: float) -> float:
        """The percentile of the latency that an objective means."""
        if objective is Objective.LARGEST_TIER:
            return max(percentile_s(each, percentile) for each in self.latencies_s)
        return percentile_s(self.felt_s(objective), percentile)


def run_cascade(
    site: Site,
    demand: Demand,
    thresholds: Sequence[float],
    strategies: Sequence[Strategy],
    dispatch: Dispatch,
    rounds: int = ROUNDS,
) -> CascadeRun:
    """Simulate. rounds: where grading is a load; else there is one.

    Raises:
        InvalidRequest: requests reach a tier that has no GPUs, or answers are to be graded by one.
    """
    processed = route(demand.requests, thresholds).processed
    simulation = _Simulation(site, demand, processed, strategies, dispatch)
    if site.grading is None:
        return simulation.run(simulation.simulate_round(), None)
    for _ in range(rounds):
        reports = simulation.simulate_round()
    waits = simulation.waits_s[demand.requests.judged_answers(processed)]
    rate = demand.rate_per_s
    per_s = None if rate is None else rate * len(waits) / len(demand.requests)
    by = site.tiers[site.grading.tier] if site.grading.by_tier else site.grading.model
    grading = Judging(by, len(waits), per_s, percentiles(waits))
    return simulation.run(reports, grading)


class _Simulation:
    """The requests of a cascade, in rounds. ends_s (C, N): when each tier's answer was complete; NaN before that is known.

    first_s (C, N): when its first token was there. waits_s (C, N): from its end to its grade. done_s (N): when the final
    answer was there.
    """

    def __init__(
        self, site: Site, demand: Demand, processed: Bools, strategies: Sequence[Strategy], dispatch: Dispatch
    ) -> None:
        self._site, self._demand, self._dispatch = site, demand, dispatch
        self._processed, self._strategies = processed, strategies
        self.ends_s: Floats = np.full(processed.shape, np.nan)
        self.first_s: Floats = np.full(processed.shape, np.nan)
        self.waits_s: Floats = np.zeros(processed.shape)
        self._judged = demand.requests.judged_answers(processed)
        self._judged_s = demand.requests.judged_s(processed, site.judge_s)
        self.done_s: Floats = np.zeros(len(demand.requests))
        self._works: list[Workload] = []
        self._latencies_s: list[Floats] = []

    def run(self, reports: Sequence[SimulatedTier], grading: Judging | None) -> CascadeRun:
        """What the last round shows."""
        return CascadeRun(
            tuple(reports),
            tuple(self._works),
            self.done_s - self._demand.arrival_s,
            grading,
            replies(self._demand.requests, self._processed),
            np.where(self._processed, self.ends_s - self.first_s, 0.0),
            tuple(self._latencies_s),
        )

    def simulate_round(self) -> list[SimulatedTier]:
        """One round: every tier from the first to the last."""
        at_s, reports = self._demand.arrival_s.copy(), []  # when each request reaches the tier at hand
        self._works, self._latencies_s = [], []
        for tier, strategy in enumerate(self._strategies):
            reports.append(self._serve(tier, strategy, at_s))
            chosen = self._processed[tier]
            judged_s = self._judged_s[tier, chosen] + self.waits_s[tier, chosen]
            at_s[chosen] = self.done_s[chosen] = self.ends_s[tier, chosen] + judged_s
        grading = self._site.grading
        if grading is not None and not grading.by_tier:
            nobody = Arrivals(np.zeros(0, np.int64), np.zeros(0))
            strategy = Strategy(((grading.replicas[0], len(grading.replicas)),), 0.0)
            self._serve_all(self._load(grading.tier, nobody), strategy)
        return reports

    def _serve(self, tier: int, strategy: Strategy, at_s: Floats) -> SimulatedTier:
        rows = np.flatnonzero(self._processed[tier])
        rows = rows[np.argsort(at_s[rows], kind="stable")]
        drafts = self._demand.requests.draft_tokens(tier, self._processed)
        load = self._load(tier, Arrivals(rows, at_s[rows], drafts[rows]))
        if len(load.work) and not strategy.used:
            what = f"{len(rows)} requests reach" if len(rows) else f"{len(load.work)} answers are to be graded by"
            raise invalid("thresholds", f"{what} tier {self._site.tiers[tier]}, which has no GPUs")
        served = self._serve_all(load, strategy)
        own = np.flatnonzero(load.own)
        self.first_s[tier, load.row[own]], self.ends_s[tier, load.row[own]] = served.first_s[own], served.finish_s[own]
        of_own = {name: getattr(served, name)[own] for name in ("first_s", "finish_s", "replica")}
        part = replace(served, **of_own)
        self._works.append(load.work.subset(own))
        self._latencies_s.append(part.finish_s - self._works[-1].arrival_s)
        return report(self._site.tiers[tier], self._works[-1], part)

    def _serve_all(self, load: TierLoad, strategy: Strategy) -> Served:
        """Serve a load, and note how long its answers wait for their grades."""
        if strategy.remote is not None:
            served = strategy.remote.serve(load.work)
        else:
            replicas = [replica for replica, count in strategy.replicas for _ in range(count)]
            placed = self._dispatch is Dispatch.PENDING_WORK
            served = serve_placed(load.work, replicas) if placed else serve(load.work, replicas, self._dispatch)
        answers = np.flatnonzero(~load.own)
        self.waits_s[load.graded[answers], load.row[answers]] = served.finish_s[answers] - load.work.arrival_s[answers]
        return served

    def _load(self, tier: int, own: Arrivals) -> TierLoad:
        answers = [(of, self._answers(of)) for of in range(len(self._strategies))]
        return tier_load(self._demand.requests, tier, own, self._site.grading, answers)

    def _answers(self, tier: int) -> Arrivals:
        """The answers of a tier that are known to be complete and are judged."""
        known = np.flatnonzero(np.isfinite(self.ends_s[tier]) & self._judged[tier])
        return Arrivals(known, self.ends_s[tier, known])
