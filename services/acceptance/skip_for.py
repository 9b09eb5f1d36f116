"""Skipping for a better tier: a tier is passed over if another one's predicted score is so much higher. No I/O.

Where nothing is judged, it does not matter whether an answer would be rejected, but what a dearer one would be worth more:
prompts go to a tier by the difference of predicted scores (routing before generation).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

from penstock.services.acceptance.rule import AcceptanceRule
from penstock.services.domain.errors import invalid
from penstock.types.problems import FieldProblem
from penstock.types.rules import RuleOptions, SkipFor

if TYPE_CHECKING:
    from penstock.services.acceptance.arrays import Bools, Floats
    from penstock.services.acceptance.judged import JudgedSample

EPSILON = 1e-6  # gains of this less or more are the same: limits are differences of other numbers


@overload
def gains_enough(own: float, other: float, rule: SkipFor) -> bool: ...
@overload
def gains_enough(own: "Floats", other: "Floats", rule: SkipFor) -> "Bools": ...
def gains_enough(own: "float | Floats", other: "float | Floats", rule: SkipFor) -> "bool | Bools":
    """Whether a tier is passed over. own, other: predicted scores of the tier and of `rule.tier`; NaN passes none over."""
    return other - own > rule.gain + EPSILON


class SkippingForAnother(AcceptanceRule):
    """Tiers are passed over for another one. Planning sends prompts so where it is best; no question asks for it."""

    field = "skip_for"
    predicts = True

    def refused(self, value: SkipFor | None, later: Sequence[str]) -> FieldProblem | None:
        if value is None or value.tier in later:
            return None
        return FieldProblem("tier", f"'{value.tier[:80]}' is none of the later tiers: {', '.join(later)}")

    def under(self, answers: "JudgedSample", value: Sequence[SkipFor | None]) -> "JudgedSample":
        """After skip prediction, which may pass over the same tiers."""
        import numpy as np

        self.check_count(answers, value)
        mask = np.zeros(answers.scores.shape, np.bool_) if answers.passed_over is None else answers.passed_over.copy()
        for tier, rule in enumerate(value):
            if rule is None:
                continue
            if (problem := self.refused(rule, answers.tiers[tier + 1 :])) is not None:
                raise invalid(f"skip_for[{tier}].{problem.field}", problem.problem)
            own, other = self.predicted(answers)[:, [tier, answers.tiers.index(rule.tier)]].T
            mask[:, tier] |= gains_enough(own, other, rule)
        return replace(answers, passed_over=mask)

    def lines(self, plan: Any, question: RuleOptions | None) -> list[str]:
        words = [
            f"{tier.name} where {rule.tier} gains over {rule.gain:.4g}"
            for tier in plan.tiers
            if (rule := tier.skip_for) is not None
        ]
        return [f"passed over by predicted scores: {', '.join(words)}"] if words else []
