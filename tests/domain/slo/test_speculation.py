"""Speculation lengths under SLOs: the solver finds what trying every combination finds."""

import itertools
import random

import pytest

from penstock.services.domain.latency import StepLatencyModel
from penstock.services.domain.slo.speculation import SpeculationTier, expected_tokens, plan_of, speculation_lengths


def test_acc_counts_verified_tokens_and_one_is_plain_decoding() -> None:
    assert expected_tokens(1, 0.7) == pytest.approx(1.0)
    assert expected_tokens(3, 0.7) == pytest.approx(1 + 0.7 + 0.49)
    assert expected_tokens(5, 1.0) == 5.0
    assert expected_tokens(5, 0.0) == 1.0


@pytest.mark.parametrize("tiers", [1, 2, 3])
def test_the_solver_equals_trying_every_combination(tiers: int) -> None:
    most, unequal = 5, 0
    for seed in range(40):
        rng = random.Random(seed)
        latency = StepLatencyModel(
            (0.0, 64.0, 512.0), (0.01, 0.012, 0.08), 1e-7, draft_step_s=rng.choice([0.0, 0.002, 0.01])
        )
        asked = [
            SpeculationTier(rng.randint(1, 40), rng.choice([0.02, 0.03, 0.05, 0.1]), rng.choice([0.0, 0.5, 0.7, 0.9]))
            for _ in range(tiers)
        ]
        context = rng.randint(0, 50_000)
        plans = [
            plan
            for lengths in itertools.product(range(1, most + 1), repeat=tiers)
            if (plan := plan_of(lengths, asked, latency, context, 1024)) is not None
        ]
        best = max((plan.prefill_tokens_per_s for plan in plans), default=None)
        found = speculation_lengths(asked, latency, context_tokens=context, max_step_tokens=1024, max_length=most)
        if found is None:
            assert best is None
            continue
        assert found.prefill_tokens_per_s == pytest.approx(best)
        unequal += len(set(found.lengths)) > 1
    assert tiers == 1 or unequal > 0  # one length for all paces would not do
