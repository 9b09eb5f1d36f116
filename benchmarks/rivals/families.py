"""Judged answers of two or three models, and what each answer costs: all tables of the folder that PENSTOCK_DATA names.

A model's size is `N B` in the file's name where that has one for each tier, else SIZES; its shape is that of the nearest
model of the catalogue. Output lengths that a table lacks are drawn from a trace, one for all tiers of a prompt.
"""

import csv
import gzip
import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from benchmarks.public_data import DATA, DataMissing, public
from penstock.planner_service.files.catalogue import catalogue
from penstock.planner_service.files.hardware import model_of_catalogue
from penstock.planner_service.files.measured import read_trace
from penstock.planner_service.question.site import Site, replica_kinds
from penstock.planner_service.routing.quality import JudgedSample
from penstock.planner_service.simulator import Replica
from penstock.planner_service.simulator.workload import Floats, Ints
from penstock.services.domain.hardware import ModelSpec
from tests.support.inputs import read_site

T = TypeVar("T")

TIERS = ("small", "medium", "large")
SIZES = {"small": 7.0, "medium": 13.0, "large": 70.0}  # billions
TRACE = "traces/azure2023_conv.csv.gz"
EXAMPLES = Path("examples")
CLUSTER, MODELS = EXAMPLES / "cluster-4x8-h100.yaml", EXAMPLES / "deepseek-cascade.yaml"
GPUS = 16
WINDOWS = (0, 1, 2, 4, 8, 16)  # drafted tokens that a pass may verify
SEED = 1


@dataclass(frozen=True, slots=True)
class Setting:
    """What is assumed. acceptance: of a rejected answer's next token, if those before it are. cached_share: of each prompt.

    judge_error: the standard deviation, in points, of the scores that routing sees around what answers are worth. planned:
    whether plans are made for it, of which each takes some 8 s.
    """

    name: str
    acceptance: float
    cached_share: float = 0.0
    judge_error: float = 0.0
    planned: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """N prompts, C tiers. quality, scores (N, C): what an answer is worth, and what its judge says. predicted (N, C): from
    the prompt alone.

    Seconds of a GPU: fresh_s (N, C) for an answer; drafted_s (N, C) for one with a rejected answer as its draft; judging_s
    (N, C) for scoring it, by a model like the first tier's.
    """

    tiers: tuple[str, ...]
    quality: Floats
    scores: Floats
    fresh_s: Floats
    drafted_s: Floats
    judging_s: Floats
    predicted: Floats

    def subset(self, rows: Ints, predicted: Floats) -> Self:
        parts = {name: getattr(self, name)[rows] for name in ("quality", "scores", "fresh_s", "drafted_s", "judging_s")}
        return replace(self, **parts, predicted=predicted)


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """texts: of the prompts; empty where the table has none. sources: the collection that each prompt is from."""

    name: str
    tiers: tuple[str, ...]
    models: tuple[ModelSpec, ...]
    texts: tuple[str, ...]
    sources: tuple[str, ...]
    input_tokens: Ints
    output_tokens: Ints
    quality: Floats

    def prompts(self, setting: Setting) -> Prompts:
        """With what answers cost by a roofline, each tier on the replicas that serve most per GPU."""
        cached = self.input_tokens.astype(np.float64) * setting.cached_share
        columns: dict[str, list[Floats]] = {"fresh_s": [], "drafted_s": [], "judging_s": []}
        judge = _least(self._kinds(0), self.input_tokens, self.output_tokens[:, 0], cached, 0.0)[0]
        for tier in range(len(self.tiers)):
            lengths = (self.input_tokens, self.output_tokens[:, tier], cached)
            kinds = self._kinds(tier)
            columns["fresh_s"].append(_seconds(_least(kinds, *lengths, 0.0), *lengths, 0.0))
            drafted = _least(kinds, *lengths, setting.acceptance)
            columns["drafted_s"].append(_seconds(drafted, *lengths, setting.acceptance))
            read = self.input_tokens + self.output_tokens[:, tier]
            columns["judging_s"].append(_seconds((judge, 0), read, np.ones_like(read), 0.0 * cached, 0.0))
        drawn = np.random.default_rng(SEED).normal(0.0, 1.0, self.quality.shape) * setting.judge_error
        scores = np.clip(self.quality + drawn, 0.0, 100.0)
        costs = {name: np.stack(values, axis=1) for name, values in columns.items()}
        return Prompts(self.tiers, self.quality, scores, **costs, predicted=np.zeros_like(scores))

    def judged(self, rows: Ints, predicted: Floats | None = None) -> JudgedSample:
        """Some of the prompts as plans are made of them."""
        lengths = self.input_tokens[rows], self.output_tokens[rows]
        return JudgedSample(self.tiers, *lengths, self.quality[rows], predicted)

    @property
    def site(self) -> Site:
        """The example cluster with these models."""
        return replace(_site(), tiers=self.tiers, models=self.models)

    def _kinds(self, tier: int) -> list[Replica]:
        longest = int((self.input_tokens + self.output_tokens[:, tier]).max())
        return replica_kinds(self.site, tier, GPUS, longest)[0]


