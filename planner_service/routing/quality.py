"""What thresholds do to a profiled sample: who escalates how far, and the quality of what stands. Exact counts. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from planner_service.early_checks import EarlyRule, PartScores, checked_answers
from planner_service.routing.rules import RoutingRules
from planner_service.simulator.felt import Replies
from planner_service.simulator.workload import Bools, Floats, Ints
from services.domain.bursts import tie_accepted
from services.domain.errors import invalid
from services.domain.long_answers import LongAnswers, stands_by_length
from services.domain.score_prediction import passes_over

SKIPPED = 101.0  # a threshold that no score meets: the tier is not asked at all
OVER_THRESHOLDS = 100.5  # over every threshold of a tier that is asked

OF_ANSWERS = ("predicted", "passed_over", "rejected_early", "known_quality", "long_enough", "refused")


@dataclass(frozen=True, slots=True, eq=False)
class JudgedSample:
    """N prompts answered and scored by all C tiers. scores (N, C), from 0 to 100; output_tokens (N, C); input_tokens (N).

    predicted (N, C): scores predicted from the prompts alone, by a model that has not seen them; None without any.
    passed_over (N, C): tiers that are not asked, see `skipping`; None if all are. parts: scores of unfinished answers; None
    without any. rejected_early (N, C): answers that are not finished, see `checking`; None if all are. least (C - 1): lower
    thresholds are not tried; None if all are. known_quality (N, C): what the answers are worth, from 0 to 100, where that is
    known apart from their scores, as by comparison with references; None if the scores are the quality. long_enough (N, C):
    answers that stand whatever the threshold, see `accepting`; None if none do. refused (N, C): answers that a guard of the
    judge has refused, which are never long ones; None if none are. best_answer: a request's reply is its best answer, see
    `delivered`. cached_tokens (N): of the prompts, the first tokens that a tier which the request reaches need not compute,
    see Workload; None if all are computed.
    """

    tiers: tuple[str, ...]
    input_tokens: Ints
    output_tokens: Ints
    scores: Floats
    predicted: Floats | None = None
    passed_over: Bools | None = None
    parts: PartScores | None = None
    rejected_early: Bools | None = None
    least: tuple[float, ...] | None = None
    known_quality: Floats | None = None
    long_enough: Bools | None = None
    refused: Bools | None = None
    best_answer: bool = False
    cached_tokens: Ints | None = None

    def __post_init__(self) -> None:
        shape = (len(self.input_tokens), len(self.tiers))
        if self.scores.shape != shape or self.output_tokens.shape != shape:
            raise invalid("quality", f"scores and output tokens must be of shape {shape}")
        for name, values in self._of_answers().items():
            if values.shape != shape:
                raise invalid("quality", f"{name} must be of shape {shape}")
        if self.parts is not None and self.parts.scores.shape != (*shape, len(self.parts.after_tokens)):
            raise invalid("quality", f"scores of parts must be of shape {(*shape, len(self.parts.after_tokens))}")
        if self.cached_tokens is not None and len(self.cached_tokens) != len(self):
            raise invalid("quality", f"cached tokens must be {len(self)} numbers")
        if not len(self):
            raise invalid("quality", "no prompts")
        if not ((self.scores >= 0) & (self.scores <= 100)).all():
            raise invalid("quality", "scores must be from 0 to 100")
        if not ((self.quality >= 0) & (self.quality <= 100)).all():
            raise invalid("quality", "the quality of answers must be from 0 to 100")

    def __len__(self) -> int:
        return len(self.input_tokens)

    @property
    def quality(self) -> Floats:
        """(N, C) what the answers are worth: `known_quality`, or the scores. Thresholds are compared with the scores."""
        return self.scores if self.known_quality is None else self.known_quality

    @property
    def cached(self) -> Ints:
        """(N) `cached_tokens`, 0 where there are none."""
        return np.zeros(len(self), np.int64) if self.cached_tokens is None else self.cached_tokens

    @property
    def worst(self) -> float:
        """Mean quality where the first tier answers all: z2 of CASCADIA, section 3.3."""
        return float(self.quality[:, 0].mean())

    @property
    def best(self) -> float:
        """Mean quality where the last tier answers all: z1."""
        return float(self.quality[:, -1].mean())

    @property
    def most(self) -> float:
        """Mean quality where the last tier answers all, or with `best_answer` where all tiers do, whichever is more.

        With a judge that errs, the answers that it scores highest may be worth less than the last tier's.
        """
        return max(self.best, float(self.quality_over(range(len(self.tiers))).mean()))

    def subset(self, rows: Ints) -> "JudgedSample":
        return replace(
            self,
            input_tokens=self.input_tokens[rows],
            output_tokens=self.output_tokens[rows],
            scores=self.scores[rows],
            cached_tokens=None if self.cached_tokens is None else self.cached_tokens[rows],
            parts=None if self.parts is None else self.parts.subset(rows),
            **{name: values[rows] for name, values in self._of_answers().items()},
        )

    def only(self, tiers: Sequence[int]) -> "JudgedSample":
        """The same prompts for some of the tiers, by number in ascending order."""
        columns = list(tiers)
        return replace(
            self,
            tiers=tuple(self.tiers[tier] for tier in columns),
            output_tokens=self.output_tokens[:, columns],
            scores=self.scores[:, columns],
            parts=None if self.parts is None else self.parts.only(columns),
            least=None if self.least is None else tuple(self.least[tier] for tier in columns[:-1]),
            **{name: values[:, columns] for name, values in self._of_answers().items()},
        )

    def _of_answers(self) -> dict[str, Any]:
        """What is known of each answer besides its score and tokens, (N, C) each, by field."""
        named = {name: getattr(self, name) for name in OF_ANSWERS}
        return {name: values for name, values in named.items() if values is not None}

    def under(self, rules: RoutingRules) -> "JudgedSample":
        """The same prompts under the routing of a plan."""
        sample = self.skipping(rules.skip_below) if rules.skip_below else self
        sample = sample.accepting(rules.long_answers) if rules.long_answers else sample
        sample = replace(sample, best_answer=True) if rules.best_answer else sample
        return sample.checking(rules.early) if rules.early else sample

    def skipping(self, skip_below: Sequence[float | None]) -> "JudgedSample":
        """The same prompts where tiers are passed over as routers do it. skip_below (C - 1): of the tiers but the last.

        Raises:
            InvalidRequest: A limit without predicted scores, or not one for each tier but the last.
        """
        if len(skip_below) != len(self.tiers) - 1:
            raise invalid(
                "skip_below", f"{len(self.tiers)} tiers have {len(self.tiers) - 1} limits, not {len(skip_below)}"
            )
        if all(limit is None for limit in skip_below):
            return replace(self, passed_over=None)
        if self.predicted is None:
            raise invalid("skip_below", "needs predicted scores, which the judged prompts do not have")
        mask = np.zeros(self.scores.shape, np.bool_)
        for tier, limit in enumerate(skip_below):
            mask[:, tier] = [passes_over(score, limit) for score in self.predicted[:, tier].tolist()]
        return replace(self, passed_over=mask)

    def accepting(self, rules: Sequence[LongAnswers | None]) -> "JudgedSample":
        """The same prompts where long answers are accepted as routers do it. rules (C - 1): of the tiers but the last.

        Raises:
            InvalidRequest: Not one rule, or None, for each tier but the last.
        """
        if len(rules) != len(self.tiers) - 1:
            raise invalid("long_answers", f"{len(self.tiers)} tiers have {len(self.tiers) - 1} rules, not {len(rules)}")
        if all(rule is None for rule in rules):
            return replace(self, long_enough=None)
        mask = np.zeros(self.scores.shape, np.bool_)
        for tier, rule in enumerate(rules):
            answers = zip(self.output_tokens[:, tier].tolist(), self.scores[:, tier].tolist(), strict=True)
            mask[:, tier] = [stands_by_length(rule, tokens, score) for tokens, score in answers]
        if self.refused is not None:
            mask &= ~self.refused
        return replace(self, long_enough=mask)

    def checking(self, rules: Sequence[EarlyRule], fitted_to: Sequence[float] | None = None) -> "JudgedSample":
        """The same prompts where unfinished answers are rejected as routers do it. rules (C - 1): of the tiers but the last.

        What is rejected has only the tokens that are generated until its verdict. fitted_to (C - 1): the thresholds that the
        checks were fitted to; a tier with checks gets none below, where they would reject more answers that stand.

        Raises:
            InvalidRequest: Checks at tokens for which there are no scores, or not one rule for each tier but the last.
        """
        if len(rules) != len(self.tiers) - 1:
            raise invalid("early_checks", f"{len(self.tiers)} tiers have {len(self.tiers) - 1} rules, not {len(rules)}")
        if not any(rule.checks for rule in rules):
            return self
        if self.parts is None:
            raise invalid("early_checks", "need scores of unfinished answers, which these prompts do not have")
        if self.rejected_early is not None:
            raise ValueError("answers were cut already")
        after = self.parts.after_tokens
        if unknown := sorted({check.after_tokens for rule in rules for check in rule.checks} - set(after)):
            raise invalid("early_checks", f"no scores of answers after {', '.join(map(str, unknown))} tokens")
        rejected, output_tokens = np.zeros(self.scores.shape, np.bool_), self.output_tokens.copy()
        for tier, rule in enumerate(rules):
            checked = checked_answers(rule, after, self.parts.scores[:, tier], self.output_tokens[:, tier])
            rejected[:, tier], output_tokens[:, tier] = checked.rejected, checked.tokens
        least = None
        if fitted_to is not None:
            least = tuple(h if rule.checks else 0.0 for h, rule in zip(fitted_to, rules, strict=True))
        return replace(self, output_tokens=output_tokens, rejected_early=rejected, least=least)

    @property
    def comparable(self) -> Floats:
        """(N, C) the scores that thresholds are compared with: over all of them where a long answer stands; below all of them
        where the tier is passed over, or its answer rejected early."""
        scores = self.scores if self.long_enough is None else np.where(self.long_enough, OVER_THRESHOLDS, self.scores)
        for mask in (self.passed_over, self.rejected_early):
            scores = scores if mask is None else np.where(mask, -1.0, scores)
        return scores

    def delivered(self, processed: Bools) -> Ints:
        """(N) the tier whose answer is the reply. processed (C, N): who reaches each tier.

        The last that the request reaches; with `best_answer` that of the highest score, see
        services.domain.best_answer.best_of. Answers that were rejected early are not finished, and are no replies.
        """
        ranked = self._finished(processed)
        if self.best_answer:
            ranked = np.where(ranked, self.scores.T, -1.0)
        return np.asarray(len(self.tiers) - 1 - ranked[::-1].argmax(axis=0), np.int64)

    def held(self, processed: Bools) -> Bools:
        """(N) whether the answer of the last tier that a request reaches is judged before it is delivered, and not streamed.

        Of the last tier of all only with `best_answer`, if the request has another answer.
        """
        others = self._finished(processed)[:-1].any(axis=0)
        return np.asarray(others if self.best_answer else ~processed[-1], np.bool_)

    def judged_answers(self, processed: Bools) -> Bools:
        """(C, N) the answers that are judged when they are finished. processed (C, N): who reaches each tier."""
        judged = self._finished(processed).copy()
        judged[-1] &= self.held(processed)
        return judged

    def judged_s(self, processed: Bools, judge_s: float) -> Floats:
        """(C, N) seconds from the end of an answer to its score, where judging takes `judge_s`; 0 where none is judged.

        What was rejected early has its score by then.
        """
        return np.where(self.judged_answers(processed), judge_s, 0.0)

    def replies(self, processed: Bools) -> Replies:
        """What users get."""
        return Replies(self.delivered(processed), self.held(processed), self.output_tokens)

    def _finished(self, processed: Bools) -> Bools:
        """(C, N) the answers that are generated to their end."""
        return processed if self.rejected_early is None else processed & ~self.rejected_early.T

    def _quality_of(self, tier: Ints) -> Floats:
        """(N) the quality of each prompt's answer by a tier. tier (N)."""
        return np.asarray(self.quality[np.arange(len(self)), tier])

    def quality_over(self, tiers: Sequence[int]) -> Floats:
        """(N) the quality of the reply where a request reaches these tiers, without those that are passed over."""
        processed = np.zeros(self.scores.T.shape, np.bool_)
        processed[list(tiers)] = True
        if self.passed_over is not None:
            processed &= ~self.passed_over.T
        return self._quality_of(self.delivered(processed))

    def levels(self, tier: int) -> Floats:
        """Thresholds of `tier` that differ in what they do: 0, its distinct scores ascending, and SKIPPED.

        At a threshold an answer of just that score stands. Threshold 0 lets every finished answer stand. The first is
        `least`, where that is given. With `best_answer`, 100 is one as well: only the best possible answer stands, and others
        may be delivered all the same.
        """
        least = 0.0 if self.least is None else self.least[tier]
        values = np.unique([*self.scores[:, tier], 100.0] if self.best_answer else self.scores[:, tier])
        return np.unique([least, *values[values > least], SKIPPED])


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """processed (C, N): who reaches each tier. answered (N): the tier whose answer is the reply. quality: mean of those."""

    processed: npt.NDArray[np.bool_]
    answered: Ints
    quality: float

    def share_processed(self) -> tuple[float, ...]:
        return tuple(float(row.mean()) for row in self.processed)

    def share_answered(self) -> tuple[float, ...]:
        return tuple(float((self.answered == tier).mean()) for tier in range(len(self.processed)))


