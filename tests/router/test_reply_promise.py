"""What is left of a promise, and which tiers can still keep it."""

import math

from penstock.router_service.domain.reply_promise import ReplyPromise
from penstock.router_service.generation.tier_times import MAX_AGE_S, TierTimes
from penstock.services.domain.slo.promises import MIN_REMAINDER_S, Promise
from penstock.types.plans import TierPlan
from penstock.types.replies import TokenFrame
from penstock.types.slo import Slo, SloClass, SloPhase
from tests.support.present import present

ROUTE = (TierPlan("small", "s", 50.0, 1), TierPlan("large", "l", None, 1))


def frame(offset: int, count: int = 1, text: str = "") -> TokenFrame:
    return TokenFrame(offset, tuple(range(count)), text)


def test_the_deadline_is_absolute_and_the_remainder_shrinks() -> None:
    promise = ReplyPromise(Promise.received(Slo(2.0, (SloPhase(0, 0.1),)), 100.0))
    assert promise.remainder(100.5) == Slo(1.5, (SloPhase(0, 0.1),))
    first_hop = present(promise.remainder(100.5))
    second = ReplyPromise(Promise.received(first_hop, 7.0))  # another process, another clock
    assert second.remainder(7.25) == Slo(1.25, (SloPhase(0, 0.1),))
    assert promise.remainder(101.5) == Slo(0.5, (SloPhase(0, 0.1),))
    assert promise.remainder(200.0) == Slo(MIN_REMAINDER_S, (SloPhase(0, 0.1),)), "never zero, which means no deadline"


def test_behind_the_first_token_what_is_left_is_the_pace_of_its_windows() -> None:
    promise = ReplyPromise(Promise.received(Slo(2.0, (SloPhase(0, 0.1),)), 0.0))
    promise.take(frame(0), 1.0)
    assert promise.next_token_due_s() == 1.1
    for i in range(1, 11):
        promise.take(frame(i), 1.0 + 0.01 * i)  # ten times as fast: most of a window is left
    assert math.isclose(promise.next_token_due_s(), 1.01 + 1.0)
    assert promise.attainment.late_windows == 0
    promise.take(frame(11), 5.0)
    late = promise.attainment
    assert (late.attained, late.late_windows) == (False, 1)


def test_phases_behind_a_marker_and_those_that_have_passed_travel_as_what_they_are() -> None:
    phases = (SloPhase(0, 0.5), SloPhase(0, 0.1, "</think>"), SloPhase(100, 0.2))
    promise = ReplyPromise(Promise(None, phases))
    promise.take(frame(0, 5, "some thoughts"), 1.0)
    remainder = present(promise.remainder(1.0))
    assert remainder.phases == phases
    promise.take(frame(5, 2, " </think> so"), 1.2)
    remainder = present(promise.remainder(1.2))
    assert remainder.phases == (SloPhase(0, 0.1), SloPhase(100, 0.2))
    assert not [*remainder.problems("slo")], "a worker accepts it"


def test_a_promise_stays_made_whatever_becomes_of_its_class() -> None:
    promise = ReplyPromise(Promise(1.0, (SloPhase(0, 0.1),)))
    slo = promise.remainder(0.0)
    assert promise.granted(slo, slo_kept=True) is SloClass.STANDARD
    assert promise.granted(slo, slo_kept=False) is SloClass.BEST_EFFORT
    assert promise.promised
    first_only = ReplyPromise(Promise(1.0))
    first_only.granted(first_only.remainder(0.0), slo_kept=True)
    first_only.take(frame(0), 0.5)
    assert first_only.remainder(0.6) is None, "all has been kept"
    assert first_only.granted(None, slo_kept=False) is SloClass.STANDARD


def test_a_move_needs_slack_for_its_stall() -> None:
    promise = ReplyPromise(Promise(10.0, (SloPhase(0, 0.1),)))
    assert promise.allows_stall(99.0, 0.0), "nothing is promised yet"
    promise.granted(promise.remainder(0.0), slo_kept=True)
    promise.take(frame(0), 1.0)
    assert promise.allows_stall(0.05, 1.0)
    assert not promise.allows_stall(0.2, 1.0)
    promise.granted(promise.remainder(1.0), slo_kept=False)
    assert promise.allows_stall(99.0, 1.0), "a best-effort reply has nothing to lose"


def measured(times: TierTimes, count: int, now_s: float) -> None:
    """Answers of both tiers and judgements that end now: 2 s on small, 0.5 s to large's first token, 0.3 s for the judge."""
    for _ in range(count):
        times.answered("small", now_s - 2.0, now_s - 1.5, now_s)
        times.answered("large", now_s - 3.0, now_s - 2.5, now_s)
        times.judged(now_s - 0.3, now_s)


def test_a_held_answer_has_a_time_to_finish_by() -> None:
    """The first token's time less the judge and a reserve for the last tier; its own first token still earlier."""
    times = TierTimes()
    assert times.finish_by_s(110.0, ROUTE, 100.0) == 110.0
    assert not times.is_too_late("small", 100.0, 100.0), "nothing is skipped on no measurement"
    measured(times, 20, 100.0)
    finish_by_s = times.finish_by_s(110.0, ROUTE, 100.0)
    assert math.isclose(finish_by_s, 110.0 - 0.3 - 0.5)
    assert math.isclose(times.first_token_due_s("small", finish_by_s, 100.0), finish_by_s - 1.5)
    assert not times.is_too_late("small", 102.1, 100.0)
    assert times.is_too_late("small", 101.9, 100.0)


def test_a_tier_that_was_skipped_is_tried_again_after_a_while() -> None:
    times = TierTimes()
    measured(times, 20, 100.0)
    assert times.is_too_late("small", 100.0 + MAX_AGE_S, 99.0 + MAX_AGE_S)
    assert not times.is_too_late("small", 101.0 + MAX_AGE_S, 100.5 + MAX_AGE_S)
