"""The rules for long answers that are tried: from quantiles of their lengths on, and from few scores (see rule_search).
No I/O."""

import math

import numpy as np

from planner_service.routing.quality import JudgedSample
from services.domain.long_answers import LongAnswers

LENGTHS = (0.85, 0.6, 0.35)  # quantiles of the tier's output tokens, from score 0 and from a higher one
MORE_LENGTHS = (0.9, 0.8, 0.65, 0.5, 0.35, 0.2)  # where there is no such score
LOW_SCORES = 0.25  # the quantile of the tier's scores below which answers escalate, however long
MOST_RULES = 6  # of a tier

Rules = tuple[LongAnswers | None, ...]


def rules_tried(tiers: int) -> int:
    """How many rules there are at most, none included."""
    return 1 + (tiers - 1) * MOST_RULES


def candidates(judged: JudgedSample) -> list[list[LongAnswers]]:
    """By tier but the last, the longest answers first.

    A coarse judge, which gives most answers its best score, leaves only score 0 to begin at.
    """
    rules = []
    for tokens, scores in zip(judged.output_tokens.T[:-1], judged.scores.T[:-1], strict=True):
        low = float(np.quantile(scores, LOW_SCORES, method="lower"))
        starts, lengths = ([low, 0.0], LENGTHS) if 0 < low < scores.max() else ([0.0], MORE_LENGTHS)
        longer = dict.fromkeys(max(1, math.ceil(np.quantile(tokens, q))) for q in lengths)
        rules.append([LongAnswers(length, start) for length in longer for start in starts])
    return rules
