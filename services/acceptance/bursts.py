"""The ladder of thresholds by which a plan gives way under a burst. No I/O.

Step 0 has the plan's own thresholds. Each further step accepts more answers at lower tiers: it sustains a higher rate and has
a lower mean quality. `burst_control` chooses the step.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, overload

from penstock.services.acceptance.rule import AcceptanceRule
from penstock.services.domain.randomness import TIE, uniform
from penstock.types.problems import FieldProblem
from penstock.types.ranges import own_range_problems
from penstock.types.rules import MAX_BURST_STEPS, BurstLadder, BurstStep, BurstThreshold, RuleOptions

if TYPE_CHECKING:
    from penstock.services.acceptance.arrays import Bools, Floats


@overload
def tie_accepted(tie_share: float, draw: float) -> bool: ...
@overload
def tie_accepted(tie_share: "Floats", draw: "Floats") -> "Bools": ...
def tie_accepted(tie_share: "float | Floats", draw: "float | Floats") -> "bool | Bools":
    """Whether an answer that scores exactly the threshold is accepted. draw: a random number from 0 to 1, less than 1."""
    return draw < tie_share


def tie_draw(seed: int, tier: int) -> float:
    """The random number of a request for ties at a tier of its plan: the same request gets the same decision."""
    return uniform(seed, tier, TIE)


def ladder_problems(
    ladder: BurstLadder, tiers: Sequence[str], thresholds: Sequence[float | None], path: str
) -> Iterator[FieldProblem]:
    """What is wrong with a ladder for these tiers, whose own thresholds (None for the last) are `thresholds`."""
    if not 2 <= len(ladder.steps) <= MAX_BURST_STEPS:
        yield FieldProblem(f"{path}.steps", f"must be 2 to {MAX_BURST_STEPS}, not {len(ladder.steps)}")
        return
    if problems := [*own_range_problems(ladder, path)]:
        yield from problems
    elif ladder.mean_quality > ladder.steps[0].quality:
        yield FieldProblem(
            f"{path}.mean_quality",
            f"must be at most the quality of steps[0], {ladder.steps[0].quality}, not {ladder.mean_quality}",
        )
    unsound = False
    for i, step in enumerate(ladder.steps):
        for problem in _step_problems(step, tiers, f"{path}.steps[{i}]"):
            unsound = True
            yield problem
    if unsound:
        return
    for j, (rule, own) in enumerate(zip(ladder.steps[0].thresholds, thresholds, strict=False)):
        if own is not None and rule != BurstThreshold(own):
            yield FieldProblem(f"{path}.steps[0].thresholds[{j}]", f"must be the tier's own threshold, {own}")
    for i, (before, step) in enumerate(pairwise(ladder.steps), 1):
        yield from _order_problems(before, step, f"{path}.steps[{i}]")


def _step_problems(step: BurstStep, tiers: Sequence[str], path: str) -> Iterator[FieldProblem]:
    if len(step.thresholds) != len(tiers) - 1:
        yield FieldProblem(
            f"{path}.thresholds",
            f"must be {len(tiers) - 1}, one for each tier but the last, not {len(step.thresholds)}",
        )
    for j, rule in enumerate(step.thresholds):
        yield from own_range_problems(rule, f"{path}.thresholds[{j}]")
    yield from own_range_problems(step, path)
    if step.tier not in tiers:
        yield FieldProblem(f"{path}.tier", f"no tier '{step.tier[:80]}' in the plan")


def _order_problems(before: BurstStep, step: BurstStep, path: str) -> Iterator[FieldProblem]:
    if step.rate_per_s <= before.rate_per_s:
        yield FieldProblem(f"{path}.rate_per_s", f"must be over that of the step before, {before.rate_per_s}")
    if step.quality > before.quality:
        yield FieldProblem(f"{path}.quality", f"must be at most that of the step before, {before.quality}")
    for j, (old, new) in enumerate(zip(before.thresholds, step.thresholds, strict=True)):
        if not accepts_as_much(new, old):
            yield FieldProblem(f"{path}.thresholds[{j}]", "must accept all that the step before accepts")


def accepts_as_much(rule: BurstThreshold, other: BurstThreshold) -> bool:
    """Whether a rule accepts every answer that the other accepts."""
    return rule.score < other.score or (rule.score == other.score and rule.tie_share >= other.tie_share)


class BurstSteps(AcceptanceRule):
    """Thresholds give way under a burst. Planning computes the ladder for a plan that it has found."""

    options = ("burst_floor", "burst_mean")
    question = """burst_floor: 75  # thresholds that give way under a burst, down to this mean score
burst_mean: 80  # that their mean holds; default: min_quality"""

    def lines(self, plan: Any, question: RuleOptions | None) -> list[str]:
        return [f"no burst ladder: {plan.burst_reason}"] if question is not None and plan.burst_reason else []
