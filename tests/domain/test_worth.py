"""A move is advised only where its expected time is less than what it saves: one pure rule, live and simulated."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.services.domain.stages.qoe import BatchLoad, InFlight, batch_quality
from penstock.services.domain.stages.worth import ROUND_TRIP_S, move_s, saved_s, worth_moving
from penstock.types.plans import QoeModel

QOE = QoeModel(0.005, 1e-4, 1e-8, 0.0, 1e-7)
LONG = InFlight(8_000, 6_000)
sequences = st.builds(
    lambda prompt, output: InFlight(prompt + output, prompt), st.integers(1, 9_000), st.integers(1, 9_000)
)


def by_hand(request: InFlight, here: Sequence[InFlight], there: Sequence[InFlight], qoe: QoeModel) -> float:
    """The total quality without the move less that with it, over the tokens to come."""

    def quality(batch: Sequence[InFlight]) -> float:
        return batch_quality(qoe, BatchLoad.of(batch))

    without = quality([*here, request]) + quality(there)
    return (request.tokens - request.input_tokens) * (without - quality(here) - quality([*there, request]))


@given(sequences, st.lists(sequences, max_size=8), st.lists(sequences, max_size=8))
def test_what_is_saved_is_the_difference_of_the_total_quality(
    request: InFlight, here: list[InFlight], there: list[InFlight]
) -> None:
    saved = saved_s(request, BatchLoad.of([*here, request]), [BatchLoad.of(there)], QOE)
    assert saved == pytest.approx(by_hand(request, here, there, QOE), rel=1e-9, abs=1e-9)
    back = saved_s(request, BatchLoad.of([*there, request]), [BatchLoad.of(here)], QOE)
    assert back == pytest.approx(-saved, rel=1e-9, abs=1e-9), "what a move saves, the move back costs"


def test_a_move_pays_from_a_full_instance_to_an_empty_one_unless_it_takes_too_long() -> None:
    here, there = BatchLoad.of([LONG, *[InFlight(500, 400)] * 20]), BatchLoad.of([LONG])
    saved = saved_s(LONG, here, [there], QOE)
    assert saved > 0
    assert worth_moving(LONG, here, [there], QOE, saved * 0.99)
    assert not worth_moving(LONG, here, [there], QOE, saved)
    slow, fast = (move_s(LONG.tokens, 114_688, rate) for rate in (0.01e9, 2e9))
    assert fast < saved < slow
    assert worth_moving(LONG, here, [there], QOE, fast)
    assert not worth_moving(LONG, here, [there], QOE, slow)


def test_a_move_between_equals_or_to_a_fuller_instance_saves_nothing() -> None:
    alone, full = BatchLoad.of([LONG]), BatchLoad.of([LONG] * 5)
    assert not worth_moving(LONG, alone, [BatchLoad()], QOE, 0.0)
    assert not worth_moving(LONG, alone, [full], QOE, 0.0)
    assert not worth_moving(LONG, full, [], QOE, 0.0), "nowhere to go"


def test_the_time_of_a_move_is_its_kv_over_the_bandwidth_and_a_round_trip() -> None:
    assert move_s(1000, 1e5, 1e9) == pytest.approx(0.1 + ROUND_TRIP_S)
    assert move_s(1000, 0.0, 0.0) == ROUND_TRIP_S