@dataclass(frozen=True, slots=True, eq=False)
class TieRule:
    """Which answers that score exactly the threshold are accepted. shares: of the tiers but the last. draws (N, C): a random
    number of each prompt for each tier, from 0 to 1; see services.domain.bursts."""

    shares: tuple[float, ...]
    draws: Floats

    def escalates(self, tier: int, tied: Bools) -> Bools:
        """Of the prompts that score the tier's threshold, those that are not accepted."""
        result = tied.copy()
        for row in np.flatnonzero(tied):
            result[row] = not tie_accepted(self.shares[tier], float(self.draws[row, tier]))
        return result


def route(sample: JudgedSample, thresholds: Sequence[float], ties: TieRule | None = None) -> Routed:
    """Each prompt escalates until a tier's score is at least its threshold; the last tier's answers stand.

    A tier whose threshold is above 100 is passed over. ties: without it, answers that score exactly the threshold stand.
    """
    tiers = len(sample.tiers)
    if len(thresholds) != tiers - 1:
        raise invalid("thresholds", f"{tiers} tiers have {tiers - 1} thresholds, not {len(thresholds)}")
    processed, compared = np.zeros((tiers, len(sample)), np.bool_), sample.comparable
    escalating = np.ones(len(sample), np.bool_)
    for tier, threshold in enumerate(thresholds):
        if threshold > 100:
            continue
        processed[tier] = escalating if sample.passed_over is None else escalating & ~sample.passed_over[:, tier]
        stands = processed[tier] & (compared[:, tier] >= threshold)
        if ties is not None and ties.shares[tier] < 1:
            stands &= ~ties.escalates(tier, stands & (compared[:, tier] == threshold))
        escalating = escalating & ~stands
    processed[-1] = escalating
    answered = sample.delivered(processed)
    return Routed(processed, answered, float(sample.quality[np.arange(len(sample)), answered].mean()))


