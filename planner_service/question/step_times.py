"""Where the step times of a plan are from, and in which numbers they were computed. No I/O."""

from collections.abc import Iterable

from penstock.planner_service.question.site import Site
from penstock.services.domain.hardware import ReplicaShape
from penstock.types.planned import StepTimes

ESTIMATED, PROFILED, STATED = "estimated", "profiled", "stated"


def step_times(site: Site, tier: int, shapes: Iterable[ReplicaShape]) -> StepTimes:
    """Those of the replicas of a tier. shapes: in use."""
    if site.remote_of(tier) is not None:
        return StepTimes(STATED)
    if site.measured and site.measured[tier]:
        return StepTimes(PROFILED)
    arithmetic = site.models[tier].arithmetic
    used = dict.fromkeys(kind for shape in shapes if (kind := site.type_of(shape)) is not None)
    widened = tuple(kind.name or kind.gpu.name for kind in used if not kind.gpu.computes(arithmetic))
    return StepTimes(ESTIMATED, arithmetic.value, widened)
