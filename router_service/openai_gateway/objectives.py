"""The extension field `slo` of requests: a class of the mesh file, or latency objectives. No I/O."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.domain.errors import FieldProblem
from services.domain.requests import (
    MAX_SLO_MARKER_CHARS,
    MAX_SLO_NAME_CHARS,
    MAX_SLO_PHASES,
    MAX_SLO_S,
    MIN_SLO_S,
    Slo,
    SloFallback,
    SloPhase,
)

_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)
_Seconds = Annotated[float, Field(ge=MIN_SLO_S, le=MAX_SLO_S)]
_FIELDS = {
    "slo.name": "slo",
    "slo.time_to_first_token": "slo.time_to_first_token_s",
    "from_output_token_count": "from_output_token",
}


class Phase(BaseModel):
    model_config = _STRICT

    time_per_output_token_s: _Seconds
    from_output_token: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    after_marker: Annotated[str, Field(max_length=MAX_SLO_MARKER_CHARS)] = ""


class Objectives(BaseModel):
    model_config = _STRICT

    time_to_first_token_s: _Seconds | None = None
    time_per_output_token_s: _Seconds | None = None
    phases: Annotated[list[Phase], Field(max_length=MAX_SLO_PHASES, fail_fast=True)] = []
    fallback: Literal["best_effort", "decline"] | None = None


class SloField(BaseModel):
    """The field, in requests of both kinds."""

    model_config = _STRICT

    slo: Annotated[str, Field(min_length=1, max_length=MAX_SLO_NAME_CHARS)] | Objectives | None = None

    def objectives(self) -> Slo | None:
        """What the request asks for; a class is not looked up yet."""
        if self.slo is None or isinstance(self.slo, str):
            return Slo(name=self.slo) if self.slo else None
        given = self.slo
        phases = tuple(SloPhase(p.from_output_token, p.time_per_output_token_s, p.after_marker) for p in given.phases)
        if given.time_per_output_token_s is not None:
            phases = (SloPhase(0, given.time_per_output_token_s), *phases)
        fallback = SloFallback(given.fallback) if given.fallback is not None else None
        return Slo(given.time_to_first_token_s, phases, fallback=fallback)

    def slo_problems(self) -> Iterator[FieldProblem]:
        if isinstance(self.slo, Objectives) and self.slo.phases and self.slo.time_per_output_token_s is not None:
            yield FieldProblem("slo.phases", "must not be combined with time_per_output_token_s")
        elif (slo := self.objectives()) is not None:
            yield from map(in_own_field, slo.problems("slo"))


def in_own_field(problem: FieldProblem) -> FieldProblem:
    """A problem of an SLO under the field that this API has for it."""
    field = problem.field
    for name, own_name in _FIELDS.items():
        field = field.replace(name, own_name)
    return FieldProblem(field, problem.problem)
