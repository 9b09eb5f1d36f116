"""Whether length stages help: layouts replayed on a trace against one stage with the same dispatch. No I/O.

What they are held against is a tier without stages as it serves (`LeastWork`): requests go where the least work is pending,
and none moves; or, where a tier has stages already, their layout. A layout is worth switching on if no figure is worse by
more than `MARGIN` and one is better by `MIN_GAIN`; and if on the requests before these none is worse, either: what is
chosen for one stretch of a trace may do harm on the next.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.planner_service.simulator import Replica, Workload
from penstock.planner_service.simulator.cluster import Cluster, Moves
from penstock.planner_service.simulator.loop import serve_on
from penstock.planner_service.simulator.policies import LeastWork, Policy
from penstock.planner_service.simulator.staged import Staged
from penstock.planner_service.simulator.tier import alone_times
from penstock.planner_service.simulator.workload import Floats
from penstock.services.domain.stages.layout import StageLayout
from penstock.types.plans import QoeModel

MARGIN = 0.03
"""By which a figure may be worse: two replays that differ in nothing but a request's place differ by as much."""
MIN_GAIN = 0.05
"""By which one figure must be better."""
REPLAYED = 3000
"""Requests of a trace that are replayed, the last ones. A choice is replayed on as many before them, too."""
LEAST_BEFORE = 500
"""Fewer requests before the last ones say nothing: a choice holds without them."""
MOST_SUSTAINED = 2
"""Layouts whose sustained rate is searched, which takes a dozen replays each."""
RATE_PRECISION = 0.03
"""Of the sustained rate."""
SEED = 1
SUSTAINED_LATENCIES, SUSTAINED_REQUESTS = 60.0, (4000, 24_000)
"""What is served to tell whether a rate is sustained: so many times as long as a request takes alone, within these numbers of
requests. In less time the number in flight still grows to what the rate needs, or a backlog is too small to be seen."""
FIRST_STEP, MOST_STEPS = 12, 96
"""Steps of `RATE_PRECISION` between the rates that are tried first, and from the first rate to the last that is tried. Little
overload is simulated in much less time than a lot. From a rate that is near the steps are 1, 2, 4, and so on: so two policies
are held at the same rates, and those that serve alike sustain the same."""
FIRST_SHARE = 0.7
"""Of what instances can carry by the roofline: the rate that is tried first."""
GROWTH = 1.1
"""A rate is sustained if in the last quarter of the run, until the last arrival, at most this many times as many requests are
in flight as in the quarter before: under more load than can be served, of whatever length, their number grows with time."""

PolicyOf = Callable[[Cluster], Policy]


@dataclass(frozen=True, slots=True)
class ReplayFigures:
    """What the requests of a replay felt. Seconds; tpot: mean time per output token after the first, over requests.

    drain_s: from the last arrival to the last token.
    """

    ttft_p50_s: float
    ttft_p95_s: float
    tpot_s: float
    drain_s: float
    moved: int


class Changes(NamedTuple):
    """What a layout changes of the figures of another: shares, negative is less."""

    ttft_p50_change: float = 0.0
    ttft_p95_change: float = 0.0
    tpot_change: float = 0.0
    sustained_rate_change: float = 0.0

    @property
    def losses(self) -> tuple[float, ...]:
        """By how much each figure is worse, as shares."""
        return *self[:3], -self.sustained_rate_change

    def __str__(self) -> str:
        return (
            f"time to first token {self.ttft_p50_change:+.0%} (p95 {self.ttft_p95_change:+.0%}), "
            f"time per output token {self.tpot_change:+.0%}, sustained rate {self.sustained_rate_change:+.0%}"
        )


@dataclass(frozen=True, slots=True)
class ReplayVerdict:
    """Whether to use a layout, and what it changes against one stage or against what serves.

    layout: the one that was judged; None if there was none to judge, and nothing changes. replayed: how many were.
    against: the layout that serves; None for one stage. before: the changes on the requests before those that were replayed,
    where the layout would have been favoured without them; None where it was not, or there are too few.
    """

    favoured: bool
    changes: Changes
    layout: StageLayout | None
    replayed: int
    against: StageLayout | None = None
    before: Changes | None = None

    @property
    def chosen(self) -> StageLayout | None:
        """The layout to use; None for one stage."""
        layout = self.layout if self.favoured else self.against
        return layout if layout is not None and len(layout.stages) > 1 else None

    @property
    def use_stages(self) -> bool:
        return self.chosen is not None

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        serving = _in_words(self.against)
        if self.layout is None:
            return f"Keep {serving}: no layout of several stages holds its KV and carries its moves."
        judged = _in_words(self.layout)
        if self.favoured:
            return f"Use {judged}: replayed against {serving}, {self.changes}."
        before = f", but on the requests before {self.before}" if self.before is not None else ""
        return f"Keep {serving}: the best of {self.replayed} layouts, with {judged}, has {self.changes}{before}."


