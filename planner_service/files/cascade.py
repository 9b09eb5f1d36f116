"""The models file: the tiers of a cascade, the APIs that serve some of them, their runtime and what judges."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from planner_service.files.entries import Count, Part, Positive
from planner_service.files.models import ModelEntry, SpeculationEntry, model_of_catalogue
from planner_service.routing.grading import QUESTION_TOKENS, REPLY_TOKENS, Grading
from planner_service.simulator import EngineLimits
from planner_service.simulator.remote import RemoteTier
from planner_service.site import TierSpeculation
from services.domain.hardware import ClusterSpec, ModelSpec, Runtime
from services.domain.latency import StepLatencyModel
from services.mesh_schema import MAX_PROCESSES, MeshJudge

MAX_PRICE = 1e6  # dollars per million tokens
MAX_JUDGE_S = 3600.0  # to judge one answer
MAX_JUDGE_TOKENS = 1_000_000  # longer than any model's context
MAX_THINKING_TOKENS = 65_536  # of a grading tier, as in the mesh file
JUDGE_MODEL_FIELDS = frozenset(("replicas", "pass_s", "token_s", "max_batch", "max_batch_tokens"))
GRADING_TIER_FIELDS = frozenset(("question_tokens", "reply_tokens"))


class RemoteEntry(Part):
    """An API that serves a tier: prices in dollars per million tokens, seconds, limits per minute. See RemoteTier."""

    dollars_per_million_input_tokens: Annotated[float, Field(ge=0, le=MAX_PRICE)]
    dollars_per_million_output_tokens: Annotated[float, Field(ge=0, le=MAX_PRICE)]
    first_token_s: Positive
    token_s: Annotated[float, Field(ge=0)]
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None

    def spec(self) -> RemoteTier:
        def per_s(per_minute: float | None) -> float:
            return math.inf if per_minute is None else per_minute / 60

        return RemoteTier(
            self.first_token_s,
            self.token_s,
            self.dollars_per_million_input_tokens / 1e6,
            self.dollars_per_million_output_tokens / 1e6,
            per_s(self.requests_per_minute),
            per_s(self.tokens_per_minute),
        )


class TierEntry(Part):
    """profiles: files of `penstock profile`, next to this one; the tier is planned with these replicas only.

    remote: the API that serves the tier, where the model has the name `model`; then it is not in the catalogue.
    """

    name: Annotated[str, Field(min_length=1)]
    model: str | ModelEntry
    profiles: tuple[Path, ...] = ()
    speculation: SpeculationEntry = SpeculationEntry()
    remote: RemoteEntry | None = None

    @model_validator(mode="after")
    def _not_both(self) -> Self:
        if self.remote is not None and (self.profiles or self.speculation.drafters):
            raise ValueError("remote: not with profiles or speculation")
        if self.remote is not None and not isinstance(self.model, str):
            raise ValueError("model: must be a name for a remote tier")
        if self.profiles and self.speculation.drafters:
            raise ValueError("speculation: not with profiles, which are measured with what drafts")
        own = self.model if isinstance(self.model, str) else self.model.name
        for j, drafter in enumerate(self.speculation.drafters):
            if drafter.name == own:
                raise ValueError(f"speculation.drafters.{j}.model: must be another model than the tier's own")
        return self

    def spec(self) -> ModelSpec:
        if isinstance(self.model, ModelEntry):
            return self.model.spec(self.model.name or self.name)
        if self.remote is not None:
            return ModelSpec(self.model, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0)  # takes no memory of ours
        return model_of_catalogue(self.model)


class RuntimeEntry(Part):
    """See Runtime."""

    step_overhead_ms: Annotated[float, Field(ge=0)] = 2.0
    memory_share: Annotated[float, Field(gt=0, le=1)] = 0.92
    activation_gb: Annotated[float, Field(ge=0)] = 1.0

    def spec(self) -> Runtime:
        return Runtime(self.step_overhead_ms / 1e3, self.memory_share, self.activation_gb * 1e9)


class EngineEntry(Part):
    """See EngineLimits."""

    max_running: Count = 256
    max_step_tokens: Count = 2048
    block_tokens: Count = 16

    def spec(self) -> EngineLimits:
        return EngineLimits(self.max_running, self.max_step_tokens, self.block_tokens)


class JudgeEntry(Part):
    """What judges, as a load: a tier of the cascade, or processes of the judge service with a model of their own.

    tier: its name. question_tokens: of a grading request, in addition to prompt and answer. reply_tokens: of a grade, with
    thoughts. model: of the judge service, under /models. replicas: its processes. pass_s, token_s: a forward pass takes
    pass_s + token_s * its tokens. max_batch, max_batch_tokens: as in the mesh file.
    """

    tier: str = ""
    question_tokens: Annotated[int, Field(ge=0, le=MAX_JUDGE_TOKENS)] = QUESTION_TOKENS
    reply_tokens: Annotated[int, Field(ge=1, le=MAX_THINKING_TOKENS)] = REPLY_TOKENS
    model: str = ""
    replicas: Annotated[int, Field(ge=1, le=MAX_PROCESSES)] = 1
    pass_s: Annotated[float, Field(ge=0)] = 0.0
    token_s: Positive | None = None
    max_batch: Annotated[int, Field(ge=1, le=MAX_JUDGE_TOKENS)] = MeshJudge().max_batch
    max_batch_tokens: Annotated[int, Field(ge=64, le=MAX_JUDGE_TOKENS)] = MeshJudge().max_batch_tokens

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if bool(self.tier) == bool(self.model):
            raise ValueError("give either tier or model")
        of_other = JUDGE_MODEL_FIELDS if self.tier else GRADING_TIER_FIELDS
        if others := sorted(self.model_fields_set & of_other):
            raise ValueError(f"{others[0]}: not with {'tier' if self.tier else 'model'}")
        if self.model and self.token_s is None:
            raise ValueError("token_s: is needed for a model: how long the judge takes per token")
        return self

    def grading(self, tiers: Sequence[str]) -> Grading:
        if self.tier:
            return Grading(tiers.index(self.tier), self.question_tokens, self.reply_tokens)
        assert self.token_s is not None
        latency = StepLatencyModel.linear(self.pass_s, self.token_s, 0.0)
        limits = EngineLimits(self.max_batch, self.max_batch_tokens)
        return Grading.by_judge_model(len(tiers), self.model, self.replicas, latency, limits)


class CascadeFile(Part):
    tiers: Annotated[list[TierEntry], Field(min_length=1)]
    judge: JudgeEntry | None = None
    judge_s: Annotated[float, Field(ge=0, le=MAX_JUDGE_S)] = 0.0
    runtime: RuntimeEntry = RuntimeEntry()
    engine: EngineEntry = EngineEntry()

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        names = [tier.name for tier in self.tiers]
        if len(set(names)) < len(names):
            raise ValueError("tiers: every name may stand once")
        if self.judge is not None and len(names) == 1:
            raise ValueError("judge: the answers of a single tier are not judged")
        if self.judge is not None and self.judge.tier and self.judge.tier not in names:
            raise ValueError(f"judge.tier: '{self.judge.tier[:80]}' is none of the tiers: {', '.join(names)}")
        return self

    def remotes(self, types: Sequence[ClusterSpec]) -> tuple[RemoteTier | None, ...]:
        """The APIs that serve tiers; empty where there is none.

        Raises:
            ValueError: A type of GPU has no price.
        """
        if all(tier.remote is None for tier in self.tiers):
            return ()
        if any(each.dollars_per_gpu_hour is None for each in types):
            raise ValueError("remote: the cluster needs dollars_per_gpu_hour, which prices of tokens are added to")
        return tuple(None if tier.remote is None else tier.remote.spec() for tier in self.tiers)

    def grading(self) -> Grading | None:
        """What judges, as a load; None where that is not stated."""
        return None if self.judge is None else self.judge.grading([tier.name for tier in self.tiers])

    def speculations(self) -> tuple[TierSpeculation, ...]:
        """What drafts, by tier; empty for none at all. ValueError for a model that the catalogue does not have."""
        result = tuple(tier.speculation.spec() for tier in self.tiers)
        return result if any(of_tier.drafters for of_tier in result) else ()
