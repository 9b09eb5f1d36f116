"""How well each scorer tells right answers of the shipped tiers from wrong ones: AUC, calibration, guards.

The small and medium tier answer held-out prompts greedily; every answer is right or wrong by its final line. Calibrations and
the combination are measured on folds that they were not fitted to (answers to one prompt are in one fold); intervals are
95 % of 500 bootstrap samples of the prompts. Guards are measured on the same answers and on damaged ones.
"""

import asyncio
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from benchmarks import report
from benchmarks.reliability import reliability
from models.training import measure
from models.training.answers import chat_of
from models.training.problems import Problem, is_correct
from penstock.judge_service.calibration import metrics
from penstock.judge_service.calibration.isotonic import Calibration, held_out_scores
from penstock.judge_service.clients.tier_client import choice_of
from penstock.judge_service.scorers.combined.combination import held_out_logits
from penstock.judge_service.scorers.confidence import ConfidenceScorer
from penstock.judge_service.scorers.exact import ExactScorer
from penstock.judge_service.scorers.judge_model.scorer import JudgeModelScorer
from penstock.judge_service.scorers.llm.grading import NoGrade, expected_grade, grade_question
from penstock.judge_service.scorers.screened import is_sure
from penstock.judge_service.scoring.comparison import same
from penstock.judge_service.scoring.guards import objection
from penstock.judge_service.scoring.interface import Scorer, probability
from penstock.judge_service.scoring.questions import REPLY_TOKENS, TOP_LOGPROBS
from penstock.services.clock import SystemClock
from penstock.services.domain.auc import auc
from penstock.types.judging import JudgedAnswer, LogprobSummary
from penstock.types.prompts import ChatMessage, ChatPrompt, Prompt
from penstock.types.replies import FinishReason, TokenFrame
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.types.workers import EngineFinished
from penstock.worker_service.engine.torch.engine import TorchEngineOptions, torch_core

FAMILY = report.RESULTS.parent.parent / "models" / "family"
TIERS = ("small", "medium")
PROMPTS = 300
GRADED = 60  # prompts whose answers the large tier grades: each is about 900 tokens
SAMPLES, TEMPERATURE = 5, 0.7  # the defaults of the consistency scorer
MAX_TOKENS = 512
TOGETHER = 64
BOOTSTRAPS = 500
COMBINED = ("confidence: min", "judge-model", "consistency")
THRESHOLDS = {"small": 30.0, "medium": 60.0}  # of the shipped mesh
MARGINS = (2.0, 5.0, 10.0, 15.0, 20.0)  # of the screened scorer


@dataclass(frozen=True, slots=True)
class Reply:
    """frames: with logprobs, if they were requested."""

    text: str
    frames: tuple[TokenFrame, ...]
    reason: FinishReason


def generated(tier: str, prompts: Seq[Prompt], sampling: Seq[SamplingParams]) -> list[Reply]:
    """The replies of a tier, computed by the torch engine."""
    options = TorchEngineOptions(
        FAMILY / tier, tier, max_running=TOGETHER, max_queued=len(prompts), kv_tokens=TOGETHER * 1024, threads=1
    )
    core, _ = torch_core(options, SystemClock())
    frames: dict[str, list[TokenFrame]] = {}
    replies: dict[str, Reply] = {}
    for i, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
        core.add(GenerationRequest(str(i), prompt, params), core.tokenizer.encode(prompt))
        frames[str(i)] = []
    while not core.idle:
        for name, event in core.step():
            if isinstance(event, TokenFrame):
                frames[name].append(event)
            elif isinstance(event, EngineFinished):
                text = "".join(frame.text for frame in frames[name])
                replies[name] = Reply(text, tuple(frames[name]), event.reason)
    return [replies[str(i)] for i in range(len(prompts))]


def judged(problem: Problem, tier: str, reply: Reply) -> JudgedAnswer:
    logprobs = [position.chosen.logprob for frame in reply.frames for position in frame.logprobs]
    summary = LogprobSummary(len(logprobs), float(np.mean(logprobs)), min(logprobs))
    return JudgedAnswer(chat_of(problem), reply.text, tier, reply.reason, summary, reference=problem.answer)


def consistency(answers: Seq[JudgedAnswer], tier: str) -> list[float]:
    """Shares of samples that agree with the answers, as the scorer computes them."""
    prompts = [item.prompt for item in answers for _ in range(SAMPLES)]
    params = [
        SamplingParams(temperature=TEMPERATURE, seed=1 + i % SAMPLES, max_tokens=MAX_TOKENS)
        for i in range(len(prompts))
    ]
    texts = [reply.text for reply in generated(tier, prompts, params)]
    return [
        sum(same("final-answer", text, item.answer) for text in texts[i * SAMPLES : (i + 1) * SAMPLES]) / SAMPLES
        for i, item in enumerate(answers)
    ]