def _in_words(layout: StageLayout | None) -> str:
    return "one stage" if layout is None or len(layout.stages) == 1 else f"{len(layout.stages)} stages"


@dataclass(frozen=True, slots=True)
class Replayer:
    """Replays a workload on `instances` replicas."""

    work: Workload
    replica: Replica
    instances: int
    moves: Moves

    def figures(self, policy: PolicyOf) -> ReplayFigures:
        """At the workload's own rate."""
        return figures_of(self._serve(self.work, policy))

    def sustained_per_s(self, policy: PolicyOf, near: float = 0.0) -> float:
        """The greatest rate, in whole steps of `RATE_PRECISION`, at which the number of requests in flight does not grow.

        0 if not even the least rate that is tried is sustained. near: a rate that it is expected near; 0: none is known.
        """
        first = near or FIRST_SHARE * self.instances * self.replica.capacity_per_s(*self.work.mean_tokens)

        def sustains(steps: int) -> bool:
            return self._sustains(first * (1 + RATE_PRECISION) ** steps, policy)

        step = 1 if near else FIRST_STEP
        up = sustains(0)
        low, high = (0, step) if up else (-step, 0)
        while sustains(high if up else low) == up:
            step *= 2 if near else 1
            low, high = (high, high + step) if up else (low - step, low)
            if max(-low, high) > MOST_STEPS:
                return first * (1 + RATE_PRECISION) ** low if up else 0.0
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if sustains(middle) else (low, middle)
        return float(first * (1 + RATE_PRECISION) ** low)

    def _sustains(self, rate_per_s: float, policy: PolicyOf) -> bool:
        alone_s = float(alone_times(self.work, self.replica).finish_s.mean())
        least, most = SUSTAINED_REQUESTS
        requests = min(most, max(least, math.ceil(SUSTAINED_LATENCIES * alone_s * rate_per_s)))
        work = lasting(self.work, rate_per_s, requests)
        served = self._serve(work, policy, until_s=float(work.arrival_s[-1]))
        return is_stable(work.arrival_s, served.finish_s)

    def _serve(self, work: Workload, policy: PolicyOf, until_s: float = np.inf) -> Cluster:
        return serve_on(Cluster(work, [self.replica] * self.instances, self.moves), policy, until_s)


def count_replayed(work: Workload, replica: Replica, moves: Moves, instances: int) -> int:
    """Sequences in flight at once on one stage, the mean from the first arrival to the last, by a replay.

    `count_in_flight` answers the same by the QoE model alone, which near saturation says several times as many.
    """
    last = last_requests(work)
    served = serve_on(Cluster(last, [replica] * instances, moves), LeastWork)
    arrival = last.arrival_s - last.arrival_s[0]
    span = float(arrival[-1])
    held_s = float((np.minimum(served.finish_s, span) - arrival).clip(min=0).sum())
    return max(1, round(held_s / span)) if span > 0 else len(last)


def lasting(work: Workload, rate_per_s: float, requests: int) -> Workload:
    """So many requests of the workload at another rate, each time all of them in another order. Deterministic.

    In a trace's own order its last quarter may simply have longer prompts than the one before.
    """
    rng, gaps = np.random.default_rng(SEED), np.diff(work.arrival_s, append=work.arrival_s[-1] + 1 / work.rate_per_s)
    times = math.ceil(requests / len(work))
    order = np.concatenate([rng.permutation(len(work)) for _ in range(times)])[:requests]
    gap_order = np.concatenate([rng.permutation(len(work)) for _ in range(times)])[:requests]
    arrival = np.cumsum(gaps[gap_order]) * (work.rate_per_s / rate_per_s)
    tokens = work.input_tokens[order], work.output_tokens[order]
    return Workload(arrival - arrival[0], *tokens, cached_tokens=work.cached_tokens[order])


