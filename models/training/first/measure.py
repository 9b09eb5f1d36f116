"""Measure the models on held-out problems, fit the judge's calibration, and write the model cards.

There are two disjoint sets of held-out problems: TEST_COUNT for the figures, and others for fitting calibration and
thresholds.
"""

import json
import platform
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from judge_service.calibration import Calibration, fit
from models.training.first import answers, judge, tasks
from models.training.first.answers import Answered
from models.training.measure import auc

TIERS = ("small", "medium", "large")
TEST_COUNT, TEST_SEED = 500, 20_26
FIT_COUNT, FIT_SEED = 2000, 77


def test_problems() -> list[tasks.Problem]:
    """The 500 held-out prompts for all figures."""
    return tasks.held_out(TEST_COUNT, TEST_SEED)


def fit_problems() -> list[tasks.Problem]:
    """Held-out prompts for fitting, disjoint from those of the test."""
    test_keys = {p.key for p in test_problems()}
    return [p for p in tasks.held_out(FIT_COUNT + TEST_COUNT, FIT_SEED) if p.key not in test_keys][:FIT_COUNT]


@dataclass(frozen=True, slots=True)
class CascadeFigures:
    thresholds: tuple[float, float]
    accuracy: float
    shares: tuple[float, float, float]


def cascade(
    answered: dict[str, list[Answered]], scores: dict[str, list[float]], thresholds: tuple[float, float]
) -> CascadeFigures:
    """The result of the cascade, from the answers and scores of every tier for every problem, in the same order."""
    count = len(answered["large"])
    tiers_taken = [
        0 if scores["small"][i] >= thresholds[0] else 1 if scores["medium"][i] >= thresholds[1] else 2
        for i in range(count)
    ]
    right = sum(answered[TIERS[tier]][i].correct for i, tier in enumerate(tiers_taken))
    shares = tuple(tiers_taken.count(tier) / count for tier in range(3))
    return CascadeFigures(thresholds, right / count, (shares[0], shares[1], shares[2]))


def choose_thresholds(
    answered: dict[str, list[Answered]], scores: dict[str, list[float]], slack: float = 0.01
) -> CascadeFigures:
    """The thresholds with the lowest use of the large tier and an accuracy within `slack` of the large tier's."""
    target = answers.accuracy(answered["large"]) - slack
    grid = [float(t) for t in range(5, 100, 5)]
    able = [f for a in grid for b in grid if (f := cascade(answered, scores, (a, b))).accuracy >= target]
    return min(able, key=lambda f: (f.shares[2], -f.accuracy, -f.shares[0]))


def sorted_answers(
    family: Path, tier: str, problems: list[tasks.Problem], threads: int
) -> tuple[list[Answered], float]:
    """Greedy answers in the problems' order, and tokens per second."""
    answered, rate = answers.timed(family / tier, tier, problems, threads)
    place = {p.key: i for i, p in enumerate(problems)}
    return sorted(answered, key=lambda a: place[a.problem.key]), rate


def measure(family: Path, work: Path, threads: int) -> dict[str, Any]:
    """Figures, calibration, cards, held-out file. Returns the figures."""
    test, fitting = test_problems(), fit_problems()
    on_test, on_fit, rates = {}, {}, {}
    for tier in TIERS:
        on_test[tier], rates[tier] = sorted_answers(family, tier, test, threads)
        on_fit[tier], _ = sorted_answers(family, tier, fitting, threads)
    raw_test = {tier: judge.score_all(family / "judge", on_test[tier], threads) for tier in TIERS}
    raw_fit = {tier: judge.score_all(family / "judge", on_fit[tier], threads) for tier in TIERS}
    calibration = calibrated([*on_fit["small"], *on_fit["medium"]], [*raw_fit["small"], *raw_fit["medium"]])
    calibration.write(family / "judge" / "calibration.json")
    scores_fit = {tier: [calibration.apply(x) for x in raw_fit[tier]] for tier in TIERS}
    scores_test = {tier: [calibration.apply(x) for x in raw_test[tier]] for tier in TIERS}
    chosen = choose_thresholds(on_fit, scores_fit)
    reached = cascade(on_test, scores_test, chosen.thresholds)
    figures: dict[str, Any] = {
        "machine": f"{platform.machine()}, {threads} threads, Python {platform.python_version()}",
        "test_prompts": len(test),
        "tiers": {},
        "judge": {
            "auc": {tier: auc(raw_test[tier], [a.correct for a in on_test[tier]]) for tier in TIERS[:2]},
            "calibration": {"samples": calibration.samples, "brier": calibration.brier},
        },
        "cascade": {
            "thresholds": dict(zip(TIERS, chosen.thresholds, strict=False)),
            "accuracy": reached.accuracy,
            "share_answered": dict(zip(TIERS, reached.shares, strict=True)),
        },
    }
    for tier in TIERS:
        lengths = sorted(a.tokens for a in on_test[tier])
        figures["tiers"][tier] = {
            "accuracy": answers.accuracy(on_test[tier]),
            "by_level": by(on_test[tier], "level"),
            "by_task": by(on_test[tier], "task"),
            "reply_tokens": {
                "p50": lengths[len(lengths) // 2],
                "p95": lengths[int(0.95 * len(lengths))],
                "most": lengths[-1],
            },
            "tokens_per_s_at_128": round(rates[tier]),
            "right": "".join("01"[a.correct] for a in on_test[tier]),  # by line of heldout.jsonl
        }
    for tier in (*TIERS, "judge"):
        trained = work / f"{tier}.figures.json"
        if trained.exists():
            part = figures["judge"] if tier == "judge" else figures["tiers"][tier]
            part["training"] = json.loads(trained.read_text())
    (family / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    write_heldout(family.parent / "heldout.jsonl", test)
    return figures


def calibrated(answered: list[Answered], raw: list[float]) -> Calibration:
    return fit(raw, [a.correct for a in answered], [100 * float(np.exp(x)) for x in raw])


def by(answered: list[Answered], what: str) -> dict[str, float]:
    """Accuracy by task or level."""
    groups: dict[str, list[bool]] = defaultdict(list)
    for a in answered:
        groups[str(getattr(a.problem, what))].append(a.correct)
    return {name: round(sum(group) / len(group), 3) for name, group in sorted(groups.items())}


def write_heldout(path: Path, problems: list[tasks.Problem]) -> None:
    """The held-out prompts with their answers, in an order that mixes tasks and levels."""
    with path.open("w") as out:
        for p in problems:
            row = {"prompt": p.prompt, "answer": p.answer, "task": p.task, "level": p.level}
            out.write(json.dumps(row) + "\n")
