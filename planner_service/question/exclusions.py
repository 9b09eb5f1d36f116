"""What does not go together in a planning question: one table, which is read before anything is searched. No I/O.

An option of a question has a name here, as have facts about its files: a question is a set of names. What no row of the
table keeps apart is planned together: a test walks all pairs.
"""

import enum
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from penstock.planner_service.routing.grid import MOST_TIERS
from penstock.services.domain.errors import invalid
from penstock.types.planning import PlanOptions
from penstock.types.rules import RuleOptions

if TYPE_CHECKING:
    from penstock.planner_service.question.planning_options import Options
    from penstock.planner_service.question.site import Site
    from penstock.planner_service.routing.quality import JudgedSample

REMOTE, GRADED, SLOS = "remote tiers", "a stated judge", "SLO classes"
DRAFTED = "drafts of rejected answers"
IN_FORCE = "rules of the plan in force"
AT_ONCE, UNPREDICTED = "arrivals all at once", "no predicted scores"
TOO_MANY = f"more than {MOST_TIERS} tiers without max_tiers"
SWEEP = "a sweep"
NO_RATE = "the arrivals come all at once: they have no rate that could be changed"


@dataclass(frozen=True, slots=True)
class Exclusion:
    """None of `these` goes with any of `those`. field: that the error names. why: {} is the value of the first."""

    these: tuple[str, ...]
    those: tuple[str, ...]
    field: str
    why: str


TABLE = (
    Exclusion(("no min_quality",), ("no max_latency_s",), "target", "give min_quality, max_latency_s or both"),
    Exclusion(("goal: latency", "goal: cost"), ("no min_quality",), "min_quality", "is needed where the goal is {}"),
    Exclusion(
        ("goal: quality", "goal: rate"), ("no max_latency_s",), "max_latency_s", "is needed where the goal is {}"
    ),
    Exclusion(("min_tiers",), ("no max_tiers",), "min_tiers", "goes with max_tiers, which is not given"),
    Exclusion(
        (*(f"rules.{rule.name}" for rule in fields(RuleOptions)), IN_FORCE),
        (TOO_MANY,),
        "rules",
        f"go with up to {MOST_TIERS} tiers",
    ),
    Exclusion(
        ("rules.skip",),
        (UNPREDICTED,),
        "rules.skip",
        "needs a column {tier}_predicted_score of every tier: see `penstock predictor`",
    ),
    Exclusion(
        ("rules.long_answers",),
        ("lengths: trace",),
        "lengths",
        "must be those of the judged answers where long answers are accepted",
    ),
    Exclusion((SLOS,), (REMOTE,), "remote", "tiers are not simulated with SLOs"),
    Exclusion((SLOS,), (DRAFTED,), "draft_acceptance", "is not simulated with SLOs"),
    Exclusion((SLOS,), (GRADED,), "judge", "is not simulated with SLOs: state judge_s instead"),
    Exclusion(("goal: rate", "rate"), (AT_ONCE,), "rate", NO_RATE),
    Exclusion((f"{SWEEP}: rate",), (AT_ONCE,), "sweep", NO_RATE),
    Exclusion((REMOTE,), (AT_ONCE,), "trace", "the arrivals come all at once: a remote tier is paid by the rate"),
    Exclusion((f"{SWEEP}: rate",), ("goal: rate",), "sweep", "{} does not go with the goal rate, which finds it"),
    Exclusion(
        (f"{SWEEP}: quality",), ("goal: quality",), "sweep", "{} does not go with the goal quality, which finds it"
    ),
)


def check_together(names: Collection[str]) -> None:
    """InvalidRequest for the first row of the table that has two of these names."""
    for row in TABLE:
        these = [name for name in row.these if name in names]
        if these and not set(row.those).isdisjoint(names):
            raise invalid(row.field, row.why.replace("{}", these[0].partition(": ")[2]))


def names_of(options: "Options", tiers: int) -> set[str]:
    """What a question about so many tiers asks for, with the goal that it has where it names none."""
    rules, result = options.rules, {f"goal: {options.aim}"}
    if tiers > MOST_TIERS and options.max_tiers is None:
        result.add(TOO_MANY)
    for field in fields(PlanOptions):
        if field.name not in ("goal", "rules"):
            result.add(_name(field.name, getattr(options, field.name)))
    return result | {_name(f"rules.{field.name}", getattr(rules, field.name)) for field in fields(rules)}


def _name(option: str, value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{option}: {value.value}"
    return f"no {option}" if value is None or value is False else option


def names_of_files(site: "Site", judged: "JudgedSample | None" = None, *, at_once: bool = False) -> set[str]:
    """What there is to know of where a cascade is to run, and of what it is to serve. at_once: all requests arrive then."""
    known = {
        REMOTE: bool(site.remotes),
        GRADED: site.grading is not None,
        SLOS: site.one_batch,
        DRAFTED: any(site.draft_acceptance),
        AT_ONCE: at_once,
    }
    if judged is not None:
        known |= {UNPREDICTED: judged.predicted is None, IN_FORCE: judged.under_rules}
    return {name for name, holds in known.items() if holds}
