"""Which thresholds and skip limits the family is shipped with: the cheapest with about the large tier's accuracy.

Pure: N prompts that all T tiers have answered, the judge's scores of all answers, and the scores that a predictor expects
from the prompt alone. The rule is the router's: a tier but the last is passed over if its predicted score is below its
limit, and its answer stands if its score is at least its threshold.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

THRESHOLDS = tuple(float(t) for t in range(5, 100, 5))
SKIP_LIMITS = (0.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0)  # 0: never

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """right (T, N) bool. tokens (T, N): of each answer. cost_ms (T, N): CPU time to answer and, but for the last tier, to
    judge. scores, predicted (T - 1, N): 0 to 100."""

    right: NDArray[np.bool_]
    tokens: Floats
    cost_ms: Floats
    scores: Floats
    predicted: Floats


@dataclass(frozen=True, slots=True)
class Rule:
    """thresholds, skip_below (T - 1): by tier, 0 to 100."""

    thresholds: tuple[float, ...]
    skip_below: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """accuracy: of the answers that stand. shares: of prompts, by the tier that answered. wrong_among_accepted: of answers
    that the judge let stand. cost_ms, tokens_in_vain: mean of a prompt; in vain are tokens of rejected answers."""

    accuracy: float
    shares: tuple[float, ...]
    wrong_among_accepted: float
    cost_ms: float
    tokens_in_vain: float


def outcome(answers: Answers, rule: Rule) -> Outcome:
    """What the cascade does under `rule`."""
    tiers, count = answers.right.shape
    waiting = np.ones(count, bool)
    shares, right, accepted, accepted_right = list[float](), 0, 0, 0
    cost = in_vain = 0.0
    for tier in range(tiers):
        last = tier == tiers - 1
        asked = waiting if last else waiting & (answers.predicted[tier] >= rule.skip_below[tier])
        stands = asked if last else asked & (answers.scores[tier] >= rule.thresholds[tier])
        cost += float(answers.cost_ms[tier, asked].sum())
        in_vain += float(answers.tokens[tier, asked & ~stands].sum())
        good = int(answers.right[tier, stands].sum())
        right += good
        if not last:
            accepted, accepted_right = accepted + int(stands.sum()), accepted_right + good
        shares.append(float(stands.mean()))
        waiting = waiting & ~stands
    wrong = 1 - accepted_right / accepted if accepted else 0.0
    return Outcome(right / count, tuple(shares), wrong, cost / count, in_vain / count)


def rules(tiers: int, limits: Sequence[float] = SKIP_LIMITS) -> Iterator[Rule]:
    """Every rule that `choose` tries, for a cascade of so many tiers."""
    for thresholds in itertools.product(THRESHOLDS, repeat=tiers - 1):
        for skip_below in itertools.product(limits, repeat=tiers - 1):
            yield Rule(thresholds, skip_below)


def choose(answers: Answers, slack: float, limits: Sequence[float] = SKIP_LIMITS) -> Rule:
    """The rule with the least cost whose accuracy is at most `slack` below the last tier's; the most accurate if none is."""
    tiers = len(answers.right)
    target = float(answers.right[-1].mean()) - slack
    best: tuple[bool, float, Rule] | None = None
    for rule in rules(tiers, limits):
        found = outcome(answers, rule)
        able = found.accuracy >= target - 1e-12
        key = (not able, found.cost_ms if able else -found.accuracy, rule)
        if best is None or key[:2] < best[:2]:
            best = key
    assert best is not None
    return best[2]
