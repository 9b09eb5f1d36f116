"""Percentiles and spreads of measured values, computed in one way for all benchmarks."""

import statistics
from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit

CONFIDENCE = 0.95


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The percentile of the values, in their unit, interpolated linearly between two of them; None without values."""
    return float(np.percentile(values, percent)) if values else None


def median_and_range(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, lowest, highest): a bar and its error bar in `report.bars`."""
    return statistics.median(values), min(values), max(values)


def median_and_quartiles(values: Sequence[float]) -> dict[str, float]:
    """The median and the quartiles around it, for a JSON result."""
    lower, median, upper = (float(value) for value in np.percentile(values, (25, 50, 75)))
    return {"median": median, "lower_quartile": lower, "upper_quartile": upper}


def interval(values: Sequence[float]) -> dict[str, float]:
    """The mean of values over rounds, and between which it lies with CONFIDENCE (Student's t); one value has no width."""
    mean, half = float(np.mean(values)), 0.0
    if len(values) > 1:
        half = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2) * np.std(values, ddof=1) / np.sqrt(len(values)))
    return {"mean": mean, "low": mean - half, "high": mean + half, "rounds": len(values)}
