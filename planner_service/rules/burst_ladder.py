"""The ladder of thresholds by which a deployment gives way to a burst, from the judged prompts. No I/O.

Sets: tiers c but the last, rules r of each: a threshold at a judged score, with the share of the answers that score exactly
that which are accepted. Variables: one rule for each tier. A step maximises the mean score, subject to
(1) the rate that the deployment sustains is at least the step's, (2) the mean score is at least the floor, and (3) each tier
accepts all that it accepts at the step before. Rates grow from step to step by a constant factor.

All combinations of rules are evaluated, with rates by arithmetic on mean lengths, scaled by what the simulation of the plan's
own thresholds says of each tier. The rates of the steps that are chosen are simulated, as the plan's own is. Where a tier has
too many scores for that, rules are spread evenly over them.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.planner_service.deployment.search import Strategy
from penstock.planner_service.question.planning_options import Options
from penstock.planner_service.question.site import Demand
from penstock.planner_service.replay.sustained_load import SustainedLoad, load_of
from penstock.planner_service.routing.quality import JudgedSample, TieRule, route
from penstock.planner_service.simulator import Dispatch
from penstock.planner_service.simulator.workload import Bools, Floats
from penstock.services.acceptance.bursts import accepts_as_much
from penstock.types.rules import BurstLadder, BurstStep, BurstThreshold

MOST_STEPS = 8
GROWTH = 1.2  # of the rate, from one step to the next
LEAST_GAIN = 1.03  # a step that sustains less than this times the rate of the one before is left out
COMBINATIONS = 1024
TIED = 0.05  # of the prompts: where more score just the same, a part of them may be accepted
TIE_SHARES = (0.25, 0.5, 0.75)
EPSILON = 1e-9
SEED = 0  # of the draws for ties in simulations


@dataclass(frozen=True, slots=True)
class NoLadder:
    """Why there is no ladder."""

    reason: str


@dataclass(frozen=True, slots=True)
class _Candidate:
    rules: tuple[BurstThreshold, ...]
    quality: float
    rate_per_s: float


def burst_ladder(
    demand: Demand,
    thresholds: Sequence[float],
    strategies: Sequence[Strategy],
    dispatch: Dispatch,
    *,
    floor: float,
    mean_quality: float,
    max_utilisation: float | None,
    tie_shares: Sequence[float] = TIE_SHARES,
) -> BurstLadder | NoLadder:
    """The ladder of a plan with these thresholds and this deployment.

    floor: the least quality of a step. mean_quality: that the mean holds. max_utilisation: the share of what a tier sustains
    up to which a step is used; None for the usual share. tie_shares: parts of the ties that a step may accept, other
    than all. A tier that is not used has the threshold SKIPPED, at all steps.
    """
    share = Options().max_utilisation if max_utilisation is None else max_utilisation
    own = tuple(BurstThreshold(score) for score in thresholds)
    steps: list[BurstStep] = []

    def step_of(rules: tuple[BurstThreshold, ...], quality: float, load: SustainedLoad, reached: Bools) -> BurstStep:
        tier = demand.requests.tiers.index(load.tier)
        return BurstStep(rules, quality, share * load.sustained_per_s, load.tier, float(reached[tier].mean()))

    load, reached = _simulated(demand, own, strategies, dispatch)
    if load is None:
        return NoLadder("the arrivals come all at once: they have no rate")
    processed, quality = expected(demand.judged, own)
    first = step_of(own, quality, load, reached)
    steps.append(first)
    scales = _scales(_limits(demand.judged, processed, strategies), load)
    candidates = _candidates(demand.judged, own, strategies, scales, floor, tie_shares)
    base = load.sustained_per_s
    for power in range(1, MOST_STEPS):
        last = steps[-1]
        able = [c for c in candidates if _after(c, last)]
        fast = [c for c in able if c.rate_per_s >= base * GROWTH**power]
        if fast:
            chosen = max(fast, key=lambda c: (c.quality, c.rate_per_s))
        elif able:
            chosen = max(able, key=lambda c: (c.rate_per_s, c.quality))
        else:
            break
        changed, reached = _simulated(demand, chosen.rules, strategies, dispatch)
        assert changed is not None
        step = step_of(chosen.rules, chosen.quality, changed, reached)
        if step.rate_per_s >= LEAST_GAIN * last.rate_per_s:
            steps.append(step)
        if not fast:
            break
    if len(steps) < 2:
        return NoLadder(f"no thresholds of quality {floor:g} or more sustain a higher rate: {first.tier} breaks first")
    return BurstLadder(mean_quality, tuple(steps))


def expected(sample: JudgedSample, rules: Sequence[BurstThreshold]) -> tuple[Floats, float]:
    """((C, N) probability that each prompt is processed by each tier, mean score), over the draws for ties."""
    tiers = len(sample.tiers)
    processed = np.zeros((tiers, len(sample)))
    reaching, quality, visited = np.ones(len(sample)), 0.0, list[int]()
    for tier, rule in enumerate(rules):
        if rule.score > 100:
            continue
        reached = reaching if sample.passed_over is None else reaching * ~sample.passed_over[:, tier]
        scores = sample.comparable[:, tier]
        accepted = reached * ((scores > rule.score) + rule.tie_share * (scores == rule.score))
        processed[tier] = reached
        visited.append(tier)
        quality += float((accepted * sample.quality_over(visited)).sum())
        reaching = reaching - accepted
    processed[-1] = reaching
    quality += float((reaching * sample.quality_over((*visited, tiers - 1))).sum())
    return processed, quality / len(sample)


def draws(requests: int, tiers: int, seed: int = SEED) -> Floats:
    """(N, C) random numbers for ties, as the seeds of requests give them to routers."""
    return np.random.default_rng(seed).random((requests, tiers))


def tie_rule(rules: Sequence[BurstThreshold], drawn: Floats) -> TieRule:
    """The part of the rules that thresholds do not say. drawn (N, C)."""
    return TieRule(tuple(rule.tie_share for rule in rules), drawn)


def _simulated(
    demand: Demand, rules: Sequence[BurstThreshold], strategies: Sequence[Strategy], dispatch: Dispatch
) -> tuple[SustainedLoad | None, Bools]:
    requests = demand.requests
    ties = tie_rule(rules, draws(len(requests), len(requests.tiers)))
    processed = route(requests, [rule.score for rule in rules], ties).processed
    return load_of(requests, demand.arrival_s, processed, strategies, dispatch), processed


def _candidates(
    sample: JudgedSample,
    own: tuple[BurstThreshold, ...],
    strategies: Sequence[Strategy],
    scales: Sequence[float],
    floor: float,
    tie_shares: Sequence[float],
) -> list[_Candidate]:
    """All combinations of rules that accept at least as much as the plan's own, and hold the floor."""
    used = sum(rule.score <= 100 for rule in own)
    most = max(2, int(COMBINATIONS ** (1 / max(1, used))))
    candidates = []
    below = (rules_below(sample, tier, rule, most, tie_shares) for tier, rule in enumerate(own))
    for rules in itertools.product(*below):
        processed, quality = expected(sample, rules)
        if quality < floor - EPSILON:
            continue
        limits = _limits(sample, processed, strategies)
        rates = [scale * limit for scale, limit in zip(scales, limits, strict=True) if limit is not None]
        candidates.append(_Candidate(rules, quality, min(rates)))
    return candidates


