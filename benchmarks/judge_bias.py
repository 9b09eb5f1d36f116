"""Biases of language models as judges, as far as public judged answers show them: verbosity and self-preference.

Verbosity: by how much a score rises with each doubling of an answer's length, between the answers of different models to the
same prompt: score = prompt + model + slope * log2(tokens), by least squares. Self-preference: GPT-4 judges MT-bench answers
of GPT-4 and Mixtral; a judge that prefers its own style should give its lead where style decides (writing, roleplay,
humanities), rather than where answers can be verified (maths, reasoning, code). Intervals are 95 % of bootstrap samples of
the prompts.
"""

import csv
import gzip
import json
from collections.abc import Callable

import numpy as np

from benchmarks import report
from benchmarks.public_data import public

BOOTSTRAPS = 2000
SETS = {
    "WildBench, GPT-4o, absolute 1 to 10": (
        "quality/wildbench_reka_edge-flash-core.csv.gz",
        ("small", "medium", "large"),
    ),
    "MT-bench, GPT-4, absolute 1 to 10": ("quality/mtbench_mixtral-gpt4.csv.gz", ("small", "large")),
}
VERIFIABLE = ("math", "reasoning", "coding")
OPEN = ("writing", "roleplay", "humanities")


def rows_of(name: str) -> list[dict[str, str]]:
    with gzip.open(public(name), "rt", newline="") as file:
        return list(csv.DictReader(file))


def slope(tokens: np.ndarray, scores: np.ndarray) -> float:
    """Points per doubling of the length. tokens, scores: (prompts, models)."""
    length = np.log2(tokens)

    def within(x: np.ndarray) -> np.ndarray:
        return np.asarray(x - x.mean(axis=0) - x.mean(axis=1, keepdims=True) + x.mean())

    x, y = within(length), within(scores)
    return float((x * y).sum() / (x * x).sum())


def interval(count: int, statistic: Callable[[np.ndarray], float], rng: np.random.Generator) -> list[float]:
    """Of a statistic of drawn rows."""
    values = [statistic(rng.integers(0, count, count)) for _ in range(BOOTSTRAPS)]
    return [float(value) for value in np.percentile(values, [2.5, 97.5])]


def verbosity(rng: np.random.Generator) -> dict[str, object]:
    figures: dict[str, object] = {}
    for name, (file, tiers) in SETS.items():
        rows = [row for row in rows_of(file) if all(float(row[f"{tier}_output_tokens"]) > 0 for tier in tiers)]
        tokens = np.array([[float(row[f"{tier}_output_tokens"]) for tier in tiers] for row in rows])
        scores = np.array([[float(row[f"{tier}_judge_score"]) for tier in tiers] for row in rows])

        def drawn(rows: np.ndarray, tokens: np.ndarray = tokens, scores: np.ndarray = scores) -> float:
            return slope(tokens[rows], scores[rows])

        figures[name] = {
            "prompts": len(rows),
            "points_per_doubling": slope(tokens, scores),
            "points_95": interval(len(rows), drawn, rng),
        }
    return figures


def self_preference(rng: np.random.Generator) -> dict[str, object]:
    with gzip.open(public("prompts/mt_bench_80.jsonl.gz"), "rt") as file:
        categories = {str(row["prompt_id"]): str(row["category"]) for row in map(json.loads, file)}
    leads: dict[str, list[float]] = {"verifiable": [], "open": []}
    for row in rows_of("quality/mtbench_mixtral-gpt4.csv.gz"):
        category = categories[row["prompt_id"].rpartition("-t")[0]]
        kind = "verifiable" if category in VERIFIABLE else "open" if category in OPEN else ""
        if kind:
            leads[kind].append(float(row["large_judge_score"]) - float(row["small_judge_score"]))
    means = {kind: np.array(values) for kind, values in leads.items()}
    figures: dict[str, object] = {}
    for kind, values in means.items():

        def drawn(rows: np.ndarray, values: np.ndarray = values) -> float:
            return float(values[rows].mean())

        figures[kind] = {
            "turns": len(values),
            "lead_of_gpt_4": float(values.mean()),
            "lead_95": interval(len(values), drawn, rng),
        }
    return figures


def run(_: int = 1) -> None:
    rng = np.random.default_rng(1)
    figures = {"verbosity": verbosity(rng), "self_preference": self_preference(rng)}
    report.write("judge_bias", figures)
    print(json.dumps(figures, indent=1))
