"""Ways to serve prompts with several models, side by side: what they cost at equal quality on prompts they were not tuned on.

Families are all tables of judged answers in the folder that PENSTOCK_DATA names. Per family, target and split each rival
is tuned on one half of the prompts, for the least GPU time of at least the target's quality, and reported on the other: each
model alone, every pair and the three as cascades, routing before generation, random mixtures of two models, and a load-based
cascade (thresholds by mean costs); cascades also with escalation drafts, with skip prediction and with both. Of the rivals
`best` is the one that was cheapest there, `best_plain` the cheapest without drafts and skips. Ours is what `penstock plan`'s
own code chooses for the training half, in the setting that is called measured; in the others it is `best`.

GPU time is arithmetic: each request on the replicas of its tier that serve most per GPU of the example cluster, always
busy, by the planner's step times. Scoring an answer is a pass of a model like the first tier over prompt and answer. What
answers are worth is the table's score; in the setting `erring judge` cascades decide by it with a normal error. Acceptance of
drafts is the share of greedy tokens in which a real pair agrees (Qwen2.5-Coder 0.5B and 1.5B), and half of it.

Figures are means over splits with intervals (Student's t), of ratios on a logarithmic scale.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.rivals.families import Family, Prompts, Setting, dollars_per_gpu_hour, measured
from benchmarks.rivals.planned import planned
from benchmarks.rivals.systems import Tuned, alone, cascades, load_based, mixtures, routings
from benchmarks.spread import interval

SHARES = (0.25, 0.5, 0.75, 0.95)  # of the way from the worst model's quality to the best's
SPLITS, QUICK_SPLITS = range(1, 6), range(1, 3)
ACCEPTANCE = 0.86
SETTINGS = (
    Setting("measured", ACCEPTANCE, planned=True),
    Setting("half acceptance", ACCEPTANCE / 2),
    Setting("prefix reuse", ACCEPTANCE, cached_share=0.37),  # of an unlimited cache, by `prefix_reuse`
    Setting("erring judge", ACCEPTANCE, judge_error=20.0),
)
VARIANTS = {"": (False, False), ", drafts": (True, False), ", skips": (False, True), ", drafts and skips": (True, True)}
COMPARED = ("best", "best_plain", "large alone", "routing", "mixture")
EQUAL = 0.5  # points of quality


def tuned(prompts: Prompts, targets: Sequence[float]) -> dict[str, list[Tuned | None]]:
    """By rival, the cheapest for each target on these prompts; None where it does not reach it."""
    every = range(len(prompts.tiers))
    rivals = {f"{prompts.tiers[tier]} alone": alone(prompts, tier, targets) for tier in every}
    for size in range(2, len(every) + 1):
        for tiers in combinations(every, size):
            name = " + ".join(prompts.tiers[tier] for tier in tiers)
            for variant, (drafts, skips) in VARIANTS.items():
                rivals[name + variant] = cascades(prompts, tiers, targets, drafts=drafts, skips=skips)
    rivals["routing"] = routings(prompts, targets)
    rivals["mixture"] = mixtures(prompts, targets)
    rivals["load-based"] = load_based(prompts, targets)
    return rivals


def plain(name: str) -> bool:
    """Whether a rival has neither drafts nor skips."""
    return "," not in name


def measure(family: Family, split: int) -> dict[str, Any]:
    """The cells of a family and a split by setting, and what its predictors are like."""
    from benchmarks.rivals.predictors import predict

    first, second = np.array_split(np.random.default_rng(split).permutation(len(family.quality)), 2)
    predicted = predict(family, first, second, split)
    cells: dict[str, list[dict[str, Any]]] = {}
    for setting in SETTINGS:
        whole = family.prompts(setting)
        training, unseen = whole.subset(first, predicted.training), whole.subset(second, predicted.unseen)
        means = training.quality.mean(axis=0)
        targets = [float(means.min() + share * (means.max() - means.min())) for share in SHARES]
        rivals = tuned(training, targets)
        cells[setting.name] = [
            {
                "family": family.name,
                "share": share,
                "target_quality": target,
                "split": split,
                **_cell(rivals, at, unseen, planned(family, first, training, target) if setting.planned else None),
            }
            for at, (share, target) in enumerate(zip(SHARES, targets, strict=True))
        ]
    figures = {name: value for name, value in asdict(predicted).items() if name not in ("training", "unseen")}
    return {"cells": cells, "predictors": {"family": family.name, "split": split, "tiers": family.tiers, **figures}}


def _cell(
    rivals: dict[str, list[Tuned | None]], at: int, unseen: Prompts, ours: tuple[str, Tuned] | None
) -> dict[str, Any]:
    """ours: None for the best rival."""
    able = {name: choice for name, choices in rivals.items() if (choice := choices[at]) is not None}
    best = min(able, key=lambda name: able[name].gpu_s)
    best_plain = min(filter(plain, able), key=lambda name: able[name].gpu_s)
    rows = [
        {"name": name, "best": name == best, "best_plain": name == best_plain, **_figures(choice, unseen)}
        for name, choice in able.items()
    ]
    form, chosen = ours or (best, able[best])
    return {"ours": {"form": form, **_figures(chosen, unseen)}, "rivals": rows}


def _figures(choice: Tuned, unseen: Prompts) -> dict[str, float]:
    gpu_s, quality = choice.system.run(unseen)
    return {
        "gpu_seconds": float(f"{gpu_s:.5g}"),
        "dollars_per_1000": round(1000 * gpu_s / 3600 * dollars_per_gpu_hour(), 5),
        "quality_unseen": round(quality, 3),
    }


def summarised(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By family and target: our GPU time over that of other ways, and the points of quality more, on unseen prompts."""
    summary = []
    for family, share in dict.fromkeys((cell["family"], cell["share"]) for cell in cells):
        of = [cell for cell in cells if (cell["family"], cell["share"]) == (family, share)]
        line: dict[str, Any] = {
            "family": family,
            "share": share,
            "forms": sorted({cell["ours"]["form"] for cell in of}),
        }
        for key in COMPARED:
            pairs = [(cell["ours"], row) for cell in of for row in cell["rivals"] if row.get(key) or row["name"] == key]
            if pairs:
                logs = interval([math.log(ours["gpu_seconds"] / row["gpu_seconds"]) for ours, row in pairs])
                points = interval([ours["quality_unseen"] - row["quality_unseen"] for ours, row in pairs])
                ratio = {name: round(math.exp(logs[name]), 4) for name in ("mean", "low", "high")}
                line[key] = {"gpu_seconds_ratio": ratio, "quality_difference": round(points["mean"], 2)}
        missed = [cell["target_quality"] - cell["ours"]["quality_unseen"] for cell in of]
        line["below_target"] = round(float(np.mean(missed)), 2)
        summary.append(line)
    return summary


