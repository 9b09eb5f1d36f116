"""Plots of plans: the best of all qualities, the tiers on the nodes, and what changes with rate, quality or GPUs."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli import options, plan_report
from penstock.types.planned import CascadePlan

if TYPE_CHECKING:
    from penstock.planner_service.manifests.node_layout import Node, NodeLayout
    from penstock.planner_service.planning.frontiers import Points
    from penstock.planner_service.planning.sweep import SweepPoint

BEST, OWN, GREY = "#1f6f78", "#e07a3f", "#777777"
MOST_ROWS = 32  # of the picture of the nodes


def plot_frontiers(latencies: "Points", costs: "Points", plan: CascadePlan, out: Path) -> list[Path]:
    """Plot latency and cost against quality with this plan marked, as PNG and SVG next to the plan file."""
    figure, (left, right) = panels_of("The best plans of each quality")
    dollars = None if plan.cost is None else plan.cost.dollars_per_hour
    own_cost, unit = (float(plan.gpus), "GPUs") if dollars is None else (dollars, "dollars per hour")
    for axes, points, own in ((left, latencies, plan.latency_p95_s), (right, costs, own_cost)):
        axes.step([q for q, _ in points], [y for _, y in points], where="pre", color=BEST, label="best plans")
        axes.plot([q for q, _ in points], [y for _, y in points], "o", color=BEST, markersize=4)
        axes.plot(plan.quality, own, "D", color=OWN, markersize=9, label="this plan")
        axes.set_xlabel("quality: mean of the accepted answers (0 to 100)")
        axes.set_ylim(0, 1.1 * max(own, *(y for _, y in points)))
    left.set_ylabel("p95 latency of the slowest tier (s)")
    left.set_title("Least latency on these GPUs", fontsize=10)
    right.set_ylabel(unit)
    right.set_title(f"Least cost, slowest tier within {plan.latency_p95_s:.3g} s", fontsize=10)
    left.legend(frameon=False)
    return write_pictures(figure, out)


def plot_nodes(layout: "NodeLayout", plan: CascadePlan, out: Path) -> list[Path]:
    """Draw which GPUs of which node run which replica, as PNG and SVG named like the plan file, with `-nodes`.

    Above MOST_ROWS nodes, neighbours that run the same share a row.
    """
    rows = [[node] for node in layout.nodes]
    if len(rows) > MOST_ROWS:
        rows = [list(same) for _, same in groupby(layout.nodes, key=_content)]
    title = f"The tiers on the nodes: {plan.gpus} of {sum(node.type.gpus_per_node for node in layout.nodes)} GPUs"
    if layout.unplaced:
        title += f"; {layout.unplaced} replicas fit on no node whole"
    widest = max(row[0].type.gpus_per_node for row in rows)
    figure, (axes,) = panels_of(title, 1, (max(7.0, 1.9 + 1.15 * widest), 1.6 + 0.42 * len(rows)))
    colours = _colours(len(plan.tiers))
    for y, row in enumerate(rows):
        for gpu in range(row[0].type.gpus_per_node):
            axes.add_patch(_box(gpu, y, 1, facecolor="#f0f0f0", edgecolor="#d0d0d0", linewidth=0.6))
        for placed in row[0].stages:
            first, shape, colour = placed.first_gpu, placed.shape, colours[placed.tier]
            axes.add_patch(_box(first, y, shape.tp, facecolor=colour, edgecolor="white", linewidth=2))
            label = plan.tiers[placed.tier].name
            if len(row) == 1:
                label += f" {placed.replica + 1}"
            if shape.pp > 1:
                label += f", stage {placed.stage + 1}/{shape.pp}" if len(row) == 1 else f", PP={shape.pp}"
            fitting = int(12.5 * shape.tp)  # characters of 7.5 points in the box
            if len(label) > fitting:
                label = label[: fitting - 1] + "\u2026"
            axes.text(first + shape.tp / 2, y, label, ha="center", va="center", fontsize=7.5, color="white")
    axes.set_yticks(range(len(rows)), [_row_label(row) for row in rows], fontsize=8)
    axes.set_xticks([gpu + 0.5 for gpu in range(widest)], [str(gpu) for gpu in range(widest)])
    axes.set_xlim(-0.02, widest + 0.02)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("GPU of the node")
    axes.tick_params(length=0)
    axes.spines[["left", "bottom"]].set_visible(False)
    names = [f"{tier.name}: {plan_report.strategy_of(tier) if tier.used else 'not used'}" for tier in plan.tiers]
    handles = [_box(0, 0, 1, facecolor=colour) for colour in colours]
    handles.append(_box(0, 0, 1, facecolor="#f0f0f0", edgecolor="#d0d0d0"))
    figure.legend(handles, [*names, "idle"], loc="outside lower left", frameon=False, fontsize=8, ncols=1)
    return write_pictures(figure, out.with_name(f"{out.stem}-nodes{out.suffix}"))


def plot_sweep(axis: str, points: "Sequence[SweepPoint]", out: Path) -> list[Path]:
    """Plot what plans reach and cost against what is varied; values without a plan are marked."""
    labels = {"rate": "requests per second", "quality": "least quality (0 to 100)", "gpus": "GPUs that may be used"}
    figure, panels = panels_of(f"Plans by {'number of GPUs' if axis == 'gpus' else axis}", 3)
    plans = [(point.value, point.plan) for point in points if point.plan is not None]
    prices = [plan.cost.dollars_per_hour for _, plan in plans if plan.cost is not None]
    priced = bool(plans) and all(price is not None for price in prices)
    costs = [price or 0.0 for price in prices] if priced else [float(plan.gpus) for _, plan in plans]
    latencies = [plan.latency.seconds for _, plan in plans if plan.latency is not None]
    shown = (
        ("Latency", "latency that the objective means (s)", latencies),
        ("Cost", "dollars per hour" if priced else "GPUs", costs),
        ("Quality", "mean of the accepted answers (0 to 100)", [plan.quality for _, plan in plans]),
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
    return write_pictures(figure, out)


def _content(node: "Node") -> tuple[object, ...]:
    """What a node runs, without the numbers of replicas and of their stages."""
    return node.type.name, *((s.tier, s.shape, s.first_gpu) for s in node.stages)


def _row_label(row: "Sequence[Node]") -> str:
    kind, first, last = row[0].type.name or row[0].type.gpu.name, row[0].number, row[-1].number
    return f"{kind} node {first}" if first == last else f"{kind} nodes {first} to {last}"


def _colours(count: int) -> list[Any]:
    """Colours of the tiers, from the cheapest to the most expensive: dark enough for white text."""
    import matplotlib as mpl

    scale = mpl.colormaps["viridis"]
    return [scale(0.72 - 0.62 * i / max(1, count - 1)) for i in range(count)]


def _box(gpu: int, row: int, gpus: int, **style: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((gpu, row - 0.42), gpus, 0.84, **style)


def panels_of(title: str, count: int = 2, size: tuple[float, float] | None = None) -> tuple[Any, Any]:
    """(figure, its panels side by side). size: in inches; default: by the number of panels."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, count, figsize=size or (5.5 * count, 4.4), layout="constrained", squeeze=False)
    panels = panels[0]
    figure.suptitle(title)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def write_pictures(figure: Any, out: Path) -> list[Path]:
    import matplotlib.pyplot as plt

    written = [out.with_suffix(suffix) for suffix in options.PICTURES]
    for path in written:
        figure.savefig(path, dpi=120)
    plt.close(figure)
    return written
