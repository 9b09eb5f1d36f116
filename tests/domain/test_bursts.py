"""Burst ladders: what makes one valid, the law of the budget, when steps change, and ties. Pure."""

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.router_service.generation import cascade
from penstock.router_service.generation.cascade import Accept, Escalate
from penstock.services.acceptance.burst_control import (
    BACK,
    DRAIN_S,
    HOLD_S,
    RATE_WINDOW_S,
    SPENT_AT_MOST,
    ArrivalRate,
    BurstController,
)
from penstock.services.acceptance.bursts import tie_accepted, tie_draw
from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.instances import Load
from penstock.services.domain.plans import check_plan
from penstock.services.state import codec
from penstock.types.events import EscalationReason
from penstock.types.mesh_status import BurstReason
from penstock.types.plans import Plan, TierPlan
from penstock.types.rules import BurstLadder, BurstStep, BurstThreshold
from tests.support.present import present

WINDOW_S = 60.0


def step(score: float, quality: float, rate: float, tie_share: float = 1.0) -> BurstStep:
    return BurstStep((BurstThreshold(score, tie_share),), quality, rate, "large", 0.5)


LADDER = BurstLadder(80.0, (step(70, 84, 10), step(60, 81, 15), step(50, 76, 20), step(40, 70, 40)))
TIERS = (TierPlan("small", "s", 70.0, 1), TierPlan("large", "l", None, 1))


def plan(ladder: BurstLadder | None = LADDER) -> Plan:
    return Plan(1, TIERS, burst=ladder)


def with_step(index: int, **fields: Any) -> BurstLadder:
    steps = [dataclasses.replace(one, **fields) if i == index else one for i, one in enumerate(LADDER.steps)]
    return dataclasses.replace(LADDER, steps=tuple(steps))


def idle(_: str) -> int:
    return 0


@pytest.mark.parametrize(
    ("ladder", "field"),
    [
        (dataclasses.replace(LADDER, steps=LADDER.steps[:1]), "plan.burst.steps"),
        (dataclasses.replace(LADDER, steps=LADDER.steps * 5), "plan.burst.steps"),
        (dataclasses.replace(LADDER, mean_quality=math.nan), "plan.burst.mean_quality"),
        (dataclasses.replace(LADDER, mean_quality=84.5), "plan.burst.mean_quality"),
        (with_step(1, quality=math.nan), "plan.burst.steps[1].quality"),
        (with_step(1, quality=84.5), "plan.burst.steps[1].quality"),
        (with_step(2, rate_per_s=15.0), "plan.burst.steps[2].rate_per_s"),
        (with_step(2, rate_per_s=math.inf), "plan.burst.steps[2].rate_per_s"),
        (with_step(0, rate_per_s=0.0), "plan.burst.steps[0].rate_per_s"),
        (with_step(1, tier="huge"), "plan.burst.steps[1].tier"),
        (with_step(1, tier_share=0.0), "plan.burst.steps[1].tier_share"),
        (with_step(1, thresholds=()), "plan.burst.steps[1].thresholds"),
        (with_step(1, thresholds=(BurstThreshold(math.nan),)), "plan.burst.steps[1].thresholds[0].score"),
        (with_step(1, thresholds=(BurstThreshold(60, 0.0),)), "plan.burst.steps[1].thresholds[0].tie_share"),
        (with_step(1, thresholds=(BurstThreshold(71),)), "plan.burst.steps[1].thresholds[0]"),
        (with_step(2, thresholds=(BurstThreshold(60, 0.5),)), "plan.burst.steps[2].thresholds[0]"),
        (with_step(0, thresholds=(BurstThreshold(71),)), "plan.burst.steps[0].thresholds[0]"),
        (with_step(0, thresholds=(BurstThreshold(70, 0.5),)), "plan.burst.steps[0].thresholds[0]"),
    ],
)
def test_an_unsound_ladder_is_refused_by_its_field(ladder: BurstLadder, field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        check_plan(plan(ladder))
    assert [problem.field for problem in error.value.problems] == [field]


def test_a_ladder_may_begin_a_step_with_a_part_of_the_ties_and_outlives_the_state_store() -> None:
    ties = with_step(1, thresholds=(BurstThreshold(60, 0.25),))
    check_plan(plan(ties))
    for each in (plan(ties), plan(None)):
        assert codec.plan_from_json(codec.plan_to_json(each)) == each
    assert codec.load_from_json(codec.load_to_json(Load(arrivals_per_s=12.3))).arrivals_per_s == 12.3


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), mean=st.sampled_from([70.0, 75.0, 80.0, 83.5, 84.0]))
def test_the_mean_over_the_window_holds_whenever_thresholds_give_way(seed: int, mean: float) -> None:
    """On any arrivals and any load: when a step below the mean is taken, SPENT_AT_MOST of what was earned within the window
    pays for it. Requests older than the window do not count."""
    rng = np.random.default_rng(seed)
    controller = BurstController(dataclasses.replace(LADDER, mean_quality=mean), WINDOW_S)
    now_s, taken = 0.0, list[tuple[float, float]]()
    for _ in range(400):
        now_s += float(rng.exponential(rng.choice([0.02, 0.5, 4.0])))
        controller.observe(now_s, float(rng.choice([1, 12, 18, 100])), idle)
        index, _ = controller.take(now_s)
        surplus = LADDER.steps[index].quality - mean
        taken.append((now_s, surplus))
        if surplus < 0:
            part_s = WINDOW_S / 600
            window = [s for at, s in taken if int(at / part_s) > int(now_s / part_s) - 600]
            earned, spent = sum(s for s in window if s > 0), -sum(s for s in window if s < 0)
            assert spent <= SPENT_AT_MOST * earned + 1e-9
            quality, count = controller.window(now_s)
            assert count == len(window)
            assert quality / count >= mean
    assert any(s < 0 for _, s in taken) or mean in (70.0, 84.0)