def dollars_per_gpu_hour() -> float:
    """Of the example cluster, by whose GPUs costs are counted."""
    price = _site().cluster.dollars_per_gpu_hour
    assert price is not None
    return price


def measured(measure: Callable[[Family, int], T], splits: Sequence[int]) -> list[T]:
    """Of every family and split, on all cores.

    Raises:
        DataMissing: As `families`.
    """
    with ProcessPoolExecutor() as pool:
        jobs = [pool.submit(measure, family, split) for family in families() for split in splits]
        return [job.result() for job in jobs]


def families() -> list[Family]:
    """Raises:
    DataMissing: There is no table.
    """
    paths = sorted([*(DATA / "quality").glob("*.csv.gz"), *(DATA / "quality").glob("*.jsonl.gz")])
    if not paths:
        raise DataMissing(f"needs {DATA / 'quality'}; set PENSTOCK_DATA to the folder that holds it")
    return [_family(path) for path in paths]


def family(name: str) -> Family:
    """Raises:
    DataMissing: There is no such table.
    """
    return _family(public(f"quality/{name}"))


@cache
def _site() -> Site:
    return read_site(CLUSTER, MODELS)


def _family(path: Path) -> Family:
    with gzip.open(path, "rt") as file:
        rows: list[dict[str, Any]] = (
            list(csv.DictReader(file)) if ".csv" in path.name else [json.loads(line) for line in file]
        )
    tiers = tuple(tier for tier in TIERS if f"{tier}_judge_score" in rows[0])
    named = [float(size) for size in re.findall(r"(\d+(?:\.\d+)?)B", path.name)]
    sizes = named if len(named) == len(tiers) else [SIZES[tier] for tier in tiers]
    inputs = np.maximum(1, np.array([int(row["input_tokens"]) for row in rows]))
    drawn = np.random.default_rng(SEED).choice(read_trace(public(TRACE)).output_tokens, len(rows))
    outputs = [[row.get(f"{tier}_output_tokens") or "" for tier in tiers] for row in rows]
    known = all(value != "" for row in outputs for value in row)
    tokens = np.array(outputs, np.int64) if known else np.repeat(drawn[:, None], len(tiers), axis=1)
    return Family(
        path.name.split(".")[0],
        tiers,
        tuple(_model(size) for size in sizes),
        tuple(row["prompt"] for row in rows if "prompt" in row),
        tuple(row.get("dataset", "") for row in rows),
        inputs,
        np.maximum(1, tokens),
        np.array([[float(row[f"{tier}_judge_score"]) for tier in tiers] for row in rows]),
    )


def _model(billions: float) -> ModelSpec:
    """The shape of the dense 16-bit model of the catalogue that is nearest in size, with so many parameters."""
    dense = [name for name, entry in catalogue("models").items() if {"experts", "arithmetic"}.isdisjoint(entry)]
    specs = [spec for spec in map(model_of_catalogue, dense) if spec.bytes_per_parameter == 2.0]
    nearest = min(specs, key=lambda spec: abs(np.log(spec.parameters / (billions * 1e9))))
    return replace(nearest, parameters=billions * 1e9, active_parameters=billions * 1e9)


def _least(
    kinds: Sequence[Replica], inputs: Ints, outputs: Ints, cached: Floats, acceptance: float
) -> tuple[Replica, int]:
    """(replica, window) that take the fewest GPU seconds for requests of mean lengths."""
    means = float(inputs.mean()), float(outputs.mean()), float(cached.mean())
    windows = WINDOWS if acceptance else WINDOWS[:1]
    choices = [(kind, window) for kind in kinds for window in windows]
    return min(choices, key=lambda one: one[0].shape.gpus / one[0].capacity_per_s(*means, one[1], acceptance))


def _seconds(chosen: tuple[Replica, int], inputs: Ints, outputs: Ints, cached: Floats, acceptance: float) -> Floats:
    """(N) GPU seconds of each request."""
    replica, window = chosen
    lengths = zip(inputs.tolist(), outputs.tolist(), cached.tolist(), strict=True)
    rates = [replica.capacity_per_s(*one, window, acceptance) for one in lengths]
    return replica.shape.gpus / np.array(rates)
