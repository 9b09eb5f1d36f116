"""Ticks of one process wake it once for all, never late by more than a period; counters are read with metrics."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from penstock.services.counters import LabelledCounter
from penstock.services.ticks import next_tick_s
from tests.support.measured import sums


@given(st.floats(0, 1e7), st.sampled_from([0.05, 0.25, 0.5, 1.0, 3.0]))
def test_the_next_tick_comes_within_a_period(now_s: float, period_s: float) -> None:
    assert -1e-6 <= next_tick_s(now_s, period_s) - now_s <= period_s * 1.000001


@given(st.floats(0, 1e6))
def test_longer_periods_tick_with_shorter_ones(now_s: float) -> None:
    at_s = next_tick_s(now_s, 1.0)
    for period_s in (0.5, 0.25):
        assert next_tick_s(at_s - period_s / 2, period_s) == pytest.approx(at_s, abs=1e-6)


def test_a_collection_has_the_sums_so_far_by_label_and_an_empty_value_leaves_its_label_out() -> None:
    reader = InMemoryMetricReader()
    counter = LabelledCounter(MeterProvider([reader]).get_meter("t"), "c", ("model", "tier"), unit="{request}")
    assert sums(reader, "c") == {}
    counter.add(1, "m", "small")
    counter.add(2, "m", "small")
    counter.add(5, "m", "")
    both, model_only = frozenset({("model", "m"), ("tier", "small")}), frozenset({("model", "m")})
    assert sums(reader, "c") == {both: 3, model_only: 5}
    counter.add(1, "m", "")
    assert sums(reader, "c") == {both: 3, model_only: 6}


def test_every_label_needs_a_value() -> None:
    counter = LabelledCounter(MeterProvider().get_meter("t"), "c", ("model",), unit="{request}")
    with pytest.raises(ValueError, match="2 values"):
        counter.add(1, "m", "small")
