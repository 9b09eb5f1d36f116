"""The rules in their order: for one request at a time as routers serve it, and for all judged prompts as plans count them.
No I/O.

(1) Skip prediction and skipping for another tier: before a tier is asked. (2) Long answers, then (3) the threshold: when
the answer is finished and has a score. (4) The best answer: when one is accepted.
"""

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.services.acceptance.best_answer import BestAnswer
from penstock.services.acceptance.long_answers import LongAnswersAccepted, stands_by_length
from penstock.services.acceptance.rule import AcceptanceRule
from penstock.services.acceptance.skip_for import SkippingForAnother, gains_enough
from penstock.services.acceptance.skip_prediction import SkipPrediction, passes_over
from penstock.types.plans import Plan, TierPlan
from penstock.types.problems import FieldProblem
from penstock.types.ranges import range_problems
from penstock.types.rules import AcceptanceRules, PlanRules, RuleOptions, TierRules, rules_of

if TYPE_CHECKING:
    from penstock.services.acceptance.judged import JudgedSample

RULES: tuple[AcceptanceRule, ...] = (BestAnswer(), SkipPrediction(), SkippingForAnother(), LongAnswersAccepted())
"""All rules, in the order in which plans list them. The rest of the house asks these, and names none of them."""
OF_TIERS = tuple(rule for rule in RULES if rule.of_tiers)
OF_PLANS = tuple(rule for rule in RULES if not rule.of_tiers)
NO_RULES = AcceptanceRules()


def rules_of_plan(plan: Plan) -> AcceptanceRules:
    """Those of a plan that is served."""
    lower = plan.tiers[:-1]
    columns: dict[str, Any] = {rule.field: tuple(rule.value(tier) for tier in lower) for rule in OF_TIERS}
    return AcceptanceRules(**columns, **rules_of(plan))


def joined(one: AcceptanceRules, other: AcceptanceRules) -> AcceptanceRules:
    """The rules of one, and those of the other where it has none."""
    values = {}
    for rule in RULES:
        own, others = rule.value(one), rule.value(other)
        if rule.of_tiers and own and others:
            own = tuple(b if a is None else a for a, b in zip(own, others, strict=True))
        values[rule.field] = own or others
    return AcceptanceRules(**values)


def of_tiers(rules: AcceptanceRules, used: Sequence[bool]) -> AcceptanceRules:
    """The rules of those tiers alone."""
    changed: dict[str, Any] = {
        rule.field: tuple(value if is_used else None for value, is_used in zip(values, used, strict=True))
        for rule in OF_TIERS
        if (values := rule.value(rules))
    }
    return replace(rules, **changed)


def of_tier(rules: AcceptanceRules, tier: int) -> dict[str, Any]:
    """The rules of a tier by name; None for each that it does not have."""
    columns = {rule.field: rule.value(rules) for rule in OF_TIERS}
    return {name: values[tier] if tier < len(values) else None for name, values in columns.items()}


def predicting(tier: TierRules) -> list[str]:
    """The rules of a tier, by name, that decide by predicted scores."""
    return [rule.field for rule in OF_TIERS if rule.predicts and rule.value(tier) is not None]


def kinds_of(rules: AcceptanceRules) -> tuple[bool, ...]:
    """Which rules there are."""
    values = ((rule, rule.value(rules)) for rule in RULES)
    return tuple(any(each is not None for each in value) if rule.of_tiers else bool(value) for rule, value in values)


def asked(options: RuleOptions) -> list[AcceptanceRule]:
    """The rules that a question asks for, of those of which choices are tried."""
    return [rule for rule in RULES if rule.asked(options)]


def asked_of_plans(options: RuleOptions) -> AcceptanceRules:
    """The rules for all tiers that a question asks for."""
    chosen: dict[str, Any] = {rule.field: True for rule in OF_PLANS if rule.asked(options)}
    return AcceptanceRules(**chosen)


def candidates(judged: "JudgedSample", options: RuleOptions) -> list[list[AcceptanceRules]]:
    """What planning tries: for one tier after another but the last, the choices of one rule each."""
    tiers, result = len(judged.tiers) - 1, list[list[AcceptanceRules]]()
    for tier in range(tiers):
        for rule in asked(options):
            if rule.of_tiers:
                columns: list[Any] = [
                    tuple(choice if i == tier else None for i in range(tiers)) for choice in rule.choices(judged, tier)
                ]
                result.append([AcceptanceRules(**{rule.field: column}) for column in columns])
    return result


def tier_problems(tiers: Sequence[TierRules], names: Sequence[str], path: str) -> Iterator[FieldProblem]:
    """What is wrong with the rules of tiers. names, path: of the tiers; the last one has none."""
    for i, tier in enumerate(tiers):
        at = f"{path}[{i}]"
        if i == len(tiers) - 1:
            for rule in OF_TIERS:
                if rule.value(tier) != rule.value(TierRules()):
                    problem = "must not be set: the last tier is always asked, and its answers are accepted"
                    yield FieldProblem(f"{at}.{rule.field}", problem)
            continue
        yield from range_problems(TierRules(**rules_of(tier)), at)
        for rule in OF_TIERS:
            if (refused := rule.refused(rule.value(tier), names[i + 1 :])) is not None:
                yield FieldProblem(f"{at}.{rule.field}.{refused.field}", refused.problem)


def rule_lines(plan: Any, question: RuleOptions | None) -> list[str]:
    """What is said of the rules of a plan. plan: a Plan or a CascadePlan. question: its rules; None of a Plan."""
    return [line for rule in RULES for line in rule.lines(plan, question)]


def compares_answers(plan: PlanRules) -> bool:
    """Whether the answer that is delivered may be an earlier one: then it is kept, and the last tier's is judged, too."""
    return plan.best_answer


class Decision(enum.Enum):
    """What the rules say of a finished answer that has a score."""

    LONG_ANSWER = "long_answer"
    SCORE_AT_LEAST_THRESHOLD = "score_at_least_threshold"
    SCORE_BELOW_THRESHOLD = "score_below_threshold"

    @property
    def accepted(self) -> bool:
        return self in (Decision.LONG_ANSWER, Decision.SCORE_AT_LEAST_THRESHOLD)


def is_asked(tier: TierPlan, predicted: Mapping[str, float]) -> bool:
    """Whether a tier is asked. predicted: the scores that answers are expected to get, by tier, of those that have one."""
    own, better = predicted.get(tier.name), tier.skip_for
    if passes_over(own, tier.skip_below):
        return False
    return own is None or better is None or not gains_enough(own, predicted.get(better.tier, own), better)


def decide(tier: TierPlan, score: float, counted_tokens: int) -> Decision:
    """Whether an answer of a tier that has a threshold is accepted. counted_tokens: see `long_answers`."""
    assert tier.threshold is not None
    if stands_by_length(tier.long_answers, counted_tokens, score):
        return Decision.LONG_ANSWER
    return Decision.SCORE_AT_LEAST_THRESHOLD if score >= tier.threshold else Decision.SCORE_BELOW_THRESHOLD


def lowest_accepted(tier: TierPlan, counted_tokens: int) -> float:
    """The score from which on an answer is accepted: the threshold, or that for long answers."""
    threshold, rule = tier.threshold or 0.0, tier.long_answers
    return threshold if rule is None or counted_tokens < rule.from_tokens else min(threshold, rule.threshold)
