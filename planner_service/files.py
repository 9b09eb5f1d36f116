"""Reads what `penstock plan` is given: cluster, models, trace, judged prompts. Faults name file, line and column."""

import csv
import gzip
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from planner_service.early_checks import PartScores
from planner_service.profiles import IDENTIFIED, ProfileError, fit_qoe, read_profile
from planner_service.routing.grading import QUESTION_TOKENS, REPLY_TOKENS, Grading
from planner_service.routing.quality import JudgedSample
from planner_service.simulator import EngineLimits, Replica, Workload
from planner_service.simulator.remote import RemoteTier
from planner_service.simulator.speculation import MAX_WINDOW
from planner_service.site import Site, TierSpeculation
from planner_service.stages import batches_of
from services.domain.early_checks import MAX_EARLY_CHECKS
from services.domain.hardware import Arithmetic, ClusterSpec, GpuSpec, ModelSpec, ReplicaShape, Runtime, fit, roofline
from services.domain.latency import StepLatencyModel
from services.domain.stages import QoeModel
from services.mesh_schema import MAX_DRAFT_WINDOW, MAX_PROCESSES, MeshJudge

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


MAX_DRAFTERS = 4  # of one tier: every subset of them is a chain to compare
SCORE_AFTER = "score_after_"  # tokens: the column of parts of a tier's answers
MAX_PRICE = 1e6  # dollars per million tokens
MAX_JUDGE_S = 3600.0  # to judge one answer
MAX_JUDGE_TOKENS = 1_000_000  # longer than any model's context
MAX_THINKING_TOKENS = 65_536  # of a grading tier, as in the mesh file
JUDGE_MODEL_FIELDS = frozenset(("replicas", "pass_s", "token_s", "max_batch", "max_batch_tokens"))
GRADING_TIER_FIELDS = frozenset(("question_tokens", "reply_tokens"))


class FileError(Exception):
    """A file cannot be used; the message names it, and what in it is at fault."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class GpuEntry(_Part):
    """A GPU's data sheet; see GpuSpec."""

    name: str = ""
    memory_gb: Positive
    memory_gb_per_s: Positive
    tflops: Positive
    link_gb_per_s: Positive
    compute_efficiency: Annotated[float, Field(gt=0, le=1)] = 0.6
    memory_efficiency: Annotated[float, Field(gt=0, le=1)] = 0.8
    fp8_tflops: Positive | None = None
    int8_tops: Positive | None = None
    fp4_tflops: Positive | None = None
    int4_tops: Positive | None = None

    def spec(self, name: str) -> GpuSpec:
        narrow = (
            (Arithmetic.FP8, self.fp8_tflops),
            (Arithmetic.INT8, self.int8_tops),
            (Arithmetic.FP4, self.fp4_tflops),
            (Arithmetic.INT4, self.int4_tops),
        )
        return GpuSpec(
            name,
            self.memory_gb * 1e9,
            self.memory_gb_per_s * 1e9,
            self.tflops * 1e12,
            self.link_gb_per_s * 1e9,
            self.compute_efficiency,
            self.memory_efficiency,
            tuple((arithmetic, peak * 1e12) for arithmetic, peak in narrow if peak is not None),
        )


class NodesEntry(_Part):
    """Nodes with GPUs of one type."""

    gpu: str | GpuEntry
    nodes: Count
    gpus_per_node: Count
    node_link_gb_per_s: Positive = 25.0
    dollars_per_gpu_hour: Annotated[float, Field(ge=0)] | None = None

    def spec(self, name: str = "") -> ClusterSpec:
        gpu = gpu_of_catalogue(self.gpu) if isinstance(self.gpu, str) else self.gpu.spec(self.gpu.name or "gpu")
        link_bytes_per_s = self.node_link_gb_per_s * 1e9
        return ClusterSpec(gpu, self.nodes, self.gpus_per_node, link_bytes_per_s, self.dollars_per_gpu_hour, name)


