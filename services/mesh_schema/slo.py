"""What a mesh file says of latency objectives."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.services.domain.errors import invalid
from penstock.services.mesh_schema.common import FROZEN
from penstock.types.problems import FieldProblem, shortened
from penstock.types.slo import (
    MAX_SLO_MARKER_CHARS,
    MAX_SLO_NAME_CHARS,
    MAX_SLO_PHASES,
    MAX_SLO_S,
    MIN_SLO_S,
    Slo,
    SloFallback,
    SloPhase,
)

STRICT = FROZEN | ConfigDict(strict=True)  # requests may have the same objectives, in JSON


class MeshSloPhase(BaseModel):
    """A phase of a reply with a pace of its own."""

    model_config = STRICT

    time_per_output_token_s: float = Field(ge=MIN_SLO_S, le=MAX_SLO_S)
    """Seconds per output token."""
    from_output_token: int = Field(default=0, ge=0, le=2**31 - 1)
    """The output token with which the phase begins."""
    after_marker: str = Field(default="", max_length=MAX_SLO_MARKER_CHARS)
    """The phase begins after the first occurrence of this text instead, such as `</think>`."""


class MeshSloClass(BaseModel):
    """A class of latency objectives, which requests name in place of objectives of their own. Without any objective, its
    requests are served as best effort."""

    model_config = STRICT

    time_to_first_token_s: float | None = Field(default=None, ge=MIN_SLO_S, le=MAX_SLO_S)
    """Seconds from the router's receiving a request to the first token of its answer."""
    time_per_output_token_s: float | None = Field(default=None, ge=MIN_SLO_S, le=MAX_SLO_S)
    """Seconds per output token, for the whole answer."""
    phases: tuple[MeshSloPhase, ...] = Field(default=(), max_length=MAX_SLO_PHASES, fail_fast=True, strict=False)
    """Phases with different paces, in order, in place of `time_per_output_token_s`."""
    fallback: Literal["best_effort", "decline"] | None = None
    """What follows where no worker can keep the objectives. None: the mesh's `slo.fallback`."""

    def problems(self, path: str) -> Iterator[FieldProblem]:
        """What is wrong between the objectives."""
        if self.time_per_output_token_s is not None and self.phases:
            yield FieldProblem(f"{path}.phases", "must not be combined with time_per_output_token_s")
            return
        for problem in self.slo().problems(path):
            yield FieldProblem(problem.field.replace("from_output_token_count", "from_output_token"), problem.problem)

    def slo(self) -> Slo:
        """The objectives."""
        phases = tuple(SloPhase(p.from_output_token, p.time_per_output_token_s, p.after_marker) for p in self.phases)
        if self.time_per_output_token_s is not None:
            phases = (SloPhase(0, self.time_per_output_token_s),)
        return Slo(self.time_to_first_token_s, phases, fallback=SloFallback(self.fallback) if self.fallback else None)


class MeshSlo(BaseModel):
    """Latency objectives (SLOs) of requests. Workers keep them in tiers whose `batch_policy` is `slo`."""

    model_config = FROZEN

    classes: dict[Annotated[str, Field(min_length=1, max_length=MAX_SLO_NAME_CHARS)], MeshSloClass] = {}
    """Named classes: `{interactive: {time_to_first_token_s: 2, time_per_output_token_s: 0.05}, batch: {}}`."""
    fallback: Literal["best_effort", "decline"] = "best_effort"
    """What follows where no worker can keep a request's objectives: it is served as best effort, or ends as declined."""
    max_hops: int = Field(default=3, ge=0)
    """Other instances of a tier that are tried after one has declined a request."""
    hop_time_s: float = Field(default=0.5, ge=0)
    """No further instance of a tier is tried later than this after the first one."""

    @property
    def tightest_ttft_s(self) -> float | None:
        """Seconds to the first token of the tightest class; None where no class has such a limit."""
        limits = [each.time_to_first_token_s for each in self.classes.values()]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def tightest_tpot_s(self) -> float | None:
        """Seconds per output token of the tightest class; None where no class has a pace."""
        paces = [phase.time_per_output_token_s for one in self.classes.values() for phase in one.slo().phases]
        return min(paces, default=None)

    def resolved(self, slo: Slo, path: str = "slo") -> Slo:
        """The objectives of a request, with those of its class and a fallback. path: of the request's field.

        Raises:
            InvalidRequest: There is no such class; names the field.
        """
        objectives = slo
        if slo.name:
            if slo.name not in self.classes:
                known = ", ".join(sorted(self.classes)) or "none"
                raise invalid(f"{path}.name", f"no class '{shortened(slo.name)}' in the mesh file, which has: {known}")
            objectives = self.classes[slo.name].slo()
        fallback = slo.fallback or objectives.fallback or SloFallback(self.fallback)
        return replace(objectives, name=slo.name, fallback=fallback)
