"""Planning questions that tests ask, and what they come to in the planner."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from penstock.planner_service.files.measured import workload_of
from penstock.planner_service.files.quality import judged_for
from penstock.planner_service.files.site import site_of
from penstock.planner_service.question.demand import demand_of
from penstock.planner_service.question.site import Demand, Site
from penstock.types.planning import (
    Cascade,
    CascadeTier,
    Cluster,
    Gpu,
    GpuType,
    JudgedPrompt,
    JudgedPrompts,
    Model,
    Objective,
    PlanningQuestion,
    Trace,
)
from tests.conftest import ROOT

TIERS = ("small", "medium", "large")
MODELS = ("deepseek-r1-distill-qwen-7b", "deepseek-r1-distill-llama-70b", "deepseek-r1-671b-awq")


def question(**options: Any) -> PlanningQuestion:
    """The DeepSeek cascade on 24 GPUs, and a workload of our own making.

    Without options for 40 requests and the slowest tier, without further runs, and a plan may be overloaded: what is quickly
    planned.
    """
    rng = np.random.default_rng(5)
    judged = tuple(
        JudgedPrompt(
            int(rng.integers(20, 900)),
            tuple(int(n) for n in rng.integers(20, 300, 3)),
            tuple(float(s) for s in np.clip(np.array([60, 75, 90]) - rng.normal(0, 20), 0, 100).round()),
        )
        for _ in range(100)
    )
    arrivals = np.cumsum(rng.exponential(0.2, 300)).tolist()
    usual: dict[str, Any] = {
        "requests": 40,
        "rate": 10.0,
        "runs": 0,
        "objective": Objective.LARGEST_TIER,
        "allow_overload": True,
    }
    return PlanningQuestion(
        cluster=Cluster((GpuType(Gpu("h100"), 3, 8, 50.0),)),
        models=Cascade(tuple(CascadeTier(n, Model(m)) for n, m in zip(TIERS, MODELS, strict=True)), 0.1),
        trace=Trace(tuple(arrivals), (100,) * 300, (50,) * 300),
        quality=JudgedPrompts(judged),
        **usual | options,
    )


_FOLDER = tempfile.TemporaryDirectory(prefix="questions")


def asked(**fields: Any) -> tuple[str, str]:
    """Arguments of `penstock plan` for a question file with these fields."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", dir=_FOLDER.name, delete=False) as file:
        yaml.safe_dump(fields, file)
    return "--question", file.name


def replan_question(folder: Path, **fields: Any) -> Path:
    """A question file for planning again with two tiers: for the slowest tier on 60 requests, without further runs."""
    examples, path = ROOT / "examples", folder / "question.yaml"
    content = {
        "cluster": {"gpu": "l40s", "nodes": 4, "gpus_per_node": 1},
        "models": str(ROOT / "tests" / "planner" / "two-tiers.yaml"),
        "trace": str(examples / "trace.csv"),
        "quality": str(examples / "judged.csv"),
        "requests": 60,
        "runs": 0,
        "objective": "largest-tier",
    }
    path.write_text(yaml.safe_dump(content | fields))
    return path


def with_prompts(asked: PlanningQuestion, **columns: Any) -> PlanningQuestion:
    """The question with further fields of its judged prompts: for each, the values of all prompts."""
    prompts = tuple(
        dataclasses.replace(prompt, **{name: values[i] for name, values in columns.items()})
        for i, prompt in enumerate(asked.quality.prompts)
    )
    return dataclasses.replace(asked, quality=dataclasses.replace(asked.quality, prompts=prompts))


def predicted(asked: PlanningQuestion) -> PlanningQuestion:
    """The question with predictions that know something of the scores."""
    rng, scores = np.random.default_rng(6), [np.array(prompt.judge_scores) for prompt in asked.quality.prompts]
    return with_prompts(
        asked, predicted_scores=[tuple(np.clip(s + rng.normal(0, 8, 3), 0, 100).round(1).tolist()) for s in scores]
    )


def site_and_demand(asked: PlanningQuestion) -> tuple[Site, Demand]:
    """What a question is about."""
    site, trace = site_of(asked.cluster, asked.models), workload_of(asked.trace)
    judged, count = judged_for(asked.quality, site), len(trace) if asked.requests is None else asked.requests
    return site, demand_of(trace, judged, requests=count, seed=asked.seed, lengths=asked.lengths.value, rate=asked.rate)
