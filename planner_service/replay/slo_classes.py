"""Classes of SLOs for a simulated workload: what each asks for, and what share of the requests has it. No I/O."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.planner_service.simulator.workload import Ints
from penstock.services.domain.errors import invalid

MAX_CLASSES = 16
SHARE_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class WorkloadClass:
    """A class of requests. ttft_s, tpot_s: seconds, infinite for none; without ttft_s a request asks for best effort.

    share: of all requests, over 0 to 1.
    """

    name: str
    ttft_s: float
    tpot_s: float
    share: float

    @property
    def best_effort(self) -> bool:
        return math.isinf(self.ttft_s)


def check_classes(classes: Sequence[WorkloadClass]) -> None:
    """Check names, times and shares.

    Raises:
        InvalidRequest: No class or too many; a name twice; a time or a share out of range; shares that add up to more than 1.
    """
    if not 1 <= len(classes) <= MAX_CLASSES:
        raise invalid("slo", f"from 1 to {MAX_CLASSES} classes, not {len(classes)}")
    names = [one.name for one in classes]
    for i, one in enumerate(classes):
        if not one.name or names.count(one.name) > 1:
            raise invalid(f"slo[{i}].name", f"every class needs a name of its own, not '{one.name}'")
        if not one.ttft_s > 0 or not one.tpot_s > 0:
            raise invalid(f"slo[{i}]", "times must be greater than 0")
        if one.best_effort and math.isfinite(one.tpot_s):
            raise invalid(f"slo[{i}].tpot_s", "a time per output token needs a time to first token")
        if not 0 < one.share <= 1:
            raise invalid(f"slo[{i}].share", f"must be over 0 and at most 1, not {one.share:g}")
    if sum(one.share for one in classes) > 1 + SHARE_TOLERANCE:
        raise invalid("slo", f"the shares add up to {sum(one.share for one in classes):g}, more than 1")


def draw_classes(classes: Sequence[WorkloadClass], requests: int, seed: int) -> Ints:
    """(requests) the class of each request, drawn by share; len(classes) for those that have none: best effort."""
    shares = np.array([one.share for one in classes])
    bounds = np.append(np.cumsum(shares), 1.0)
    drawn: Ints = np.searchsorted(bounds, np.random.default_rng(seed).random(requests), side="right").astype(np.int64)
    last = len(classes) - int(shares.sum() > 1 - SHARE_TOLERANCE)
    return np.minimum(drawn, np.int64(last))
