"""Places: as the layout says, the same for everybody who computes them, and kept while they can be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.domain.stages import Stage, StageLayout
from services.domain.stages.places import (
    MAX_NEIGHBOURS,
    StagePlace,
    assign,
    by_preference,
    neighbours,
    outgrown_to,
    peers,
    successors,
    targets,
    with_instances,
)


@st.composite
def layouts(draw: st.DrawFn) -> StageLayout:
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    return StageLayout(tuple(Stage(100 * i, 100 * (i + 1), n) for i, n in enumerate(counts)))


IDS = st.sets(st.integers(0, 30), min_size=1, max_size=20)


@given(layouts(), st.integers(1, 40))
def test_targets_hold_every_instance_and_every_stage_while_there_are_enough(layout: StageLayout, live: int) -> None:
    found = targets(live, layout)
    assert sum(found) == live
    assert min(found) >= 1 or live < len(layout.stages)
    assert found[-1] >= 1, "the last stage can serve every length"
    if live == layout.instances:
        assert found == tuple(stage.instances for stage in layout.stages)


@given(layouts(), st.integers(1, 40))
def test_stages_survive_another_number_of_instances(layout: StageLayout, live: int) -> None:
    """With their ranges; a plan with fewer instances than stages has none."""
    kept = with_instances(layout.stages, live)
    assert (not kept) == (live < len(layout.stages))
    if kept:
        assert sum(stage.instances for stage in kept) == live
        assert StageLayout(kept).cuts == layout.cuts
    assert with_instances((), live) == ()


@given(layouts(), IDS, st.data())
def test_everybody_computes_the_same_places_and_keeps_them(
    layout: StageLayout, ids: set[int], data: st.DataObject
) -> None:
    names = [f"w{i:02}" for i in sorted(ids)]
    current = {name: data.draw(st.none() | st.integers(0, 6)) for name in names}
    stages = assign(current, layout)
    assert stages == assign(dict(reversed(current.items())), layout), "whatever the order of the records"
    assert assign(stages, layout) == stages, "once taken, places are kept"
    counts = tuple(list(stages.values()).count(s) for s in range(len(layout.stages)))
    assert counts == targets(len(names), layout)


@given(layouts(), IDS, st.data())
def test_when_one_leaves_nobody_moves_but_to_close_a_gap(
    layout: StageLayout, ids: set[int], data: st.DataObject
) -> None:
    names = [f"w{i:02}" for i in sorted(ids)]
    before = assign(dict.fromkeys(names), layout)
    gone = data.draw(st.sampled_from(names))
    left = {name: stage for name, stage in before.items() if name != gone}
    if not left:
        return
    after = assign(left, layout)
    changed = [name for name in left if after[name] != left[name]]
    wanted, had = targets(len(left), layout), targets(len(names), layout)
    shifted = sum(max(0, w - (h - (before[gone] == s))) for s, (w, h) in enumerate(zip(wanted, had, strict=True)))
    assert len(changed) == shifted
    again = assign({**after, gone: None}, layout)
    if wanted == tuple(h - (before[gone] == s) for s, h in enumerate(had)):
        assert again == before, "and who comes back finds its place"


PLACES = {
    "a": StagePlace(0, 0, 100),
    "b": StagePlace(0, 0, 140),
    "c": StagePlace(1, 100, 300),
    "d": StagePlace(3, 300, 900),
}


def test_a_length_goes_to_the_earliest_stage_that_covers_it() -> None:
    assert by_preference(PLACES, 99) == [["a", "b"], ["c"], ["d"]]
    assert by_preference(PLACES, 120) == [["b"], ["c"], ["d"], ["a"]], "the boundary is each instance's own"
    assert by_preference(PLACES, 500) == [["d"], ["c"], ["a", "b"]]
    assert by_preference(PLACES, 5000) == [["d"], ["c"], ["a", "b"]], "the last stage takes what is longer than all"
    assert by_preference({**PLACES, "x": None}, 500) == [["d", "x"], ["c"], ["a", "b"]]
    assert by_preference({**PLACES, "x": None}, 5000) == [["x"], ["d"], ["c"], ["a", "b"]]
    assert by_preference({}, 5) == []


def test_what_has_outgrown_a_stage_goes_to_a_later_one() -> None:
    assert outgrown_to(PLACES, 0, 150) == ["c"]
    assert outgrown_to(PLACES, 0, 400) == ["d"]
    assert outgrown_to(PLACES, 1, 5000) == ["d"]
    assert outgrown_to(PLACES, 3, 5000) == []
    assert successors(PLACES, 0) == ["c"]
    assert successors(PLACES, 1) == ["d"], "a stage without instances is passed over"


def test_neighbours_are_few_of_both_stages_and_in_time_all() -> None:
    places = {f"w{i:03}": StagePlace(i % 4, 0, 9) for i in range(400)} | {"new": None}
    me = places.pop("w000")
    assert me is not None
    first = neighbours(places, "w000", 0, 1)
    assert len(first) == len(set(first)) == MAX_NEIGHBOURS
    assert sorted(place.stage for i in first if (place := places[i]) is not None) == [0] * 8 + [1] * 8
    assert neighbours(places, "w004", 0, 1) != first, "instances begin with different ones"
    turns = {i for turn in range(20) for i in neighbours(places, "w000", 0, turn)}
    assert turns == {*peers(places, 0), *successors(places, 0)}


@pytest.mark.parametrize(("here", "after"), [(0, 0), (3, 5), (2, 40), (40, 2), (40, 0), (8, 8), (16, 0)])
def test_a_small_stage_leaves_its_share_to_the_other(here: int, after: int) -> None:
    places = {f"a{i}": StagePlace(0, 0, 9) for i in range(here)} | {f"b{i}": StagePlace(2, 9, 99) for i in range(after)}
    for turn in range(5):
        chosen = neighbours(places, "me", 0, turn)
        assert len(chosen) == len(set(chosen)) == min(MAX_NEIGHBOURS, here + after)
        assert sum(i.startswith("a") for i in chosen) >= min(here, MAX_NEIGHBOURS // 2)
        assert sum(i.startswith("b") for i in chosen) >= min(after, MAX_NEIGHBOURS // 2)
