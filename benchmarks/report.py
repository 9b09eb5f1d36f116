"""Results of benchmarks: JSON files with a description of the machine, and plots."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

RESULTS = Path(__file__).with_name("results")
COLOURS = ("#1f6f78", "#e07a3f", "#8d99ae", "#c9a227", "#6d597a", "#7fb069", "#b23a48", "#4a4e69")
LEGEND_WITHIN = 4  # series; the legend of more is below the plot


def machine() -> dict[str, Any]:
    """Processor, cores, memory and versions, on which absolute figures depend."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in ("torch", "transformers", "grpcio", "numba")},
    }


def commit() -> str:
    """The measured commit, with a plus sign if the tree had changes."""
    try:
        name = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout
        changed = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name.strip() + ("+" if changed.strip() else "")


def write(name: str, figures: Mapping[str, Any]) -> Path:
    """Write results/<name>.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    about = {"benchmark": name, "at": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit()}
    path.write_text(json.dumps({**about, "machine": machine(), **figures}, indent=1) + "\n")
    return path


def bars(
    name: str,
    title: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[tuple[float, float, float]]],
    unit: str,
    *,
    log: bool = False,
) -> Path:
    """Grouped bars: per series and group (median, lowest, highest). Writes results/<name>.svg."""
    count = len(groups) * len(series)
    figure, axes = plt.subplots(figsize=(max(8.0, 0.38 * count), 4.2), layout="constrained")  # room for the figures
    width = 0.8 / len(series)
    for i, (label, values) in enumerate(series.items()):
        places = [place + (i - (len(series) - 1) / 2) * width for place in range(len(groups))]
        middle = [value[0] for value in values]
        spread = [[m - low for m, low, _ in values], [high - m for m, _, high in values]]
        axes.bar(places, middle, width * 0.92, label=label, color=COLOURS[i % len(COLOURS)])
        if any(map(any, spread)):
            axes.errorbar(places, middle, spread, fmt="none", ecolor="#333333", capsize=3, linewidth=1)
        for place, (m, _, high) in zip(places, values, strict=True):  # above the spread
            label_text = f"{m:,.0f}" if m >= 10 else f"{m:.2g}"
            axes.annotate(label_text, (place, high), (0, 4), textcoords="offset points", ha="center", fontsize=9)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel(unit)
    axes.set_yscale("log" if log else "linear")
    axes.set_title(title, loc="left")
    axes.margins(y=0.15)
    if len(series) <= LEGEND_WITHIN:
        axes.legend(frameon=False, loc="upper left")
    else:
        figure.legend(frameon=False, loc="outside lower center", ncols=len(series))
    return save(name, figure)


def save(name: str, figure: Figure) -> Path:
    """Write results/<name>.svg, without frames around the plots, and close the figure."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    path = RESULTS / f"{name}.svg"
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path
