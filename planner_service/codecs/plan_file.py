"""Plan files: a computed plan as JSON, which `penstock plan` writes and the other commands read.

The fields are those of CascadePlan, but for the rules of tiers: those are lists, of the tiers but the last.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.planner_service.manifests.mesh_tiers import mesh_tiers
from penstock.proto.planner.v1 import planner_pb2 as pb
from penstock.question_files.errors import FileError
from penstock.question_files.message_form import value_from
from penstock.question_files.questions import QuestionFile
from penstock.services.acceptance.pipeline import OF_PLANS, OF_TIERS, tier_problems
from penstock.types.planned import CascadePlan
from penstock.types.problems import FieldProblem
from penstock.types.rules import TierRules, rules_of

TIER_RULES = {"thresholds": "threshold", **{rule.field: rule.field for rule in OF_TIERS}}
"""Lists of a plan file, of the tiers but the last, and the field of PlannedTier that each is of."""
ALWAYS = ("thresholds", "skip_below")  # lists that are there also where no tier has a value
NEEDED = ("thresholds", "quality", "latency_p95_s", "end_to_end_p95_s", "objective", "dispatch")


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """What a plan was made from: paths, or what the question itself said, and how requests were drawn; see PlanOptions."""

    cluster: Any
    models: Any
    quality: Any
    trace: Any
    gpus: int | None
    requests: int
    seed: int
    lengths: str
    rate: float | None
    max_utilisation: float | None = None
    runs: int = 0
    max_tiers: int | None = None
    min_tiers: int | None = None
    ignore_cached: bool = False


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A plan and what it was made from. unsaid: rules that a file of an earlier version says nothing of."""

    plan: CascadePlan
    inputs: PlanInputs
    unsaid: frozenset[str] = frozenset()

    def to_json(self) -> dict[str, Any]:
        return plan_to_json(self.plan) | {"inputs": asdict(self.inputs)}


def plan_inputs(file: QuestionFile, plan: CascadePlan) -> PlanInputs:
    """What the plan was made from."""
    question = file.question
    assert plan.horizon is not None
    drawn = {name: getattr(question, name) for name in ("gpus", "seed", "rate", "runs", "max_tiers", "min_tiers")}
    return PlanInputs(
        **file.sources,
        **drawn,
        requests=plan.horizon.requests,
        lengths=question.lengths.value,
        max_utilisation=None if question.allow_overload else question.max_utilisation,
        ignore_cached=question.ignore_cached,
    )


def plan_to_json(plan: CascadePlan) -> dict[str, Any]:
    content = asdict(plan)
    for name, field in TIER_RULES.items():
        values = [tier.pop(field) for tier in content["tiers"]][:-1]
        content[name] = values if name in ALWAYS or any(value is not None for value in values) else None
    return content


def plan_from_json(content: Any, where: str) -> CascadePlan:
    """Raises:
    FileError: It is no plan; names the field, after `where`.
    """
    if not isinstance(content, dict) or not isinstance(content.get("tiers"), list) or not content["tiers"]:
        raise FileError(f"{where}: not a plan file")
    if missing := [*_missing(content)]:
        raise FileError(f"{where}: not a plan file: {', '.join(missing)} missing")
    content = dict(content)
    tiers = [dict(tier) for tier in content["tiers"]]
    for name, field in TIER_RULES.items():
        values = content.pop(name, None) or [None] * (len(tiers) - 1)
        if len(values) != len(tiers) - 1:
            raise FileError(f"{where}: not a plan file: {name}: must be of {len(tiers) - 1} tiers, not {len(values)}")
        for tier, value in zip(tiers, (*values, None), strict=True):
            tier[field] = value
    content["tiers"] = tiers
    plan = value_from(content, pb.CascadePlan, CascadePlan, f"{where}: not a plan file", ignore_unknown=True)
    if problems := "; ".join(f"{problem.field}: {problem.problem}" for problem in _rule_problems(plan)):
        raise FileError(f"{where}: not a plan file: {problems}")
    return plan


def read_plan(path: Path) -> PlanFile:
    """FileError for anything that is not a plan of ours."""
    try:
        content = json.loads(path.read_text())
        unsaid = frozenset(name for name in (*TIER_RULES, *(rule.field for rule in OF_PLANS)) if name not in content)
        return PlanFile(plan_from_json(content, str(path)), PlanInputs(**content["inputs"]), unsaid)
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(f"{path}: not a plan file: {error!r}") from None


def _missing(content: dict[str, Any]) -> Iterator[str]:
    yield from (name for name in NEEDED if name not in content)
    for i, tier in enumerate(content["tiers"]):
        yield from (f"tiers[{i}].{name}" for name in ("name", "model", "gpus", "replicas") if name not in tier)


def _rule_problems(plan: CascadePlan) -> Iterator[FieldProblem]:
    rules, names = [TierRules(**rules_of(tier)) for tier in plan.tiers], [tier.name for tier in plan.tiers]
    for problem in tier_problems(rules, names, "tiers"):
        yield FieldProblem(re.sub(r"tiers(\[\d+\])\.(\w+)", r"\2\1", problem.field), problem.problem)


def served_tiers(plan: CascadePlan) -> list[tuple[float | None, int]]:
    """(threshold, instances) of each tier as a mesh serves the plan."""
    return mesh_tiers([tier.threshold for tier in plan.tiers[:-1]], [tier.instances for tier in plan.tiers])
