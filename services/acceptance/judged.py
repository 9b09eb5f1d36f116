"""Judged prompts: what every tier answers to each, and what rules do to these answers. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.services.acceptance.arrays import Bools, Floats, Ints
from penstock.services.acceptance.best_answer import delivered
from penstock.services.acceptance.pipeline import RULES
from penstock.services.acceptance.threshold import levels
from penstock.services.domain.errors import invalid
from penstock.types.rules import AcceptanceRules

OVER_THRESHOLDS = 100.5  # over every threshold of a tier that is asked
OF_ANSWERS = ("output_tokens", "scores", "predicted", "passed_over", "known_quality", "long_enough", "refused")


@dataclass(frozen=True, slots=True)
class GivenDrafts:
    """What rejected answers are to a tier. acceptance: the probability that it draws the next token as well if it drew those
    before. window: tokens that a pass verifies; 0 where that does not pay."""

    acceptance: float
    window: int

    @property
    def tokens_per_pass(self) -> float:
        """That a pass is expected to give."""
        return sum(self.acceptance**place for place in range(self.window + 1))


@dataclass(frozen=True, slots=True, eq=False)
class JudgedSample:
    """N prompts answered and scored by all C tiers. scores (N, C), from 0 to 100; output_tokens (N, C); input_tokens (N).

    predicted (N, C): scores predicted from the prompts alone, by a model that has not seen them; None without any.
    known_quality (N, C): what the answers are worth, from 0 to 100, if that is known apart from their scores, as by
    comparison with references; None if the scores are the quality. refused (N, C): answers that a guard of the judge has
    refused, which are never long ones; None if none are. cached_tokens (N): of the prompts, the first tokens that a tier
    which the request reaches need not compute, see Workload; None if all are computed.

    By rules, see `under`; (N, C), None for no answer. passed_over: tiers that are not asked. long_enough: accepted whatever
    the threshold. highest_delivered: a request's reply is its answer with the highest score. routed: scores are predicted
    ones, and a request goes to one tier alone, the first that its score is enough for; see `routed_by`.

    drafts: by tier, what rejected answers of earlier tiers are as drafts; empty where drafts are not counted.
    """

    tiers: tuple[str, ...]
    input_tokens: Ints
    output_tokens: Ints
    scores: Floats
    predicted: Floats | None = None
    passed_over: Bools | None = None
    known_quality: Floats | None = None
    long_enough: Bools | None = None
    refused: Bools | None = None
    highest_delivered: bool = False
    routed: bool = False
    cached_tokens: Ints | None = None
    drafts: tuple[GivenDrafts, ...] = ()

    def __post_init__(self) -> None:
        if not ((self.scores >= 0) & (self.scores <= 100)).all():  # of sampled requests, whose records have any numbers
            raise invalid("quality", "scores must be from 0 to 100")

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
        """Mean quality where the last tier answers all, or with `highest_delivered` where all tiers do, whichever is more.

        With a judge that errs, the answers that it scores highest may be worth less than the last tier's.
        """
        return max(self.best, float(self.quality_over(range(len(self.tiers))).mean()))

    def subset(self, rows: Ints) -> "JudgedSample":
        return replace(
            self,
            input_tokens=self.input_tokens[rows],
            cached_tokens=None if self.cached_tokens is None else self.cached_tokens[rows],
            **{name: values[rows] for name, values in self._of_answers().items()},
        )

    def only(self, tiers: Sequence[int]) -> "JudgedSample":
        """The same prompts for some of the tiers, by number in ascending order."""
        columns = list(tiers)
        return replace(
            self,
            tiers=tuple(self.tiers[tier] for tier in columns),
            drafts=tuple(self.drafts[tier] for tier in columns) if self.drafts else (),
            **{name: values[:, columns] for name, values in self._of_answers().items()},
        )

    def draft_tokens(self, tier: int, processed: Bools) -> Ints:
        """(N) the tokens of the rejected answer with which each request reaches a tier; 0 for none, and for requests that do
        not reach it. processed (C, N): who reaches each tier."""
        tokens = np.zeros(len(self), np.int64)
        if tier >= len(self.drafts) or not self.drafts[tier].window:
            return tokens
        for earlier in range(tier):
            tokens = np.where(processed[earlier], self.output_tokens[:, earlier], tokens)
        return np.where(processed[tier], tokens, 0)

    def lengths(self, tier: int, rows: Ints, draft_tokens: Ints) -> tuple[Ints, Ints]:
        """(input tokens, output tokens) of requests as a tier computes them, by row.

        draft_tokens (rows): of a rejected answer. For steps that give a token each, the answer is as long as its passes are
        many, and what these verify counts as prompt.
        """
        inputs, outputs = self.input_tokens[rows], self.output_tokens[rows, tier]
        if not draft_tokens.any():
            return inputs, outputs
        given, drafted = self.drafts[tier], np.minimum(outputs, draft_tokens)
        passes = np.ceil(drafted / given.tokens_per_pass).astype(np.int64)
        return inputs + given.window * passes, outputs - drafted + passes

    def _of_answers(self) -> dict[str, Any]:
        """What is known of each answer, (N, C) each, by field."""
        named = {name: getattr(self, name) for name in OF_ANSWERS}
        return {name: values for name, values in named.items() if values is not None}

    def under(self, rules: AcceptanceRules) -> "JudgedSample":
        """The same prompts under the routing of a plan."""
        answers = self
        for rule in RULES:
            if value := rule.value(rules):
                answers = rule.under(answers, value)
        return answers

    @property
    def lead(self) -> Floats:
        """(N, C) 100 less the points by which the last tier's predicted score is higher; at most 100, as without scores."""
        assert self.predicted is not None
        lead = 100.0 + self.predicted - self.predicted[:, -1:]
        return np.clip(np.nan_to_num(lead, nan=100.0), 0.0, 100.0)

    def routed_by(self, levels: Sequence[Floats]) -> "JudgedSample":
        """The same prompts, each sent to one tier by its `lead`: a threshold of the result is 100 less a gain of `skip_for`.

        levels: by tier, the limits that planning tries, ascending and from 0 on.
        """
        lead = self.lead
        at = [np.searchsorted(values, lead[:, tier], side="right") - 1 for tier, values in enumerate(levels)]
        scores = np.stack([values[places] for values, places in zip(levels, at, strict=True)], axis=1)
        return replace(self, scores=scores, known_quality=self.quality, predicted=None, routed=True)

    @property
    def under_rules(self) -> bool:
        """Whether more than thresholds decides what is accepted."""
        return self.highest_delivered or self.passed_over is not None or self.long_enough is not None

    @property
    def comparable(self) -> Floats:
        """(N, C) what thresholds are compared with, so that all rules hold by that comparison alone: over all thresholds
        where a long answer is accepted, below all of them where the tier is passed over."""
        scores = self.scores if self.long_enough is None else np.where(self.long_enough, OVER_THRESHOLDS, self.scores)
        return scores if self.passed_over is None else np.where(self.passed_over, -1.0, scores)

    def processed(self, thresholds: Sequence[float]) -> Bools:
        """(C, N) who reaches each tier: each prompt escalates until an answer is accepted. A tier whose threshold is above
        100 is not asked; where prompts are `routed`, tiers whose score is not enough are not."""
        scores, result = self.comparable, np.zeros(self.scores.T.shape, np.bool_)
        escalating = np.ones(len(self), np.bool_)
        for tier, threshold in enumerate(thresholds):
            if threshold > 100:
                continue
            result[tier] = escalating if self.passed_over is None else escalating & ~self.passed_over[:, tier]
            accepted = result[tier] & (scores[:, tier] >= threshold)
            result[tier] = accepted if self.routed else result[tier]
            escalating = escalating & ~accepted
        result[-1] = escalating
        return result

    @property
    def streams_last(self) -> bool:
        """Whether the last tier's answers are passed on as they are generated: then none is judged."""
        return not self.highest_delivered

    def streamed(self, processed: Bools) -> Bools:
        """(C) the tiers whose answers are passed on as they are generated. With best answers they count as held, although
        those of requests without another answer are not."""
        return ~self.rejecting(processed) & self.streams_last

    def delivered(self, processed: Bools) -> Ints:
        """(N) the tier whose answer is the reply. processed (C, N): who reaches each tier."""
        return delivered(self.scores.T, processed, highest=self.highest_delivered)

    def held(self, processed: Bools) -> Bools:
        """(N) whether the answer of the last tier that a request reaches is judged before it is delivered, and not streamed.

        Of a tier that accepts all only with `highest_delivered`, if the request has another answer.
        """
        held = self.rejecting(processed)[self._last_reached(processed)]
        return np.asarray(held | (processed.sum(axis=0) > 1) if self.highest_delivered else held, np.bool_)

    def rejecting(self, processed: Bools) -> Bools:
        """(C) the tiers from which requests escalate. A tier from which none does accepts all: its answers are not judged."""
        later = np.logical_or.accumulate(processed[::-1], axis=0)[::-1]
        return np.append((processed[:-1] & later[1:]).any(axis=1), np.False_)

    def _last_reached(self, processed: Bools) -> Ints:
        """(N) the last tier that a request reaches."""
        return np.asarray(len(self.tiers) - 1 - processed[::-1].argmax(axis=0), np.int64)

    def judged_answers(self, processed: Bools) -> Bools:
        """(C, N) the answers that are judged when they are finished. processed (C, N): who reaches each tier."""
        judged = processed & self.rejecting(processed)[:, None]
        last, rows = self._last_reached(processed), np.arange(len(self))
        judged[last, rows] |= processed[last, rows] & self.held(processed)
        return judged

    def judged_s(self, processed: Bools, judge_s: float) -> Floats:
        """(C, N) seconds from the end of an answer to its score, where judging takes `judge_s`; 0 where none is judged."""
        return np.where(self.judged_answers(processed), judge_s, 0.0)

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
        """The thresholds of `tier` that are tried; see `threshold.levels`.

        Where the highest is delivered, 100 is one as well: only the best possible answer is accepted, and others may still be
        delivered.
        """
        return levels(self.scores[:, tier], also_best=self.highest_delivered)