def grades(answers: Seq[JudgedAnswer]) -> list[float | None]:
    """The large tier's grades; None for a reply that holds none."""
    prompts = []
    for item in answers:
        messages = grade_question(item.prompt, item.answer)
        prompts.append(ChatPrompt(tuple(ChatMessage(m["role"], m["content"]) for m in messages)))
    params = SamplingParams(temperature=0.0, max_tokens=REPLY_TOKENS, top_logprobs=TOP_LOGPROBS)
    results: list[float | None] = []
    for reply in generated("large", prompts, [params] * len(prompts)):
        try:
            results.append(expected_grade(choice_of(list(reply.frames))))
        except NoGrade:
            results.append(None)
    return results


async def raws_of(scorer: Scorer, answers: Seq[JudgedAnswer]) -> list[tuple[float, float]]:
    """(raw, uncalibrated score) of each answer."""
    await scorer.start()
    try:
        return [(result.raw, result.score) for result in await scorer.score(answers)]
    finally:
        await scorer.close()


def interval(raw: Seq[float], good: Seq[bool], rng: np.random.Generator) -> tuple[float, float]:
    """95 % of the AUC over bootstrap samples of answers (one for each prompt)."""
    x, y = np.asarray(raw), np.asarray(good)
    values = []
    for _ in range(BOOTSTRAPS):
        rows = rng.integers(0, len(x), len(x))
        values.append(auc(x[rows].tolist(), y[rows].tolist()))
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def figures_of(
    raw: Seq[float], uncalibrated: Seq[float] | None, scores: Seq[float], good: Seq[bool], rng: np.random.Generator
) -> dict[str, Any]:
    low, high = interval(raw, good, rng)
    return {
        "answers": len(good),
        "auc": auc(raw, good),
        "auc_95": [low, high],
        "brier": metrics.brier(scores, good),
        "brier_uncalibrated": metrics.brier(uncalibrated, good) if uncalibrated is not None else None,
        "reliability": [[b.predicted, b.good, b.count] for b in reliability(scores, good)],
    }


def judge_scorer() -> JudgeModelScorer:
    return JudgeModelScorer(FAMILY / "judge", max_batch=32, max_tokens=4096, threads=1, device="cpu")


def tier_figures(tier: str, problems: Seq[Problem], rng: np.random.Generator) -> dict[str, Any]:
    """Figures of all scorers on one tier's answers."""
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, top_logprobs=0)
    prompts = [chat_of(problem) for problem in problems]
    replies = generated(tier, prompts, [params] * len(prompts))
    answers = [judged(p, tier, r) for p, r in zip(problems, replies, strict=True)]
    right = [is_correct(p.answer, r.text) for p, r in zip(problems, replies, strict=True)]
    objections = [objection(item) for item in answers]
    rows = [i for i, reason in enumerate(objections) if reason is None]
    scored, good = [answers[i] for i in rows], [right[i] for i in rows]
    raws: dict[str, list[tuple[float, float]]] = {
        "confidence: mean": asyncio.run(raws_of(ConfidenceScorer("mean"), scored)),
        "confidence: min": asyncio.run(raws_of(ConfidenceScorer("min"), scored)),
        "judge-model": asyncio.run(raws_of(judge_scorer(), scored)),
        "consistency": [(share, 100 * share) for share in consistency(scored, tier)],
        "exact": asyncio.run(raws_of(ExactScorer("final-answer"), scored)),
    }
    scorers: dict[str, Any] = {}
    for name, pairs in raws.items():
        raw, uncalibrated = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        scorers[name] = figures_of(raw, uncalibrated, held_out_scores(raw, good), good, rng)
    features = np.array([[raws[name][i][0] for name in COMBINED] for i in range(len(good))])
    logits = held_out_logits(features, np.asarray(good), range(len(good)))
    probabilities = [100 * probability(logit) for logit in logits]
    scorers["combined"] = figures_of(logits.tolist(), None, probabilities, good, rng)
    graded = grades(scored[:GRADED])
    with_grade = [i for i, grade in enumerate(graded) if grade is not None]
    raw = [grade for grade in graded if grade is not None]
    labels = [good[i] for i in with_grade]
    mixed = any(labels) and not all(labels)
    scorers["llm"] = {"answers": GRADED, "graded": len(raw), "auc": auc(raw, labels) if mixed else None}
    return {
        "right": sum(right) / len(right),
        "scorers": scorers,
        "screened": screened_figures(
            held_out_scores([raw for raw, _ in raws["confidence: min"]], good),
            held_out_scores([raw for raw, _ in raws["judge-model"]], good),
            good,
            THRESHOLDS[tier],
        ),
        "guards": {
            "right_refused": sum(ok and reason is not None for ok, reason in zip(right, objections, strict=True)),
            "wrong_refused": sum(not ok and reason is not None for ok, reason in zip(right, objections, strict=True)),
            "damaged": damaged_figures([answers[i] for i, ok in enumerate(right) if ok]),
        },
    }


