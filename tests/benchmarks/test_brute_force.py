"""The joint question against brute force, on some of the benchmark's instances."""

import pytest

from benchmarks.brute_force import compare

ALONE_THE_BEST = {"one model": (1006, 1009), "routed": (1003, 1023), "pair": (1080, 1116)}
NO_PLAN = 1000


@pytest.mark.parametrize(("form", "seed"), [(form, seed) for form, seeds in ALONE_THE_BEST.items() for seed in seeds])
def test_a_plan_takes_as_few_gpus_as_any(form: str, seed: int) -> None:
    """The instances are such that no other form has a plan on so few."""
    row = compare(seed)
    assert row["forms_of_optimum"] == [form]
    assert (row["planned_form"], row["planned_gpus"]) == (form, row["optimum_gpus"])


def test_where_there_is_no_plan_none_is_found() -> None:
    row = compare(NO_PLAN)
    assert (row["planned_gpus"], row["optimum_gpus"]) == (None, None)
