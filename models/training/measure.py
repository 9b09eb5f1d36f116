"""Measure the models on problems and wordings it has never seen; fit the calibrations of the judge and of the tokens'
confidence that screens for it, the predictor of scores, and the thresholds and skip limits of the cascade.

Two sets of held-out problems with none in common: TEST_COUNT for the figures, and others for what is fitted (calibration,
thresholds). The same test problems are asked again with surface noise and in held-out wordings.
"""

import itertools
import json
import platform
import time
from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models.training import tasks, wording
from models.training.answers import COST_BATCH, Answered, accuracy, answer_all, logprobs_all, score_all, step_cost_s
from models.training.data import turn_ids
from models.training.operating_point import Answers, Outcome, Rule, best_of, choose, outcome
from models.training.problems import Problem
from penstock.judge_service.calibration.isotonic import Calibration, fit
from penstock.judge_service.scorers.screened import is_sure
from penstock.planner_service.question.score_predictor import train
from penstock.services.domain.auc import auc
from penstock.services.domain.score_prediction import ScorePredictor

TIERS = ("small", "medium", "large")
LOWER = TIERS[:-1]
TEST_COUNT, TEST_SEED = 500, 20_27
FIT_COUNT, FIT_SEED = 1500, 78
PREDICTOR, PREDICTOR_PROMPTS, PREDICTOR_SEED = "predictor.json", 4000, 79
SLACK = 0.01  # accuracy that the cascade may lose to the large tier where its rule is chosen
SHARES_READ = (0.25, 0.5, 0.75, 1.0)
MARGINS = (0.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 50.0)
"""Of the screened scorer, from which the shipped one is chosen. 0: the judge reads all; 50: none (confidence alone)."""
CONFIDENCE = Path("judge") / "confidence.json"
COST_ROUNDS = 5
RELIABILITY_BINS = 10
# How the test prompts are asked once more: noise, and whether in held-out wordings.
ROWS: dict[str, tuple[wording.Noise, bool]] = {
    "as they are": (wording.clean, False),
    "final mark flipped": (wording.flipped_mark, False),
    "first letter lower-cased": (wording.lower_first, False),
    "Please ...": (wording.please, False),
    "... Thanks.": (wording.thanks, False),
    "held-out wordings": (wording.clean, True),
    "held-out wordings, any noise": (wording.surface, True),
}


def heldout_problems(noise: wording.Noise = wording.clean, *, held_out_wording: bool = False) -> list[Problem]:
    """The 500 held-out prompts that every figure is about."""
    return tasks.held_out(TEST_COUNT, TEST_SEED, noise=noise, held_out_wording=held_out_wording)


def fit_problems() -> list[Problem]:
    """Held-out prompts with noise to fit on; none of the test's."""
    test_keys = {p.key for p in heldout_problems()}
    candidates = tasks.held_out(FIT_COUNT + TEST_COUNT, FIT_SEED, noise=wording.surface)
    return [p for p in candidates if p.key not in test_keys][:FIT_COUNT]


def by(answered: Seq[Answered], what: str) -> dict[str, float]:
    """Accuracy by task or level."""
    groups: dict[str, list[bool]] = defaultdict(list)
    for a in answered:
        groups[str(getattr(a.problem, what))].append(a.correct)
    return {name: round(sum(group) / len(group), 3) for name, group in sorted(groups.items())}


def auc_by_share(logprobs: Seq[Seq[float]], good: list[bool]) -> dict[str, float]:
    """The judge's AUC when it has read so much of each reply: its least likely token up to there; the end only at 1."""
    result = {}
    for share in SHARES_READ:
        scores = [min(row if share == 1 else row[: max(1, int(share * (len(row) - 1)))]) for row in logprobs]
        result[f"{share:g}"] = round(auc(scores, good), 4)
    return result


def auc_by_length(scores: Seq[float], answered: Seq[Answered]) -> dict[str, float]:
    """AUC within thirds of the replies by length, and that of the length alone: what judging by nothing else would reach."""
    lengths = [a.tokens for a in answered]
    order = np.argsort(lengths, kind="stable")
    result = {"length alone": round(auc([-float(n) for n in lengths], [a.correct for a in answered]), 4)}
    for name, part in zip(("short", "middle", "long"), np.array_split(order, 3), strict=True):
        good = [answered[i].correct for i in part]
        if any(good) and not all(good):
            result[name] = round(auc([scores[i] for i in part], good), 4)
    return result


