"""Answers that do not stand, on held-out prompts of the shipped family: with and without skip prediction and early checks.

Every tier answers every prompt, by the torch engine; the judge's model scores each answer and its beginnings. Then routing is
replayed by the code that routers and planner use. Splits: half of the prompts to train the predictor, choose the skip rule
and fit the early checks; the other half for the figures. Thresholds are those of `mesh.yaml`, for all.

An answer that is rejected early costs LAG_TOKENS more than the check says: what is generated while it is scored.
Answers and scores are kept in `build/skipping_tiers`; delete them to have them generated again (about five CPU minutes).
"""

import asyncio
import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks import report
from judge_service.calibration import Calibration
from judge_service.scorers import JudgedAnswer
from judge_service.scorers.judge_model import BatchOptions, JudgeModelScorer
from models.training import answers, tasks
from models.training.measure import heldout_problems
from models.training.problems import Problem
from planner_service.early_checks import first_rejection, fit_early_checks
from planner_service.routing.quality import JudgedSample, route
from planner_service.routing.skip_rule import cheapest_rule
from planner_service.score_predictor import train
from planner_service.simulator.workload import Bools, Floats, Ints
from services.domain.early_checks import EarlyCheck

ROOT = Path(__file__).parents[1]
FAMILY, KEPT = ROOT / "models" / "family", ROOT / "build" / "skipping_tiers"
TIERS = ("small", "medium", "large")
PARAMETERS = (0.12, 0.82, 2.41)  # millions; what a token of each tier costs
JUDGE_PARAMETERS = 2.41
MORE_PROMPTS, SEED = 3500, 4242
SPLITS, QUICK_SPLITS = 10, 2
CHECKS = (16, 64)
ERROR = 0.01
LAG_TOKENS = 8
ROUTING_LIMITS = tuple(range(5, 100, 5))  # of direct routing, by predicted score
BATCH = BatchOptions(64, 16_384)


@dataclass(frozen=True, slots=True, eq=False)
class Data:
    """N prompts. right (N, C): by the expected answers.

    part_scores: by tier, (N, K) of the first CHECKS tokens; NaN where the answer has no more.
    """

    texts: list[str]
    sample: JudgedSample
    right: Bools
    part_scores: tuple[Floats, ...]

    def subset(self, rows: Ints) -> "Data":
        parts = tuple(scores[rows] for scores in self.part_scores)
        return Data([self.texts[i] for i in rows], self.sample.subset(rows), self.right[rows], parts)


@dataclass(slots=True)
class Outcome:
    """Of one way to route, on held-out prompts, per prompt. in_vain: output tokens of answers that do not stand.

    compute: output tokens times the tier's parameters (in millions). judge_tokens: prompts and answers that the judge reads.
    """

    accuracy: float
    in_vain: float
    compute: float
    judge_tokens: float
    shares: tuple[float, ...]
    other: dict[str, float] = field(default_factory=dict)


def run(_rounds: int) -> None:
    _measured(_data(), SPLITS)


def run_quick(_rounds: int) -> None:
    _measured(_data(), QUICK_SPLITS)


def _measured(data: Data, splits: int) -> None:
    thresholds = tuple(
        float(tier["threshold"]) for tier in yaml.safe_load((ROOT / "mesh.yaml").read_text())["tiers"][:-1]
    )
    by_way: dict[str, list[Outcome]] = {}
    for split in range(splits):
        order = np.random.default_rng(split).permutation(len(data.texts))
        half = len(order) // 2
        for way, outcome in _split(data.subset(order[:half]), data.subset(order[half:]), thresholds).items():
            by_way.setdefault(way, []).append(outcome)
    plain = by_way["cascade"]
    figures: dict[str, Any] = {
        "prompts": len(data.texts),
        "splits": splits,
        "thresholds": thresholds,
        "checks_after_tokens": CHECKS,
        "stated_error": ERROR,
        "lag_tokens": LAG_TOKENS,
        "ways": {way: _figures(outcomes, plain) for way, outcomes in by_way.items()},
    }
    print(f"{'':28}{'accuracy':>22}{'tokens in vain':>24}{'against cascade':>24}{'compute':>10}{'and judge':>10}")
    for way, row in figures["ways"].items():
        ratio = _text(row["in_vain_ratio"])
        print(
            f"{way:28}{_text(row['accuracy']):>22}{_text(row['in_vain']):>24}{ratio:>24}{row['compute_ratio'][0]:>10.3f}"
            f"{row['compute_with_judge_ratio'][0]:>10.3f}"
        )
    print(report.write("skipping_tiers", figures))


