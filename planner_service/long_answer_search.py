"""The rules for long answers that are tried: from quantiles of their lengths on, and from few scores (see rule_search).
No I/O."""

import itertools
import math

import numpy as np

from planner_service.routing.quality import JudgedSample
from services.domain.long_answers import LongAnswers

LENGTHS = (0.35, 0.6, 0.85)  # quantiles of the tier's output tokens
SCORES = (0.0, 0.25)  # 0, and the quantile of the tier's scores: worse answers escalate, however long

Rules = tuple[LongAnswers | None, ...]


def rules_tried(tiers: int) -> int:
    """How many rules there are at most, none included."""
    return 1 + (tiers - 1) * len(LENGTHS) * len(SCORES)


def candidates(judged: JudgedSample) -> list[list[LongAnswers]]:
    """By tier but the last, the longest answers first."""
    rules = []
    for tokens, scores in zip(judged.output_tokens.T[:-1], judged.scores.T[:-1], strict=True):
        lengths = sorted({max(1, math.ceil(q)) for q in np.quantile(tokens, LENGTHS)}, reverse=True)
        limits = sorted({0.0, *(float(q) for q in np.quantile(scores, SCORES[1:], method="lower"))}, reverse=True)
        rules.append([LongAnswers(length, limit) for length, limit in itertools.product(lengths, limits)])
    return rules
