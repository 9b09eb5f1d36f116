"""The skip rules that are tried: limits at quantiles of the predicted scores (see rule_search). No I/O."""

import numpy as np

from planner_service.routing.quality import JudgedSample
from services.domain.errors import invalid

QUANTILES = (0.15, 0.3, 0.45, 0.6)

Limits = tuple[float | None, ...]


def rules_tried(tiers: int) -> int:
    """How many rules there are at most, none included."""
    return 1 + (tiers - 1) * len(QUANTILES)


def candidates(judged: JudgedSample) -> list[list[float]]:
    """By tier but the last, limits at which shares of the prompts pass the tier over, ascending.

    Raises:
        InvalidRequest: The judged prompts have no predicted scores.
    """
    if judged.predicted is None:
        raise invalid("skip", "needs a column {tier}_predicted_score of every tier: see `penstock predictor`")
    limits = (np.quantile(of_tier, QUANTILES) for of_tier in judged.predicted.T[:-1])
    return [sorted({round(float(q), 1) for q in of_tier} - {0.0}) for of_tier in limits]