class TypeEntry(NodesEntry):
    """One of several types of GPU. name: what plans call it, else the GPU's; spot GPUs are a type with its own price."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,38}[a-z0-9])?$")] = ""

    @property
    def called(self) -> str:
        return self.name or (self.gpu if isinstance(self.gpu, str) else self.gpu.name)


class ClusterFile(_Part):
    """`types`: the GPUs by type, where there are several; all of them have a price or none has one."""

    types: Annotated[list[TypeEntry], Field(min_length=1)]

    @model_validator(mode="after")
    def _sound(self) -> Self:
        names = [entry.called for entry in self.types]
        for i, entry in enumerate(self.types):
            if len(names) > 1 and not entry.called:
                raise ValueError(f"types.{i}.name: is needed for a GPU that has no name")
            if names.index(entry.called) < i:
                raise ValueError(f"types.{i}.name: '{entry.called}' is the name of types.{names.index(entry.called)}")
            if (entry.dollars_per_gpu_hour is None) != (self.types[0].dollars_per_gpu_hour is None):
                raise ValueError(f"types.{i}.dollars_per_gpu_hour: give it for all types or for none")
        return self

    def specs(self) -> tuple[ClusterSpec, ...]:
        """The GPUs by type. ValueError for a GPU that the catalogue does not have."""
        if len(self.types) == 1:
            return (self.types[0].spec(),)
        return tuple(_type_spec(entry, i) for i, entry in enumerate(self.types))


def _type_spec(entry: TypeEntry, i: int) -> ClusterSpec:
    try:
        return entry.spec(entry.called)
    except ValueError as error:
        raise ValueError(f"types.{i}.{error}") from None


def cluster_types(content: Any) -> tuple[ClusterSpec, ...]:
    """The GPUs by type of a cluster file: of one, or under `types` of several. ValueError names the field at fault."""
    if isinstance(content, dict) and "types" in content:
        return ClusterFile.model_validate(content).specs()
    return (NodesEntry.model_validate(content).spec(),)


class ModelEntry(_Part):
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


class DrafterEntry(_Part):
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


class SpeculationEntry(_Part):
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


class RemoteEntry(_Part):
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


class TierEntry(_Part):
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


class RuntimeEntry(_Part):
    """See Runtime."""

    step_overhead_ms: Annotated[float, Field(ge=0)] = 2.0
    memory_share: Annotated[float, Field(gt=0, le=1)] = 0.92
    activation_gb: Annotated[float, Field(ge=0)] = 1.0

    def spec(self) -> Runtime:
        return Runtime(self.step_overhead_ms / 1e3, self.memory_share, self.activation_gb * 1e9)


class EngineEntry(_Part):
    """See EngineLimits."""

    max_running: Count = 256
    max_step_tokens: Count = 2048
    block_tokens: Count = 16


class JudgeEntry(_Part):
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


class CascadeFile(_Part):
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


def catalogue(name: str) -> dict[str, Any]:
    """`gpus` or `models`: entries by name."""
    text = (files("planner_service.catalogue") / f"{name}.yaml").read_text()
    result: dict[str, Any] = yaml.safe_load(text)
    return result


def gpu_of_catalogue(name: str) -> GpuSpec:
    """ValueError lists what there is."""
    known = catalogue("gpus")
    if name not in known:
        raise ValueError(f"gpu: no '{name}' in the catalogue: {', '.join(sorted(known))}")
    return GpuEntry.model_validate(known[name]).spec(name)


def model_of_catalogue(name: str) -> ModelSpec:
    """ValueError lists what there is."""
    known = catalogue("models")
    if name not in known:
        raise ValueError(f"no model '{name}' in the catalogue: {', '.join(sorted(known))}")
    return ModelEntry.model_validate(known[name]).spec(name)


def read_site(cluster: Path, models: Path) -> Site:
    """FileError names the file and every field at fault."""
    try:
        where = cluster_types(_yaml(cluster))
    except (ValidationError, ValueError) as error:
        raise FileError(f"{cluster}: {_said(error)}") from None
    try:
        cascade = CascadeFile.model_validate(_yaml(models))
        specs = tuple(tier.spec() for tier in cascade.tiers)
        remotes = cascade.remotes(where)
        measured = tuple(
            tuple(
                _measured(models.parent / path, where, f"tiers.{i}.profiles.{j}") for j, path in enumerate(t.profiles)
            )
            for i, t in enumerate(cascade.tiers)
        )
    except (ValidationError, ValueError, ProfileError) as error:
        raise FileError(f"{models}: {_said(error)}") from None
    limits = EngineLimits(cascade.engine.max_running, cascade.engine.max_step_tokens, cascade.engine.block_tokens)
    names = tuple(tier.name for tier in cascade.tiers)
    return Site(
        where[0],
        names,
        specs,
        cascade.runtime.spec(),
        limits,
        cascade.judge_s,
        measured,
        where[1:],
        cascade.speculations(),
        cascade.grading(),
        remotes,
    )


def _measured(path: Path, types: tuple[ClusterSpec, ...], at: str) -> Replica:
    """A profile's replica, on the type of GPU that it was measured on. ValueError where that is none of the cluster's."""
    profile = read_profile(path)
    if len(types) == 1:
        return profile.replica
    kind = next((each for each in types if each.gpu.name == profile.machine), None)
    if kind is None:
        gpus = ", ".join(each.gpu.name for each in types)
        raise ValueError(f"{at}: measured on '{profile.machine}', which is none of the cluster's GPUs: {gpus}")
    return replace(profile.replica, shape=replace(profile.replica.shape, gpu=kind.name))


@dataclass(frozen=True, slots=True)
class StageReplica:
    """What stages are planned with: a replica, its QoE model, what a sequence's move weighs; `source` in words."""

    replica: Replica
    qoe: QoeModel
    kv_bytes_per_token: float
    source: str


