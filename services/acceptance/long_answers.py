"""Long answers that are accepted from a lower score on. No I/O.

A tier's long answer took long, and its request takes longest if it escalates: a long answer of one tier is mostly a long one
of the next. So where latency or rate count, the same mean quality is cheaper with fewer long answers that escalate and more
short ones.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

from penstock.services.acceptance.rule import AcceptanceRule
from penstock.types.planning import LengthSource, PlanOptions
from penstock.types.problems import FieldProblem
from penstock.types.rules import LongAnswers, RuleOptions

if TYPE_CHECKING:
    from penstock.services.acceptance.arrays import Bools, Floats, Ints
    from penstock.services.acceptance.judged import JudgedSample

LENGTHS = (0.35, 0.6, 0.85)  # quantiles of a tier's output tokens, from which on planning tries rules
SCORES = (0.0, 0.25)  # 0, and the quantile of the tier's scores: worse answers escalate, however long


@overload
def stands_by_length(rule: LongAnswers | None, output_tokens: int, score: float) -> bool: ...
@overload
def stands_by_length(rule: LongAnswers | None, output_tokens: "Ints", score: "Floats") -> "Bools | bool": ...
def stands_by_length(rule: LongAnswers | None, output_tokens: "int | Ints", score: "float | Floats") -> "bool | Bools":
    """Whether an answer is accepted because it is long, whatever the tier's own threshold."""
    return False if rule is None else (output_tokens >= rule.from_tokens) & (score >= rule.threshold)


def counted_tokens(output_tokens: int, reason: str) -> int:
    """Of an answer's output tokens, those by which it may be a long answer.

    None of an answer that a guard of the judge has refused: one that was cut off or repeats itself is long for that reason.
    reason: of the verdict.
    """
    return 0 if reason else output_tokens


class LongAnswersAccepted(AcceptanceRule):
    """Long answers are accepted from a lower score on."""

    field = "long_answers"
    option = "long_answers"
    question = "long_answers: false  # from which length and score on long answers are accepted"

    def unfit(self, judged: "JudgedSample", drawn: PlanOptions) -> FieldProblem | None:
        if drawn.lengths is not LengthSource.TRACE:
            return None
        return FieldProblem("lengths", "must be those of the judged answers where long answers are accepted")

    def under(self, answers: "JudgedSample", value: Sequence[LongAnswers | None]) -> "JudgedSample":
        import numpy as np

        self.check_count(answers, value)
        if all(rule is None for rule in value):
            return replace(answers, long_enough=None)
        mask = np.zeros(answers.scores.shape, np.bool_)
        for tier, rule in enumerate(value):
            mask[:, tier] = stands_by_length(rule, answers.output_tokens[:, tier], answers.scores[:, tier])
        if answers.refused is not None:
            mask &= ~answers.refused
        return replace(answers, long_enough=mask)

    def choices(self, judged: "JudgedSample", tier: int) -> Sequence[LongAnswers]:
        """The longest answers first."""
        import numpy as np

        quantiles = np.quantile(judged.output_tokens[:, tier], LENGTHS)
        lengths = sorted({max(1, math.ceil(q)) for q in quantiles}, reverse=True)
        limits = np.quantile(judged.scores[:, tier], SCORES[1:], method="lower")
        every = itertools.product(lengths, sorted({0.0, *(float(q) for q in limits)}, reverse=True))
        return [LongAnswers(length, limit) for length, limit in every]

    def lines(self, plan: Any, question: RuleOptions | None) -> list[str]:
        words = [
            f"{tier.name} of {rule.from_tokens} tokens from score {rule.threshold:.4g}"
            for tier in plan.tiers
            if (rule := tier.long_answers) is not None
        ]
        if not (words if question is None else self.asked(question)):
            return []
        return [f"long answers accepted: {', '.join(words) or 'by score alone, length would not help'}"]
