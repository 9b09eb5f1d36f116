"""Where the step times of a plan are from, and in which numbers they were computed. No I/O."""

from collections.abc import Iterable
from dataclasses import dataclass

from planner_service.site import Site
from services.domain.hardware import ReplicaShape

ESTIMATED, PROFILED, STATED = "estimated", "profiled", "stated"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Of one tier. source: ESTIMATED by data sheets, PROFILED on hardware, or STATED of a remote tier.

    arithmetic: of an estimate, the model's; empty for others, whose times have it already. widened: types of GPU in use that
    do not have it, and are taken to compute in 16 bits.
    """

    source: str
    arithmetic: str = ""
    widened: tuple[str, ...] = ()

    def __str__(self) -> str:
        """`estimated in fp8, in 16 bits on a100-80gb`."""
        text = f"{self.source} in {self.arithmetic}" if self.arithmetic else self.source
        return f"{text}, in 16 bits on {', '.join(self.widened)}" if self.widened else text


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