def _shown(setting: str, summary: Sequence[dict[str, Any]]) -> None:
    print(f"-- {setting}")
    for line in summary:
        ratios = "; ".join(
            f"{key} {line[key]['gpu_seconds_ratio']['mean']:.2f} ({line[key]['quality_difference']:+.1f})"
            for key in COMPARED
            if key in line
        )
        print(f"{line['family'][:30]:30} {line['share']:.2f}  {ratios}  {' / '.join(line['forms'])}", flush=True)


def run(_: int) -> None:
    """Nothing here is timed: one round is all."""
    _run(SPLITS)


def run_quick(_: int) -> None:
    _run(QUICK_SPLITS)


def _run(splits: Sequence[int]) -> None:
    results = measured(measure, splits)
    summaries = {}
    for setting in SETTINGS:
        cells = [cell for result in results for cell in result["cells"][setting.name]]
        summary = summarised(cells)
        _shown(setting.name, summary)
        cheaper = [line for line in summary if line["best_plain"]["gpu_seconds_ratio"]["mean"] <= 0.85]
        equal = [line for line in summary if abs(line["best_plain"]["quality_difference"]) <= EQUAL]
        counts = {"cells": len(summary), "equal_quality": len(equal), "cheaper_by_15_percent": len(cheaper)}
        summaries[setting.name] = {**asdict(setting), **counts, "lines": summary}
    figures = {
        "splits": list(splits),
        "dollars_per_gpu_hour": dollars_per_gpu_hour(),
        "settings": summaries,
        "predictors": [result["predictors"] for result in results],
        "cells": [cell for result in results for cell in result["cells"][SETTINGS[0].name]],
    }
    print(report.write("rivals", figures))