def is_stable(arrival_s: Floats, finish_s: Floats) -> bool:
    """Whether the number of requests in flight does not grow (`GROWTH`), until the last arrival.

    finish_s: 0 for requests that have not ended by then.
    """
    end = np.where(finish_s > 0, finish_s, np.inf)

    def mean_in_flight(from_s: float, to_s: float) -> float:
        return float((np.minimum(end, to_s) - np.maximum(arrival_s, from_s)).clip(min=0).sum() / (to_s - from_s))

    span = float(arrival_s[-1])
    if span <= 0:
        return True
    return mean_in_flight(0.75 * span, span) <= GROWTH * mean_in_flight(0.5 * span, 0.75 * span) + 1


def figures_of(served: Cluster) -> ReplayFigures:
    """Of a cluster that has served all of its workload."""
    work = served.work
    arrival = work.arrival_s - work.arrival_s[0]
    ttft = served.first_s - arrival
    several = work.output_tokens > 1
    tpot = (served.finish_s - served.first_s)[several] / (work.output_tokens[several] - 1)
    return ReplayFigures(
        float(np.percentile(ttft, 50)),
        float(np.percentile(ttft, 95)),
        float(tpot.mean()) if len(tpot) else 0.0,
        float(served.finish_s.max() - arrival[-1]),
        served.moved,
    )


def last_requests(work: Workload) -> Workload:
    """The requests of a workload that are replayed, the last `REPLAYED`."""
    return work.subset(np.arange(max(0, len(work) - REPLAYED), len(work)))


def requests_before(work: Workload) -> Workload | None:
    """As many before these; None where there are too few, or they came all at once."""
    before = work.subset(np.arange(max(0, len(work) - 2 * REPLAYED), max(0, len(work) - REPLAYED)))
    return before if len(before) >= LEAST_BEFORE and before.rate_per_s < np.inf else None


def judge(
    work: Workload,
    replica: Replica,
    moves: Moves,
    qoe: QoeModel,
    instances: int,
    layouts: Sequence[StageLayout],
    against: StageLayout | None = None,
) -> ReplayVerdict:
    """Replay every layout on the last `REPLAYED` requests, and judge the best. Deterministic.

    The best has the least product of the changes of its latencies. Its sustained rate is searched only if they pass. What is
    favoured is replayed on the requests before, too.
    against: the layout that serves; None for one stage.
    """
    if not layouts:
        return ReplayVerdict(False, Changes(), None, 0, against)
    replayer = Replayer(last_requests(work), replica, instances, moves)
    serving = LeastWork if against is None else _policy(against, qoe)
    reference = replayer.figures(serving)
    judged = [(_changes(replayer.figures(_policy(layout, qoe)), reference), layout) for layout in layouts]
    judged.sort(key=lambda pair: math.prod(1 + change for change in pair[0]))
    passing = [pair for pair in judged if max(pair[0].losses) <= MARGIN][:MOST_SUSTAINED]
    rate = replayer.sustained_per_s(serving)
    verdicts = list[ReplayVerdict]()
    for of_latencies, layout in passing or judged[:1]:
        policy = _policy(layout, qoe)
        changes = _with_rate(of_latencies, replayer, policy, rate)
        use = max(changes.losses) <= MARGIN and min(changes.losses) <= -MIN_GAIN
        earlier = requests_before(work) if use else None
        before = None
        if earlier is not None:
            there = Replayer(earlier, replica, instances, moves)
            before = _changes(there.figures(policy), there.figures(serving))
            before = _with_rate(before, there, policy, there.sustained_per_s(serving))
            use = max(before.losses) <= MARGIN
        verdicts.append(ReplayVerdict(use, changes, layout, len(layouts), against, before))
        if use:
            return verdicts[-1]
    return verdicts[0]


def _with_rate(changes: Changes, replayer: Replayer, policy: PolicyOf, rate_per_s: float) -> Changes:
    """With that of the sustained rate, against a policy that sustains `rate_per_s`."""
    if rate_per_s <= 0:
        return changes
    change = replayer.sustained_per_s(policy, near=rate_per_s) / rate_per_s - 1
    return changes._replace(sustained_rate_change=change)


def _policy(layout: StageLayout, qoe: QoeModel) -> PolicyOf:
    """How a layout serves: one stage is a tier without stages, whose requests do not move."""
    return LeastWork if len(layout.stages) == 1 else lambda cluster: Staged(cluster, layout, qoe)


def _changes(figures: ReplayFigures, against: ReplayFigures) -> Changes:
    """Of the latencies alone."""
    pairs = (
        (figures.ttft_p50_s, against.ttft_p50_s),
        (figures.ttft_p95_s, against.ttft_p95_s),
        (figures.tpot_s, against.tpot_s),
    )
    return Changes(*(value / reference - 1 if reference > 0 else 0.0 for value, reference in pairs))
