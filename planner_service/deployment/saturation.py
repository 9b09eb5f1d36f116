"""What a replica serves at most, by simulation: the rate beyond which its queue grows without end. No I/O.

`Replica.capacity_per_s` is arithmetic on mean lengths. It knows neither the bubbles of a pipeline whose steps take
unlike times (two stages reach about three quarters of it, eight little over half) nor preemption. So a replica is given
more requests at once than it can hold, and the tokens that it writes while its queue lasts are counted.

It begins with running requests, as it would after a long time: at evenly spread places of all tokens to be
written, so a request of ten times the length is there ten times as often. Where they all began at once, the short ones would
end first, and one prompt in a hundred of ten times the length made the rate come out at twice what is sustained.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.planner_service.deployment.ranking import ROUNDING
from penstock.planner_service.simulator import Dispatch, Replica, Workload, serve

TURNS, LEAST_REQUESTS = 6, 400  # in the queue: so many times what the replica holds at once, and at least so many
MOST_HELD = 2048  # of the requests that it holds
SETTLED = 1 / 3  # of the time until the queue is empty, after which the count begins
KEPT = 256  # results: each form of a plan asks again for the tiers that it has


def saturated_per_s(replicas: Iterable[Replica], work: Workload) -> list[float]:
    """Requests per second that one of each sustains, for requests of the lengths of `work` (at least one) in any order, with
    as much of their prompts cached."""
    lengths = np.stack([work.input_tokens, work.output_tokens, work.cached_tokens]).tobytes()
    return [_saturated_per_s(replica, lengths) for replica in replicas]


@functools.lru_cache(maxsize=KEPT)
def _saturated_per_s(replica: Replica, lengths: bytes) -> float:
    """lengths: tokens of prompts, of answers and in the cache, (3, N) int64."""
    inputs, outputs, cached = np.frombuffer(lengths, np.int64).reshape(3, -1)
    ends = np.cumsum(outputs)
    context = float((outputs * (inputs + outputs / 2)).sum() / ends[-1])  # of a token that is written
    lane = int(max(1, min(replica.limits.max_running, replica.lane_tokens / context)))
    held = min(MOST_HELD, replica.shape.pp * lane)
    rng = np.random.default_rng(held)
    at = (rng.permutation(held) + 0.5) / held * ends[-1]
    begun = np.searchsorted(ends, at, side="right")
    written = (at - (ends - outputs)[begun]).astype(np.int64)
    count = max(TURNS * held, LEAST_REQUESTS)
    queued = rng.permutation(np.arange(count) * len(inputs) // count)  # lengths may change along a trace
    running = [inputs[begun] + written, outputs[begun] - written, inputs[begun] + written - 1]
    waiting = [inputs[queued], outputs[queued], cached[queued]]
    prompts, answers, known = np.concatenate([running, waiting], axis=1)
    served = serve(Workload(np.zeros(len(prompts)), prompts, answers, cached_tokens=known), [replica])
    end_s = float(served.first_s.max())  # the queue is empty then
    begin_s = SETTLED * end_s
    writing_s = np.minimum(served.finish_s, end_s) - np.maximum(served.first_s, begin_s)
    shares = writing_s / np.maximum(served.finish_s - served.first_s, 1e-12)
    at_once = served.finish_s == served.first_s
    shares = np.where(at_once, served.first_s > begin_s, np.clip(shares, 0.0, 1.0))
    return float((shares * answers).sum()) / (end_s - begin_s) / float(outputs.mean())


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
