"""What `penstock measure` proposes, from answers of which it is known whether they are right."""

import random

import pytest

from penstock.cli.proposal import MeasuredTier, propose, worth
from tests.support.present import present

COUNT = 300


def tier(name: str, share: float, seconds: float, seed: int, *, noise: float) -> MeasuredTier:
    """A tier and a scorer that errs by a normal error of `noise` points around 30 (wrong) and 70 (right)."""
    rng = random.Random(seed)
    right = [rng.random() < share for _ in range(COUNT)]
    scores = [min(100.0, max(0.0, rng.gauss(70 if good else 30, noise))) for good in right]
    return MeasuredTier(name, seconds, right, {"s": scores})


def test_a_judge_that_knows_is_worth_what_it_can_save() -> None:
    """As often right as the last tier at about the cost of a judge that knows, or less: some wrong answers may pass."""
    proposal = present(propose([tier("small", 0.7, 1, 1, noise=1), tier("large", 0.8, 4, 2, noise=1)]))
    assert proposal.pays
    assert 30 < proposal.thresholds["small"] < 72
    assert proposal.right >= proposal.last_right
    assert proposal.gained[0] == pytest.approx(100 * (proposal.right - proposal.last_right))
    assert proposal.cost < proposal.least_cost + 0.03 < 0.7


@pytest.mark.parametrize(("share", "seconds", "noise"), [(0.2, 2.0, 1), (0.7, 1.0, 10_000)])
def test_where_no_cascade_pays_the_last_tier_is_proposed(share: float, seconds: float, noise: float) -> None:
    """As the first tier is too seldom right for its price, or the scorer tells nothing."""
    proposal = present(propose([tier("small", share, seconds, 1, noise=noise), tier("large", 0.95, 4, 2, noise=1)]))
    assert not proposal.pays
    assert (proposal.right, proposal.cost, proposal.gained) == (proposal.last_right, 1.0, (0, 0, 0))


def test_the_worth_of_a_scorer_is_stated_with_its_error() -> None:
    (good,), (useless,) = (list(worth(tier("small", 0.5, 1, 3, noise=noise))) for noise in (1, 10_000))
    assert good.auc[1] == 1
    assert [(limit, right) for limit, right, _ in good.reliability] == [(40, 0), (80, 1)]
    assert useless.auc[1] < 0.5 < useless.auc[2]
    assert not list(worth(MeasuredTier("small", 1, [True] * COUNT, {"s": [1.0] * COUNT})))
