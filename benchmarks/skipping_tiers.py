"""Rejected answers, on held-out prompts of the shipped family: with and without skip prediction; and what it brings to
deliver the best answer of each prompt instead of the last one.

Every tier answers every prompt, by the torch engine. Answers are scored as by the scorer of `mesh.yaml`: by the confidence of
the tier itself, and by the judge's model where that is not sure. Then routing is replayed by the code that routers and
planner use. Splits: half of the prompts to train the predictor and choose the skip rule; the other half for the figures.
Thresholds are those of `mesh.yaml`, for all; `as shipped` also takes its skip limits and the shipped predictor, which have
seen none of these prompts.

CPU time is computed from tokens and the costs on the family's card: steps of batch 8, prompts and judged answers read once.
Then `skipping_under_load`: limits that move with the load, in virtual time.

Answers and scores are kept in `build/skipping_tiers`; delete them to have them generated again (about 15 CPU minutes).
"""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks import report, skipping_under_load
from benchmarks.skip_rule import cheapest_rule
from models.training import answers, tasks
from models.training.data import turn_ids
from models.training.measure import CONFIDENCE, Calibrations, Costs, Verdicts, heldout_problems, verdicts
from models.training.problems import Problem
from penstock.judge_service.calibration.isotonic import Calibration
from penstock.planner_service.question.score_predictor import train
from penstock.planner_service.routing.quality import JudgedSample, route
from penstock.planner_service.simulator.workload import Bools, Floats, Ints
from penstock.services.domain.score_prediction import ScorePredictor
from penstock.types.rules import AcceptanceRules

ROOT = Path(__file__).parents[1]
FAMILY, KEPT = ROOT / "models" / "family", ROOT / "build" / "skipping_tiers"
TIERS = ("small", "medium", "large")
MORE_PROMPTS, SEED = 3500, 4242
SPLITS, QUICK_SPLITS = 10, 2
ROUTING_LIMITS = tuple(range(5, 100, 5))  # of direct routing, by predicted score


def skips(limits: Sequence[float | None]) -> AcceptanceRules:
    return AcceptanceRules(skip_below=tuple(limits))


@dataclass(frozen=True, slots=True, eq=False)
class Data:
    """N prompts. right (N, C): by the expected answers. read (N, C): whether the judge's model reads the answer."""

    texts: list[str]
    sample: JudgedSample
    right: Bools
    read: Bools

    def subset(self, rows: Ints) -> "Data":
        texts = [self.texts[i] for i in rows]
        return Data(texts, self.sample.subset(rows), self.right[rows], self.read[rows])


@dataclass(slots=True)
class Outcome:
    """Of one way to route, on held-out prompts, per prompt. in_vain: output tokens of rejected answers.

    tiers_ms, judge_ms: CPU time of the tiers and of the judge. judge_tokens: that its model reads.
    """

    accuracy: float
    in_vain: float
    tiers_ms: float
    judge_ms: float
    judge_tokens: float
    shares: tuple[float, ...]
    other: dict[str, float] = field(default_factory=dict)


def run(_rounds: int) -> None:
    _measured(_data(), SPLITS)
    skipping_under_load.run()


def run_quick(_rounds: int) -> None:
    _measured(_data(), QUICK_SPLITS)
    skipping_under_load.run(quick=True)


def _measured(data: Data, splits: int) -> None:
    mesh = _mesh()
    thresholds = tuple(float(tier["threshold"]) for tier in mesh["tiers"][:-1])
    limits = tuple(float(tier["skip_below"]) for tier in mesh["tiers"][:-1])
    shipped = ScorePredictor.from_json((ROOT / mesh["router"]["score_predictor"]).read_text())
    costs = _costs()
    by_way: dict[str, list[Outcome]] = {}
    for split in range(splits):
        order = np.random.default_rng(split).permutation(len(data.texts))
        half = len(order) // 2
        fitted, held_out = data.subset(order[:half]), data.subset(order[half:])
        ways = _split(fitted, held_out, thresholds, costs)
        ways["as shipped"] = _outcome(held_out, _predicted(held_out, shipped).under(skips(limits)), thresholds, costs)
        for way, outcome in ways.items():
            by_way.setdefault(way, []).append(outcome)
    plain = by_way["cascade"]
    figures: dict[str, Any] = {
        "prompts": len(data.texts),
        "splits": splits,
        "thresholds": thresholds,
        "step_cost_ms": costs.step,
        "read_cost_ms": costs.read,
        "ways": {way: _figures(outcomes, plain) for way, outcomes in by_way.items()},
    }
    print(f"{'':28}{'accuracy':>22}{'tokens in vain':>24}{'against cascade':>24}{'tiers CPU':>10}{'and judge':>10}")
    for way, row in figures["ways"].items():
        ratio = _text(row["in_vain_ratio"])
        print(
            f"{way:28}{_text(row['accuracy']):>22}{_text(row['in_vain']):>24}{ratio:>24}{row['tiers_cpu_ratio'][0]:>10.3f}"
            f"{row['cpu_ratio'][0]:>10.3f}"
        )
    print(report.write("skipping_tiers", figures))