def screened_figures(sure: Seq[float], costly: Seq[float], good: Seq[bool], threshold: float) -> list[dict[str, Any]]:
    """The costly scorer asked only where the other one leaves a margin; the last row: always. Scores are calibrated.

    unsure: share of the answers for which the costly one is needed. wrong_accepted, right_refused: shares of all answers, at
    the threshold.
    """
    first, second, right = np.asarray(sure), np.asarray(costly), np.asarray(good)
    rows = []
    for margin in (*MARGINS, 0.0):
        unsure = np.array([margin == 0 or not is_sure(score, margin) for score in sure])
        scores = np.where(unsure, second, first)
        accepted = scores >= threshold
        rows.append(
            {
                "margin": margin,
                "unsure": float(unsure.mean()),
                "auc": auc(scores.tolist(), good),
                "brier": metrics.brier(scores.tolist(), good),
                "wrong_accepted": float((accepted & ~right).mean()),
                "right_refused": float((~accepted & right).mean()),
            }
        )
    return rows


def damaged_figures(answers: Seq[JudgedAnswer]) -> dict[str, Any]:
    """Right answers, damaged: how many the guards refuse, and how many the shipped judge alone would accept."""
    long = [item for item in answers if len(item.answer) >= 8][:100]
    kinds = {
        "empty_answer": [replace(item, answer="") for item in long],
        "truncated_answer": [
            replace(item, answer=item.answer[: len(item.answer) // 2], finish_reason=FinishReason.LENGTH)
            for item in long
        ],
        "repeated_answer": [replace(item, answer=item.answer + item.answer[-8:] * 60) for item in long],
    }
    curve = Calibration.read(FAMILY / "judge" / "calibration.json")
    results = {}
    for kind, items in kinds.items():
        # Padding is scored by its beginning: the judge reads as much as its context holds.
        scores = [curve.apply(raw) for raw, _ in asyncio.run(raws_of(judge_scorer(), items))] if items else []
        results[kind] = {
            "answers": len(items),
            "refused": sum(objection(item) == kind for item in items),
            "accepted_without_guards": sum(score >= THRESHOLDS[TIERS[0]] for score in scores),
        }
    return results


def run(_: int = 1) -> None:
    problems, rng = measure.heldout_problems()[:PROMPTS], np.random.default_rng(1)
    tiers = {tier: tier_figures(tier, problems, rng) for tier in TIERS}
    report.write("judge", {"prompts": PROMPTS, "samples": SAMPLES, "combined": COMBINED, "tiers": tiers})
    plot(tiers)
    for tier, figures in tiers.items():
        for name, row in figures["scorers"].items():
            print(f"{tier} {name}: AUC {row['auc']}, Brier {row.get('brier')}, {row['answers']} answers")
        for row in figures["screened"]:
            print(f"{tier} screened: " + ", ".join(f"{key} {value:.3f}" for key, value in row.items()))
        print(f"{tier} guards: {figures['guards']}")


def plot(tiers: dict[str, Any]) -> None:
    """Reliability of every scorer: predicted probability and share of right answers; the area of a dot is its count."""
    names = [name for name in tiers[TIERS[0]]["scorers"] if name not in ("exact", "llm")]
    figure, panels = plt.subplots(1, len(names), figsize=(3.1 * len(names), 3.5), sharey=True, layout="constrained")
    for panel, name in zip(panels, names, strict=True):
        panel.plot([0, 1], [0, 1], color="#cccccc", linewidth=1, zorder=0)
        for i, tier in enumerate(TIERS):
            row = tiers[tier]["scorers"][name]
            x, y, count = zip(*row["reliability"], strict=True)
            label = f"{tier}: AUC {row['auc']:.3f}, Brier {row['brier']:.3f}"
            panel.plot(x, y, color=report.COLOURS[i], linewidth=1, alpha=0.6)
            panel.scatter(x, y, s=[8 + 0.8 * n for n in count], color=report.COLOURS[i], label=label, alpha=0.8)
        panel.set_title(name, loc="left", fontsize=10)
        panel.set_xlabel("predicted")
        panel.set_xlim(-0.05, 1.05)
        panel.set_ylim(-0.05, 1.3)
        panel.set_yticks([0, 0.25, 0.5, 0.75, 1])
        panel.legend(frameon=False, loc="upper left", fontsize=7, markerscale=0.5)
    panels[0].set_ylabel("share of right answers")
    report.save("judge", figure)