def proportional(sample: JudgedSample) -> tuple[float, ...]:
    """Thresholds with which tier i processes about 1/i of the prompts: where CASCADIA's loop starts."""
    escalating, compared = np.ones(len(sample), np.bool_), sample.comparable
    thresholds = []
    for tier in range(len(sample.tiers) - 1):
        levels = sample.levels(tier)
        expected = len(sample) / (tier + 2)
        counts = np.array([(escalating & (compared[:, tier] < level)).sum() for level in levels])
        threshold = float(levels[int(np.abs(counts - expected).argmin())])
        escalating = escalating & (compared[:, tier] < threshold)
        thresholds.append(threshold)
    return tuple(thresholds)


def chebyshev(latency_s: float, quality: float, target: float, best: float, worst: float, weight: float) -> float:
    """J = L + weight * max(0, (wanted - Q) / (best - worst)) (CASCADIA, section 3.3)."""
    spread = best - worst
    shortfall = max(0.0, target - quality)
    if shortfall == 0.0:
        return latency_s
    return latency_s + weight * shortfall / (spread if spread > 0 else 1.0)


def chebyshev_quality(
    quality: float, latency_s: float, budget_s: float, least_s: float, most_s: float, weight: float
) -> float:
    """J = -Q + weight * max(0, (L - budget) / (most - least)) (CASCADIA, appendix C)."""
    excess = max(0.0, latency_s - budget_s)
    if excess == 0.0:
        return -quality
    return -quality + weight * excess / (most_s - least_s if most_s > least_s else 1.0)


