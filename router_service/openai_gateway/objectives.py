"""The extension field `slo` of requests: a class of the mesh file, or latency objectives. No I/O."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from penstock.router_service.openai_gateway.json_values import StrictModel
from penstock.services.mesh_schema import MeshSloClass
from penstock.types.problems import FieldProblem
from penstock.types.slo import MAX_SLO_NAME_CHARS, Slo


class SloField(StrictModel):
    """The field, in requests of all kinds."""

    slo: Annotated[str, Field(min_length=1, max_length=MAX_SLO_NAME_CHARS)] | MeshSloClass | None = None

    def objectives(self) -> Slo | None:
        """What the request asks for; a class is not looked up yet."""
        return Slo(name=self.slo) if isinstance(self.slo, str) else self.slo.slo() if self.slo is not None else None

    def slo_problems(self) -> Iterator[FieldProblem]:
        if isinstance(self.slo, MeshSloClass):
            yield from self.slo.problems("slo")
