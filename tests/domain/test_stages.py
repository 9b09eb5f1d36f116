"""Length stages: layouts, batches' quality and overload, refined cuts, and which instances have which stages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.stages.layout import StageLayout
from penstock.services.domain.stages.overload import excess_tokens, to_hand_over
from penstock.services.domain.stages.places import (
    MAX_NEIGHBOURS,
    assign,
    by_preference,
    neighbours,
    outgrown_to,
    peers,
    successors,
    targets,
    with_instances,
)
from penstock.services.domain.stages.qoe import BatchLoad, InFlight, batch_quality, even_share, qoe_problems
from penstock.services.domain.stages.refinement import LEAST_REQUESTS, SMOOTHING, averaged, best_split, refine
from penstock.types.mesh_status import StagePlace
from penstock.types.plans import QoeModel, Stage


def test_every_instance_has_one_stage() -> None:
    layout = StageLayout((Stage(0, 2000, 3), Stage(2000, 4000, 3), Stage(4000, 6000, 2)))  # figure 4
    assert [layout.stage_of_instance(i) for i in range(9)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert (layout.instances, layout.max_tokens, layout.cuts) == (8, 6000, (2000, 4000))


def test_a_layout_with_gaps_names_every_field() -> None:
    with pytest.raises(InvalidRequest) as found:
        StageLayout((Stage(0, 10, 1), Stage(12, 12, 0)))
    assert [p.field for p in found.value.problems] == [
        "stages[1].from_tokens",
        "stages[1].to_tokens",
        "stages[1].instances",
    ]
    with pytest.raises(InvalidRequest, match="at least one"):
        StageLayout(())


def test_a_batchs_quality_is_equation_1() -> None:
    model = QoeModel(1.0, 0.1, 0.01, 0.001, 0.0001)
    load = BatchLoad.of([InFlight(30, 10), InFlight(70, 20)])
    assert load == BatchLoad(2, 30, 500, 100)
    assert batch_quality(model, load) == pytest.approx(2 * (1 + 0.2 + 0.3 + 0.5 + 0.01))
    assert batch_quality(model, BatchLoad()) == 0
    assert [problem.field for problem in qoe_problems(QoeModel(1, -1, 0, 0, 0))] == ["qoe.request_s"]


def test_a_share_is_every_nth_from_the_middle_of_the_first_n() -> None:
    assert list(even_share(range(10), 3)) == [1, 4, 7]
    assert list(even_share(range(10), 1)) == list(range(10))
    assert list(even_share(range(2), 5)) == [1]  # as many parts as elements
    assert list(even_share([], 5)) == []


LOADS = st.lists(st.integers(0, 1000), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("own", "peers", "excess"),
    [
        (125, [75], 0.0),  # exactly a quarter over an average of 100: not yet
        (126, [74], 26.0),
        (500, [], 0.0),  # alone in its stage
        (0, [0, 0], 0.0),
        (300, [0, 0], 200.0),
    ],
)
def test_overloaded_is_a_quarter_over_the_average(own: int, peers: list[int], excess: float) -> None:
    assert excess_tokens(own, peers) == pytest.approx(excess)


@given(LOADS)
def test_not_all_of_a_stage_are_overloaded(loads: list[int]) -> None:
    over = [excess_tokens(own, loads[:i] + loads[i + 1 :]) for i, own in enumerate(loads)]
    assert min(over) == 0.0


@given(LOADS, st.lists(st.integers(1, 500), min_size=1, max_size=8))
def test_what_is_handed_over_leaves_the_sender_at_the_average_or_over(peers: list[int], lengths: list[int]) -> None:
    excess = excess_tokens(sum(lengths), peers)
    running = {f"r{i}": tokens for i, tokens in enumerate(lengths)}
    chosen = to_hand_over(running, excess)
    fitting = [tokens for tokens in lengths if tokens <= excess]
    assert (chosen is None) == (not fitting)
    if chosen is not None:
        assert running[chosen] == max(fitting)
        average = (sum(lengths) + sum(peers)) / (1 + len(peers))
        assert sum(lengths) - running[chosen] >= average - 1e-6


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
        batch_quality(qoe, BatchLoad.of(ordered[:i])) + batch_quality(qoe, BatchLoad.of(ordered[i:]))
        for i in range(len(ordered))
    ]
    assert costs[best_split(ordered, qoe)] == pytest.approx(min(costs))


QOE = QoeModel(0.0, 0.0, 0.0, 0.0, 1.0)


def sequences(*tokens: int) -> list[InFlight]:
    return [InFlight(t, 1) for t in tokens]


def test_an_average_successor_holds_an_even_share_of_the_union() -> None:
    assert averaged([sequences(5, 1, 3), sequences(6, 4, 2)]) == sequences(2, 4, 6)
    assert averaged([sequences(5), []]) == sequences(5)
    assert list(averaged([])) == []


def test_a_boundary_moves_a_part_of_the_way_and_stays_within_its_limits() -> None:
    own, successor = sequences(10, 20, 30), sequences(400, 500)
    found = refine(200.0, own, successor, QOE, least=1, most=1000)
    split = 400  # 3 * 60 + 2 * 900 is the least total
    assert found == 200 + SMOOTHING * (split - 200)
    assert refine(200.0, own, successor, QOE, least=1, most=250) == 250
    assert refine(900.0, own, successor, QOE, least=800, most=1000) == 800


@given(st.floats(1, 1000), st.integers(2, 60))
def test_the_same_picture_again_and_again_takes_the_boundary_there(boundary: float, rounds: int) -> None:
    own, successor = sequences(10, 20, 30), sequences(400, 500)
    gap = abs(boundary - 400)
    for _ in range(rounds):
        boundary = refine(boundary, own, successor, QOE, least=1, most=1000)
    assert abs(boundary - 400) <= gap * 0.7**rounds + 1e-6, "without overshooting"


def test_thin_traffic_freezes_the_boundary() -> None:
    few = sequences(*range(1, LEAST_REQUESTS))
    assert refine(77.0, few, [], QOE, least=1, most=99) == 77.0
    assert refine(77.0, [*few, *few], [], QOE, least=1, most=99) != 77.0


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
