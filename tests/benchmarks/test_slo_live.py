"""How `benchmarks slo_live` compares policies: within rounds, over rounds, and without cells in which the machine drifted."""

from typing import Any

from benchmarks.slo_live import POLICIES, comparison

SCALE = (3.0, 5.0)


def row(number: int, policy: str, goodput: float, sustained: float = 1.0, *, counts: bool = True) -> dict[str, Any]:
    return {
        "round": number,
        "bursty": True,
        "scale": SCALE,
        "policy": policy,
        "goodput_per_s": goodput,
        "sustained_per_s": sustained,
        "counts": counts,
    }


def test_the_ratio_is_of_the_best_loads_as_shares_of_what_was_sustained() -> None:
    """A machine that is twice as fast in one round serves twice as much by every policy: the ratio stays."""
    rows = list[dict[str, Any]]()
    for number, speed in ((0, 1.0), (1, 2.0)):
        for load in (0.5, 1.0):
            rows += [
                row(number, "slo", 0.9 * load * speed, speed),
                row(number, "decode_first", 0.6 * load * speed, speed),
            ]
            rows.append(row(number, "prefill_first", 0.1 * load * speed, speed))
    found = comparison(rows, True, SCALE)
    assert abs(found["over_best_other"] - 1.5) < 1e-9
    assert found["interval"] is not None
    assert all(abs(end - 1.5) < 1e-9 for end in found["interval"]), "rounds are alike"


def test_cells_in_which_the_machine_drifted_are_left_out() -> None:
    rows = [row(0, policy, 1.0) for policy in POLICIES]
    rows += [row(1, policy, 9.0 if policy == "slo" else 0.1, counts=False) for policy in POLICIES]
    assert comparison(rows, True, SCALE)["over_best_other"] == 1.0


def test_nothing_is_compared_where_the_others_attained_nothing() -> None:
    rows = [row(0, policy, 1.0 if policy == "slo" else 0.0) for policy in POLICIES]
    assert comparison(rows, True, SCALE)["over_best_other"] is None
    assert comparison(rows, False, SCALE)["over_best_other"] is None
