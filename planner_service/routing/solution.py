"""What a search for a plan answers: thresholds with a deployment, and what is proved of them. No I/O."""

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

from penstock.planner_service.deployment.search import Strategy

_Plan = TypeVar("_Plan")


class Proof(enum.Enum):
    """What is known beyond the plan itself: over routings at the judged scores, and the replica mixes that are searched.

    ENUMERATED: every routing that meets the target was tried. BOUNDED: those not tried cannot be better, even with each
    request alone on the fastest replica. SEARCHED: a search found nothing better; see Solution.gap.
    """

    ENUMERATED = "enumerated"
    BOUNDED = "bounded"
    SEARCHED = "searched"


@dataclass(frozen=True, slots=True)
class Deployment:
    """What one routing leads to: GPUs and strategy of each tier; latency_s, the largest of the tiers'."""

    gpus: tuple[int, ...]
    strategies: tuple[Strategy, ...]
    latency_s: float

    @classmethod
    def of(cls, strategies: Sequence[Strategy]) -> Self:
        return cls(tuple(s.gpus for s in strategies), tuple(strategies), max(s.latency_s for s in strategies))


@dataclass(frozen=True, slots=True)
class Solution:
    """gap: how far the plan may be from the best one over what `proof` says, at most; None where that is unknown.

    Of a latency or of GPUs the share that might be saved, of a quality the points that might be won.
    """

    thresholds: tuple[float, ...]
    quality: float
    deployment: Deployment
    proof: Proof
    gap: float | None
    evaluations: int


class Binds(enum.Enum):
    """What is in the way of a plan: a target, the rate that it has to sustain, or that models do not fit the GPUs."""

    MIN_QUALITY = "min_quality"
    MAX_LATENCY = "max_latency_s"
    RATE = "rate_per_s"
    GPUS = "gpus"


class Unreachable(Exception):
    """No plan meets the targets. binds: what is in the way.

    best: of what binds, the nearest with which there is a plan: a quality, a latency in seconds, or a rate. Infinite where
    none is known; where the GPUs bind, the quality that was reached.
    """

    def __init__(self, message: str, best: float, binds: Binds = Binds.GPUS) -> None:
        super().__init__(message)
        self.best, self.binds = best, binds

    @property
    def distance(self) -> tuple[int, float]:
        """How near a plan is: first where only the latency has to give way, then the rate, then where nothing is known."""
        match self.binds:
            case Binds.MAX_LATENCY:
                return 0, self.best
            case Binds.RATE:
                return 1, -self.best
            case Binds.GPUS:
                return 2, 0.0
        return 3, -self.best


def too_slow(why: str, least_s: float) -> Unreachable:
    """That a latency binds. least_s: what can be had."""
    return Unreachable(f"max latency binds: {why}", least_s, Binds.MAX_LATENCY)


def too_poor(why: str, best: float) -> Unreachable:
    """That a quality binds. best: what can be had."""
    return Unreachable(f"min quality binds: {why}", best, Binds.MIN_QUALITY)


def best_of(attempts: Iterable[Callable[[], _Plan]], rank: Callable[[_Plan], tuple[float, float]]) -> _Plan:
    """The plan of the lowest rank that the attempts give; of equals the first.

    Raises:
        Unreachable: None gives any; the error is of what comes nearest.
    """
    plans, failures = list[_Plan](), list[Unreachable]()
    for attempt in attempts:
        try:
            plans.append(attempt())
        except Unreachable as error:
            failures.append(error)
    if not plans:
        raise min(failures, key=lambda error: error.distance)
    return min(plans, key=rank)
