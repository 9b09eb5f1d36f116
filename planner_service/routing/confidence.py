"""Thresholds whose quality on *new* requests is promised: a bound, not the sample's mean. No I/O.

A sample's mean flatters the thresholds that were chosen on it. So the judged prompts are split. On one half, plans are made
for a ladder of targets, from far above the one wanted down to it. On the other half, which has not seen how they were made,
each plan is tested from the safest down: is the mean score of new requests below the target? The last plan before the first
that cannot refute it is taken. Testing in an order fixed beforehand keeps the chance of any false promise at delta without a
price for the number of tests (fixed sequence testing; Angelopoulos et al., Learn then Test, 2021, section 3).

The test is by betting (Waudby-Smith and Ramdas, 2023, section 4): a gambler who bets on scores above the target, fairly
priced if the target were their mean, multiplies his capital by 1 / delta only with probability delta. It holds at any
sample size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.planner_service.routing.quality import JudgedSample, route
from penstock.planner_service.routing.solution import Binds, Solution, Unreachable
from penstock.planner_service.simulator.workload import Floats
from penstock.services.domain.errors import invalid

RUNGS = 12
LEAST_PROMPTS = 40


@dataclass(frozen=True, slots=True)
class Promise:
    """solution: thresholds whose mean quality is at least the target with probability `confidence`.

    aimed_at: the target on the ladder that led to it. tested_quality: its mean on the half that only tested it.
    """

    solution: Solution
    confidence: float
    aimed_at: float
    tested_quality: float
    tested_prompts: int


def p_value(scores: Floats, target: float) -> float:
    """An upper bound of the chance to see such scores if their mean were `target` or less. scores (N), from 0 to 100."""
    x, m = scores / 100.0, target / 100.0
    capital = best = 0.0  # logarithms
    mean, total, variance, seen = 0.5, 0.5, 0.25, 1.0
    for value in x.tolist():
        # Kelly's bet for what has been seen so far, never more than half of what could ruin
        bet = max(0.0, (mean - m) / (variance / seen + (mean - m) ** 2))
        capital += float(np.log1p(min(bet, 0.5 / max(m, 1e-9)) * (value - m)))
        best = max(best, capital)
        total += value
        seen += 1
        mean = total / seen
        variance += (value - mean) ** 2
    return float(np.exp(-best))


def promised(
    judged: JudgedSample,
    min_quality: float,
    confidence: float,
    seed: int,
    solve: Callable[[float, JudgedSample], Solution],
) -> Promise:
    """The cheapest plan on the ladder that can be promised. solve(target, sample) is least_latency on that sample.

    Raises:
        InvalidRequest: a confidence that is none, or fewer than LEAST_PROMPTS prompts.
        Unreachable: not even the safest plan can be promised.
    """
    if not 0.5 <= confidence < 1:
        raise invalid("confidence", f"must be from 0.5 to under 1, not {confidence:g}")
    if len(judged) < LEAST_PROMPTS:
        raise invalid("quality", f"a promise needs {LEAST_PROMPTS} judged prompts, not {len(judged)}")
    chosen_on, tested_on = halves(judged, seed)
    result: Promise | None = None
    top = max(chosen_on.most, min_quality)
    for target in np.linspace(top, min_quality, RUNGS).tolist():
        try:
            solution = solve(target, chosen_on)
        except Unreachable:
            continue
        scores = answered_quality(tested_on, solution.thresholds)
        if p_value(scores, min_quality) > 1 - confidence:
            break
        result = Promise(solution, confidence, target, float(scores.mean()), len(scores))
    if result is None:
        most, answers = tested_on.most, "the last tier alone has"
        if most > tested_on.best:
            answers = "all tiers together have"
        raise Unreachable(
            f"quality {min_quality:g} cannot be promised with {confidence:.0%} on {len(judged)} judged prompts: "
            f"{answers} {most:.2f} on those that test it",
            most,
            Binds.MIN_QUALITY,
        )
    return result


def halves(judged: JudgedSample, seed: int) -> tuple[JudgedSample, JudgedSample]:
    """(the prompts that plans are made on, those that test them)."""
    order = np.random.default_rng(seed).permutation(len(judged))
    half = len(judged) // 2
    return judged.subset(order[:half]), judged.subset(order[half:])


def answered_quality(sample: JudgedSample, thresholds: tuple[float, ...]) -> Floats:
    """(N) the quality of the accepted answer."""
    answered = route(sample, thresholds).answered
    return np.asarray(sample.quality[np.arange(len(sample)), answered])
