"""Early checks of a whole cascade: fitted to the thresholds of a plan, and what they do there. No I/O."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.planner_service.question.site import Site, replica_kinds
from penstock.planner_service.routing.quality import JudgedSample, PartScores, route
from penstock.planner_service.simulator.workload import Bools, Ints
from penstock.services.acceptance.early_checks import NEEDS_PARTS, checked_answers, fit_early_checks
from penstock.services.domain.errors import invalid
from penstock.services.domain.latency import StepLoad
from penstock.types.rules import AcceptanceRules, PlannedEarlyChecks, TierRules


def fitted_rules(
    site: Site, sample: JudgedSample, thresholds: Sequence[float], error: float
) -> tuple[PlannedEarlyChecks, ...]:
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
        rules.append(
            PlannedEarlyChecks(checks, meanwhile_tokens(site, tier, sample)) if checks else PlannedEarlyChecks()
        )
    return tuple(rules)


def checking(sample: JudgedSample, rules: Sequence[PlannedEarlyChecks], fitted_to: Sequence[float]) -> JudgedSample:
    """The prompts under early checks that were fitted to these thresholds: a tier with checks gets none below, where they
    would reject more answers that are accepted."""
    least = tuple(h if rule.checks else 0.0 for h, rule in zip(fitted_to, rules, strict=True))
    return replace(sample.under(AcceptanceRules(early_checks=tuple(rules))), least=least)


def meanwhile_tokens(site: Site, tier: int, sample: JudgedSample) -> int:
    """How many tokens a reply gets while a part of it is scored, at most: alone on the tier's fastest replica."""
    context = round(float((sample.input_tokens + sample.output_tokens[:, tier] / 2).mean()))
    steps_s = [
        kind.latency.step_s(StepLoad(1, context, requests=1))
        for kind in replica_kinds(site, tier, site.gpus, context)[0]
    ]
    longest = int(sample.output_tokens[:, tier].max())
    return math.floor(min(longest, site.judge_s / min(steps_s))) if steps_s and min(steps_s) > 0 else 0


def planned_checks(site: Site, sample: JudgedSample, tiers: Sequence[TierRules]) -> dict[str, Any]:
    """The early checks of these tiers, those but the last, as AcceptanceRules has them; nothing where no tier has any."""
    if not any(tier.early_checks for tier in tiers):
        return {"early_checks": ()}
    rules = (
        PlannedEarlyChecks(tier.early_checks, meanwhile_tokens(site, i, sample) if tier.early_checks else 0)
        for i, tier in enumerate(tiers)
    )
    return {"early_checks": tuple(rules)}


def outcomes_of(
    sample: JudgedSample, rules: Sequence[PlannedEarlyChecks], thresholds: Sequence[float]
) -> tuple[PlannedEarlyChecks, ...]:
    """The rules with what they do, by tier but the last. sample: before the rules are applied."""
    checked = sample.under(AcceptanceRules(early_checks=tuple(rules)))
    processed = route(checked, thresholds).processed
    result = []
    for tier, (rule, threshold) in enumerate(zip(rules, thresholds, strict=True)):
        rows = np.flatnonzero(processed[tier])
        if not rule.checks or not len(rows):
            result.append(rule)
            continue
        assert checked.rejected_early is not None
        assert sample.parts is not None
        rejected, stands = checked.rejected_early[rows, tier], sample.comparable[rows, tier] >= threshold
        before, after = (one.output_tokens[rows, tier].sum() for one in (sample, checked))
        result.append(
            replace(
                rule,
                rejected=_share(rejected, ~stands),
                error=_share(rejected, stands),
                saved=float(1 - after / before),
                scored=_scored(rule, sample.parts, rows, tier, sample.output_tokens),
            )
        )
    return tuple(result)


def _share(rejected: Bools, among: Bools) -> float | None:
    return float(rejected[among].mean()) if among.any() else None


def _scored(rule: PlannedEarlyChecks, parts: PartScores, rows: Ints, tier: int, output_tokens: Ints) -> float:
    """Parts per answer that are scored."""
    checked = checked_answers(rule, parts.after_tokens, parts.scores[rows, tier], output_tokens[rows, tier])
    return float(checked.parts.mean())
