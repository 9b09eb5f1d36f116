"""Limits that move with the load: pure."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from penstock.services.acceptance import pipeline
from penstock.services.acceptance.wait_price import Price, priced_to_accept, priced_to_ask
from penstock.services.domain.dispatch import REQUEST_TOKENS, delay_s, wait_s, work_tokens
from penstock.types.plans import TierPlan
from penstock.types.rules import SkipFor

scores = st.floats(0, 100)
limits = st.none() | st.floats(0, 100)
prices = st.builds(Price, st.floats(0, 100), st.floats(1, 100))
seconds = st.floats(0, 60)


def tier(threshold: float, skip_below: float | None = None) -> TierPlan:
    return TierPlan("small", "m", threshold, 1, skip_below=skip_below)


@given(scores, limits, scores, prices, seconds, seconds)
def test_with_idle_tiers_or_a_price_of_nothing_limits_are_those_of_the_plan(
    threshold: float, limit: float | None, predicted: float, price: Price, own_s: float, next_s: float
) -> None:
    of_plan = tier(threshold, limit)
    for price_of_load, own, following in ((price, 0.0, 0.0), (Price(0.0), own_s, next_s)):
        assert priced_to_ask(of_plan, predicted, price_of_load, own, following) == of_plan
        assert priced_to_accept(of_plan, price_of_load, following) == of_plan


@given(scores, scores, prices, seconds, seconds, seconds)
def test_who_waits_longer_at_a_tier_passes_it_over_and_who_waits_longer_behind_it_asks_it(
    limit: float, predicted: float, price: Price, own_s: float, next_s: float, more_s: float
) -> None:
    def asked(own: float, following: float) -> bool:
        priced = priced_to_ask(tier(50.0, limit), predicted, price, own, following)
        return pipeline.is_asked(priced, {"small": predicted})

    assert asked(own_s, next_s) or not asked(own_s + more_s, next_s)
    assert asked(own_s, next_s + more_s) or not asked(own_s, next_s)


@given(scores, scores, prices, seconds, seconds)
def test_an_answer_that_is_accepted_is_accepted_under_more_load(
    threshold: float, score: float, price: Price, next_s: float, more_s: float
) -> None:
    def accepted(delay: float) -> bool:
        return pipeline.decide(priced_to_accept(tier(threshold), price, delay), score, 10).accepted

    assert accepted(next_s + more_s) or not accepted(next_s)


def test_limits_move_by_the_price_of_the_seconds() -> None:
    """Asking the tier costs its own delay, less the delay of the next tier with the chance of an answer that is accepted."""
    plan, five = tier(60.0, 20.0), Price(5.0)
    assert priced_to_ask(plan, 50.0, five, 4.0, 2.0) == replace(plan, skip_below=35.0)
    assert priced_to_ask(tier(60.0), 50.0, five, 4.0, 2.0) == tier(60.0, 15.0)
    routed = replace(plan, skip_below=None, skip_for=SkipFor("large", 30.0))
    assert priced_to_ask(routed, 50.0, five, 4.0, 2.0).skip_for == SkipFor("large", 15.0), "a smaller gain is enough"
    both = replace(plan, skip_for=SkipFor("large", 30.0))
    assert priced_to_ask(both, 50.0, five, 4.0, 2.0) == replace(both, skip_below=35.0, skip_for=SkipFor("large", 15.0))
    assert priced_to_accept(plan, five, 2.0) == replace(plan, threshold=50.0)
    assert priced_to_accept(plan, five, 60.0) == replace(plan, threshold=0.0)
    assert priced_to_accept(plan, Price(5.0, most=15.0), 60.0) == replace(plan, threshold=45.0), "however long it takes"
    assert priced_to_ask(plan, 50.0, Price(5.0, most=10.0), 4.0, 2.0) == replace(plan, skip_below=30.0)


def test_pending_work_delays_an_answer_of_a_requests_tokens_by_the_time_that_it_takes() -> None:
    work = work_tokens(300, 4, 2000)
    assert delay_s(REQUEST_TOKENS, 300, work, 1000.0) == wait_s(work, 1000.0)
    assert delay_s(0, 300, work, 1000.0) == 0.3, "prompts delay every answer"
    assert delay_s(2 * REQUEST_TOKENS, 300, work, 1000.0) == 2 * work / 1000 - 0.3
    assert delay_s(REQUEST_TOKENS, 300, work, 0.0) == 0.0, "the throughput is not known"
    assert delay_s(5000, 0, 0.0, 1000.0) == 0.0, "idle"
