"""What a search for a plan answers: thresholds with a deployment, and what is proved of them. No I/O."""

import enum
from dataclasses import dataclass

from planner_service.deployment.search import Strategy


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


class Unreachable(Exception):
    """No plan meets the targets. best: the nearest that can be had, a quality, a latency in seconds, or GPUs."""

    def __init__(self, message: str, best: float) -> None:
        super().__init__(message)
        self.best = best
