"""Real instruct models on public prompts: what cascades of them save and lose, by the records in results/real_models.

`python -m benchmarks.real_models answers` lets the models answer, for hours, at low priority; `records` in its place adds
what they have answered to the records, without text. Each model answers each prompt once, alone, greedily, by the llamacpp
engine with one thread, 8 to 32 prompts at a time. Answers that were cut off count as wrong. CPU seconds are those of the
tokens at the costs that `costs` has measured, of escalated answers at those of `drafts`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.public_data import DataMissing
from benchmarks.real_models.costs import read_costs, read_drafts
from benchmarks.real_models.prompts import MODELS, Set, tasks
from benchmarks.real_models.records import Record, read
from benchmarks.real_models.systems import Model, Outcome, System, compared, cross_fitted, features, mixed, with_belief
from benchmarks.reliability import reliability
from penstock.judge_service.calibration.metrics import brier
from penstock.judge_service.scorers.combined.combination import held_out_logits
from penstock.judge_service.scoring.interface import probability
from penstock.services.domain.auc import auc

SMALL, LARGE, TINY = range(len(MODELS))
SETS: tuple[Set, ...] = ("humaneval", "gsm8k")
LEAST_PROMPTS = 30
SCORERS = ("examples", "mean", "least", "combined", "agreement", *(f"believed:{model}" for model in MODELS[:2]))
SYSTEMS = {
    "0.5B, 1.5B": System((SMALL, LARGE), "combined"),
    "0.5B, 1.5B, best answer": System((SMALL, LARGE), "combined", "best"),
    "0.5B, 1.5B, examples only": System((SMALL, LARGE), "examples"),
    "0.5B, 1.5B, log-probability only": System((SMALL, LARGE), "mean"),
    "0.5B, 1.5B, skipping": System((SMALL, LARGE), "combined", "skipping"),
    "0.5B or 1.5B by the prompt": System((SMALL, LARGE), "combined", "routing"),
    "135M, 0.5B": System((TINY, SMALL), "combined"),
    "135M, 1.5B": System((TINY, LARGE), "combined"),
    "135M, 0.5B, 1.5B": System((TINY, SMALL, LARGE), "combined"),
}
GOALS = ("cheap", "right")


def alone(model: Model) -> dict[str, Any]:
    """What a model gets right and costs."""
    each = [*model.records.values()]
    rights = [bool(one.right) for one in each if one.right is not None]
    return {
        "prompts": len(each),
        "right": _share(rights),
        "cut": round(float(np.mean([one.truncated for one in each])), 3),
        "output_tokens": round(float(np.mean([one.tokens[1] for one in each])), 1),
        "cpu_s": round(float(np.mean([model.cpu_s(prompt) for prompt in model.records])), 2),
    }


def _share(rights: Sequence[bool]) -> list[float] | None:
    """(share, low, high), by Wilson's interval of 95 %."""
    if not rights:
        return None
    n, p, z = len(rights), float(np.mean(rights)), 1.96
    middle, half = (p + z * z / (2 * n)), z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return [round(float(each), 3) for each in (p, (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n))]


def scorer_quality(records: Mapping[str, Record], scorer: str) -> dict[str, Any] | None:
    """How well a scorer tells right answers that were not cut, cross-validated; None with too few, or all right or wrong."""
    chosen = [one for one in with_belief(records, scorer).values() if one.right is not None and not one.truncated]
    if scorer == "examples":
        chosen = [one for one in chosen if one.examples[0]]
    right = [bool(one.right) for one in chosen]
    if len(chosen) < LEAST_PROMPTS or len(set(right)) == 1:
        return None
    logits = held_out_logits(np.array([features(one, scorer) for one in chosen]), np.array(right), [*range(len(right))])
    rng, drawn = np.random.default_rng(1), list[float]()
    for _ in range(500):
        rows = rng.integers(0, len(right), len(right))
        drawn.append(auc(logits[rows].tolist(), [right[i] for i in rows]))
    scores = [100 * probability(float(logit)) for logit in logits]
    return {
        "answers": len(right),
        "auc": [
            round(auc(logits.tolist(), right), 3),
            *(round(float(q), 3) for q in np.quantile(drawn, (0.025, 0.975))),
        ],
        "brier": round(brier(scores, right), 3),
        "reliability": [
            [round(each.predicted, 3), round(each.good, 3), each.count] for each in reliability(scores, right)
        ],
    }


def compare(models: Sequence[Model], texts: Mapping[str, str], system: System, goal: str) -> dict[str, Any] | None:
    """A system, cross-fitted, compared with its largest model alone; None where too few prompts have all its records.

    texts: of all prompts.
    """
    usable = [models[index].only(with_belief(models[index].records, system.scorer)) for index in system.models]
    prompts = [name for name in usable[0].records if all(name in model.records for model in usable)]
    if len(prompts) < LEAST_PROMPTS:
        return None
    own = replace(system, models=tuple(range(len(usable))))
    result = cross_fitted(usable, texts, prompts, own, goal)
    first, large = (
        Outcome(np.array([bool(model.records[p].right) for p in prompts]), np.array([model.cpu_s(p) for p in prompts]))
        for model in (usable[0], usable[-1])
    )
    at_once = Counter(usable[-1].records[p].set for p in np.array(prompts)[result.cpu_s == large.cpu_s])
    return {
        "prompts": len(prompts),
        "right": round(float(result.right.mean()), 3),
        "cpu_s": round(float(result.cpu_s.mean()), 2),
        "large_right": round(float(large.right.mean()), 3),
        "large_at_once": at_once,  # prompts that no smaller model was given
        "mixed_right": round(mixed(first, large, float(result.cpu_s.mean())), 3),
        **compared(result, large),
    }


def run(_: int) -> None:
    """Nothing here is timed: one round is all."""
    costs = read_costs()
    drafts = read_drafts()
    models = [Model(read(name), costs[name], costs, name, drafts.get(name, {})) for name in MODELS]
    if not any(model.records for model in models):
        raise DataMissing("no records: run python -m benchmarks.real_models answers, and then records")
    texts = {task.id: task.text for name in SETS for task in tasks(name)}
    figures = dict[str, Any]()
    for name in (*SETS, "both"):
        sets = SETS if name == "both" else (name,)
        by_model = [model.only({key: one for key, one in model.records.items() if one.set in sets}) for model in models]
        figures[name] = {
            "alone": {model: alone(each) for model, each in zip(MODELS, by_model, strict=True) if each.records},
            "scorers": {
                model: {
                    scorer: result for scorer in SCORERS if (result := scorer_quality(each.records, scorer)) is not None
                }
                for model, each in zip(MODELS, by_model, strict=True)
            },
            "systems": {
                f"{label} ({goal})": result
                for label, system in SYSTEMS.items()
                for goal in GOALS
                if (result := compare(by_model, texts, system, goal)) is not None
            },
        }
        _show(name, figures[name])
    print(report.write("real_models", {"sets": figures}))


def _show(name: str, figures: dict[str, Any]) -> None:
    for model, each in figures["alone"].items():
        print(f"{name}: {model}: {each}")
    for model, scorers in figures["scorers"].items():
        for scorer, each in scorers.items():
            print(f"{name}: {model}: {scorer}: AUC {each['auc']} of {each['answers']}, Brier {each['brier']}")
    for label, each in figures["systems"].items():
        print(f"{name}: {label}: {each}", flush=True)
