"""Early checks of a whole cascade: fitted to the thresholds of a plan, and what they do there. No I/O."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner_service.early_checks import EarlyRule, PartScores, checked_answers, fit_early_checks
from planner_service.routing.quality import JudgedSample, route
from planner_service.simulator.workload import Bools, Ints
from planner_service.site import Site, replica_kinds
from services.domain.errors import invalid
from services.domain.latency import StepLoad

NEEDS_PARTS = "needs scores of unfinished answers in the quality file: see measure --early-after"


@dataclass(frozen=True, slots=True)
class EarlyOutcome:
    """The early checks of one tier, and what they do to the answers of the judged prompts that reach it.

    rejected: the share of those that would not stand which is rejected early; error: of those that would. None where there
    are no such answers. saved: share of the tier's output tokens. scored: parts per answer that the judge scores.
    """

    rule: EarlyRule
    rejected: float | None = None
    error: float | None = None
    saved: float = 0.0
    scored: float = 0.0


def fitted_rules(site: Site, sample: JudgedSample, thresholds: Sequence[float], error: float) -> tuple[EarlyRule, ...]:
    """The rules of the tiers but the last, each fitted with `error` to the prompts that reach its tier.

    Raises:
        InvalidRequest: The prompts have no scores of unfinished answers, or after too many numbers of tokens; the error is
            none.
    """
    if sample.parts is None:
        raise invalid("early_error", NEEDS_PARTS)
    processed, rules = route(sample, thresholds).processed, []
    for tier, threshold in enumerate(thresholds):
        rows = np.flatnonzero(processed[tier])
        accepted = sample.comparable[rows, tier] >= threshold
        checks = fit_early_checks(sample.parts.after_tokens, sample.parts.scores[rows, tier], accepted, error)
        rules.append(EarlyRule(checks, meanwhile_tokens(site, tier, sample)) if checks else EarlyRule())
    return tuple(rules)


def meanwhile_tokens(site: Site, tier: int, sample: JudgedSample) -> int:
    """How many tokens a reply gets while a part of it is scored, at most: alone on the tier's fastest replica."""
    context = round(float((sample.input_tokens + sample.output_tokens[:, tier] / 2).mean()))
    steps_s = [kind.latency.step_s(StepLoad(1, context)) for kind in replica_kinds(site, tier, site.gpus, context)[0]]
    longest = int(sample.output_tokens[:, tier].max())
    return math.floor(min(longest, site.judge_s / min(steps_s))) if steps_s and min(steps_s) > 0 else 0


def outcomes_of(
    sample: JudgedSample, rules: Sequence[EarlyRule], thresholds: Sequence[float]
) -> tuple[EarlyOutcome, ...]:
    """By tier but the last. sample: before the rules are applied."""
    checked = sample.checking(rules)
    processed = route(checked, thresholds).processed
    result = []
    for tier, (rule, threshold) in enumerate(zip(rules, thresholds, strict=True)):
        rows = np.flatnonzero(processed[tier])
        if not rule.checks or not len(rows):
            result.append(EarlyOutcome(rule))
            continue
        assert checked.rejected_early is not None
        assert sample.parts is not None
        rejected, stands = checked.rejected_early[rows, tier], sample.comparable[rows, tier] >= threshold
        before, after = (one.output_tokens[rows, tier].sum() for one in (sample, checked))
        result.append(
            EarlyOutcome(
                rule,
                _share(rejected, ~stands),
                _share(rejected, stands),
                float(1 - after / before),
                _scored(rule, sample.parts, rows, tier, sample.output_tokens),
            )
        )
    return tuple(result)


def _share(rejected: Bools, among: Bools) -> float | None:
    return float(rejected[among].mean()) if among.any() else None


def _scored(rule: EarlyRule, parts: PartScores, rows: Ints, tier: int, output_tokens: Ints) -> float:
    """Parts per answer that are scored."""
    checked = checked_answers(rule, parts.after_tokens, parts.scores[rows, tier], output_tokens[rows, tier])
    return float(checked.parts.mean())