def rules_below(
    sample: JudgedSample, tier: int, own: BurstThreshold, most: int, tie_shares: Sequence[float] = TIE_SHARES
) -> list[BurstThreshold]:
    """The tier's own rule and those that accept more, in this order; at most `most`, spread evenly."""
    if own.score > 100:
        return [own]
    rules = [own]
    for level in sample.levels(tier)[::-1]:
        if level >= own.score:
            continue
        shares = tie_shares if float((sample.scores[:, tier] == level).mean()) >= TIED else ()
        rules += [BurstThreshold(float(level), share) for share in (*shares, 1.0)]
    places = np.unique(np.linspace(0, len(rules) - 1, min(most, len(rules))).round().astype(int))
    return [rules[i] for i in places]


def _scales(limits: Sequence[float | None], load: SustainedLoad) -> list[float]:
    """By tier, the rate that it sustains by simulation over that by arithmetic; 1 for a tier that no request reaches."""
    return [
        load.offered_per_s / used / limit if used > 0 and limit is not None else 1.0
        for used, limit in zip(load.utilisation, limits, strict=True)
    ]


def _limits(sample: JudgedSample, processed: Floats, strategies: Sequence[Strategy]) -> list[float | None]:
    """By tier, the requests per second of the whole cascade that it sustains, by arithmetic on mean lengths; None where no
    request reaches it, or it has no replicas. processed (C, N): as of `expected`.

    Judged prompts have nothing cached; what the requests have is in the scales (`_scales`).
    """
    rates: list[float | None] = []
    for tier, (reached, strategy) in enumerate(zip(processed, strategies, strict=True)):
        total = float(reached.sum())
        if total <= EPSILON or not strategy.replicas:
            rates.append(None)
            continue
        means = (
            float((reached * tokens).sum()) / total for tokens in (sample.input_tokens, sample.output_tokens[:, tier])
        )
        mean_input, mean_output = means
        per_s = sum(count * replica.capacity_per_s(mean_input, mean_output) for replica, count in strategy.replicas)
        rates.append(per_s * len(sample) / total)
    return rates


def _after(candidate: _Candidate, last: BurstStep) -> bool:
    """Whether a step with these rules may come after `last`."""
    deeper = all(accepts_as_much(new, old) for new, old in zip(candidate.rules, last.thresholds, strict=True))
    return deeper and candidate.rules != last.thresholds and candidate.quality <= last.quality