def _figures(outcomes: Sequence[Outcome], plain: Sequence[Outcome]) -> dict[str, Any]:
    pairs = [*zip(outcomes, plain, strict=True)]
    return {
        "accuracy": _interval(o.accuracy for o in outcomes),
        "accuracy_difference": _interval(o.accuracy - p.accuracy for o, p in pairs),
        "in_vain": _interval(o.in_vain for o in outcomes),
        "in_vain_ratio": _interval(o.in_vain / p.in_vain for o, p in pairs),
        "compute_ratio": _interval(o.compute / p.compute for o, p in pairs),
        "compute_with_judge_ratio": _interval(
            (o.compute + o.judge_tokens * JUDGE_PARAMETERS) / (p.compute + p.judge_tokens * JUDGE_PARAMETERS)
            for o, p in pairs
        ),
        "judge_tokens_ratio": _interval(o.judge_tokens / p.judge_tokens for o, p in pairs),
        "share_answered": [round(float(np.mean([o.shares[t] for o in outcomes])), 4) for t in range(len(TIERS))],
        **{name: _interval(o.other[name] for o in outcomes) for name in outcomes[0].other},
    }


def _interval(values: Iterable[float]) -> tuple[float, float, float]:
    """(mean, 2.5th and 97.5th percentile over splits)."""
    array = np.array([*values])
    low, high = np.percentile(array, (2.5, 97.5))
    return round(float(array.mean()), 5), round(float(low), 5), round(float(high), 5)


def _text(interval: tuple[float, float, float]) -> str:
    return f"{interval[0]:.4g} [{interval[1]:.4g}, {interval[2]:.4g}]"


def _split(fitted: Data, held_out: Data, thresholds: tuple[float, ...]) -> dict[str, Outcome]:
    trained = train(fitted.texts, TIERS, fitted.sample.scores)
    of_held_out = [trained.predictor.predict(text) for text in held_out.texts]
    predicted = np.array([[scores[tier] for tier in TIERS] for scores in of_held_out])
    sample = JudgedSample(
        TIERS, fitted.sample.input_tokens, fitted.sample.output_tokens, fitted.sample.scores, trained.predicted
    )
    test = JudgedSample(
        TIERS, held_out.sample.input_tokens, held_out.sample.output_tokens, held_out.sample.scores, predicted
    )
    rule = cheapest_rule(sample, thresholds, PARAMETERS, route(sample, thresholds).quality)
    in_vain_rule = cheapest_rule(sample, thresholds, (1.0, 1.0, 1.0), route(sample, thresholds).quality)
    checks = [
        fit_early_checks(CHECKS, fitted.part_scores[t], fitted.sample.scores[:, t] >= thresholds[t], ERROR)
        for t in range(len(thresholds))
    ]
    ways = {
        "cascade": _outcome(held_out, test, thresholds),
        "skip (least compute)": _outcome(held_out, test.skipping(rule.limits), thresholds),
        "skip (least tokens)": _outcome(held_out, test.skipping(in_vain_rule.limits), thresholds),
        "early": _outcome(held_out, test, thresholds, checks),
        "skip and early": _outcome(held_out, test.skipping(rule.limits), thresholds, checks),
        "large alone": _outcome(held_out, test, (101.0, 101.0)),
    }
    for name in ("skip (least compute)", "skip and early"):
        ways[name].other |= {f"skip_below_{TIERS[t]}": limit or 0.0 for t, limit in enumerate(rule.limits)}
    ways["direct routing"] = _direct(held_out, test, sample, ways["skip and early"].compute)
    return ways


def _outcome(
    data: Data,
    sample: JudgedSample,
    thresholds: tuple[float, ...],
    checks: Sequence[tuple[EarlyCheck, ...]] = ((), ()),
) -> Outcome:
    """Routed with early checks: an answer that one of them rejects is as one that scores 0, and shorter."""
    tokens, scores = sample.output_tokens.copy(), sample.scores.copy()
    judged, asked_checks = sample.input_tokens[:, None] + sample.output_tokens, np.zeros_like(sample.output_tokens)
    wrong_rejections = accepted = 0
    for t, of_tier in enumerate(checks):
        stopped = first_rejection(of_tier, CHECKS, data.part_scores[t])
        rejected = stopped < len(CHECKS)
        stands = sample.scores[:, t] >= thresholds[t]
        wrong_rejections, accepted = wrong_rejections + int((rejected & stands).sum()), accepted + int(stands.sum())
        for k, after in enumerate(CHECKS):
            if any(check.after_tokens == after for check in of_tier):
                is_made = (sample.output_tokens[:, t] > after) & (stopped >= k)
                asked_checks[:, t] += np.where(is_made, sample.input_tokens + after, 0)
        at = np.array([*CHECKS, 0])[stopped] + LAG_TOKENS
        tokens[:, t] = np.where(rejected, np.minimum(tokens[:, t], at), tokens[:, t])
        judged[:, t] = np.where(rejected, 0, judged[:, t])  # it is not scored once more
        scores[rejected, t] = 0.0
    cut = JudgedSample(TIERS, sample.input_tokens, tokens, scores, sample.predicted, sample.passed_over)
    # a threshold of 0 lets an answer stand that scores 0; these have none
    routed = route(cut, thresholds)
    answered, everyone = routed.answered, np.arange(len(sample))
    used = routed.processed.T
    stands = np.zeros_like(used)
    stands[everyone, answered] = True
    cost = tokens * np.array(PARAMETERS)[None, :]
    other = {"error": wrong_rejections / accepted} if accepted else {}
    return Outcome(
        float(data.right[everyone, answered].mean()),
        float((tokens * (used & ~stands)).sum() / len(sample)),
        float((cost * used).sum() / len(sample)),
        float(((judged + asked_checks) * used)[:, :-1].sum() / len(sample)),
        routed.share_answered(),
        other,
    )


