"""The statistics that all benchmarks report."""

from benchmarks.spread import median_and_quartiles, median_and_range, percentile


def test_percentiles_interpolate_and_do_not_depend_on_the_order() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([4.0, 1.0, 3.0, 2.0], 100) == 4.0
    assert percentile([], 99) is None


def test_spreads_are_taken_around_the_median() -> None:
    assert median_and_range([3.0, 1.0, 10.0]) == (3.0, 1.0, 10.0)
    assert median_and_quartiles([5.0, 1.0, 2.0, 3.0, 4.0]) == {
        "median": 3.0,
        "lower_quartile": 2.0,
        "upper_quartile": 4.0,
    }
    assert median_and_quartiles([7.0]) == {"median": 7.0, "lower_quartile": 7.0, "upper_quartile": 7.0}
