"""Plots of plans: the best of all qualities, and what changes with the rate, the quality or the GPUs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli import options

if TYPE_CHECKING:
    from planner_service.cascade_plan import CascadePlan
    from planner_service.frontiers import Points
    from planner_service.sweep import SweepPoint

BEST, OWN, GREY = "#1f6f78", "#e07a3f", "#777777"


def plot_frontiers(latencies: "Points", costs: "Points", plan: "CascadePlan", out: Path) -> list[Path]:
    """Plot latency and cost against quality with this plan marked, as PNG and SVG next to the plan file."""
    figure, (left, right) = _panels("The best plans of each quality")
    own_cost = float(plan.gpus) if plan.dollars_per_hour is None else plan.dollars_per_hour
    unit = "GPUs" if plan.dollars_per_hour is None else "dollars per hour"
    for axes, points, own in ((left, latencies, plan.latency_p95_s), (right, costs, own_cost)):
        axes.step([q for q, _ in points], [y for _, y in points], where="pre", color=BEST, label="best plans")
        axes.plot([q for q, _ in points], [y for _, y in points], "o", color=BEST, markersize=4)
        axes.plot(plan.quality, own, "D", color=OWN, markersize=9, label="this plan")
        axes.set_xlabel("quality: mean score of the answers that stand (0 to 100)")
        axes.set_ylim(0, 1.1 * max(own, *(y for _, y in points)))
    left.set_ylabel("p95 latency of the slowest tier (s)")
    left.set_title("Least latency on these GPUs", fontsize=10)
    right.set_ylabel(unit)
    right.set_title(f"Least cost, slowest tier within {plan.latency_p95_s:.3g} s", fontsize=10)
    left.legend(frameon=False)
    return _write(figure, out)


def plot_sweep(axis: str, points: "Sequence[SweepPoint]", out: Path) -> list[Path]:
    """Plot what plans reach and cost against what is varied; values without a plan are marked."""
    labels = {"rate": "requests per second", "quality": "least quality (0 to 100)", "gpus": "GPUs that may be used"}
    figure, panels = _panels(f"Plans by {'number of GPUs' if axis == 'gpus' else axis}", 3)
    plans = [(point.value, point.plan) for point in points if point.plan is not None]
    priced = bool(plans) and all(plan.dollars_per_hour is not None for _, plan in plans)
    costs = [float(plan.gpus) if not priced else float(plan.dollars_per_hour or 0.0) for _, plan in plans]
    shown = (
        ("Latency", "p95 latency that the objective means (s)", [plan.felt_p95_s for _, plan in plans]),
        ("Cost", "dollars per hour" if priced else "GPUs", costs),
        ("Quality", "mean score of the answers that stand (0 to 100)", [plan.quality for _, plan in plans]),
    )
    missing = [point.value for point in points if point.plan is None]
    for axes, (title, label, figures) in zip(panels, shown, strict=True):
        axes.plot([value for value, _ in plans], figures, "o-", color=BEST)
        for i, value in enumerate(missing):
            axes.axvline(value, color=GREY, linestyle=":", label="no plan" if i == 0 else None)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(labels[axis])
        axes.set_ylabel(label)
        axes.set_ylim(0, 100 if title == "Quality" else 1.1 * max(figures, default=1.0))
    if missing:
        panels[0].legend(frameon=False)
    return _write(figure, out)


def _panels(title: str, count: int = 2) -> tuple[Any, Any]:
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, count, figsize=(5.5 * count, 4.4), layout="constrained")
    figure.suptitle(title)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _write(figure: Any, out: Path) -> list[Path]:
    import matplotlib.pyplot as plt

    written = [out.with_suffix(suffix) for suffix in options.PICTURES]
    for path in written:
        figure.savefig(path, dpi=120)
    plt.close(figure)
    return written
