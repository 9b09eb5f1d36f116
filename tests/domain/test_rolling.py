"""New replicas before old ones, as far as there are GPUs; else so that the tiers lose as little as they can."""

import numpy as np
import pytest

from penstock.services.domain.hardware import ReplicaShape
from penstock.services.domain.rolling import Kinds, ReplicaKind, Roll, next_moves, roll_steps, step_text

TIERS = ("small", "large")


def kind(tier: int, tp: int) -> ReplicaKind:
    return ReplicaKind(tier, ReplicaShape(tp, 1), tp)


def texts(roll: Roll) -> list[str]:
    return [step_text(step, TIERS) for step in roll_steps(roll)]


def test_where_gpus_are_free_new_ones_start_first() -> None:
    old, new = Kinds({kind(0, 1): 2, kind(1, 4): 1}), Kinds({kind(0, 1): 2, kind(1, 2): 2})
    assert texts(Roll(old, new, {"": 10})) == ["start 2 x large (TP=2)", "stop 1 x large (TP=4)"]
    assert texts(Roll(old, new, {})) == texts(Roll(old, new, {"": 10})), "a pool that is missing has enough"
    assert texts(Roll(new, new, {"": 6})) == []


def test_where_none_is_free_the_tier_that_loses_the_smallest_share_goes_first() -> None:
    """One of four is a quarter, one of two a half. A tier never loses all that it has while another can make room."""
    old, new = Kinds({kind(0, 1): 4, kind(1, 2): 2}), Kinds({kind(0, 2): 2, kind(1, 1): 4})
    steps = texts(Roll(old, new, {"": 8}))
    assert steps[0] == "stop 1 x small (TP=1); start 1 x large (TP=1); small serves less meanwhile"
    assert all("stop 4 x" not in step for step in steps)
    last = Kinds({kind(0, 2): 1, kind(1, 4): 1}), Kinds({kind(0, 1): 2, kind(1, 2): 2})
    assert texts(Roll(*last, {"": 7})) == [
        "start 1 x small (TP=1)",
        "stop 1 x small (TP=2); start 1 x large (TP=2); small serves less meanwhile",
        "stop 1 x large (TP=4); start 1 x small (TP=1), 1 x large (TP=2); large serves less meanwhile",
    ]


@pytest.mark.parametrize("seed", range(60))
def test_a_roll_ends_at_what_is_wanted_within_the_gpus(seed: int) -> None:
    """And no tier that has replicas before and after is without any, where any other order would do, too."""
    rng = np.random.default_rng(seed)

    def drawn() -> Kinds:
        while True:
            kinds = Kinds({kind(t, tp): int(rng.integers(0, 3)) for t in range(2) for tp in (1, 2, 4)})
            if 0 < sum(each.gpus * n for each, n in kinds.items()) <= 8:
                return +kinds

    old, new = drawn(), drawn()
    roll = Roll(old, new, {"": 8})
    for step in roll_steps(roll):
        assert not (step.stops - roll.running)
        before, roll = roll, roll.after(step)
        assert sum(each.gpus * n for each, n in roll.running.items()) <= 8
        if served(before.running) & served(new) - served(roll.running):
            assert room_with_every_tier(before) < min(each.gpus for each in before.missing)
    assert roll.running == new


def room_with_every_tier(roll: Roll) -> int:
    """GPUs that can be made free while every tier keeps a replica: the free ones, and those of surplus beside one."""
    used = sum(each.gpus * n for each, n in roll.running.items())
    freed = 8 - used
    for tier in served(roll.running):
        own = Kinds({each: n for each, n in roll.running.items() if each.tier == tier})
        surplus = sorted(each.gpus for each in (own & roll.surplus).elements())
        freed += sum(surplus) - (surplus[0] if surplus and own == own & roll.surplus else 0)
    return freed


def served(kinds: Kinds) -> set[int]:
    return {each.tier for each, n in kinds.items() if n}


def test_nothing_stops_before_what_replaces_it_takes_requests() -> None:
    old, new = Kinds({kind(1, 4): 1}), Kinds({kind(1, 2): 2})
    roll = Roll(old, new, {"": 8})
    assert next_moves(roll, old) == (new, Kinds())
    loading = Roll(old + new, new, {"": 8})
    assert next_moves(loading, old + Kinds({kind(1, 2): 1})) == (Kinds(), Kinds())
    assert next_moves(loading, old + new) == (Kinds(), old)
    back = Roll(old + new, old, {"": 8})
    assert next_moves(back, old) == (Kinds(), new), "a roll that is taken back stops what was loading"


def test_what_no_room_is_made_for_starts_and_waits_for_gpus() -> None:
    """As on a cluster that grows: its autoscaler is asked. The old one serves until then."""
    old, new = Kinds({kind(1, 2): 1}), Kinds({kind(1, 8): 1})
    assert next_moves(Roll(old, new, {"": 4}), old) == (new, Kinds())
    grown = Roll(old, Kinds({kind(1, 2): 5}), {"": 4})
    assert next_moves(grown, old) == (Kinds({kind(1, 2): 4}), Kinds())


def test_a_shape_is_known_by_its_name() -> None:
    for shape in (ReplicaShape(1, 1), ReplicaShape(8, 3, "accelerator_type:H100", 4, 2)):
        assert ReplicaShape.named(shape.name) == shape == ReplicaShape.of(shape.times(3))
    for bad in ("", "tp0pp1", "tp2", "tp1pp1-a/b", "tp1pp1\n"):
        with pytest.raises(ValueError, match="must be like tp2pp1"):
            ReplicaShape.named(bad)
