"""Skip prediction: a tier is passed over if the score that is predicted for its answer is too low. No I/O.

The model that predicts from a prompt alone is `services.domain.score_prediction`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

from penstock.services.acceptance.rule import AcceptanceRule
from penstock.types.rules import RuleOptions

if TYPE_CHECKING:
    from penstock.services.acceptance.arrays import Bools, Floats
    from penstock.services.acceptance.judged import JudgedSample

QUANTILES = (0.15, 0.3, 0.45, 0.6)  # of the predicted scores of a tier, at which planning tries limits


@overload
def passes_over(predicted: float | None, skip_below: float | None) -> bool: ...
@overload
def passes_over(predicted: "Floats", skip_below: float | None) -> "Bools | bool": ...
def passes_over(predicted: "float | Floats | None", skip_below: float | None) -> "bool | Bools":
    """Whether a tier is passed over. predicted: 0 to 100; None: there is no prediction. skip_below: None for never."""
    return False if skip_below is None or predicted is None else predicted < skip_below


class SkipPrediction(AcceptanceRule):
    """Tiers are passed over by predicted scores."""

    field = "skip_below"
    option = "skip"
    question = "skip: false  # below which predicted score a tier is passed over; needs predicted scores"
    predicts = True

    def under(self, answers: "JudgedSample", value: Sequence[float | None]) -> "JudgedSample":
        import numpy as np

        self.check_count(answers, value)
        if all(limit is None for limit in value):
            return replace(answers, passed_over=None)
        predicted, mask = self.predicted(answers), np.zeros(answers.scores.shape, np.bool_)
        for tier, limit in enumerate(value):
            mask[:, tier] = passes_over(predicted[:, tier], limit)
        return replace(answers, passed_over=mask)

    def choices(self, judged: "JudgedSample", tier: int) -> Sequence[float]:
        """The limits at which shares of the prompts pass a tier over, ascending."""
        import numpy as np

        assert judged.predicted is not None
        return sorted({round(float(q), 1) for q in np.quantile(judged.predicted[:, tier], QUANTILES)} - {0.0})

    def lines(self, plan: Any, question: RuleOptions | None) -> list[str]:
        limits = [f"{tier.name} below {tier.skip_below:g}" for tier in plan.tiers if tier.skip_below is not None]
        if not (limits if question is None else self.asked(question)):
            return []
        return [f"passed over by predicted score: {', '.join(limits) or 'no tier, which would not help'}"]
