"""How limits under load are fitted, and what is said of them."""

from typing import Any

import pytest

from benchmarks.skipping_under_load import THRESHOLD_PRECISION, least_threshold, summarised
from tests.support.present import present


@pytest.mark.parametrize("highest", [100.0, 80.0])
def test_the_least_threshold_is_found_where_higher_ones_fall_short_again(highest: float) -> None:
    found = present(least_threshold(lambda threshold: 37.2 <= threshold <= highest))
    assert 37.2 <= found <= 37.2 + THRESHOLD_PRECISION
    assert least_threshold(lambda _: False) is None


def test_ratios_and_differences_are_means_over_the_seeds() -> None:
    def cell(seed: int, priced_s: float) -> dict[str, Any]:
        others = ("fixed", "long answers", "both", "kept fixed", "kept priced")
        rows = {way: {"p95_s": 10.0, "quality": 60.0} for way in others}
        load = {"load": 0.9, **rows, "priced": {"p95_s": priced_s, "quality": 60.5}}
        return {"trace": "t", "seed": seed, "loads": [load]}

    priced, long, *_, kept = summarised([cell(1, 6.0), cell(2, 8.0)])
    assert (priced["way"], priced["p95_ratio"]["mean"]) == ("priced", pytest.approx(0.7))
    assert priced["quality_difference"]["mean"] == 0.5
    assert (long["p95_ratio"]["mean"], kept["p95_ratio"]["mean"]) == (1.0, 1.0)