def all_qualities(sample: JudgedSample) -> tuple[list[Floats], npt.NDArray[np.float64]]:
    """(levels of each tier but the last, mean quality at every combination of them): the whole grid, by sums.

    Three tiers: Q[a, b] = mean((q_1 where s_1 >= h1_a) + (q_2 where s_1 < h1_a, s_2 >= h2_b) + (q_3 below both)), with
    scores s and qualities q, of the best answer so far with `best_answer`. ValueError beyond three tiers.
    """
    if len(sample.tiers) > 3:
        raise ValueError("the grid is for up to three tiers")
    n = len(sample)
    levels = [sample.levels(tier) for tier in range(len(sample.tiers) - 1)]
    if not levels:
        return [], np.array(sample.quality[:, 0].mean())
    compared = sample.comparable
    below: list[Bools] = [compared[None, :, t] < level[:, None] for t, level in enumerate(levels)]  # (levels, N)
    first = (~below[0] * sample.quality[:, 0]).sum(axis=1)
    if len(levels) == 1:
        qualities = first + (below[0] * sample.quality_over((0, 1))).sum(axis=1)
        if sample.best_answer:
            qualities[-1] = sample.quality[:, 1].sum()  # the first tier is passed over
        return levels, qualities / n

    escalating = below[0].astype(np.float64)
    second = escalating @ (~below[1] * sample.quality_over((0, 1))).T
    third = escalating @ (below[1] * sample.quality_over((0, 1, 2))).T
    qualities = first[:, None] + second + third
    if sample.best_answer:  # answers of a tier that is passed over are no replies
        qualities[:, -1] = first + escalating @ sample.quality_over((0, 2))
        without_first = np.where(below[1], sample.quality_over((1, 2)), sample.quality[:, 1])
        qualities[-1] = [*without_first.sum(axis=1)[:-1], sample.quality[:, 2].sum()]
    return levels, qualities / n
