"""Scores against the share of good answers."""

import pytest

from benchmarks.reliability import reliability


def test_reliability_counts_every_answer_once() -> None:
    bins = reliability([0, 5, 9.99, 10, 95, 100], [False, False, True, True, True, True])
    assert [(b.count, round(b.good, 2)) for b in bins] == [(3, 0.33), (1, 1.0), (2, 1.0)]
    assert bins[2].predicted == pytest.approx(0.975)
