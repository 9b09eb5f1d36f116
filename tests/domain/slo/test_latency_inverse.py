"""How many tokens fit in a time, and how predictions are corrected by what steps really took."""

import random

import numpy as np
import pytest

from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.latency import SUM_TOLERANCE_S, StepLatencyModel, StepLoad
from penstock.services.domain.slo.compiled import layout
from penstock.services.domain.slo.correction import MIN_SAMPLES, LatencyCorrection

MODEL = StepLatencyModel((1.0, 64.0, 256.0, 1024.0), (0.02, 0.021, 0.05, 0.3), 3e-7, 2e-8, 1e-7, 0.004)


def load_of(load: StepLoad) -> layout.Load:
    """The same for compiled code: one decode without context has the gap."""
    return layout.Load(load.tokens, float(load.context_tokens), load.pairs, 1, 0.0, float(load.longest_gap))


def test_the_inverse_is_the_greatest_chunk_that_fits_and_the_compiled_one_agrees() -> None:
    rng = random.Random(1)
    model = layout.step_model(MODEL, 2048)
    for _ in range(500):
        beside = StepLoad(rng.randint(0, 200), rng.randint(0, 90_000), rng.random() * 1e5, rng.randint(0, 50_000))
        start, seconds, most = rng.randint(0, 4000), rng.random() * 0.4, rng.randint(1, 2048)
        found = MODEL.tokens_within(seconds, most, beside, start)

        def took(count: int, beside: StepLoad = beside, start: int = start) -> float:
            context = beside.context_tokens + (start + count if count else 0)
            pairs = beside.pairs + count * (start + 0.5 * (count + 1))
            return MODEL.step_s(StepLoad(beside.tokens + count, context, pairs, beside.longest_gap))

        if found < 0:
            assert took(0) > seconds
        else:
            assert took(found) <= seconds + SUM_TOLERANCE_S
            assert found == most or took(found + 1) > seconds
        compiled = layout.tokens_within(seconds, most, start, load_of(beside), model)
        assert compiled == found


def test_compiled_steps_take_the_model_s_time() -> None:
    rng = random.Random(2)
    model = layout.step_model(MODEL, 2048, correction=1.25)
    for _ in range(200):
        load = StepLoad(rng.randint(0, 2000), rng.randint(0, 90_000), rng.random() * 1e5, rng.randint(0, 50_000))
        compiled = layout.step_s(load_of(load), model)
        assert compiled == pytest.approx(1.25 * MODEL.step_s(load))


def test_speculative_steps_cost_a_draft_step_each() -> None:
    plain, speculative = StepLoad(8, 100), StepLoad(8, 100, speculative_steps=3)
    assert MODEL.step_s(speculative) - MODEL.step_s(plain) == pytest.approx(3 * 0.004)
    with pytest.raises(InvalidRequest):
        StepLatencyModel((0.0, 1.0), (0.0, 1.0), draft_step_s=-1.0)


def test_the_correction_is_the_p95_of_the_latest_steps() -> None:
    """A promise is never made on a mean: 95 of 100 steps take at most the corrected time, and old steps are forgotten."""
    rng = np.random.default_rng(3)
    correction = LatencyCorrection(window_steps=200)
    ratios = rng.lognormal(0.1, 0.2, 500)
    for ratio in ratios:
        correction.add(0.02, 0.02 * ratio)
    latest = np.sort(ratios[-200:])
    assert correction.factor == pytest.approx(latest[189])
    assert (latest <= correction.factor + 1e-12).mean() >= 0.95


def test_a_slow_model_follows_a_machine_that_slows_down_within_four_steps() -> None:
    correction = LatencyCorrection()
    for _ in range(300):
        correction.add(1.2, 1.2)
    for _ in range(4):
        correction.add(1.2, 1.5)
    assert correction.factor == pytest.approx(1.25)


def test_few_samples_count_by_their_greatest_and_none_change_nothing() -> None:
    correction = LatencyCorrection()
    assert correction.factor == 1.0
    correction.add(0.0, 1.0)  # an empty step says nothing
    assert correction.factor == 1.0
    for actual_s in (0.9, 1.7, *[1.0] * (MIN_SAMPLES - 3)):
        correction.add(1.0, actual_s)
    assert correction.factor == 1.7