def _figures(outcomes: Sequence[Outcome], plain: Sequence[Outcome]) -> dict[str, Any]:
    pairs = [*zip(outcomes, plain, strict=True)]
    return {
        "accuracy": _interval(o.accuracy for o in outcomes),
        "accuracy_difference": _interval(o.accuracy - p.accuracy for o, p in pairs),
        "in_vain": _interval(o.in_vain for o in outcomes),
        "in_vain_ratio": _interval(o.in_vain / p.in_vain for o, p in pairs),
        "cpu_ms": _interval(o.tiers_ms + o.judge_ms for o in outcomes),
        "tiers_cpu_ratio": _interval(o.tiers_ms / p.tiers_ms for o, p in pairs),
        "cpu_ratio": _interval((o.tiers_ms + o.judge_ms) / (p.tiers_ms + p.judge_ms) for o, p in pairs),
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


def _predicted(data: Data, predictor: ScorePredictor) -> JudgedSample:
    """The sample of `data` with predicted scores; of the last tier, where the predictor knows none, zeros (never asked)."""
    of_prompts = [predictor.predict(text) for text in data.texts]
    predicted = np.array([[scores.get(tier, 0.0) for tier in TIERS] for scores in of_prompts])
    return replace(data.sample, predicted=predicted)


def _split(fitted: Data, held_out: Data, thresholds: tuple[float, ...], costs: Costs) -> dict[str, Outcome]:
    trained = train(fitted.texts, TIERS, fitted.sample.scores)
    sample = replace(fitted.sample, predicted=trained.predicted)
    test = _predicted(held_out, trained.predictor)
    per_token = tuple(costs.step[tier] / answers.COST_BATCH for tier in TIERS)
    rule = cheapest_rule(sample, thresholds, per_token, route(sample, thresholds).quality)
    in_vain_rule = cheapest_rule(sample, thresholds, (1.0, 1.0, 1.0), route(sample, thresholds).quality)
    ways = {
        "cascade": _outcome(held_out, test, thresholds, costs),
        "skip (least compute)": _outcome(held_out, test.under(skips(rule.limits)), thresholds, costs),
        "skip (least tokens)": _outcome(held_out, test.under(skips(in_vain_rule.limits)), thresholds, costs),
        "best answer": _outcome(held_out, test.under(AcceptanceRules(best_answer=True)), thresholds, costs),
        "large alone": _alone(held_out, costs),
    }
    least = ways["skip (least compute)"]
    least.other |= {f"skip_below_{TIERS[t]}": limit or 0.0 for t, limit in enumerate(rule.limits)}
    ways["direct routing"] = _direct(held_out, test, sample, least.tiers_ms + least.judge_ms, costs)
    return ways


def _outcome(data: Data, sample: JudgedSample, thresholds: tuple[float, ...], costs: Costs) -> Outcome:
    tokens = sample.output_tokens
    judged = np.where(data.read, sample.input_tokens[:, None] + tokens, 0)
    routed = route(sample, thresholds)
    answered, everyone = routed.answered, np.arange(len(sample))
    used = routed.processed.T
    stands = np.zeros_like(used)
    stands[everyone, answered] = True
    judge_tokens = float((judged * sample.judged_answers(routed.processed).T).sum() / len(sample))
    return Outcome(
        float(data.right[everyone, answered].mean()),
        float((tokens * (used & ~stands)).sum() / len(sample)),
        float((_tiers_ms(sample.input_tokens, tokens, costs) * used).sum() / len(sample)),
        judge_tokens * costs.read["judge"],
        judge_tokens,
        routed.share_answered(),
    )


def _tiers_ms(input_tokens: Ints, output_tokens: Ints, costs: Costs) -> Floats:
    """(N, C) CPU milliseconds of each tier for each answer. input_tokens (N), output_tokens (N, C)."""
    step, read = (np.array([of[tier] for tier in TIERS]) for of in (costs.step, costs.read))
    return np.asarray(input_tokens[:, None] * read + output_tokens * step / answers.COST_BATCH)


def _alone(data: Data, costs: Costs) -> Outcome:
    """The last tier answers everything; nothing is judged."""
    sample = data.sample
    ms = float(_tiers_ms(sample.input_tokens, sample.output_tokens, costs)[:, -1].mean())
    return Outcome(float(data.right[:, -1].mean()), 0.0, ms, 0.0, 0.0, (0.0,) * (len(TIERS) - 1) + (1.0,))


def _direct(data: Data, test: JudgedSample, fitted: JudgedSample, budget_ms: float, costs: Costs) -> Outcome:
    """Each prompt to the first tier whose predicted score is high enough, and no judge: the limit that spends no more CPU
    time than `budget_ms` on the prompts it was fitted to, and is the most accurate by their scores."""
    assert fitted.predicted is not None
    assert test.predicted is not None

    def chosen(predicted: Floats, limit: float) -> Ints:
        able = np.column_stack([predicted[:, :-1] >= limit, np.ones(len(predicted), np.bool_)])
        return np.asarray(np.argmax(able, axis=1), np.int64)

    def cost(sample: JudgedSample, tiers: Ints) -> float:
        ms = _tiers_ms(sample.input_tokens, sample.output_tokens, costs)
        return float(ms[np.arange(len(tiers)), tiers].mean())

    limits = [limit for limit in ROUTING_LIMITS if cost(fitted, chosen(fitted.predicted, limit)) <= budget_ms]
    tiers = chosen(test.predicted, max(limits, default=ROUTING_LIMITS[0]))
    rows = np.arange(len(tiers))
    shares = tuple(float((tiers == t).mean()) for t in range(len(TIERS)))
    return Outcome(float(data.right[rows, tiers].mean()), 0.0, cost(test, tiers), 0.0, 0.0, shares)


def _mesh() -> dict[str, Any]:
    mesh: dict[str, Any] = yaml.safe_load((ROOT / "mesh.yaml").read_text())
    return mesh


def _margin() -> float:
    scorers = {scorer["name"]: scorer for scorer in _mesh()["judge"]["scorers"]}
    return float(scorers["screened"]["margin"])


def _costs() -> Costs:
    figures = json.loads((FAMILY / "figures.json").read_text())
    return Costs(figures["step_cost_ms"], figures["read_cost_ms"])


def _data() -> Data:
    """All answers and their scores, generated where they are not kept."""
    calibrations = Calibrations(
        Calibration.read(FAMILY / "judge" / "calibration.json"), Calibration.read(FAMILY / CONFIDENCE)
    )
    margin = _margin()
    rows = [_answered(tier) for tier in TIERS]
    count = len(rows[0])
    outputs = np.array([[rows[t][i]["tokens"] for t in range(len(TIERS))] for i in range(count)], np.int64)
    right = np.array([[bool(rows[t][i]["right"]) for t in range(len(TIERS))] for i in range(count)])
    judged = [_verdicts(of_tier, calibrations, margin) for of_tier in rows]
    inputs = np.array([row["prompt_tokens"] for row in rows[0]], np.int64)
    return Data(
        [row["prompt"] for row in rows[0]],
        JudgedSample(TIERS, inputs, np.maximum(1, outputs), np.array([of_tier.scores for of_tier in judged]).T),
        right,
        np.array([of_tier.read for of_tier in judged]).T,
    )


def _verdicts(rows: Sequence[dict[str, Any]], calibrations: Calibrations, margin: float) -> Verdicts:
    """As the judge service scores, and what its model reads: an answer that is empty or truncated gets 0, unread."""
    raw, own = ([min(row[of], default=0.0) for row in rows] for of in ("logprobs", "own_logprobs"))
    judged = verdicts(raw, own, calibrations, margin)
    whole = [row["tokens"] < answers.MAX_TOKENS and bool(row["reply"].strip()) for row in rows]
    return Verdicts(
        [score * ok for score, ok in zip(judged.scores, whole, strict=True)],
        [read and ok for read, ok in zip(judged.read, whole, strict=True)],
    )


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
        answered = [by_key[problem.key] for problem in problems]
        own = answers.logprobs_all(FAMILY / tier, answered, threads=1)
        rows = _judged(answered)
        for row, values in zip(rows, own, strict=True):
            row["own_logprobs"] = [round(value, 4) for value in values]
        partial = path.with_suffix(".tmp")
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
        partial.replace(path)
    return [json.loads(line) for line in path.read_text().splitlines()]


def _judged(answered: Sequence[answers.Answered]) -> list[dict[str, Any]]:
    logprobs = answers.logprobs_all(FAMILY / "judge", answered, threads=1)
    return [
        {
            "prompt": a.problem.prompt,
            "reply": a.reply,
            "tokens": a.tokens,
            "right": a.correct,
            "prompt_tokens": 1 + len(turn_ids(a.problem)[0]),  # with the token that begins it
            "logprobs": [round(value, 4) for value in values],
        }
        for a, values in zip(answered, logprobs, strict=True)
    ]
