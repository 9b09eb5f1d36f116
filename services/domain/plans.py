"""Plans: the tiers, their instances and their thresholds. No I/O."""

import re
from collections.abc import Iterator, Sequence

from penstock.services.acceptance.pipeline import tier_problems
from penstock.services.domain.errors import check
from penstock.services.domain.stages.layout import stage_problems
from penstock.services.domain.stages.qoe import qoe_problems
from penstock.types.plans import Plan, TierPlan
from penstock.types.problems import FieldProblem
from penstock.types.ranges import own_range_problems

CASCADE_MODEL = "cascade"
_TIER_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}\Z")


def same_model(served: str, planned: str) -> bool:
    """Whether a model of the mesh is the planned one: `Qwen/Qwen2.5-7B-Instruct` is a `qwen2.5-7b`.

    Ignores the organisation and case. A plan names the shape of a model, so the served name may have a suffix.
    """
    served_name, planned_name = (name.rpartition("/")[2].lower() for name in (served, planned))
    return served_name == planned_name or (bool(planned_name) and served_name.startswith(f"{planned_name}-"))


def same_models(served: Sequence[str], planned: Sequence[str]) -> bool:
    """Whether the models of the mesh are the planned ones, in any order."""
    every = all(any(same_model(name, other) for other in planned) for name in served)
    return every and len(served) == len(planned)


def check_plan(plan: Plan) -> None:
    """Check all fields of a plan.

    Raises:
        InvalidRequest: A field is invalid; the error names every one.
    """
    check(dict.fromkeys(_problems(plan)))


def _problems(plan: Plan) -> Iterator[FieldProblem]:
    if not plan.tiers:
        yield FieldProblem("plan.tiers", "at least one tier is needed")
    names: set[str] = set()
    for i, tier in enumerate(plan.tiers):
        path = f"plan.tiers[{i}]"
        if tier.name in names and _TIER_NAME.match(tier.name) and tier.name != CASCADE_MODEL:
            yield FieldProblem(f"{path}.name", f"duplicate name '{tier.name}'")
        names.add(tier.name)
        yield from _tier_problems(tier, path)
        is_last = i == len(plan.tiers) - 1
        if is_last and tier.threshold is not None:
            yield FieldProblem(f"{path}.threshold", "must not be set: answers of the last tier are always accepted")
        if not is_last and tier.threshold is None:
            yield FieldProblem(f"{path}.threshold", "missing: required for every tier but the last")
    yield from tier_problems(plan.tiers, [tier.name for tier in plan.tiers], "plan.tiers")


def _tier_problems(tier: TierPlan, path: str) -> Iterator[FieldProblem]:
    if not _TIER_NAME.match(tier.name):
        yield FieldProblem(
            f"{path}.name", "must be 1 to 63 characters of a-z, 0-9, -, _ and ., starting with a letter or digit"
        )
    elif tier.name == CASCADE_MODEL:
        yield FieldProblem(f"{path}.name", f"'{CASCADE_MODEL}' is reserved for all tiers together")
    yield from own_range_problems(tier, path)
    yield from stage_problems(tier.stages, f"{path}.stages")
    if tier.stages and (stage_instances := sum(stage.instances for stage in tier.stages)) != tier.instances:
        yield FieldProblem(f"{path}.stages", f"have {stage_instances} instances, the tier {tier.instances}")
    if tier.stages and tier.qoe is None:
        yield FieldProblem(f"{path}.qoe", "missing: stages need it")
    if tier.qoe is not None:
        yield from qoe_problems(tier.qoe, f"{path}.qoe")
