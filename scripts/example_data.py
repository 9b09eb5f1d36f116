"""Writes the example trace and judged samples for `penstock plan`: `python scripts/example_data.py`.

Synthetic data from a seed: arrivals with a slow wave and bursts, log-normal lengths, and a difficulty of each prompt that
lowers the scores of all tiers, most of all of the small ones. For testing the planner; replace it by your own data.
"""

import csv
from pathlib import Path

import numpy as np

SEED = 2026
REQUESTS, PROMPTS, CANDIDATES_PROMPTS = 3000, 600, 200
TIERS = {
    "small": (88.0, 30.0),
    "medium": (92.0, 17.0),
    "large": (96.0, 9.0),
}  # score at no difficulty, loss at high difficulty
CANDIDATES = {
    "qwen-1.5b": (84.0, 30.0),
    "qwen-3b": (85.0, 29.0),
    "qwen-7b": (91.0, 19.0),
    "qwen-14b": (92.0, 18.0),
    "qwen-32b": (95.0, 9.0),
}
FOLDER = Path(__file__).resolve().parent.parent / "examples"


def lengths(rng: np.random.Generator, median: float, count: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.clip(rng.lognormal(np.log(median), 0.8, count), 4, 8000).astype(np.int64)


def write_trace(rng: np.random.Generator) -> None:
    gaps = rng.gamma(0.5, 2 / 8.0, REQUESTS)  # 8 requests per second, burstier than Poisson
    gaps *= 1 + 0.4 * np.sin(np.linspace(0, 4 * np.pi, REQUESTS))
    rows = zip(np.cumsum(gaps), lengths(rng, 420, REQUESTS), lengths(rng, 180, REQUESTS), strict=True)
    with (FOLDER / "trace.csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("arrival_s", "input_tokens", "output_tokens"))
        table.writerows((f"{at:.3f}", i, o) for at, i, o in rows)


def write_judged(rng: np.random.Generator, tiers: dict[str, tuple[float, float]], prompts: int, name: str) -> None:
    hard = rng.beta(1.2, 1.8, prompts) * 2
    columns = [lengths(rng, 420, prompts)]
    for best, loss in tiers.values():
        columns.append(lengths(rng, 180, prompts))
        columns.append(np.clip(best - loss * hard + rng.normal(0, 6, prompts), 0, 100).round().astype(np.int64))
    with (FOLDER / name).open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        head = (f"{tier}_{what}" for tier in tiers for what in ("output_tokens", "judge_score"))
        table.writerow(("prompt_id", "input_tokens", *head))
        table.writerows((f"p{i}", *row) for i, row in enumerate(zip(*columns, strict=True)))


if __name__ == "__main__":
    generator = np.random.default_rng(SEED)
    write_trace(generator)
    write_judged(generator, TIERS, PROMPTS, "judged.csv")
    write_judged(generator, CANDIDATES, CANDIDATES_PROMPTS, "judged-candidates.csv")
