"""What a replica serves at most, by simulation: the rate beyond which its queue grows without end. No I/O.

`Replica.capacity_per_s` is arithmetic on mean lengths. It knows neither the bubbles of a pipeline whose steps take
unlike times (two stages reach about three quarters of it, eight little over half) nor preemption. So a replica is given
more requests at once than it can hold, and its ends are counted while its queue lasts.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.planner_service.deployment.ranking import ROUNDING
from penstock.planner_service.simulator import Dispatch, Replica, Workload, serve

TURNS = 3  # times as many requests as the replica holds at once
FILLED = 0.2  # of the requests have ended when the count begins: the batches are full and mixed by then
MOST_REQUESTS = 12_000
KEPT = 1024  # results: each form of a plan asks again for the tiers that it has


def saturated_per_s(replica: Replica, work: Workload) -> float:
    """Requests per second that one replica sustains, for requests of the lengths of `work` (at least one), in their order,
    with as much of their prompts cached."""
    inputs, outputs = work.input_tokens, work.output_tokens
    held = min(replica.limits.max_running, max(1.0, replica.lane_tokens / float((inputs + outputs).mean())))
    count = int(min(MOST_REQUESTS, max(TURNS * held * replica.shape.pp, 20)))
    rows = np.arange(count) % len(work)
    lengths = np.array([inputs[rows], outputs[rows], work.cached_tokens[rows]], np.int64)
    return _saturated_per_s(replica, lengths.tobytes())


@functools.lru_cache(maxsize=KEPT)
def _saturated_per_s(replica: Replica, lengths: bytes) -> float:
    """As saturated_per_s. lengths: tokens of prompts, of answers and in the cache, (3, N) int64."""
    inputs, outputs, cached = np.frombuffer(lengths, np.int64).reshape(3, -1)
    count = len(inputs)
    same = Workload(np.zeros(count), inputs, outputs, cached_tokens=cached)
    served = serve(same, [replica])
    ends = np.sort(served.finish_s)
    begin_s, end_s = float(ends[int(FILLED * count)]), float(served.first_s.max())  # the queue is empty then
    counted = int(((ends > begin_s) & (ends <= end_s)).sum())
    if end_s <= begin_s or not counted:  # fewer requests than fill it even so
        return count / float(ends[-1])
    return counted / (end_s - begin_s)


def together_per_s(
    counts: Sequence[int], saturated: Sequence[float], capacity: Sequence[float], dispatch: Dispatch
) -> float:
    """Requests per second at which the first of a tier's replicas is given more than it sustains.

    By kind: counts of replicas, what one sustains, and its arithmetic capacity, by which requests are shared out.
    """
    if dispatch is Dispatch.ROUND_ROBIN:
        return min(saturated) * sum(counts)
    total = sum(weight * count for weight, count in zip(capacity, counts, strict=True))
    return total * min(per_s / weight for per_s, weight in zip(saturated, capacity, strict=True))


@dataclass(frozen=True, slots=True)
class Sustain:
    """What a tier must sustain: per_s, the rate at which its requests come, over max_utilisation.

    saturation: of each kind, what it sustains over its arithmetic capacity (see deployment.saturation), as an estimate.
    """

    per_s: float
    max_utilisation: float
    saturation: Mapping[Replica, float]


def needed_per_s(per_s: float, max_utilisation: float) -> float:
    """What must be sustained of requests at this rate, so that they are within the share; raised by a rounding error."""
    return per_s / max_utilisation * (1 + ROUNDING)
