"""Which thresholds and skip limits the family is shipped with: the cheapest with about the large tier's accuracy.

Pure: N prompts that all T tiers have answered, the judge's scores of all answers, and the scores that a predictor expects
from the prompt alone. What a rule does to a prompt is computed as the planner does (`planner_service.routing.quality`).
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.planner_service.routing.quality import JudgedSample, route
from penstock.types.rules import AcceptanceRules

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
    return _outcome(
        answers, _sample(answers).under(AcceptanceRules(skip_below=tuple(rule.skip_below))), rule.thresholds
    )


def _sample(answers: Answers) -> JudgedSample:
    """The prompts as the planner knows them. The last tier's answers stand whatever their score."""
    tiers, count = answers.right.shape
    last = np.zeros((1, count))
    return JudgedSample(
        tuple(f"tier {tier}" for tier in range(tiers)),
        np.zeros(count, np.int64),
        answers.tokens.T.astype(np.int64),
        np.concatenate((answers.scores, last)).T,
        np.concatenate((answers.predicted, last)).T,
    )


def _outcome(answers: Answers, sample: JudgedSample, thresholds: Sequence[float]) -> Outcome:
    routed = route(sample, thresholds)
    tiers = np.arange(len(sample.tiers))[:, None]
    stands = routed.answered == tiers  # (T, N)
    right = answers.right[routed.answered, np.arange(len(sample))]
    accepted = routed.answered < len(sample.tiers) - 1
    return Outcome(
        accuracy=float(right.mean()),
        shares=tuple(float(share) for share in stands.mean(axis=1)),
        wrong_among_accepted=float(1 - right[accepted].mean()) if accepted.any() else 0.0,
        cost_ms=float((answers.cost_ms * routed.processed).sum() / len(sample)),
        tokens_in_vain=float((answers.tokens * (routed.processed & ~stands)).sum() / len(sample)),
    )


def choose(answers: Answers, slack: float, limits: Sequence[float] = SKIP_LIMITS) -> Rule:
    """The rule with the least cost whose accuracy is at most `slack` below the last tier's; the most accurate if none is."""
    target = float(answers.right[-1].mean()) - slack
    return min(outcomes(answers, limits), key=lambda found: _rank(found[1], target))[0]


def outcomes(answers: Answers, limits: Sequence[float] = SKIP_LIMITS) -> Iterator[tuple[Rule, Outcome]]:
    """Every rule of THRESHOLDS and skip limits, with what the cascade does under it."""
    lower, sample = len(answers.right) - 1, _sample(answers)
    for skip_below in itertools.product(limits, repeat=lower):
        skipping = sample.under(AcceptanceRules(skip_below=tuple(skip_below)))
        for thresholds in itertools.product(THRESHOLDS, repeat=lower):
            yield Rule(thresholds, skip_below), _outcome(answers, skipping, thresholds)


def best_of(found: Mapping[float, Outcome], target: float) -> float:
    """The key of the cheapest outcome whose accuracy is at least `target`; of the most accurate one if none is."""
    return min(found, key=lambda key: _rank(found[key], target))


def _rank(found: Outcome, target: float) -> tuple[bool, float]:
    """Sorts outcomes, the best first."""
    able = found.accuracy >= target - 1e-12
    return not able, found.cost_ms if able else -found.accuracy
