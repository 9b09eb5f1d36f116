"""What an engine must say of itself, and the checks of a tier by its engine."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar

from pydantic import BaseModel

from penstock.services.domain.hardware import ReplicaShape
from penstock.services.extensions.lookup import ENGINES, extension, validated, within
from penstock.services.field_problems import SettingsError
from penstock.services.mesh_schema.common import FROZEN
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.services.mesh_schema.tiers import MeshTier
from penstock.services.model_folder import ModelProblem, folder_problem, model_problem
from penstock.services.settings import ServiceSettings
from penstock.types.problems import FieldProblem

ENGINE_FIELDS = frozenset(
    {
        "adapter",
        "batch_policy",
        "best_effort_reserve",
        "device",
        "dtype",
        "kv_block_tokens",
        "kv_tokens",
        "max_context_tokens",
        "max_queued",
        "max_running",
        "max_step_tokens",
        "measuring_s",
        "speculation",
        "tool_format",
    }
)
"""The fields of a tier that are for its engine, which need not use all of them."""


CONTAINER_FOLDER = PurePosixPath("/etc/penstock")
"""The folder of the mesh file in our images."""


@dataclass(frozen=True, slots=True)
class ServerContainer:
    """What runs in a container of its own next to a worker: a command, and its environment variables."""

    command: list[str]
    environment: Mapping[str, str]


class EngineOptions(BaseModel):
    """The options of an engine, `tiers[].<name of the engine>` in the mesh file. Light to import: no torch, no server."""

    model_config = FROZEN

    tier_fields: ClassVar[frozenset[str]] = frozenset()
    """Those of ENGINE_FIELDS that the engine uses. A tier that sets another one is refused."""
    batch_policies: ClassVar[tuple[str, ...]] = ("decode_first",)
    """The values of `batch_policy` that the engine has."""
    gives_logprobs: ClassVar[bool | None] = True
    """Whether replies come with the logprobs of their tokens, which scorers may need. None: each worker finds out."""

    async def logprobs_now(self, tier: MeshTier) -> bool | None:
        """Whether replies come with logprobs, asked now where only a worker finds out; None if that cannot be told."""
        return self.gives_logprobs

    def problems(self, tier: MeshTier, mesh: MeshFile) -> Iterator[FieldProblem]:
        """What makes a worker of this tier refuse to run, on every machine. Fields are those of the tier."""
        yield from ()

    def host_problems(self, tier: MeshTier, settings: ServiceSettings) -> Iterator[FieldProblem]:
        """What the machine lacks that workers of this tier run on. Fields are those of the tier."""
        yield from ()

    def models(self, tier: MeshTier) -> Iterator[tuple[str, str]]:
        """(field of the tier, folder or id at the hub) of what the engine loads."""
        yield "model", tier.model

    def folder_problem(self, field: str, folder: Path) -> str:
        """Why the engine cannot load this folder of `models`; empty if it can."""
        return folder_problem(folder)

    def start_limit_s(self, tier: MeshTier, mesh: MeshFile) -> float:
        """How long its workers may take to start, in addition to downloads; 0 for no time of its own."""
        return 0.0

    def gpu_count(self, tier: MeshTier) -> int:
        """How many GPUs one worker needs, its server's included."""
        return int("device" in self.tier_fields and tier.device.startswith("cuda"))

    def node_counts(self, tier: MeshTier) -> tuple[int, ...]:
        """The numbers of nodes that can have equal parts of one worker's GPUs, ascending."""
        return (1,)

    def shape(self, tier: MeshTier) -> ReplicaShape | None:
        """The shape of its workers; None where it is not the mesh that decides, as of endpoints."""
        return ReplicaShape(1, 1, tier.gpu_type)

    def in_shape(self, tier: MeshTier, shape: ReplicaShape) -> MeshTier:
        """The tier with workers of another shape.

        Raises:
            SettingsError: The engine has no such workers.
        """
        if self.shape(tier) is None or shape != ReplicaShape(1, 1, shape.gpu):
            raise SettingsError(f"the {tier.engine} engine has no workers of the shape {shape}")
        return tier.model_copy(update={"gpu_type": shape.gpu})

    def server(self, tier: MeshTier, settings: ServiceSettings, host: str, port: int) -> ServerContainer | None:
        """The server of one worker in a container, with the flags of one that the worker would start; None for none.

        host, port: where it listens. Relative folders of the mesh file are resolved against CONTAINER_FOLDER.
        """
        return None

    def ports(self, tier: MeshTier) -> Iterator[tuple[str, int]]:
        """(field of the tier, fixed port of its first worker) where each worker takes the next port."""
        yield from ()