def read_replica(profile: Path | None, model: str, gpu: str, work: Workload) -> StageReplica:
    """From a profile file, or by a roofline from the catalogue; FileError says what is wrong with either.

    Where batches were not measured, the QoE model is fitted to those that the step times make of the trace's requests.
    """
    if profile is not None:
        try:
            result = read_profile(profile)
        except ProfileError as error:
            raise FileError(str(error)) from None
        qoe = result.qoe or fit_qoe(batches_of(result.replica, work))
        source = f"{result.model} as measured on {result.machine}"
        if result.context_uncertainty is not None and result.context_uncertainty > IDENTIFIED:
            source += ", D4 not identified"
        return StageReplica(result.replica, qoe, result.kv_bytes_per_token, source)
    for kind, name in (("models", model), ("gpus", gpu)):
        if name not in (known := catalogue(kind)):
            raise FileError(f"no '{name}' among the catalogue's {kind}: {', '.join(sorted(known))}")
    spec = ModelEntry.model_validate(catalogue("models")[model]).spec(model)
    cluster = ClusterSpec(GpuEntry.model_validate(catalogue("gpus")[gpu]).spec(gpu), 1, 1, 1.0)
    shape, runtime = ReplicaShape(1, 1), Runtime()
    room = fit(spec, shape, cluster, runtime, work.longest_tokens)
    if not room.ok:
        raise FileError(room.reason)
    replica = Replica(shape, roofline(spec, shape, cluster, runtime), room.kv_tokens, EngineLimits(max_running=1024))
    source = f"{model} on {gpu} by its data sheet"
    return StageReplica(replica, fit_qoe(batches_of(replica, work)), spec.kv_bytes_per_token, source)


def read_trace(path: Path) -> Workload:
    """Columns arrival_s, input_tokens, output_tokens; other columns are passed over. Ordered by arrival."""
    rows = [
        (
            csv_number(path, line, row, "arrival_s"),
            csv_count(path, line, row, "input_tokens", 1),
            csv_count(path, line, row, "output_tokens", 1),
        )
        for line, row in csv_rows(path, ("arrival_s", "input_tokens", "output_tokens"))
    ]
    rows.sort(key=lambda row: row[0])
    arrivals, inputs, outputs = zip(*rows, strict=True)
    return Workload(np.array(arrivals, float), np.array(inputs, np.int64), np.array(outputs, np.int64))


