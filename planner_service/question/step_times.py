"""Where the step times of a plan are from, and in which numbers they were computed. No I/O."""

from collections.abc import Iterable

from penstock.planner_service.question.site import Site
from penstock.services.domain.hardware import ReplicaShape
from penstock.types.planned import StepTimes

ESTIMATED, PROFILED, STATED = "estimated", "profiled", "stated"


def step_times(site: Site, tier: int, shapes: Iterable[ReplicaShape]) -> StepTimes:
    """Those of the replicas of a tier. shapes: in use."""
    if not is_estimated(site, tier):
        return StepTimes(PROFILED if site.remote_of(tier) is None else STATED)
    arithmetic = site.models[tier].arithmetic
    used = dict.fromkeys(kind for shape in shapes if (kind := site.type_of(shape)) is not None)
    widened = tuple(kind.name or kind.gpu.name for kind in used if not kind.gpu.computes(arithmetic))
    engine = site.runtime.engine
    return StepTimes(ESTIMATED, arithmetic.value, widened, engine.name, engine.fast, engine.slow)


def is_estimated(site: Site, tier: int) -> bool:
    """Whether a tier's step times are neither measured nor stated."""
    return site.remote_of(tier) is None and not (site.measured and site.measured[tier])