def engine_of(mesh: MeshFile, tier: MeshTier) -> EngineOptions:
    """The options of a tier's engine.

    Raises:
        SettingsError: There is no such engine, or the options are bad; names the fields.
    """
    field = tier_field(mesh, tier)
    kind = extension(ENGINES, tier.engine, EngineOptions, f"{field}.engine")
    return validated(kind, tier.options, f"{field}.{tier.engine}")


def tier_in_shape(mesh: MeshFile, tier: MeshTier, shape: ReplicaShape | None) -> MeshTier:
    """The tier with workers of a shape; as it is if they have it already, or for None.

    Raises:
        SettingsError: Its engine has no such workers.
    """
    engine = engine_of(mesh, tier)
    return tier if shape is None or shape == engine.shape(tier) else engine.in_shape(tier, shape)


def tier_field(mesh: MeshFile, tier: MeshTier) -> str:
    """The path of a tier in the mesh file."""
    return f"tiers[{[each.name for each in mesh.tiers].index(tier.name)}]"


def tier_problems(
    mesh: MeshFile, tier: MeshTier, settings: ServiceSettings, *, of_host: bool = False
) -> list[FieldProblem]:
    """What makes a worker of this tier refuse to run, on every machine that has the mesh file's folder.

    of_host: instead, what this machine lacks that workers of this tier need.
    """
    try:
        engine = engine_of(mesh, tier)
    except SettingsError as error:
        return [] if of_host else list(error.problems)
    of_tier = _host_problems(engine, tier, settings) if of_host else _problems(engine, tier, mesh)
    models = _model_problems(engine, tier, settings)
    of_models = [FieldProblem(field, problem.text) for field, problem in models if problem.of_host is of_host]
    return within(tier_field(mesh, tier), [*of_tier, *of_models])


def _host_problems(engine: EngineOptions, tier: MeshTier, settings: ServiceSettings) -> Iterator[FieldProblem]:
    yield from engine.host_problems(tier, settings)
    if "device" in engine.tier_fields and tier.device.startswith("cuda") and not _has_gpu():
        yield FieldProblem("device", f"{tier.device}, but this machine has no GPU")


def _problems(engine: EngineOptions, tier: MeshTier, mesh: MeshFile) -> Iterator[FieldProblem]:
    yield from engine.problems(tier, mesh)
    for field in sorted((tier.model_fields_set & ENGINE_FIELDS) - engine.tier_fields):
        if field != "batch_policy" or tier.batch_policy not in engine.batch_policies:
            yield FieldProblem(field, f"the {tier.engine} engine does not use it: leave it out")
    if "batch_policy" in engine.tier_fields and tier.batch_policy not in engine.batch_policies:
        known = ", ".join(engine.batch_policies)
        yield FieldProblem("batch_policy", f"'{tier.batch_policy}' is not for the {tier.engine} engine: one of {known}")
    if "best_effort_reserve" in tier.model_fields_set & engine.tier_fields and tier.batch_policy != "slo":
        yield FieldProblem("best_effort_reserve", f"only batch_policy slo uses it, and this is {tier.batch_policy}")


def _model_problems(
    engine: EngineOptions, tier: MeshTier, settings: ServiceSettings
) -> Iterator[tuple[str, ModelProblem]]:
    for field, model in engine.models(tier):
        if not model:
            yield field, ModelProblem(f"missing: the {tier.engine} engine needs a model")
        elif (problem := model_problem(settings, model)) is not None:
            yield field, problem
        elif (folder := settings.resolve(model)).exists() and (text := engine.folder_problem(field, folder)):
            yield field, ModelProblem(text)


def _has_gpu() -> bool:
    """Whether the system has a device of NVIDIA's or AMD's driver, or WSL's; torch would take seconds to say so."""
    return any(Path(name).exists() for name in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))
