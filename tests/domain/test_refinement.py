"""Refinement: the split is the best there is, boundaries move smoothly, and thin traffic moves none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.domain.stages import BatchLoad, InFlight, QoeModel
from services.domain.stages.refinement import LEAST_REQUESTS, Outcome, RefineBy, averaged, best_split, refine

SEQUENCES = st.lists(
    st.tuples(st.integers(1, 200), st.integers(1, 200)).map(lambda pair: InFlight(max(pair), min(pair))),
    min_size=1,
    max_size=24,
)
MODELS = st.builds(QoeModel, *(st.floats(0, 1) for _ in range(4)), context_token_s=st.floats(1e-3, 1))


@given(SEQUENCES, MODELS)
def test_the_split_is_the_least_total_of_all(sequences: list[InFlight], qoe: QoeModel) -> None:
    ordered = sorted(sequences)
    costs = [
        qoe.quality(BatchLoad.of(ordered[:i])) + qoe.quality(BatchLoad.of(ordered[i:])) for i in range(len(ordered))
    ]
    assert costs[best_split(ordered, qoe)] == pytest.approx(min(costs))


@given(SEQUENCES, MODELS)
def test_the_naive_splits_even_out_numbers_or_memory(sequences: list[InFlight], qoe: QoeModel) -> None:
    ordered = sorted(sequences)
    assert best_split(ordered, qoe, RefineBy.QUANTITY) in ((len(ordered) - 1) // 2, len(ordered) // 2)
    gaps = [abs(sum(s.tokens for s in ordered[:i]) - sum(s.tokens for s in ordered[i:])) for i in range(len(ordered))]
    assert gaps[best_split(ordered, qoe, RefineBy.MEMORY)] == min(gaps)


QOE = QoeModel(0.0, 0.0, 0.0, 0.0, 1.0)


def sequences(*tokens: int) -> list[InFlight]:
    return [InFlight(t, 1) for t in tokens]


def test_an_average_successor_holds_an_even_share_of_the_union() -> None:
    assert averaged([sequences(5, 1, 3), sequences(6, 4, 2)]) == sequences(2, 4, 6)
    assert averaged([sequences(5), []]) == sequences(5)
    assert list(averaged([])) == []


def test_a_boundary_moves_a_part_of_the_way_and_stays_within_its_limits() -> None:
    own, successor = sequences(10, 20, 30), sequences(400, 500)
    found = refine(200.0, own, successor, QOE, least=1, most=1000, smoothing=0.5)
    split = 400  # 3 * 60 + 2 * 900 is the least total
    assert (found.boundary, found.outcome) == (200 + (split - 200) / 2, Outcome.SPLIT)
    assert refine(200.0, own, successor, QOE, least=1, most=250, smoothing=0.5).boundary == 250
    assert refine(900.0, own, successor, QOE, least=800, most=1000, smoothing=0.5).boundary == 800


@given(st.floats(1, 1000), st.integers(2, 60))
def test_the_same_picture_again_and_again_takes_the_boundary_there(boundary: float, rounds: int) -> None:
    own, successor = sequences(10, 20, 30), sequences(400, 500)
    gap = abs(boundary - 400)
    for _ in range(rounds):
        boundary = refine(boundary, own, successor, QOE, least=1, most=1000).boundary
    assert abs(boundary - 400) <= gap * 0.7**rounds + 1e-6, "without overshooting"


def test_thin_traffic_and_the_last_stage_freeze_the_boundary() -> None:
    few = sequences(*range(1, LEAST_REQUESTS))
    assert refine(77.0, few, [], QOE, least=1, most=99).outcome is Outcome.THIN_TRAFFIC
    assert refine(77.0, few, [], QOE, least=1, most=99).boundary == 77.0
    assert refine(77.0, [*few, *few], None, QOE, least=1, most=99).outcome is Outcome.NO_SUCCESSOR