def reliability(scores: Seq[float], good: Seq[bool]) -> list[dict[str, float]]:
    """For each tenth of the calibrated scale: how many answers, their mean score, and the share of right ones (percent)."""
    bins: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    for score, right in zip(scores, good, strict=True):
        bins[min(RELIABILITY_BINS - 1, int(score / 100 * RELIABILITY_BINS))].append((score, right))
    return [
        {
            "from": 100 * i / RELIABILITY_BINS,
            "answers": len(group),
            "mean_score": round(sum(score for score, _ in group) / len(group), 1),
            "right": round(100 * sum(right for _, right in group) / len(group), 1),
        }
        for i, group in sorted(bins.items())
    ]


@dataclass(frozen=True, slots=True)
class Calibrations:
    """judge: of the judge model. confidence: of the least likely token of an answer, by the tier that wrote it."""

    judge: Calibration
    confidence: Calibration


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Of one tier's answers: the screened scorer's scores, and which of them the judge model had to read."""

    scores: list[float]
    read: list[bool]


@dataclass(frozen=True, slots=True)
class Costs:
    """CPU milliseconds of one thread. step: of a decode step of COST_BATCH replies, by tier. read: of a token of a prompt, by
    model, the judge included."""

    step: dict[str, float]
    read: dict[str, float]


@dataclass(frozen=True, slots=True)
class Cascade:
    """How the family is shipped as a cascade. margin: of the screened scorer."""

    calibrations: Calibrations
    predictor: ScorePredictor
    costs: Costs
    margin: float
    rule: Rule


def costs_of(folder: Path, answered: Seq[Answered]) -> Costs:
    """Measured: steps of every tier, the judge's reading of `answered`. Reading is matrix products: others by parameters."""
    tokens = sum(prompt_tokens(a.problem) + a.tokens for a in answered)
    began = time.process_time()
    score_all(folder / "judge", answered, threads=1)
    judge_ms = 1000 * (time.process_time() - began) / tokens
    sizes = {name: (folder / name / "model.safetensors").stat().st_size for name in (*TIERS, "judge")}
    return Costs(step_costs(folder), {name: judge_ms * size / sizes["judge"] for name, size in sizes.items()})


def prompt_tokens(problem: Problem) -> int:
    return 1 + len(turn_ids(problem)[0])


def cost_ms(costs: Costs, answered: Answered, *, judged: bool) -> float:
    """CPU milliseconds: of the prompt read, the tokens in steps of COST_BATCH, all read by the judge if judged."""
    read = prompt_tokens(answered.problem)
    answering = read * costs.read[answered.tier] + answered.tokens * costs.step[answered.tier] / COST_BATCH
    return answering + (read + answered.tokens) * costs.read["judge"] * judged


def least_logprobs(folder: Path, tier: str, answered: Seq[Answered], threads: int) -> list[float]:
    """The logprob of the least likely token of each answer, by the model that wrote it."""
    return [min(row) for row in logprobs_all(folder / tier, answered, threads=threads)]


def verdicts(raw: Seq[float], least: Seq[float], calibrations: Calibrations, margin: float) -> Verdicts:
    """What the screened scorer says. raw: of the judge model. least: logprobs of the least likely tokens."""
    confidence = [calibrations.confidence.apply(x) for x in least]
    read = [not is_sure(score, margin) for score in confidence]
    judged = [calibrations.judge.apply(x) for x in raw]
    return Verdicts([j if r else c for j, c, r in zip(judged, confidence, read, strict=True)], read)


def all_answers(
    answered: dict[str, list[Answered]], judged: dict[str, Verdicts], predictor: ScorePredictor, costs: Costs
) -> Answers:
    """The same problems answered by all tiers, as `operating_point` takes them. judged: the answers of the LOWER tiers."""
    read = {tier: judged[tier].read if tier in LOWER else [False] * len(answered[tier]) for tier in TIERS}
    predicted = [predictor.predict(a.problem.prompt) for a in answered[TIERS[0]]]
    return Answers(
        right=np.array([[a.correct for a in answered[tier]] for tier in TIERS]),
        tokens=np.array([[float(a.tokens) for a in answered[tier]] for tier in TIERS]),
        cost_ms=np.array(
            [[cost_ms(costs, a, judged=r) for a, r in zip(answered[tier], read[tier], strict=True)] for tier in TIERS]
        ),
        scores=np.array([judged[tier].scores for tier in LOWER]),
        predicted=np.array([[row[tier] for row in predicted] for tier in LOWER]),
    )


