"""The plan against its alternatives, on real processes of this machine.

The tiers of a mesh file are profiled (`penstock profile`), a sample of held-out prompts is judged (`penstock measure`), and a
plan is made for a quality and an SLO (`penstock plan`). A mesh is started from the plan, and one from each alternative:
the largest model alone on all workers, a load-based cascade, and a random router of the same cost (`systems.py`). All get
the same stretch of a public trace (its gaps scaled to the rate) and the same prompts, in turns; a mesh without requests
uses little CPU (`idle_cores`). Prompts and arrivals are not those that the systems were tuned to, and each round has its own.

Why latencies are not as forecast is traced for each run (`explained.py`).

Rates are shares of what the largest model alone sustains on all workers, measured by a burst. The SLO is SLO_TIMES times
what it takes for a request without others. Two layouts: twice as many workers as cores that share all of them, and as many as
cores, each pinned to its own. Client, router, judge, planner and Redis share the cores with the workers.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.end_to_end.run import Setup, measure
from benchmarks.end_to_end.site import Layout, layouts

MESH_FILE = Path("mesh.yaml")
LOADS = (0.5, 0.7, 0.9)
BELOW_LARGEST = (1.0, 5.0)
RUN_S, MEASURED, REPLAYED = 15.0, 1500, 4000
QUICK_LOADS, QUICK_RUN_S, QUICK_MEASURED, QUICK_REPLAYED = (0.5, 1.6), 6.0, 100, 400


def run(rounds: int) -> None:
    """All layouts, targets and rates."""
    publish(full(rounds), "end_to_end")


def run_quick(rounds: int) -> None:
    """One layout, one target, two rates, one round; written to results/end_to_end_quick.json."""
    publish(quick(rounds), "end_to_end_quick")


def full(rounds: int, mesh_file: Path = MESH_FILE, questions: Path | int = REPLAYED) -> Setup:
    return Setup(mesh_file, questions, layouts(), LOADS, BELOW_LARGEST, rounds, RUN_S, MEASURED)


def quick(_rounds: int, mesh_file: Path = MESH_FILE, questions: Path | int = QUICK_REPLAYED) -> Setup:
    pinned = layouts()[1:]
    return Setup(mesh_file, questions, pinned, QUICK_LOADS, BELOW_LARGEST[:1], 1, QUICK_RUN_S, QUICK_MEASURED)


def publish(setup: Setup, name: str) -> None:
    """Measure; write JSON after every cell, and a plot for each layout at the end."""
    results: list[dict[str, Any]] = []

    def write(result: dict[str, Any]) -> None:
        results[:] = [result]
        print(report.write(name, result), flush=True)

    measure(setup, write)
    for cell in results[0]["cells"]:
        print(_cell_lines(cell))
    for row in results[0]["sustained"]:
        over = ", ".join(f"{ratio:.2f}x {other}" for other, ratio in row["plan_over"].items())
        print(f"{row['layout']}, {row['quality_below_largest']:g} points below the largest: {over}")
    _plot(setup.layouts, results[0], name)


def _plot(shown: Sequence[Layout], result: dict[str, Any], name: str) -> None:
    """A plot for each layout: the goodput of each system in each cell."""
    for layout in shown:
        cells = [cell for cell in result["cells"] if cell["layout"] == layout.name]
        series = {
            system: [_bar(cell["systems"][system]["measured"]["goodput_per_s"]) for cell in cells]
            for system in cells[0]["systems"]
        }
        groups = [f"load {cell['load']:g}\nquality {cell['min_quality']:.0f}" for cell in cells]
        title = f"Goodput within the SLO, {layout.workers} workers {layout.name}"
        file = name if name.endswith(layout.name) else f"{name}_{layout.name}"
        print(report.bars(file, title, groups, series, "answers in time per second"))


def _cell_lines(cell: dict[str, Any]) -> str:
    """Our plan against each other system, and what was predicted of it, with intervals."""

    def shown(interval: dict[str, float] | None, factor: float = 1.0) -> str:
        if interval is None:
            return "-"
        return "{mean:.2f} ({low:.2f} to {high:.2f})".format(
            **{k: factor * interval[k] for k in ("mean", "low", "high")}
        )

    lines = [
        f"{cell['layout']}, quality {cell['min_quality']:.1f}, {cell['rate_per_s']:.1f}/s (load {cell['load']:g}):"
    ]
    lines += [
        f"  over {name}: goodput {shown(row['goodput_ratio'])} times, CPU time {shown(row['cpu_ratio'])} times, "
        f"accuracy {shown(row['accuracy_points'])} points"
        for name, row in cell["plan_against"].items()
    ]
    ours = cell["systems"]["plan"]
    for what, key in (
        ("forecast", "forecast_error"),
        ("forecast with the step times of the round before", "corrected_error"),
    ):
        shares = [f"{name} {shown(error, 1 if 'points' in name else 100)}" for name, error in (ours[key] or {}).items()]
        lines.append(f"  {what} of the plan, % off: {', '.join(shares)}")
    return "\n".join(lines)


def _bar(interval: dict[str, float]) -> tuple[float, float, float]:
    return interval["mean"], interval["low"], interval["high"]