def test_without_earnings_no_router_gives_way_below_the_mean() -> None:
    """A router that has just started takes the last step that holds the mean by itself, and says that the budget is spent."""
    controller = BurstController(LADDER, WINDOW_S)
    change = present(controller.observe(0.0, 100.0, idle))
    assert (change.after, change.reason) == (3, BurstReason.LOAD)
    index, back = controller.take(0.0)
    assert index == 1, "81 is over the mean of 80"
    assert back is not None
    assert (back.before, back.after, back.reason) == (3, 1, BurstReason.BUDGET_SPENT)
    assert controller.out_of_budget
    assert controller.take(0.1) == (1, None), "one change, not one for each request"


def test_a_spent_budget_recovers_before_thresholds_give_way_again() -> None:
    controller, now_s = BurstController(LADDER, WINDOW_S), 0.0
    steps, reasons = [], []
    for i in range(900):  # calm for 30 s, then a burst that does not end
        now_s += 0.1
        for change in (controller.observe(now_s, 5.0 if i < 300 else 30.0, idle), None):
            reasons += [change.reason] if change is not None else []
        index, change = controller.take(now_s)
        reasons += [change.reason] if change is not None else []
        steps.append(index)
    assert set(steps[:300]) == {0}
    assert steps[300] == 3
    spent = reasons.index(BurstReason.BUDGET_SPENT)
    assert reasons[spent - 1] is BurstReason.LOAD
    changes = sum(one != other for one, other in itertools.pairwise(steps))
    assert changes < 12, "it does not go to and fro with every request"
    assert steps.count(3) > 80, "what calm requests have earned is used"


def test_a_step_is_climbed_at_once_and_left_after_a_while() -> None:
    controller = BurstController(dataclasses.replace(LADDER, mean_quality=0.0), WINDOW_S)
    assert controller.observe(0.0, 10.0, idle) is None, "the first step sustains it"
    change = present(controller.observe(1.0, 10.1, idle))
    assert change.after == 1
    assert controller.observe(2.0, 100.0, idle) is not None
    assert controller.step == 3
    for at_s in np.arange(3.0, 30.0, 0.5):
        assert controller.observe(at_s, 20.0, idle) is None, "not well within the step before"
    began_s = 30.0
    assert controller.observe(began_s, BACK * 20.0, idle) is None
    assert controller.observe(began_s + HOLD_S - 0.1, 1.0, idle) is None
    change = present(controller.observe(began_s + HOLD_S, 1.0, idle))
    assert (change.after, change.reason) == (2, BurstReason.CALM), "the highest that was needed meanwhile"


def test_what_is_queued_at_the_tier_that_breaks_is_load_too() -> None:
    """At half of the requests reaching it, q queued requests are 2 q arrivals, to be served within DRAIN_S."""
    waiting = {"large": 40, "small": 10_000}
    controller = BurstController(dataclasses.replace(LADDER, mean_quality=0.0), WINDOW_S)
    controller.observe(0.0, 5.0, waiting.__getitem__)
    assert 5.0 + 2 * 40 / DRAIN_S == 13.0
    assert controller.step == 1


def test_arrivals_are_counted_over_a_short_window() -> None:
    rate = ArrivalRate()
    for i in range(1000):
        rate.arrived(1e6 + i * 0.05)
    assert rate.per_s(1e6 + 50.0) == pytest.approx(20.0, rel=0.06)
    assert rate.per_s(1e6 + 50.0 + RATE_WINDOW_S + 0.3) == 0.0


def test_a_tie_is_decided_by_the_requests_own_seed() -> None:
    """The same request gets the same decision; of many, the share is accepted; tiers and tokens have other numbers."""
    accepted = [tie_accepted(0.3, tie_draw(seed, 0)) for seed in range(20_000)]
    assert np.mean(accepted) == pytest.approx(0.3, abs=0.015)
    assert accepted == [tie_accepted(0.3, tie_draw(seed, 0)) for seed in range(20_000)]
    assert tie_draw(1, 0) != tie_draw(1, 1)
    assert all(tie_accepted(1.0, tie_draw(seed, 0)) for seed in range(1000))
    tiers = cascade.at_step(TIERS, step(60, 81, 15, 0.3))
    assert tiers[0].threshold == 60.0
    assert tiers[1] is TIERS[1]
    assert isinstance(cascade.decide(plan(), tiers, 0, 60.1, accepts_tie=False), Accept)
    assert isinstance(cascade.decide(plan(), tiers, 0, 60.0), Accept)
    assert cascade.decide(plan(), tiers, 0, 60.0, accepts_tie=False) == Escalate(1, EscalationReason.TIE_NOT_ACCEPTED)
    assert cascade.decide(plan(), tiers, 0, 59.9) == Escalate(1, EscalationReason.SCORE_BELOW_THRESHOLD)
