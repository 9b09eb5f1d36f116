"""The vocabulary of length stages: layouts that cover every length once, batches' quality, like shares of a set."""

import pytest

from services.domain import InvalidRequest
from services.domain.stages import BatchLoad, InFlight, QoeModel, Stage, StageLayout, even_share


def test_every_length_has_one_stage_and_the_longest_stay_in_the_last() -> None:
    layout = StageLayout((Stage(0, 2000, 3), Stage(2000, 4000, 3), Stage(4000, 6000, 2)))  # figure 4
    assert [layout.stage_of(n) for n in (0, 1999, 2000, 3999, 4000, 5999, 9000)] == [0, 0, 1, 1, 2, 2, 2]
    assert [layout.stage_of_instance(i) for i in range(9)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert (layout.instances, layout.max_tokens, layout.cuts) == (8, 6000, (2000, 4000))


def test_a_layout_with_gaps_names_every_field() -> None:
    with pytest.raises(InvalidRequest) as found:
        StageLayout((Stage(0, 10, 1), Stage(12, 12, 0)))
    assert [p.field for p in found.value.problems] == [
        "stages[1].from_tokens",
        "stages[1].to_tokens",
        "stages[1].instance_count",
    ]
    with pytest.raises(InvalidRequest, match="at least one"):
        StageLayout(())


def test_a_batchs_quality_is_equation_1() -> None:
    model = QoeModel(1.0, 0.1, 0.01, 0.001, 0.0001)
    load = BatchLoad.of([InFlight(30, 10), InFlight(70, 20)])
    assert load == BatchLoad(2, 30, 500, 100)
    assert model.quality(load) == pytest.approx(2 * (1 + 0.2 + 0.3 + 0.5 + 0.01))
    assert model.quality(BatchLoad()) == 0
    with pytest.raises(InvalidRequest, match=r"qoe\.request_s"):
        QoeModel(1, -1, 0, 0, 0)


def test_a_share_is_every_nth_from_the_middle_of_the_first_n() -> None:
    assert list(even_share(range(10), 3)) == [1, 4, 7]
    assert list(even_share(range(10), 1)) == list(range(10))
    assert list(even_share(range(2), 5)) == [1]  # as many parts as elements
    assert list(even_share([], 5)) == []