def _direct(data: Data, test: JudgedSample, fitted: JudgedSample, compute: float) -> Outcome:
    """Each prompt to the first tier whose predicted score is high enough, and no judge: the limit that spends no more than
    `compute` on the prompts it was fitted to, and is the most accurate by their scores."""
    assert fitted.predicted is not None
    assert test.predicted is not None

    def chosen(predicted: Floats, limit: float) -> Ints:
        able = np.column_stack([predicted[:, :-1] >= limit, np.ones(len(predicted), np.bool_)])
        return np.asarray(np.argmax(able, axis=1), np.int64)

    def cost(sample: JudgedSample, tiers: Ints) -> float:
        return float((sample.output_tokens[np.arange(len(tiers)), tiers] * np.array(PARAMETERS)[tiers]).mean())

    limits = [limit for limit in ROUTING_LIMITS if cost(fitted, chosen(fitted.predicted, limit)) <= compute]
    tiers = chosen(test.predicted, max(limits, default=ROUTING_LIMITS[0]))
    rows = np.arange(len(tiers))
    shares = tuple(float((tiers == t).mean()) for t in range(len(TIERS)))
    return Outcome(float(data.right[rows, tiers].mean()), 0.0, cost(test, tiers), 0.0, shares)


def _data() -> Data:
    """All answers and their scores, generated where they are not kept."""
    calibration = Calibration.read(FAMILY / "judge" / "calibration.json")
    rows = [_answered(tier) for tier in TIERS]
    count = len(rows[0])
    outputs = np.array([[rows[t][i]["tokens"] for t in range(len(TIERS))] for i in range(count)], np.int64)
    scores = np.array([[_score(rows[t][i], calibration) for t in range(len(TIERS))] for i in range(count)])
    right = np.array([[bool(rows[t][i]["right"]) for t in range(len(TIERS))] for i in range(count)])
    parts = tuple(
        np.array([[_part_score(rows[t][i], after, calibration) for after in CHECKS] for i in range(count)])
        for t in range(len(TIERS))
    )
    inputs = np.array([row["prompt_tokens"] for row in rows[0]], np.int64)
    return Data(
        [row["prompt"] for row in rows[0]], JudgedSample(TIERS, inputs, np.maximum(1, outputs), scores), right, parts
    )


def _score(row: dict[str, Any], calibration: Calibration) -> float:
    """As the judge service scores: an answer that is empty or truncated gets 0."""
    if row["tokens"] >= answers.MAX_TOKENS or not row["reply"].strip():
        return 0.0
    return calibration.apply(min(row["logprobs"]))


def _part_score(row: dict[str, Any], after: int, calibration: Calibration) -> float:
    """Of the first `after` tokens, the last of which the judge leaves out; NaN where the answer has no more tokens."""
    if row["tokens"] <= after:
        return math.nan
    return calibration.apply(min(row["logprobs"][: after - 1]))


def _problems() -> list[Problem]:
    """The shipped held-out prompts, and more that no model was trained on."""
    shipped = heldout_problems()
    known = {problem.key for problem in shipped}
    more = [p for p in tasks.held_out(MORE_PROMPTS + len(shipped), SEED) if p.key not in known][:MORE_PROMPTS]
    random.Random(1).shuffle(more)
    return shipped + more


def _answered(tier: str) -> list[dict[str, Any]]:
    path = KEPT / f"{tier}.jsonl"
    if not path.is_file():
        KEPT.mkdir(parents=True, exist_ok=True)
        problems = _problems()
        by_key = {a.problem.key: a for a in answers.answer_all(FAMILY / tier, tier, problems, threads=1)}
        rows = asyncio.run(_judged([by_key[problem.key] for problem in problems]))
        partial = path.with_suffix(".tmp")
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
        partial.replace(path)
    return [json.loads(line) for line in path.read_text().splitlines()]


async def _judged(answered: Sequence[answers.Answered]) -> list[dict[str, Any]]:
    scorer = JudgeModelScorer(FAMILY / "judge", BATCH, threads=1, device="cpu")
    await scorer.start()
    items = [JudgedAnswer(answers.chat_of(a.problem), a.reply, a.tier) for a in answered]
    logprobs = scorer.token_logprobs(items)
    await scorer.close()
    return [
        {
            "prompt": a.problem.prompt,
            "reply": a.reply,
            "tokens": a.tokens,
            "right": a.correct,
            "prompt_tokens": prompt_tokens,
            "logprobs": [round(value, 4) for value in values],
        }
        for a, (prompt_tokens, values) in zip(answered, logprobs, strict=True)
    ]
