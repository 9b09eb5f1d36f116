"""Counts of workers between plans: a load that lasts ends with a count that stays, and fewer workers come late."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from penstock.planner_service.live.load_scaling import ScalingRule, TierLoad, TierScale, within_gpus

RULE, PLACES, MOST = ScalingRule(busy=0.8, rise_s=15.0, hold_s=300.0), 32, 64
STARTS_S = 40.0
"""Until a worker that was asked for is ready."""


@dataclass
class Tier:
    """A tier in steps of a second: a batch of k takes 20 + k milliseconds a token, a reply 200 tokens."""

    scale: TierScale
    workers: int
    requests: float = 0.0
    at_s: float = 0.0
    ready_s: float = math.inf

    def run(self, seconds: int, rate_per_s: Callable[[float], float]) -> list[tuple[float, int]]:
        """(time, count) of each change of what is asked for."""
        changes = []
        for _ in range(seconds):
            self.at_s += 1.0
            batch = min(self.requests / self.workers, PLACES)
            served = self.workers * batch / ((0.020 + 0.001 * batch) * 200) if batch else 0.0
            self.requests = max(0.0, self.requests + rate_per_s(self.at_s) - served)
            if self.at_s >= self.ready_s:
                self.workers, self.ready_s = self.scale.workers, math.inf
            before = self.scale.workers
            self.scale = self.scale.after(TierLoad(self.at_s, self.workers, round(self.requests), PLACES), RULE, MOST)
            if self.scale.workers > before:
                self.ready_s = self.at_s + STARTS_S
            self.workers = min(self.workers, self.scale.workers)
            if self.scale.workers != before:
                changes.append((self.at_s, self.scale.workers))
        return changes


def started(workers: int) -> Tier:
    return Tier(TierScale(workers), workers)


@pytest.mark.parametrize("rate_per_s", [0.5, 2.0, 3.0, 4.0, 5.5, 7.0, 8.5, 11.0, 20.0])
@pytest.mark.parametrize("seed", range(2))
def test_a_steady_load_does_not_oscillate(rate_per_s: float, seed: int) -> None:
    """Poisson arrivals for four hours: after the first two, the count does not change any more but once."""
    rng, tier = np.random.default_rng(seed), started(2)
    tier.run(7200, lambda _: rng.poisson(rate_per_s))
    assert len(tier.run(7200, lambda _: rng.poisson(rate_per_s))) <= 1
    assert tier.requests < 2 * PLACES * tier.workers, "and it keeps up"


def test_a_doubled_rate_raises_the_count_soon() -> None:
    tier = started(2)
    assert tier.run(1800, lambda _: 5.0) == []
    changes = tier.run(1800, lambda _: 10.0)
    (first_s, count), *_ = changes
    assert count > 2
    assert RULE.rise_s <= first_s - 1800 < 120
    assert tier.requests / tier.workers < PLACES
    counts = [count for _, count in changes]
    peak = counts.index(max(counts))
    assert counts == sorted(counts[:peak]) + sorted(counts[peak:], reverse=True), "more until what waited is answered"
    assert 4 <= tier.scale.workers <= 5


def test_a_falling_load_lowers_the_count_after_the_stated_time_and_not_before() -> None:
    tier = started(4)
    assert tier.run(1200, lambda _: 11.0) == []
    changes = tier.run(1200, lambda _: 2.0)
    assert changes
    assert changes[0][0] - 1200 >= RULE.hold_s
    assert tier.scale.workers < 4
    blips = started(4)
    blips.run(1200, lambda _: 11.0)
    assert blips.run(1800, lambda at_s: 2.0 if at_s % 240 else 60.0) == [], "a peak within that time keeps them"


def test_a_peak_shorter_than_the_rise_is_not_followed() -> None:
    tier = started(2)
    tier.run(600, lambda _: 4.0)
    assert tier.run(600, lambda at_s: 20.0 if at_s < 604 else 4.0) == []


def test_a_wait_over_the_target_asks_for_more_however_free_the_places_are() -> None:
    """Prompts are long and replies short: three requests wait two seconds for a target of one."""
    rule, scale = replace(RULE, target_s=1.0), TierScale(2)
    load = TierLoad(0.0, 2, 3, PLACES, wait_s=2.0)
    assert load.in_workers(RULE) == pytest.approx(3 / PLACES)
    for second in range(20):
        scale = scale.after(replace(load, at_s=float(second)), rule, MOST)
    assert scale.workers == 4, "at most twice as many at once"
    assert TierScale(2).after(load, rule, MOST).workers == 2


def test_no_more_are_asked_for_while_others_start_and_never_more_than_may_be() -> None:
    scale, load = TierScale(4), TierLoad(0.0, 2, 1000, PLACES)
    for second in range(100):
        scale = scale.after(replace(load, at_s=float(second)), RULE, MOST)
    assert scale.workers == 4
    for second in range(100, 400):
        scale = scale.after(replace(load, at_s=float(second), workers=scale.workers, in_flight=10**6), RULE, 10)
    assert scale.workers == 10
    assert TierScale(3).after(replace(load, workers=0, in_flight=0), RULE, MOST) == TierScale(3)


def test_a_tier_without_workers_has_one_while_requests_need_it() -> None:
    """It is asked for at once, and goes again when it has had no request for a while; without `least`, the last one stays."""
    none = TierLoad(0.0, 0, 0, PLACES)
    assert TierScale(0, least=0).after(none, RULE, MOST).workers == 0
    first = TierScale(0, least=0).after(replace(none, awaited=True), RULE, MOST)
    assert first.workers == 1
    assert first.after(replace(none, awaited=True), RULE, MOST) == first, "while it starts"
    for least in (0, 1):
        scale = replace(first, least=least)
        for second in range(400):
            scale = scale.after(TierLoad(float(second), 1, 1 if second < 100 else 0, PLACES), RULE, MOST)
            assert scale.workers == (least if second >= 100 + RULE.hold_s else 1)
            if not scale.workers:
                break


def test_workers_over_the_plan_stay_within_the_gpus() -> None:
    """They go to the tiers that lack most; those of the plan, and workers without GPUs, stay."""
    planned, gpus = {"small": 2, "large": 2, "cpu": 1}, {"small": 1, "large": 4, "cpu": 0}
    assert within_gpus({"small": 4, "large": 3, "cpu": 9}, planned, gpus, 12) == {"small": 4, "large": 2, "cpu": 9}
    assert within_gpus({"small": 8, "large": 2, "cpu": 1}, planned, gpus, 12) == {"small": 4, "large": 2, "cpu": 1}
    assert within_gpus({"small": 1, "large": 3, "cpu": 1}, planned, gpus, 13) == {"small": 1, "large": 3, "cpu": 1}
    assert within_gpus(planned, planned, gpus, 4) == planned
