"""The other latencies: what a user feels, over all tiers a request visits and judging. No I/O.

End to end, to the first visible token, or the pace: the deployer's objective says which, at its percentile. The slowest tier
says nothing about the others, and every tier that a request passes adds to its time. So for each
routing that is looked at, GPUs move between tiers (and spare ones to a tier) as long as that makes the objective's
percentile smaller, each tier simulated by itself; they begin where the slowest tier is fastest, or
where each tier has its share of the work, whichever is faster. Routings are looked at around the best of the
slowest tier's and around each choice of tiers to pass over. For the best few, GPUs are also shared out in every way, as
such moves end where a tier needs several GPUs more to be faster. What is best is then simulated whole, one tier after
the other, and that decides. The cheapest plan is searched from the other end: from the routing of least work, and for each
routing from the cheapest tiers that are within the limit.

Nothing is proved. The gap of a least latency is to what no plan of that quality can beat: each request alone on the
fastest replica of every tier it visits, and judged; of a pace, where there are few routings, else it is unknown. That of a
least cost is known over all forms alone, see planning.cascade_choice.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from penstock.planner_service.deployment.search import Strategy
from penstock.planner_service.routing.deployer import Deployer
from penstock.planner_service.routing.goals import no_deployment, sustaining
from penstock.planner_service.routing.grid import INFEASIBLE, Grid, Point, lowest
from penstock.planner_service.routing.quality import JudgedSample, replies, route
from penstock.planner_service.routing.solution import Deployment, Proof, Solution, too_slow
from penstock.planner_service.simulator.felt import felt_s, percentile_s
from penstock.planner_service.simulator.workload import Floats
from penstock.types.planning import Objective

FeltSeconds = Callable[[Sequence[float], Sequence[Strategy]], float]
Key = tuple[float, ...]
Tried = tuple[Key, Deployment] | None
"""What a routing is worth, with its deployment; None where none fits."""
Timed = tuple[float, Deployment]
Whole = tuple[float, Point, Deployment]
"""Seconds of the cascade simulated whole, routing, deployment."""

MOST_ROUTINGS = 20  # that GPUs are shared out for
CHEAPEST_ROUTINGS, CHEAPEST_REQUESTS = 60, 60_000
"""Of a routing the cheapest plan is found sooner: so many are tried, as long as their requests are no more."""
STEPS = (1, 4, 16, 64)  # levels by which a threshold is moved
SIMULATED_WHOLE = 5  # of the best, which are then simulated from end to end
POLISHED = 2  # of those, for which GPUs are moved once more with the cascade simulated whole
SPLITS_SIMULATED = 4  # of all ways to share out GPUs, the best ones, which are then simulated whole
PACES_BOUNDED = 2000  # routings, each of which is asked for what no plan of it can beat
LOWERED = 8  # times that the limit of the tiers is lowered because what is felt was over that of all
TIGHTENED = 3  # times that a limit is lowered because no plan met it when it was simulated whole


class EndToEnd:
    """Deployments by what users feel. judge_s: seconds to judge an answer; felt_s: simulates a cascade whole, and returns the
    percentile of the objective's latency."""

    def __init__(self, deployer: Deployer, judged: JudgedSample, judge_s: float, felt_s: FeltSeconds) -> None:
        self._deployer, self._judge_s, self._felt_s = deployer, judge_s, felt_s
        self._judged, self.grid = judged, Grid(judged)
        self._fastest: dict[Point, Timed | None] = {}
        self._known_whole: dict[tuple[tuple[float, ...], tuple[Strategy, ...]], float] = {}

    def least_latency(self, min_quality: float, start: Sequence[float]) -> Solution:
        """The least latency of at least this quality; start: thresholds where the search begins."""
        return self._sustaining(lambda: self._least_latency(min_quality, start))

    def _least_latency(self, min_quality: float, start: Sequence[float]) -> Solution:
        able = set(self.grid.at_least(min_quality))

        def tried(point: Point) -> Tried:
            fastest = self._fastest_at(point)
            return None if fastest is None else ((fastest[0],), fastest[1])

        plans = self._best(tried, able, start)
        if (deployment := self._deployer.deploy(start)) is not None:
            plans.append(self._whole(self.grid.nearest(start), deployment))
        seconds, point, deployment = self._polished_best(plans)[0]
        deployer = self._deployer
        how = (deployer.sample, deployer.alone_s(), self._judge_s, deployer.percentile, deployer.objective)
        bound = least_felt_s(self.grid, able, *how)
        gap = None if bound is None else max(0.0, 1 - bound / seconds) if seconds > 0 else 0.0
        return self._solution(point, deployment, gap)

    def deployed(self, thresholds: Sequence[float]) -> Deployment | None:
        """The deployment of the least latency under these thresholds; None where none fits."""
        point = self.grid.nearest(thresholds)
        fastest = self._fastest_at(point)
        return None if fastest is None else self._polished(*self._whole(point, fastest[1]))[2]

    def _polished_best(self, plans: Sequence[Whole]) -> list[Whole]:
        """The best plans of different routings, after `_polished`; the best first. plans: at least one."""
        by_routing = dict[bytes, Whole]()
        for plan in sorted(plans, key=lambda plan: plan[:2]):
            routed = route(self._deployer.sample, self.grid.thresholds(plan[1])).processed
            by_routing.setdefault(routed.tobytes(), plan)
        polished = (self._polished(*plan) for plan in [*by_routing.values()][:POLISHED])
        return sorted(polished, key=lambda plan: plan[:2])

    def cheapest(self, min_quality: float, max_latency_s: float, start: Sequence[float]) -> Solution:
        """The least cost for both targets; of equal ones the least work.

        Raises:
            Unreachable: no plan that was found is so fast.
        """

        def tried(limit_s: float, point: Point) -> Tried:
            begin = self._cheap_at(point, limit_s) or self._fastest_at(point)
            if begin is None or begin[0] > limit_s:
                return None if begin is None else ((begin[0] - limit_s, 0.0, 0.0), begin[1])
            thresholds = self.grid.thresholds(point)
            lean = self._lean(thresholds, begin[1], limit_s, partial(self._seconds, thresholds))
            return (0.0, self._deployer.cost(lean), self._deployer.gpu_s(thresholds)), lean

        return self._within(tried, min_quality, start, max_latency_s, is_lean=True)

    def most_quality(self, max_latency_s: float, min_quality: float, start: Sequence[float]) -> Solution:
        """The most quality within a latency, and of at least min_quality.

        Raises:
            Unreachable: no plan that was found is so fast.
        """

        def tried(limit_s: float, point: Point) -> Tried:
            fastest = self._fastest_at(point)
            if fastest is None:
                return None
            return (max(0.0, fastest[0] - limit_s), -float(self.grid.qualities[point]), fastest[0]), fastest[1]

        return self._within(tried, min_quality, start, max_latency_s, is_lean=False)

    def _within(
        self,
        tried: Callable[[float, Point], Tried],
        min_quality: float,
        start: Sequence[float],
        max_latency_s: float,
        *,
        is_lean: bool,
    ) -> Solution:
        """The first plan by its key that meets the limit when it is simulated whole. tried(limit, routing): the best of a
        routing within a limit. is_lean: with GPUs taken away."""
        able = set(self.grid.at_least(min_quality))
        solution = self._sustaining(lambda: self._nearest(tried, able, start, max_latency_s, is_lean=is_lean))
        least_s = self._seconds_whole(solution.thresholds, solution.deployment)
        if least_s > max_latency_s:
            words = self._deployer.latency_words
            why = f"no plan was found whose {words} is at most {max_latency_s:g} s: the least is {least_s:.4g} s"
            raise too_slow(why, least_s)
        return solution

    def _nearest(
        self,
        tried: Callable[[float, Point], Tried],
        able: set[Point],
        start: Sequence[float],
        max_latency_s: float,
        *,
        is_lean: bool,
    ) -> Solution:
        """As _within; where no plan meets the limit, the fastest one."""
        limit_s, slower = max_latency_s, list[Whole]()
        most = MOST_ROUTINGS
        if is_lean:
            most = max(most, min(CHEAPEST_ROUTINGS, CHEAPEST_REQUESTS // len(self._deployer.sample)))
        for _ in range(TIGHTENED):
            plans = self._best(partial(tried, limit_s), able, start, most, by_key=True)
            for seconds, point, deployment in plans:
                if seconds <= max_latency_s:
                    return self._solution(point, deployment, None)
            slower += plans
            limit_s *= 0.98 * max_latency_s / plans[0][0]
        least_s, point, deployment = self._polished_best(slower)[0]
        if least_s <= max_latency_s and is_lean:
            thresholds = self.grid.thresholds(point)
            deployment = self._lean(thresholds, deployment, max_latency_s, partial(self._seconds_whole, thresholds))
        return self._solution(point, deployment, None)

    def _sustaining(self, solve: Callable[[], Solution]) -> Solution:
        """See goals.sustaining."""

        def solved() -> Solution:
            self._fastest.clear()  # found before more was verified
            return solve()

        return sustaining(self._deployer, solved)

    def _best(
        self,
        tried: Callable[[Point], Tried],
        able: set[Point],
        start: Sequence[float],
        most: int = MOST_ROUTINGS,
        *,
        by_key: bool = False,
    ) -> list[Whole]:
        """The best routings with their deployments, simulated whole: by that latency, or by the key."""
        known: dict[Point, Tried] = {}

        def key(point: Point) -> Key:
            if point not in known and len(known) < most:
                known[point] = tried(point)
            result = known.get(point)
            return (INFEASIBLE,) if result is None else result[0]

        best = min(self._starts(able, start, most), key=key)
        if key(best) == (INFEASIBLE,):  # what sustains the rate is elsewhere
            best = min(self.grid.starts(able), key=key)
        while True:
            better = min((p for p in self._moves(best) if p in able), key=key, default=best)
            if key(better) >= key(best):
                break
            best = better
        ranked = sorted((result[0], point, result[1]) for point, result in known.items() if result is not None)
        if not ranked:
            reached = float(max(self.grid.qualities[point] for point in able))
            raise no_deployment(self._deployer, "no routing of this quality was found that", reached)
        whole = [self._whole(point, deployment) for _, point, deployment in ranked[:SIMULATED_WHOLE]]
        return whole if by_key else sorted(whole, key=lambda one: one[:2])

    def _starts(self, able: set[Point], start: Sequence[float], most: int) -> list[Point]:
        """Where a search begins; few routings are all tried. Where prompts are routed, also spread over them: neither high
        nor low limits serve most with few GPUs."""
        if len(able) <= most:
            return sorted(able)
        begin = self.grid.nearest(start)
        starts = [begin] if begin in able else []
        starts += [min(group, key=lambda p: (sum(p), p)) for group in self.grid.groups(able)]
        return list(dict.fromkeys([*starts, *(self.grid.starts(able) if self._judged.routed else [])]))

    def _whole(self, point: Point, deployment: Deployment) -> Whole:
        return self._seconds_whole(self.grid.thresholds(point), deployment), point, deployment

    def _seconds_whole(self, thresholds: Sequence[float], deployment: Deployment) -> float:
        """The percentile of what requests feel, the cascade simulated whole."""
        key = tuple(thresholds), deployment.strategies
        if key not in self._known_whole:
            self._known_whole[key] = self._felt_s(thresholds, deployment.strategies)
        return self._known_whole[key]

    def _polished(self, seconds: float, point: Point, deployment: Deployment) -> Whole:
        """GPUs shared out in another way where that helps the cascade simulated whole, then moved as long as it does."""
        thresholds = self.grid.thresholds(point)
        splits = sorted(self._deployer.splits(thresholds), key=lambda split: self._seconds(thresholds, split))
        for split in splits[:SPLITS_SIMULATED]:
            if (split_s := self._seconds_whole(thresholds, split)) < seconds:
                seconds, deployment = split_s, split
        seconds, deployment = self._shifted(thresholds, (seconds, deployment), partial(self._seconds_whole, thresholds))
        return seconds, point, deployment

    def _shifted(self, thresholds: Sequence[float], best: Timed, seconds_of: Callable[[Deployment], float]) -> Timed:
        """GPUs moved between tiers as long as that makes the seconds fewer."""
        improved = True
        while improved:
            improved = False
            for moved in self._deployer.shifted(thresholds, best[1]):
                if (seconds := seconds_of(moved)) < best[0]:
                    best, improved = (seconds, moved), True
                    break
        return best

    def _moves(self, point: Point) -> list[Point]:
        moves = set[Point]()
        for t, size in enumerate(self.grid.shape):
            for step in (*STEPS, *(-s for s in STEPS)):
                moves.add((*point[:t], min(size - 1, max(0, point[t] + step)), *point[t + 1 :]))
        return sorted(moves - {point})

    def _fastest_at(self, point: Point) -> Timed | None:
        """(seconds, deployment) of a routing: from the faster of two beginnings, GPUs are moved where it helps."""
        if point not in self._fastest:
            thresholds = self.grid.thresholds(point)
            seconds_of = partial(self._seconds, thresholds)
            begin = [self._deployer.deploy(thresholds), self._deployer.balanced(thresholds)]
            rated = ((seconds_of(one), one) for one in begin if one is not None)
            best = min(rated, key=lambda one: one[0], default=None)
            self._fastest[point] = None if best is None else self._shifted(thresholds, best, seconds_of)
        return self._fastest[point]

    def _cheap_at(self, point: Point, limit_s: float) -> Timed | None:
        """(seconds, deployment) of a routing within a limit, on few GPUs; None where none is found.

        It is the cheapest on which no tier is slower than a limit of its own, lowered until what is felt is within.
        """
        thresholds, tier_s = self.grid.thresholds(point), limit_s
        for _ in range(LOWERED):
            deployment = self._deployer.cheapest_within(thresholds, tier_s)
            if deployment is None:
                break
            seconds = self._seconds(thresholds, deployment)
            if seconds <= limit_s:
                return seconds, deployment
            tier_s = 0.98 * min(tier_s, deployment.latency_s) * limit_s / seconds
        return None

    def _lean(
        self,
        thresholds: Sequence[float],
        deployment: Deployment,
        limit_s: float,
        seconds_of: Callable[[Deployment], float],
    ) -> Deployment:
        """The deployment with GPUs taken away as long as the limit holds, the most that go at once first."""
        while True:
            fewer = [
                (self._deployer.cost(lean), lean_s, lean)
                for lean in self._deployer.reduced(thresholds, deployment)
                if (lean_s := seconds_of(lean)) <= limit_s
            ]
            if not fewer:
                return deployment
            deployment = min(fewer, key=lambda one: one[:2])[2]

    def _seconds(self, thresholds: Sequence[float], deployment: Deployment) -> float:
        """The percentile of what requests feel, each tier by itself."""
        felt = self._deployer.felt_s(thresholds, deployment.strategies, self._judge_s)
        return percentile_s(felt, self._deployer.percentile)

    def _solution(self, point: Point, deployment: Deployment, gap: float | None) -> Solution:
        quality = float(self.grid.qualities[point])
        thresholds = self.grid.thresholds(point)
        return Solution(thresholds, quality, deployment, Proof.SEARCHED, gap, self._deployer.evaluations)


def least_felt_s(
    grid: Grid,
    able: Iterable[Point],
    sample: JudgedSample,
    alone_s: Floats,
    judge_s: float,
    percentile: float,
    objective: Objective = Objective.END_TO_END,
) -> float | None:
    """What no plan of these routings can beat: every request alone on the fastest replica of each tier it visits.

    Where no threshold is lower and the same tiers are asked, each request visits as many tiers or more: the least
    of this over the lowest routings bounds them all. A pace is that of the tier that answers, which may be faster at more
    tiers: it is bounded by all routings, if they are at most PACES_BOUNDED, else not (None).
    Where each request goes to one tier alone, higher thresholds may be faster: nothing is known then (None).
    sample: the requests that arrive. alone_s (C, N): of what each tier is measured by under the objective.
    """
    if sample.routed:
        return None

    def alone(thresholds: Sequence[float]) -> float:
        processed = route(sample, thresholds).processed
        if objective is Objective.PACE:  # felt_s divides what is written by the tokens after the first
            later = np.maximum(1, sample.output_tokens.T - 1)
            paces = felt_s(objective, replies(sample, processed), np.zeros(len(sample)), alone_s * later)
            return percentile_s(paces, percentile)
        each_s = np.where(processed, alone_s, 0.0) + sample.judged_s(processed, judge_s)
        return percentile_s(each_s.sum(axis=0), percentile)

    points = list(able)
    if objective is Objective.PACE:
        if len(points) > PACES_BOUNDED:
            return None
        return min(alone(grid.thresholds(point)) for point in points)
    return min(alone(grid.thresholds(point)) for group in grid.groups(points) for point in lowest(group))
