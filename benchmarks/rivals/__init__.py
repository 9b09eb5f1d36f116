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
drafts is the share of greedy tokens in which a real pair agrees (Qwen2.5-Coder 0.5B and 1.5B), and half of it; replicas of
several GPUs are taken to verify drafts, too.

Figures are means over splits with intervals (Student's t), of ratios on a logarithmic scale. A rival that was tuned for a
target may have more or less quality on unseen prompts than ours, whose plans allow for that. So ours is compared at equal
quality as well: rivals are tuned for targets all the way from the worst model's quality to the best's, and the GPU time of
the best of each target, over its quality on unseen prompts, both means over splits, is read where ours is.
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
from penstock.planner_service.simulator.workload import Floats

SHARES = (0.25, 0.5, 0.75, 0.95)  # of the way from the worst model's quality to the best's
CURVE = tuple(np.linspace(0.05, 1.0, 20).tolist())
"""The same, of the rivals that ours is compared with at equal quality."""
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
    curves = dict[str, list[tuple[float, float]]]()
    for setting in SETTINGS:
        whole = family.prompts(setting)
        training, unseen = whole.subset(first, predicted.training), whole.subset(second, predicted.unseen)
        means = training.quality.mean(axis=0)
        targets = [float(means.min() + share * (means.max() - means.min())) for share in (*SHARES, *CURVE)]
        rivals = tuned(training, targets if setting.planned else targets[: len(SHARES)])
        if setting.planned:
            curves = _curves(rivals, unseen)
        cells[setting.name] = [
            {
                "family": family.name,
                "share": share,
                "target_quality": target,
                "split": split,
                **_cell(
                    rivals,
                    at,
                    unseen,
                    planned(family, first, training, target, setting.acceptance) if setting.planned else None,
                ),
            }
            for at, (share, target) in enumerate(zip(SHARES, targets[: len(SHARES)], strict=True))
        ]
    figures = {name: value for name, value in asdict(predicted).items() if name not in ("training", "unseen")}
    about = {"family": family.name, "split": split, "tiers": family.tiers, **figures}
    return {"cells": cells, "curves": curves, "predictors": about}


def _cheapest(rivals: dict[str, list[Tuned | None]], at: int) -> tuple[dict[str, Tuned], dict[str, str]]:
    """(the rivals that reach a target, by kind the name of the cheapest)."""
    able = {name: choice for name, choices in rivals.items() if (choice := choices[at]) is not None}
    kinds = (("best", able), ("best_plain", filter(plain, able)))
    return able, {kind: min(names, key=lambda name: able[name].gpu_s) for kind, names in kinds}


def _curves(rivals: dict[str, list[Tuned | None]], unseen: Prompts) -> dict[str, list[tuple[float, float]]]:
    """By kind, (quality, logarithm of GPU seconds) on unseen prompts of the cheapest rival for each target of CURVE."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for at in range(len(SHARES), len(SHARES) + len(CURVE)):
        able, cheapest = _cheapest(rivals, at)
        for kind, name in cheapest.items():
            gpu_s, quality = able[name].system.run(unseen)
            curves.setdefault(kind, []).append((quality, math.log(gpu_s)))
    return curves


def ratio_at_equal_quality(ours: Floats, curves: Floats) -> dict[str, float]:
    """Our GPU seconds over those of a curve at our quality, all means over splits; with a jackknife over splits.

    ours (S, 2): quality and logarithm of GPU seconds on unseen prompts. curves (S, T, 2): the same of the rivals of each
    target. Of the points of a curve the cheapest counts that has at least the quality; beyond its end, its last.
    """

    def ratio(rows: list[int]) -> float:
        quality, log_s = ours[rows].mean(axis=0)
        points = np.array(sorted(curves[rows].mean(axis=0).tolist()))
        least = np.minimum.accumulate(points[::-1, 1])[::-1]
        return float(log_s - np.interp(quality, points[:, 0], least))

    count = len(ours)
    whole = ratio(list(range(count)))
    without = [ratio([row for row in range(count) if row != split]) for split in range(count)] if count > 1 else [whole]
    around = interval([count * whole - (count - 1) * one for one in without])
    return {
        "mean": round(math.exp(whole), 4),
        **{name: round(math.exp(whole + around[name] - around["mean"]), 4) for name in ("low", "high")},
    }


def _cell(
    rivals: dict[str, list[Tuned | None]], at: int, unseen: Prompts, ours: tuple[str, Tuned] | None
) -> dict[str, Any]:
    """ours: None for the best rival."""
    able, cheapest = _cheapest(rivals, at)
    rows = [
        {"name": name, **{kind: name == one for kind, one in cheapest.items()}, **_figures(choice, unseen)}
        for name, choice in able.items()
    ]
    form, chosen = ours or (cheapest["best"], able[cheapest["best"]])
    return {"ours": {"form": form, **_figures(chosen, unseen)}, "rivals": rows}


def _figures(choice: Tuned, unseen: Prompts) -> dict[str, float]:
    gpu_s, quality = choice.system.run(unseen)
    return {
        "gpu_seconds": float(f"{gpu_s:.5g}"),
        "dollars_per_1000": round(1000 * gpu_s / 3600 * dollars_per_gpu_hour(), 5),
        "quality_unseen": round(quality, 3),
    }


def summarised(
    cells: Sequence[dict[str, Any]], curves: dict[tuple[str, int], dict[str, list[tuple[float, float]]]]
) -> list[dict[str, Any]]:
    """By family and target: our GPU time over that of other ways, and the points of quality more, on unseen prompts.

    curves: by family and split; empty where ours is the best rival.
    """
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
        ours = np.array([[cell["ours"]["quality_unseen"], math.log(cell["ours"]["gpu_seconds"])] for cell in of])
        for kind in ("best", "best_plain") if curves else ():
            rivals = np.array([curves[family, cell["split"]][kind] for cell in of])
            line[kind]["at_equal_quality"] = ratio_at_equal_quality(ours, rivals)
        missed = [cell["target_quality"] - cell["ours"]["quality_unseen"] for cell in of]
        line["below_target"] = round(float(np.mean(missed)), 2)
        summary.append(line)
    return summary


def _at_equal_quality(summary: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Over all families and targets."""
    best, best_plain = (
        np.array([line[kind]["at_equal_quality"]["mean"] for line in summary]) for kind in ("best", "best_plain")
    )
    return {
        "best_geometric_mean": round(float(np.exp(np.log(best).mean())), 4),
        "best_plain_geometric_mean": round(float(np.exp(np.log(best_plain).mean())), 4),
        "cheaper_than_best_plain_by_15_percent": int((best_plain <= 0.85).sum()),
        "best_is_cheaper_by_15_percent": int((best_plain / best <= 0.85).sum()),
    }


def _shown(setting: str, summary: Sequence[dict[str, Any]]) -> None:
    print(f"-- {setting}")
    for line in summary:
        ratios = "; ".join(
            f"{key} {line[key]['gpu_seconds_ratio']['mean']:.2f} ({line[key]['quality_difference']:+.1f})"
            + (f" = {line[key]['at_equal_quality']['mean']:.2f}" if "at_equal_quality" in line[key] else "")
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
    curves = {(one["predictors"]["family"], one["predictors"]["split"]): one["curves"] for one in results}
    for setting in SETTINGS:
        cells = [cell for result in results for cell in result["cells"][setting.name]]
        summary = summarised(cells, curves if setting.planned else {})
        _shown(setting.name, summary)
        counts = {"cells": len(summary), **(_at_equal_quality(summary) if setting.planned else {})}
        summaries[setting.name] = {**asdict(setting), **counts, "lines": summary}
    figures = {
        "splits": list(splits),
        "dollars_per_gpu_hour": dollars_per_gpu_hour(),
        "settings": summaries,
        "predictors": [result["predictors"] for result in results],
        "cells": [cell for result in results for cell in result["cells"][SETTINGS[0].name]],
    }
    print(report.write("rivals", figures))