def cascade_figures(answers: Answers, rule: Rule) -> dict[str, Any]:
    """What the cascade would have answered, and what it costs as a share of the large tier alone."""
    found = outcome(answers, rule)
    without = outcome(answers, Rule(rule.thresholds, (0.0,) * len(rule.skip_below)))
    return {
        "accuracy": found.accuracy,
        "share_answered": dict(zip(TIERS, found.shares, strict=True)),
        "wrong_among_accepted": found.wrong_among_accepted,
        "cost_of_large_alone": found.cost_ms / float(answers.cost_ms[-1].mean()),
        "tokens_in_vain": found.tokens_in_vain,
        "without_skipping": {"accuracy": without.accuracy, "tokens_in_vain": without.tokens_in_vain},
    }


def train_predictor(folder: Path, problems: Seq[Problem], calibration: Calibration, threads: int) -> ScorePredictor:
    """Train the predictor of the judge's scores of the lower tiers' answers; write it into `folder`."""
    columns = []
    for tier in LOWER:
        answered = answer_all(folder / tier, tier, problems, threads=threads)
        columns.append([calibration.apply(raw) for raw in score_all(folder / "judge", answered, threads=threads)])
    trained = train([problem.prompt for problem in problems], LOWER, np.array(columns).T)
    (folder / PREDICTOR).write_text(trained.predictor.to_json())
    return trained.predictor


def step_costs(folder: Path) -> dict[str, float]:
    """Milliseconds of a decode step at batch 8 on one thread: the least of several rounds in turns (CPU time)."""
    rounds = [{tier: step_cost_s(folder / tier) for tier in TIERS} for _ in range(COST_ROUNDS)]
    return {tier: round(1000 * min(costs[tier] for costs in rounds), 3) for tier in TIERS}


def fitted_cascade(folder: Path, threads: int) -> tuple[Cascade, dict[str, dict[str, float]]]:
    """Fit calibrations, predictor, margin, thresholds and skip limits; write the first two into `folder`.

    Returns the cascade, and for each of MARGINS what the best rule with it reaches on the prompts that all this is fitted to.
    """
    fitting = fit_problems()
    answered = {tier: answer_all(folder / tier, tier, fitting, threads=threads) for tier in TIERS}
    raw = {tier: score_all(folder / "judge", answered[tier], threads=threads) for tier in LOWER}
    least = {tier: least_logprobs(folder, tier, answered[tier], threads) for tier in LOWER}
    lower = [a for tier in LOWER for a in answered[tier]]
    calibrations = Calibrations(
        _calibration([x for tier in LOWER for x in raw[tier]], lower),
        _calibration([x for tier in LOWER for x in least[tier]], lower),
    )
    calibrations.judge.write(folder / "judge" / "calibration.json")
    calibrations.confidence.write(folder / CONFIDENCE)
    unseen = list(itertools.islice(tasks.stream(PREDICTOR_SEED), PREDICTOR_PROMPTS))
    predictor = train_predictor(folder, unseen, calibrations.judge, threads)
    costs = costs_of(folder, lower)
    large_ms = float(np.mean([cost_ms(costs, a, judged=False) for a in answered[TIERS[-1]]]))
    rules, found = dict[float, Rule](), dict[float, Outcome]()
    for margin in MARGINS:
        judged = {tier: verdicts(raw[tier], least[tier], calibrations, margin) for tier in LOWER}
        answers = all_answers(answered, judged, predictor, costs)
        rules[margin] = choose(answers, SLACK)
        found[margin] = outcome(answers, rules[margin])
    best = best_of(found, accuracy(answered[TIERS[-1]]) - SLACK)
    by_margin = {
        f"{margin:g}": {"accuracy": one.accuracy, "cost_of_large_alone": one.cost_ms / large_ms}
        for margin, one in found.items()
    }
    return Cascade(calibrations, predictor, costs, best, rules[best]), by_margin


