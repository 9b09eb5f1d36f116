"""How many workers a tier needs between plans, by its live load. No I/O.

The load of a tier, in workers, is what its workers hold, running or queued, over the places that one has; with a target for
the first token, it is also how much longer than that a new request would wait, times its workers. A tier needs so many
workers that each is busy to a share of its places. It gets more once it has needed them during `rise_s`, and fewer once it
has needed no more during `hold_s`, by a lower share: so a load that lasts ends with a count that stays. A tier that the plan
has no workers of gets one when a request waits for it, and loses the last one when it has had none during `hold_s`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

LOWER_SHARE = 0.75
"""Of the busy share: fewer workers are needed once they would be less busy than this."""
LARGEST_STEP = 4
"""A count is lowered by one of so many workers at once, or by one."""
LOWER_AGAIN = 0.9
"""Of the load at which fewer workers were too few: only below it they are tried again."""


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """busy: the share of their places, or of the target, at which workers are used as planned. rise_s, hold_s: as above.

    target_s: within which a request should have its first token; None: no matter when.
    """

    busy: float = 0.8
    rise_s: float = 15.0
    hold_s: float = 300.0
    target_s: float | None = None


@dataclass(frozen=True, slots=True)
class TierLoad:
    """A tier at `at_s`. workers: that take requests. in_flight: requests, running and queued. places: of one worker.

    wait_s: until a new request would have its first token, about, by the prompts that are still to be computed. awaited:
    a request waits for the tier's first worker.
    """

    at_s: float
    workers: int
    in_flight: int
    places: int
    wait_s: float = 0.0
    awaited: bool = False

    def in_workers(self, rule: ScalingRule) -> float:
        """The load, in workers that are busy all the time."""
        waiting = 0.0 if rule.target_s is None else self.workers * self.wait_s / rule.target_s
        return max(self.in_flight / self.places, waiting)


@dataclass(frozen=True, slots=True)
class Lowering:
    """A count was lowered from `workers` at `at_s`. load: the highest before that, in workers."""

    workers: int
    at_s: float
    load: float


@dataclass(frozen=True, slots=True)
class TierScale:
    """The workers that a tier should have, at least `least`: 0 where the plan has none, or 1.

    samples: (time, load in workers, whether all of its workers were ready), the oldest first, of `hold_s`.
    lowered: the last time that the count was lowered. mistaken: one that had to be taken back. Fewer workers have larger
    batches, which are slower, so the load in workers grows when they become fewer.
    """

    workers: int
    samples: tuple[tuple[float, float, bool], ...] = ()
    lowered: Lowering | None = None
    mistaken: Lowering | None = None
    least: int = 1

    def after(self, load: TierLoad, rule: ScalingRule, most: int) -> "TierScale":
        """The next state. most: the limit of workers.

        More workers are not asked for while others are not ready: what waits for those would be counted once more. A tier
        without any says nothing of its load, but for requests that wait for one.
        """
        if not load.workers:
            first = load.awaited and not self.workers
            return TierScale(1, mistaken=self.mistaken, least=self.least) if first else self
        samples = [*self.samples, (load.at_s, load.in_workers(rule), load.workers >= self.workers)]
        while len(samples) > 1 and samples[1][0] <= load.at_s - rule.hold_s:
            del samples[0]
        lasted_s, recent = load.at_s - samples[0][0], [s for s in samples if s[0] >= load.at_s - rule.rise_s]
        more = min(_needed(min(each for _, each, _ in recent) / rule.busy), 2 * self.workers, most)
        if lasted_s >= rule.rise_s and more > self.workers and all(ready for *_, ready in recent):
            soon = self.lowered is not None and load.at_s - self.lowered.at_s < 2 * rule.hold_s
            return TierScale(more, mistaken=self.lowered if soon else self.mistaken, least=self.least)
        high = max(each for _, each, _ in samples)
        fewer = max(
            self.least, _needed(high / rule.busy / LOWER_SHARE), self.workers - max(1, self.workers // LARGEST_STEP)
        )
        if self.mistaken is not None and high > LOWER_AGAIN * self.mistaken.load:
            fewer = max(fewer, self.mistaken.workers)
        if lasted_s >= rule.hold_s and fewer < self.workers:
            return TierScale(fewer, (), Lowering(self.workers, load.at_s, high), self.mistaken, self.least)
        return replace(self, samples=tuple(samples))


def _needed(workers: float) -> int:
    return math.ceil(round(workers, 6))


def within_gpus(
    counts: Mapping[str, int], planned: Mapping[str, int], gpus: Mapping[str, int], most: int
) -> dict[str, int]:
    """The counts of workers by tier, as far as `most` GPUs are enough for what the plan does not have.

    gpus: of one worker, by tier. They go to the tier that has the smallest share of its count, one worker after the other.
    """
    result = {tier: min(count, planned[tier]) for tier, count in counts.items()}
    while True:
        free = most - sum(gpus[tier] * count for tier, count in result.items())
        short = [tier for tier, count in result.items() if count < counts[tier] and gpus[tier] <= max(0, free)]
        if not short:
            return result
        result[min(short, key=lambda tier: result[tier] / counts[tier])] += 1
