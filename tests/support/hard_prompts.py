"""Prompts of which some are hard, for a small and a large tier: as a demand, and as files of `penstock plan`."""

from pathlib import Path

import numpy as np

from penstock.planner_service.question.demand import draw_demand
from penstock.planner_service.question.site import Demand
from penstock.planner_service.routing.quality import JudgedSample
from tests.support.tables import write_judged, write_trace

TIERS = ("small", "large")


def demand_at(rate_per_s: float, count: int = 400) -> Demand:
    rng = np.random.default_rng(3)
    hard, prompts = rng.normal(0, 20, 200), 200
    scores = np.clip(np.stack([65 - hard, 90 - hard], 1), 0, 100).round()
    lengths = rng.integers(100, 1500, prompts), rng.integers(50, 300, (prompts, 2))
    judged = JudgedSample(TIERS, *lengths, scores, scores - 5)
    return draw_demand(judged, np.cumsum(rng.exponential(1 / rate_per_s, count)), 1)


def plan_arguments(folder: Path, demand: Demand) -> list[str]:
    """The files of a plan, of which those of the cluster and of the models are there already."""
    files = {name: folder / f"{name}.{kind}" for name, kind in FILES.items()}
    write_judged(files["quality"], demand.judged)
    write_trace(files["trace"], ((at, 100, 100) for at in demand.arrival_s))
    return [argument for name, path in files.items() for argument in (f"--{name}", str(path))]


FILES = {"cluster": "yaml", "models": "yaml", "trace": "csv", "quality": "csv"}
