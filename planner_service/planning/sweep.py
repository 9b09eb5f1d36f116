"""What if: plans for several rates, qualities or numbers of GPUs, all else being equal. No I/O."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.planner_service.question.planning_options import Options
from penstock.services.domain.errors import invalid
from penstock.types.planned import CascadePlan

POINTS = 7


class Axis(enum.Enum):
    """What is varied: arrivals per second, the least quality, or the most GPUs."""

    RATE = "rate"
    QUALITY = "quality"
    GPUS = "gpus"

    def of(self, options: Options, value: float) -> Options:
        """The options with another value."""
        match self:
            case Axis.RATE:
                return replace(options, rate=value)
            case Axis.QUALITY:
                return replace(options, min_quality=value)
        return replace(options, gpus=int(value))


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One plan of a sweep, or why there is none for this value."""

    value: float
    plan: CascadePlan | None
    reason: str = ""


def sweep_values(
    axis: Axis, options: Options, rate_per_s: float, quality: tuple[float, float], gpus: int
) -> list[float]:
    """POINTS values, ascending: half to twice the rate; between the first tier's quality and the last's; up to all GPUs.

    quality: of the first tier alone and of the best that can be had.
    """
    if axis is Axis.RATE:
        return [rate_per_s * factor for factor in (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)]
    if axis is Axis.QUALITY:
        worst, best = quality
        return [worst + (best - worst) * i / (POINTS - 1) for i in range(POINTS)]
    most = gpus if options.gpus is None else options.gpus
    return [float(n) for n in dict.fromkeys(max(1, round(most * i / POINTS)) for i in range(1, POINTS + 1))]


def check_sweep(axis: Axis, values: Sequence[float]) -> None:
    """InvalidRequest for values that the axis cannot have."""
    if not values:
        raise invalid("sweep", "give at least one value")
    for value in values:
        if axis is Axis.RATE and not value > 0:
            raise invalid("sweep", f"a rate must be over 0, not {value:g}")
        if axis is Axis.QUALITY and not 0 <= value <= 100:
            raise invalid("sweep", f"a quality must be from 0 to 100, not {value:g}")
        if axis is Axis.GPUS and (value < 1 or value != int(value)):
            raise invalid("sweep", f"a number of GPUs must be whole and at least 1, not {value:g}")
