"""Models of the models file: their shapes, and the models that draft for them."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from planner_service.files.entries import Count, Part, Positive
from planner_service.files.yaml_files import catalogue
from planner_service.simulator.speculation import MAX_WINDOW
from planner_service.site import TierSpeculation
from services.domain.hardware import Arithmetic, ModelSpec
from services.mesh_schema import MAX_DRAFT_WINDOW

MAX_DRAFTERS = 4  # of one tier: every subset of them is a chain to compare


class ModelEntry(Part):
    """A model's shape; see ModelSpec. parameters, active, expert_parameters, attention: billions. name: the model's, where it
    is not the tier's.

    active: None for all but the experts that a token does not use. bytes_per_parameter: None for 2; an arithmetic other than
    16bit needs it. experts, experts_per_token, expert_parameters: all or none; without them, a batch is taken to read the
    active parameters of each of its tokens, all parameters at most.
    """

    name: str = ""
    layers: Count
    hidden: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    parameters: Positive
    active: Positive | None = None
    bytes_per_parameter: Positive | None = None
    kv_per_layer_bytes: Positive | None = None
    arithmetic: Arithmetic = Arithmetic.BITS_16
    experts: Count | None = None
    experts_per_token: Count | None = None
    expert_parameters: Positive | None = None
    attention: Positive | None = None

    @model_validator(mode="after")
    def _experts(self) -> Self:
        given = {name: getattr(self, name) for name in ("experts", "experts_per_token", "expert_parameters")}
        missing = [name for name, value in given.items() if value is None]
        if missing and len(missing) < len(given):
            there = " and ".join(name for name in given if name not in missing)
            raise ValueError(f"{missing[0]}: is needed with {there}")
        if self.experts and self.experts_per_token and self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token: must be at most experts, {self.experts}, not {self.experts_per_token}"
            )
        parts = [name for name in ("expert_parameters", "attention") if getattr(self, name) is not None]
        if sum(getattr(self, name) for name in parts) > self.parameters:
            raise ValueError(f"{' and '.join(parts)}: must be at most parameters, {self.parameters:g} billion")
        spec = self.spec("")
        if spec.active_parameters < spec.active_expert_parameters:
            least = spec.active_expert_parameters / 1e9
            raise ValueError(
                f"active: must be at least the experts of a token, {least:.3g} billion, not {self.active:g}"
            )
        return self

    @model_validator(mode="after")
    def _stored(self) -> Self:
        if self.arithmetic is not Arithmetic.BITS_16 and self.bytes_per_parameter is None:
            raise ValueError(
                f"bytes_per_parameter: is needed with arithmetic {self.arithmetic.value}: what weights take"
            )
        return self

    def spec(self, name: str) -> ModelSpec:
        per_layer = self.kv_per_layer_bytes or 2.0 * 2 * self.kv_heads * self.head_dim
        experts, of_token, expert_parameters = (
            self.experts or 0,
            self.experts_per_token or 0,
            self.expert_parameters or 0.0,
        )
        unused = expert_parameters * (1 - of_token / experts) if experts else 0.0  # by one token
        return ModelSpec(
            name,
            self.layers,
            self.hidden,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.parameters * 1e9,
            (self.active or self.parameters - unused) * 1e9,
            self.bytes_per_parameter or 2.0,
            per_layer * self.layers,
            self.arithmetic,
            experts,
            of_token,
            expert_parameters * 1e9,
            None if self.attention is None else self.attention * 1e9,
        )


def model_of_catalogue(name: str) -> ModelSpec:
    """ValueError lists what there is."""
    known = catalogue("models")
    if name not in known:
        raise ValueError(f"no model '{name}' in the catalogue: {', '.join(sorted(known))}")
    return ModelEntry.model_validate(known[name]).spec(name)


class DrafterEntry(Part):
    """A model that drafts. acceptance: the share of its tokens that the tier's model accepts, from 0 to 1."""

    model: str | ModelEntry
    acceptance: Annotated[float, Field(ge=0, le=1)]

    @model_validator(mode="after")
    def _named(self) -> Self:
        if isinstance(self.model, ModelEntry) and not self.model.name:
            raise ValueError("model.name: is needed for a shape: workers load the model by it")
        return self

    @property
    def name(self) -> str:
        return self.model if isinstance(self.model, str) else self.model.name

    def spec(self) -> ModelSpec:
        if isinstance(self.model, ModelEntry):
            return self.model.spec(self.model.name)
        return model_of_catalogue(self.model)


class SpeculationEntry(Part):
    """See TierSpeculation."""

    drafters: Annotated[tuple[DrafterEntry, ...], Field(max_length=MAX_DRAFTERS)] = ()
    max_window: Annotated[int, Field(ge=1, le=MAX_DRAFT_WINDOW)] = MAX_WINDOW
    context_tokens: Count = 512

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        names = [drafter.name for drafter in self.drafters]
        for j, name in enumerate(names):
            if names.index(name) < j:
                raise ValueError(f"drafters.{j}.model: '{name}' is drafters.{names.index(name)}, too")
        return self

    def spec(self) -> TierSpeculation:
        drafters = sorted(((d.spec(), d.acceptance) for d in self.drafters), key=lambda pair: pair[0].parameters)
        return TierSpeculation(tuple(drafters), self.max_window, self.context_tokens)
