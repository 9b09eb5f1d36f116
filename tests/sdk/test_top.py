"""What `penstock top` draws of length stages, and of a router of several processes."""

from collections import deque
from dataclasses import replace

from rich.console import Console

from penstock import BurstChange, BurstStatus, Drafting, InstanceStatus, MeshStatus, RouterProcessStatus, StagePlace
from penstock.cli import output
from penstock.cli.top import screen
from penstock.types.mesh_status import BurstReason, InstanceState


def drawn(*places: StagePlace | None) -> str:
    instances = tuple(
        InstanceStatus(f"w{i}", "worker", "only", "h:1", "torch", InstanceState.READY, i, 0, 50, 100, 10.0, 0.1, place)
        for i, place in enumerate(places)
    )
    found = MeshStatus("router-0", 3, True, 0.0, (), instances, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 7, 2)
    console = Console(width=100)
    with console.capture() as captured:
        console.print(screen(found, deque()))
    return captured.get()


def test_stages_show_their_ranges_and_each_worker_its_own() -> None:
    text = drawn(StagePlace(0, 0, 180), StagePlace(0, 0, 201), StagePlace(1, 256, 2048))
    assert "migrations 7" in text
    assert "advised moves that failed 2" in text
    assert "179 to 200" in text, "boundaries differ within a stage"
    assert "0 to 179" in text
    assert "256 to 2047" in text


def test_a_mesh_without_stages_shows_none() -> None:
    text = drawn(None, None)
    assert "stage" not in text
    assert "lengths" not in text


def test_workers_show_what_drafts_and_how_much_of_it_is_accepted() -> None:
    drafting = (Drafting(("small", "medium"), 5, 0.834), Drafting(), None)
    instances = tuple(
        InstanceStatus(f"w{i}", "worker", "t", "h:1", "torch", InstanceState.READY, 0, 0, 0, 0, 0.0, 0.1, drafting=each)
        for i, each in enumerate(drafting)
    )
    console = Console(width=100)
    with console.capture() as captured:
        console.print(screen(MeshStatus("r", 3, True, 0.0, (), instances, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0), deque()))
    rows = {line.split()[0]: line for line in captured.get().splitlines() if line.strip().startswith("w")}
    assert "small > medium, 5" in rows["w0"]
    assert "83 %" in rows["w0"]
    assert "none now" in rows["w1"]
    assert "%" not in rows["w1"] + rows["w2"]
    assert "drafted by" not in drawn(None)


def test_the_step_of_a_burst_ladder_is_shown_with_what_is_left_of_the_budget() -> None:
    head = ("r", 3, True, 0.0, (), (), 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)
    change = BurstChange(1.0, 0, 2, BurstReason.LOAD)

    def text(burst: BurstStatus | None) -> str:
        console = Console(width=200)
        with console.capture() as captured:
            console.print(screen(MeshStatus(*head, burst=burst), deque()))
        return captured.get()

    shown = text(BurstStatus(2, 5, 83.0, 84.21, 0.4, False, 31.24, 7, (change,)))
    assert "burst step 2 of 4 at 31.2 requests/s, mean quality 84.2 (holds 83), 40% of the budget left" in shown
    assert "last change load" in shown
    assert "budget spent" in text(BurstStatus(0, 5, 83.0, None, 0.0, True, 31.24, 0))
    assert "burst" not in text(None)


def test_the_planner_that_leads_is_marked() -> None:
    planner = InstanceStatus("planner-a", "planner", "", "h:1", "", InstanceState.READY, 0, 0, 0, 0, 0.0, 0.1)
    planners = (replace(planner, leads=True), replace(planner, instance_id="planner-b"))
    console = Console(width=140)
    with console.capture() as captured:
        console.print(screen(MeshStatus("r", 3, True, 0.0, (), planners, 0, 0, 5, 0, 0, 0, 0.0, 0.0, 0.0), deque()))
    first, second = (line for line in captured.get().splitlines() if "planner-" in line)
    assert "ready, leads" in first
    assert "leads" not in second


def test_shapes_are_shown_where_a_worker_has_several_gpus() -> None:
    worker = InstanceStatus(
        "w", "worker", "t", "h:1", "sglang", InstanceState.READY, 0, 0, 0, 0, 0.0, 0.1, shape="tp1pp1"
    )

    def text(*workers: InstanceStatus) -> str:
        console = Console(width=140)
        with console.capture() as captured:
            console.print(screen(MeshStatus("r", 3, True, 0.0, (), workers, 0, 0, 5, 0, 0, 0, 0.0, 0.0, 0.0), deque()))
        return captured.get()

    assert "tp1pp1" not in text(worker)
    assert "tp4pp2" in text(worker, replace(worker, instance_id="x", shape="tp4pp2"))


def test_a_router_of_several_processes_is_one_line_and_says_how_many_answer() -> None:
    router = InstanceStatus("router-a", "router", "", "h:1", "", InstanceState.READY, 0, 0, 0, 0, 0.0, 0.1, processes=2)
    processes = tuple(RouterProcessStatus(i, f"router-a.{i}", i == 0, 0, 0, 5) for i in range(2))
    head = ("router-a", 3, True, 0.0, (), (router,), 0, 0, 5, 0, 0, 0, 0.0, 0.0, 0.0)
    console = Console(width=140)
    with console.capture() as captured:
        console.print(screen(MeshStatus(*head, processes=processes), deque()))
    text = captured.get()
    assert "processes 1/2" in text
    assert text.count("router-a (2 processes)") == 1
    with console.capture() as captured:
        console.print(screen(MeshStatus(*head), deque()))
    assert "processes 1" not in captured.get()


def test_of_a_large_mesh_as_many_instances_are_drawn_as_fit_those_to_look_at_first() -> None:
    """Whatever the screen's height, the rest is counted by its state, and nothing is below the last line."""
    states = {700: InstanceState.EJECTED, 900: InstanceState.DRAINING}
    instances = tuple(
        InstanceStatus(
            f"w{i:04}", "worker", "t", "h:1", "torch", states.get(i, InstanceState.READY), i % 997, 0, 0, 0, 0.0, 0.1
        )
        for i in range(1000)
    )
    found = MeshStatus("r", 3, True, 0.0, (), instances, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)
    for height in (14, 24, 50):
        console = Console(width=output.console.width, height=height)
        with console.capture() as captured:
            console.print(screen(found, deque([1.0, 2.0]), height))
        lines = captured.get().splitlines()
        assert len(lines) == height
        rows = [line.split()[0] for line in lines if line.strip().startswith("w")]
        assert {"w0700", "w0900"} < {*rows}, "those that are not ready"
        assert "w0996" in rows, "the busiest"
        assert f"and {1000 - len(rows)} with less load: {1000 - len(rows)} ready" in captured.get()
    assert "less load" not in drawn(None)
