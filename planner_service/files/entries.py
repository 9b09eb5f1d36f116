"""What all entries of YAML files have in common: unknown fields and infinite numbers are refused."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class Part(BaseModel):
    """One part of a file."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
