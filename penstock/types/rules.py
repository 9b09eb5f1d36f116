"""Rules by which answers are accepted, in addition to thresholds: as plans, reports, questions and mesh files have them.

Each rule has a field here, one of the same name in the messages, and a file in `services/acceptance`.
"""

from dataclasses import dataclass, fields
from typing import Annotated, Any

from penstock.types.limits import MAX_TOKENS
from penstock.types.ranges import SCORE, Within

TOKENS = Within(1, MAX_TOKENS)


@dataclass(frozen=True, slots=True)
class LongAnswers:
    """Long answers that are accepted from a lower score on."""

    from_tokens: Annotated[int, TOKENS]
    """How many output tokens make an answer a long one."""
    threshold: Annotated[float, SCORE]
    """Long answers with at least this score, 0 to 100, are accepted, also if the tier's own threshold is higher."""


@dataclass(frozen=True, slots=True)
class SkipFor:
    """A tier is passed over for a better one."""

    tier: str
    """The later tier."""
    gain: Annotated[float, SCORE]
    """Over so many points of predicted score."""


@dataclass(frozen=True, kw_only=True)  # without slots, which a mesh file's models cannot inherit
class TierRules:
    """Rules of a tier. None is for the last tier, whose answers are always accepted."""

    skip_below: Annotated[float | None, SCORE] = None
    """The tier is passed over for prompts whose predicted score, 0 to 100, is lower. Needs router.score_predictor; not for
    the last tier. None: never."""
    skip_for: SkipFor | None = None
    """The tier is passed over where a later tier's predicted score is so much higher. None: never."""
    long_answers: LongAnswers | None = None
    """Long answers are accepted from a lower score on: they took long, and would take longest if they escalated. Not for the
    last tier. None: length does not matter."""


@dataclass(frozen=True, kw_only=True)
class PlanRules:
    """Rules of all tiers together."""

    best_answer: bool = False
    """Routers deliver the answer with the highest score of those that a request has got, instead of always the last one. The
    last tier's answer is held and judged, too, where there is an earlier one to compare it with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceRules(PlanRules):
    """What a plan's routing has in addition to thresholds. Those of tiers are of the tiers but the last; empty for none."""

    skip_below: tuple[float | None, ...] = ()
    skip_for: tuple[SkipFor | None, ...] = ()
    long_answers: tuple[LongAnswers | None, ...] = ()


@dataclass(frozen=True, slots=True)
class RuleOptions:
    """The acceptance rules that are chosen with a plan, in addition to thresholds.

    skip: below which predicted score each tier is passed over. long_answers: from which length and score on long answers are
    accepted. best_answer: whether a request's reply is the best of its answers instead of the last.
    """

    skip: bool = False
    long_answers: bool = False
    best_answer: bool = False


def rules_of(value: TierRules | PlanRules) -> dict[str, Any]:
    """The rules of a tier, or of all tiers, by name."""
    kind = TierRules if isinstance(value, TierRules) else PlanRules
    return {field.name: getattr(value, field.name) for field in fields(kind)}
