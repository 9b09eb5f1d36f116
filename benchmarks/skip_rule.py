"""Which tiers to pass over for which prompts, by predicted scores: the cheapest rule that costs no quality. No I/O.

Sets: prompts n, tiers c but the last, limits L. Variables: one limit or none for each tier. Objective: the mean over prompts
of what the answers of all tiers asked cost. Constraint: the mean quality of the accepted answers is at least that asked
for. All combinations of limits are tried.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.planner_service.routing.quality import JudgedSample, Routed, route
from penstock.planner_service.simulator.workload import Floats
from penstock.types.rules import AcceptanceRules

LIMITS: tuple[float | None, ...] = (None, 2, 5, 10, 15, 20, 25, 30, 40, 50, 60, 70, 80)


@dataclass(frozen=True, slots=True)
class SkipRule:
    """limits (C - 1): the skip_below of each tier but the last. cost: the mean of a prompt. quality: the mean."""

    limits: tuple[float | None, ...]
    cost: float
    quality: float


def cheapest_rule(
    sample: JudgedSample,
    thresholds: Sequence[float],
    cost_per_token: Sequence[float],
    min_quality: float,
    limits: Sequence[float | None] = LIMITS,
) -> SkipRule:
    """The cheapest rule whose mean quality is at least min_quality; of equally cheap ones the better.

    cost_per_token (C): of each tier's output tokens, in any unit. Without a rule of that quality: the best one.
    """
    rules = []
    for chosen in itertools.product(limits, repeat=len(sample.tiers) - 1):
        routed = route(sample.under(AcceptanceRules(skip_below=tuple(chosen))), thresholds)
        rules.append(SkipRule(chosen, mean_cost(sample, routed, cost_per_token), routed.quality))
    able = [rule for rule in rules if rule.quality >= min_quality]
    if not able:
        return max(rules, key=lambda rule: (rule.quality, -rule.cost))
    return min(able, key=lambda rule: (rule.cost, -rule.quality))


def mean_cost(sample: JudgedSample, routed: Routed, cost_per_token: Sequence[float]) -> float:
    """What the answers of all tiers asked cost, per prompt."""
    costs: Floats = sample.output_tokens * np.asarray(cost_per_token)[None, :]
    return float((costs * routed.processed.T).sum() / len(sample))