def measure(folder: Path, threads: int) -> dict[str, Any]:
    """Write figures.json, the held-out prompts and what is fitted into `folder`, which holds tiers and judge."""
    cascade, margins = fitted_cascade(folder, threads)
    rows = {}
    on_test: dict[str, dict[str, list[Answered]]] = {}
    for row, (noise, reworded) in ROWS.items():
        problems = heldout_problems(noise, held_out_wording=reworded)
        on_test[row] = {tier: answer_all(folder / tier, tier, problems, threads=threads) for tier in TIERS}
        rows[row] = _row(folder, on_test[row], cascade, threads)
    plain, predictor = on_test["as they are"], cascade.predictor
    figures: dict[str, Any] = {
        "machine": f"{platform.machine()}, {threads} threads, Python {platform.python_version()}",
        "test_prompts": TEST_COUNT,
        "step_cost_ms": cascade.costs.step,
        "read_cost_ms": cascade.costs.read,
        "predictor": {"prompts": predictor.samples, "auc": dict(zip(predictor.tiers, predictor.auc, strict=True))},
        "tiers": {tier: _tier(folder, tier, plain[tier]) for tier in TIERS},
        "rows": rows,
        "judge": _judge(folder, on_test, cascade.calibrations.judge, threads),
        "margin": cascade.margin,
        "margins": margins,
        "thresholds": dict(zip(TIERS, cascade.rule.thresholds, strict=False)),
        "skip_below": dict(zip(TIERS, cascade.rule.skip_below, strict=False)),
    }
    (folder / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    write_heldout(folder / "heldout.jsonl", heldout_problems())
    return figures


def _calibration(raw: Seq[float], answered: Seq[Answered]) -> Calibration:
    """Of logprobs, whose uncalibrated scores are their probabilities in percent."""
    return fit(raw, [a.correct for a in answered], [100 * float(np.exp(x)) for x in raw])


def _row(folder: Path, answered: dict[str, list[Answered]], cascade: Cascade, threads: int) -> dict[str, Any]:
    raw = {tier: score_all(folder / "judge", answered[tier], threads=threads) for tier in LOWER}
    least = {tier: least_logprobs(folder, tier, answered[tier], threads) for tier in LOWER}
    judged = {tier: verdicts(raw[tier], least[tier], cascade.calibrations, cascade.margin) for tier in LOWER}
    answers = all_answers(answered, judged, cascade.predictor, cascade.costs)
    return {
        "accuracy": {tier: accuracy(answered[tier]) for tier in TIERS},
        "auc": {tier: round(auc(raw[tier], [a.correct for a in answered[tier]]), 4) for tier in LOWER},
        "read_by_the_judge": {tier: sum(judged[tier].read) / len(judged[tier].read) for tier in LOWER},
        "cascade": cascade_figures(answers, cascade.rule),
    }


def _tier(folder: Path, tier: str, answered: list[Answered]) -> dict[str, Any]:
    lengths = sorted(a.tokens for a in answered)
    return {
        "accuracy": accuracy(answered),
        "by_level": by(answered, "level"),
        "by_task": by(answered, "task"),
        "reply_tokens": {
            "p50": lengths[len(lengths) // 2],
            "p95": lengths[int(0.95 * len(lengths))],
            "most": lengths[-1],
        },
        "right": "".join("01"[a.correct] for a in answered),  # by line of heldout.jsonl
        "training": _training(folder, tier),
    }


def _judge(
    folder: Path, on_test: dict[str, dict[str, list[Answered]]], calibration: Calibration, threads: int
) -> dict[str, Any]:
    figures: dict[str, Any] = {"training": _training(folder, "judge"), "calibration_samples": calibration.samples}
    for tier in LOWER:
        answered = on_test["as they are"][tier]
        good = [a.correct for a in answered]
        logprobs = logprobs_all(folder / "judge", answered, threads=threads)
        raw = [min(row) for row in logprobs]
        scores = [calibration.apply(x) for x in raw]
        figures[tier] = {
            "auc_by_share_read": auc_by_share(logprobs, good),
            "auc_by_length": auc_by_length(raw, answered),
            "reliability": reliability(scores, good),
            "brier": round(float(np.mean([(s / 100 - g) ** 2 for s, g in zip(scores, good, strict=True)])), 4),
        }
    return figures


def _training(folder: Path, name: str) -> dict[str, Any]:
    path = folder / f"{name}.figures.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write_heldout(path: Path, problems: Seq[Problem]) -> None:
    """The held-out chats with their answers; `prompt` is the last message where there is but one."""
    with path.open("w") as out:
        for p in problems:
            messages = [{"role": m.role, "content": m.content} for m in p.messages]
            row = {"messages": messages, "answer": p.answer, "task": p.task, "level": p.level}
            out.write(json.dumps(row | ({"prompt": p.prompt} if len(messages) == 1 else {})) + "\n")
