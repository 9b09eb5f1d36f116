"""Routing under acceptance rules: the arrays of plans against routers, which decide on one request after another."""

import dataclasses
import itertools

import numpy as np
import pytest

from penstock.planner_service.routing.quality import JudgedSample, all_qualities, route
from penstock.router_service.generation import cascade
from penstock.services.acceptance.best_answer import best_of
from penstock.services.domain.errors import InvalidRequest
from penstock.types.plans import Plan, TierPlan
from penstock.types.rules import AcceptanceRules, LongAnswers
from tests.support.judged_samples import TIERS, judged_sample
from tests.support.present import present


def drawn_rules(rng: np.random.Generator, tiers: int, *, best_answer: bool) -> AcceptanceRules:
    """Skip predictions and long answers of some tiers but the last."""
    limits = [None if rng.random() < 0.3 else float(rng.integers(5, 80)) for _ in range(tiers - 1)]
    long = [
        None if rng.random() < 0.3 else LongAnswers(int(rng.integers(1, 90)), float(rng.choice([0, 20, 40, 80])))
        for _ in range(tiers - 1)
    ]
    return AcceptanceRules(skip_below=tuple(limits), long_answers=tuple(long), best_answer=best_answer)


def finished_answers(judged: JudgedSample, row: int, tiers: tuple[TierPlan, ...]) -> list[int]:
    """The tiers that answer a request, by the router's own decisions."""
    finished, at, plan = list[int](), 0, Plan(1, tiers)
    predicted = dict(zip(judged.tiers, present(judged.predicted)[row].tolist(), strict=True))
    while True:
        threshold = tiers[at].threshold
        unused = threshold is not None and threshold > 100  # a plan without GPUs for the tier
        if unused or cascade.passed_over(tiers, at, predicted):
            at += 1
            continue
        finished.append(at)
        score, tokens = float(judged.scores[row, at]), int(judged.output_tokens[row, at])
        decision = cascade.decide(plan, tiers, at, score, counted_tokens=tokens)
        if decision is None:
            return finished
        at = decision.to


@pytest.mark.parametrize(("seed", "tiers"), [*itertools.product(range(16), (1, 2, 3))])
def test_replies_are_what_routers_deliver(seed: int, tiers: int) -> None:
    """Over all thresholds: who answers, whose answer is delivered, its quality; and what is judged and held for it."""
    rng, sample = np.random.default_rng(seed + 100), judged_sample(seed, tiers, 40, known=seed % 3 == 0)
    rules = drawn_rules(rng, tiers, best_answer=bool(seed % 2))
    judged = sample.under(rules)
    levels, qualities = all_qualities(judged)
    for point in np.ndindex(qualities.shape):
        thresholds = tuple(float(level[i]) for level, i in zip(levels, point, strict=True))
        own = zip(TIERS, (*thresholds, None), (*rules.skip_below, None), (*rules.long_answers, None), strict=False)
        planned = tuple(TierPlan(n, n, h, 1, skip_below=skip, long_answers=long) for n, h, skip, long in own)
        routed, total = route(judged, thresholds), 0.0
        escalated = [(routed.processed[t] & routed.processed[t + 1 :].any(axis=0)).any() for t in range(tiers)]
        held, judgings = judged.held(routed.processed), judged.judged_answers(routed.processed)
        for row in range(len(judged)):
            finished = finished_answers(judged, row, planned[:tiers])
            scores = [float(judged.scores[row, tier]) for tier in finished]
            reply = finished[best_of(scores) if rules.best_answer else -1]
            assert np.flatnonzero(routed.processed[:, row]).tolist() == finished
            assert routed.answered[row] == reply
            total += judged.quality[row, reply]
            if rules.best_answer:
                streamed = len(finished) == 1 and not escalated[finished[0]]  # nothing to compare it with
                assert held[row] == (not streamed)
                assert np.flatnonzero(judgings[:, row]).tolist() == ([] if streamed else finished)
        assert routed.quality == pytest.approx(total / len(judged))
        assert qualities[point] == pytest.approx(total / len(judged))
    if rules.best_answer:
        assert judged.most == pytest.approx(max(judged.best, judged.quality_over(range(tiers)).mean()))


def test_parts_of_a_sample_keep_all_that_is_known_of_their_answers_and_their_rules() -> None:
    rules = AcceptanceRules(
        skip_below=(20.0, None), long_answers=(LongAnswers(40, 20.0), LongAnswers(60, 0.0)), best_answer=True
    )
    sample = judged_sample(4, known=True)
    sample = dataclasses.replace(sample, refused=sample.scores < 10, cached_tokens=sample.input_tokens // 2)
    judged, rows = sample.under(rules), np.array([3, 1, 50])
    for part, expected in ((judged.subset(rows), (rows,)), (judged.only((0, 2)), (slice(None), [0, 2]))):
        assert part.highest_delivered
        for name in ("output_tokens", "scores", "predicted", "passed_over", "known_quality", "long_enough", "refused"):
            np.testing.assert_array_equal(getattr(part, name), getattr(judged, name)[expected], name)
        for name in ("input_tokens", "cached_tokens"):
            np.testing.assert_array_equal(getattr(part, name), getattr(judged, name)[expected[0]], name)
    assert judged.under(AcceptanceRules()).highest_delivered  # of a plan for requests that have it already
    assert judged.under(AcceptanceRules(long_answers=(None, None))).long_enough is None


def test_a_rule_needs_predictions_and_a_limit_for_each_tier_but_the_last() -> None:
    judged = judged_sample(1)
    bare = JudgedSample(TIERS, judged.input_tokens, judged.output_tokens, judged.scores)
    assert bare.under(AcceptanceRules(skip_below=(None, None))).passed_over is None
    with pytest.raises(InvalidRequest, match="predicted scores"):
        bare.under(AcceptanceRules(skip_below=(30.0, None)))
    with pytest.raises(InvalidRequest, match="skip_below"):
        judged.under(AcceptanceRules(skip_below=(30.0,)))
    with pytest.raises(InvalidRequest, match="long_answers"):
        judged.under(AcceptanceRules(long_answers=(None,)))