def read_quality(path: Path, tiers: tuple[str, ...]) -> JudgedSample:
    """Columns input_tokens and, for each tier, {tier}_output_tokens and {tier}_judge_score (0 to 100).

    Also {tier}_predicted_score (0 to 100), if every tier has it: see `penstock predictor`.

    Also {tier}_quality (0 to 100), if every tier has it: what the answers are worth, where that is not the judge's score.

    Also {tier}_refused (0 or 1), if every tier has it: whether a guard of the judge has refused the answer.

    Also {tier}_score_after_{tokens} of unfinished answers, empty where one has no more: see `penstock measure --early-after`.

    An empty answer counts as one token: it costs a step to find out.
    """
    expected = ("input_tokens", *(f"{tier}_{what}" for tier in tiers for what in ("output_tokens", "judge_score")))
    inputs, outputs, scores, predicted, quality, refused, parts = [], [], [], [], [], [], []
    after = list[int]()
    predictions = [f"{tier}_predicted_score" for tier in tiers]
    qualities = [f"{tier}_quality" for tier in tiers]
    refusals = [f"{tier}_refused" for tier in tiers]
    for line, row in csv_rows(path, expected):
        after = after or _after_tokens(path, row, tiers)
        inputs.append(csv_count(path, line, row, "input_tokens", 0))
        outputs.append([csv_count(path, line, row, f"{tier}_output_tokens", 0) for tier in tiers])
        parts.append([_part_scores(path, line, row, tier, after) for tier in tiers])
        scores.append([csv_number(path, line, row, f"{tier}_judge_score", 0, 100) for tier in tiers])
        if all(column in row for column in predictions):
            predicted.append([csv_number(path, line, row, column, 0, 100) for column in predictions])
        if all(column in row for column in qualities):
            quality.append([csv_number(path, line, row, column, 0, 100) for column in qualities])
        if all(column in row for column in refusals):
            refused.append([csv_number(path, line, row, column, 0, 1) > 0 for column in refusals])
    shape = (len(inputs), len(tiers))
    return JudgedSample(
        tiers,
        np.maximum(1, np.array(inputs, np.int64)),
        np.maximum(1, np.array(outputs, np.int64).reshape(shape)),
        np.array(scores, float).reshape(shape),
        np.array(predicted, float) if predicted else None,
        parts=PartScores(tuple(after), np.array(parts, float)) if after else None,
        known_quality=np.array(quality, float) if quality else None,
        refused=np.array(refused, np.bool_) if refused else None,
    )


def _after_tokens(path: Path, row: dict[str, str], tiers: tuple[str, ...]) -> list[int]:
    """After how many tokens parts of any tier's answers were scored, ascending."""
    starts = [f"{tier}_{SCORE_AFTER}" for tier in tiers]
    ends = {name.removeprefix(start) for name in row if name for start in starts if name.startswith(start)}
    after = sorted(int(end) for end in ends if end.isdecimal() and int(end) > 0)
    if len(after) > MAX_EARLY_CHECKS:
        raise FileError(f"{path}: line 1: {len(after)} columns {SCORE_AFTER}N of a tier, at most {MAX_EARLY_CHECKS}")
    return after


def _part_scores(path: Path, line: int, row: dict[str, str], tier: str, after: Sequence[int]) -> list[float]:
    """By number of tokens; NaN where there is none. An answer has one only where it has more tokens."""
    scores = []
    for tokens in after:
        column = f"{tier}_{SCORE_AFTER}{tokens}"
        if not row.get(column):
            scores.append(math.nan)
            continue
        if csv_count(path, line, row, f"{tier}_output_tokens", 0) <= tokens:
            raise FileError(
                f"{path}: line {line}: {column}: the answer has no more than {tokens} tokens: leave it empty"
            )
        scores.append(csv_number(path, line, row, column, 0, 100))
    return scores


def _yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None
    except yaml.YAMLError as error:
        raise ValueError(f"no YAML: {error}") from None


def _said(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors())
    return str(error)


def csv_rows(path: Path, expected: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """(line number, row) of a CSV file, gzip or not; FileError for missing columns or no rows."""
    try:
        with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as file:
            reader = csv.DictReader(file)
            missing = [column for column in expected if column not in (reader.fieldnames or ())]
            if missing:
                raise FileError(f"{path}: line 1: no column {', '.join(missing)}")
            empty = True
            for row in reader:
                empty = False
                yield reader.line_num, row
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise FileError(f"{path}: {error}") from None
    if empty:
        raise FileError(f"{path}: no rows")


def csv_number(
    path: Path, line: int, row: dict[str, str], column: str, least: float = -np.inf, most: float = np.inf
) -> float:
    text = row[column]
    try:
        value = float(text)
    except (TypeError, ValueError):
        message = "is missing" if text in (None, "") else f"'{text}' is not a number"
        raise FileError(f"{path}: line {line}: {column} {message}") from None
    if not least <= value <= most or not np.isfinite(value):
        raise FileError(f"{path}: line {line}: {column} must be from {least:g} to {most:g}, not {text}")
    return value


def csv_count(path: Path, line: int, row: dict[str, str], column: str, least: int) -> int:
    value = csv_number(path, line, row, column, least)
    if value != int(value):
        raise FileError(f"{path}: line {line}: {column} must be a whole number, not {row[column]}")
    return int(value)
