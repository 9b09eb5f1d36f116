"""What `penstock top` draws of length stages, and of a router of several processes."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from penstock import (
    Drafting,
    InstanceStatus,
    MeshStatus,
    RouterProcessStatus,
    SloCounts,
    StagePlace,
)
from penstock.cli import output
from penstock.cli.top import screen
from penstock.types.mesh_status import InstanceState

WORKER = InstanceStatus("w", "worker", "t", "h:1", "torch", InstanceState.READY, 0, 0, 0, 0, 0.0, 0.1)


def drawn(*instances: InstanceStatus, height: int | None = None, width: int = 140, **of_mesh: Any) -> str:
    found = MeshStatus("router-a", 3, True, 0.0, (), instances, 0, 0, 5, 0, 0, 0, 0.0, 0.0, 0.0, 7, 2, **of_mesh)
    console = Console(width=width, height=height)
    with console.capture() as captured:
        console.print(screen(found, deque([1.0, 2.0]), height) if height else screen(found, deque()))
    return captured.get()


def workers(**varied: Sequence[Any]) -> list[InstanceStatus]:
    """Workers w0, w1, ..., of which each has its own value of a field."""
    ((field, values),) = varied.items()
    return [replace(WORKER, instance_id=f"w{i}", **{field: value}) for i, value in enumerate(values)]


def test_stages_show_their_ranges_and_each_worker_its_own() -> None:
    text = drawn(*workers(place=[StagePlace(0, 0, 180), StagePlace(0, 0, 201), StagePlace(1, 256, 2048)]))
    for part in ("migrations 7", "advised moves that failed 2", "179 to 200", "0 to 179", "256 to 2047"):
        assert part in text, part
    assert not {"stage", "lengths", "drafted by", "less load", "processes 1"} & {*drawn(WORKER).split()}


def test_workers_show_what_drafts_and_how_much_of_it_is_accepted() -> None:
    text = drawn(*workers(drafting=[Drafting(("small", "medium"), 5, 0.834), Drafting(), None]))
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip().startswith("w")}
    assert "small > medium, 5" in rows["w0"]
    assert "83 %" in rows["w0"]
    assert "none now" in rows["w1"]
    assert "%" not in rows["w1"] + rows["w2"]


def test_the_planner_that_leads_and_shapes_of_several_gpus_are_marked() -> None:
    planners = workers(leads=[True, False])
    first, second = (line for line in drawn(*planners).splitlines() if line.strip().startswith("w"))
    assert "ready, leads" in first
    assert "leads" not in second
    one, several = workers(shape=["tp1pp1", "tp4pp2"])
    assert "tp1pp1" not in drawn(one)
    assert "tp4pp2" in drawn(one, several)


def test_a_router_of_several_processes_is_one_line_and_says_how_many_answer() -> None:
    router = replace(WORKER, instance_id="router-a", role="router", processes=2)
    text = drawn(router, processes=tuple(RouterProcessStatus(i, f"router-a.{i}", i == 0, 0, 0, 5) for i in range(2)))
    assert "processes 1/2" in text
    assert text.count("router-a (2 processes)") == 1


def test_of_a_large_mesh_as_many_instances_are_drawn_as_fit_those_to_look_at_first() -> None:
    """Whatever the screen's height, the rest is counted by its state, and nothing is below the last line."""
    states = {700: InstanceState.EJECTED, 900: InstanceState.DRAINING}
    instances = [
        replace(WORKER, instance_id=f"w{i:04}", state=states.get(i, InstanceState.READY), running=i % 997)
        for i in range(1000)
    ]
    for height in (14, 24, 50):
        text = drawn(*instances, height=height, width=output.console.width)
        lines = text.splitlines()
        assert len(lines) == height
        rows = [line.split()[0] for line in lines if line.strip().startswith("w")]
        assert {"w0700", "w0900"} < {*rows}, "those that are not ready"
        assert "w0996" in rows, "the busiest"
        assert f"and {1000 - len(rows)} with less load: {1000 - len(rows)} ready" in text


def test_how_objectives_were_served_is_shown_if_there_were_any() -> None:
    assert "7 met, 1 broken, 2 best effort, 3 declined" in drawn(width=200, slo=SloCounts(7, 1, 2, 3))
    assert "objectives" not in drawn(width=200, slo=SloCounts())
