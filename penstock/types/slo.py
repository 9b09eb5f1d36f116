"""Latency objectives of requests, and how they were kept."""

import enum
from collections.abc import Iterator
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from penstock.types.limits import AtMost
from penstock.types.problems import FieldProblem, length_problems

MAX_SLO_PHASES = 64
MAX_SLO_MARKER_CHARS = 64
MAX_SLO_NAME_CHARS = 64
MIN_SLO_S, MAX_SLO_S = 1e-6, 1e7
"""Of an objective: what messages carry exactly enough, and more than anything takes (116 days)."""
_SLO_RANGE = f"must be from {MIN_SLO_S:g} to {MAX_SLO_S:g} s"


@dataclass(frozen=True, slots=True)
class SloPhase:
    """From output token `from_output_token` on, the average time per token is at most `time_per_output_token_s`.

    after_marker: the phase begins after the first occurrence of this text instead, such as `</think>`.
    """

    from_output_token: int
    time_per_output_token_s: float
    after_marker: str = ""


class SloFallback(enum.StrEnum):
    """What follows where no worker can keep an SLO: the request is served as best effort, or ends as declined."""

    BEST_EFFORT = "best_effort"
    DECLINE = "decline"


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency objectives of a request.

    phases: in order of output position; none: no objective for decoding.
    name: a class of the mesh file, such as `interactive`, in place of the objectives.
    fallback: what follows where no worker can keep them; None: what the class or the mesh file says.
    time_per_output_token_s: in place of phases, one for the whole answer.

    Raises:
        ValueError: There are phases and a pace for the whole answer.
    """

    time_to_first_token_s: float | None = None
    phases: Annotated[tuple[SloPhase, ...], AtMost(MAX_SLO_PHASES, "phases")] = ()
    name: str = ""
    fallback: SloFallback | None = None
    time_per_output_token_s: InitVar[float | None] = None

    if TYPE_CHECKING:

        def __init__(
            self,
            time_to_first_token_s: float | None = None,
            phases: tuple[SloPhase, ...] = (),
            name: str = "",
            fallback: SloFallback | Literal["best_effort", "decline"] | None = None,
            time_per_output_token_s: float | None = None,
        ) -> None: ...

    def __post_init__(self, time_per_output_token_s: float | None) -> None:
        if time_per_output_token_s is None:
            return
        if self.phases:
            raise ValueError("slo.phases: must not be combined with time_per_output_token_s")
        object.__setattr__(self, "phases", (SloPhase(0, time_per_output_token_s),))

    @property
    def asks(self) -> bool:
        """Whether there is anything to keep."""
        return self.time_to_first_token_s is not None or bool(self.phases)

    def problems(self, path: str) -> Iterator[FieldProblem]:
        """What is wrong with it, by field from `path` on.

        Example:
            >>> [problem.field for problem in Slo(time_to_first_token_s=-1.0).problems("slo")]
            ['slo.time_to_first_token']
        """
        ttft = self.time_to_first_token_s
        yield from length_problems(self.name, MAX_SLO_NAME_CHARS, f"{path}.name")
        if self.name and self.asks:
            yield FieldProblem(f"{path}.name", "must not be combined with objectives: the class has its own")
        if ttft is not None and not MIN_SLO_S <= ttft <= MAX_SLO_S:
            yield FieldProblem(f"{path}.time_to_first_token", _SLO_RANGE)
        if len(self.phases) > MAX_SLO_PHASES:
            yield FieldProblem(f"{path}.phases", f"at most {MAX_SLO_PHASES} phases, not {len(self.phases)}")
            return
        last = -1
        for i, phase in enumerate(self.phases):
            at = f"{path}.phases[{i}]"
            yield from length_problems(phase.after_marker, MAX_SLO_MARKER_CHARS, f"{at}.after_marker")
            if phase.after_marker and phase.from_output_token:
                yield FieldProblem(f"{at}.after_marker", "must not be set with from_output_token_count")
            if not phase.after_marker and phase.from_output_token <= last:
                yield FieldProblem(f"{at}.from_output_token_count", "must be greater than in the previous phase")
            if not MIN_SLO_S <= phase.time_per_output_token_s <= MAX_SLO_S:
                yield FieldProblem(f"{at}.time_per_output_token", _SLO_RANGE)
            last = last if phase.after_marker else phase.from_output_token


class SloClass(enum.StrEnum):
    """How a request is served.

    STANDARD: admitted; its promise is kept at every step.
    BEST_EFFORT: without a promise, from what standard requests leave over.
    """

    STANDARD = "standard"
    BEST_EFFORT = "best_effort"


@dataclass(frozen=True, slots=True)
class SloResult:
    """How a request with an SLO was served.

    slo_class: STANDARD if a worker of the answering tier ever promised to keep the SLO; None if the request was declined.
    attained: whether the first token and every window of ten tokens came in time, whatever the class.
    first_token_late_s: 0 if it was in time, None if there was none. windows, late_windows: windows of ten tokens with a
    promised pace, and those that were slower.
    """

    slo_class: SloClass | None
    attained: bool
    first_token_late_s: float | None
    windows: int = 0
    late_windows: int = 0
