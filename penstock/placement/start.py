"""Progress and time limits of the start of a mesh."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from penstock.services.extensions.engines import engine_of
from penstock.services.extensions.scorers import scorer_of
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.services.model_folder import is_hub_id
from penstock.services.settings import ServiceSettings

START_TIMEOUT_S = 600.0
"""For imports, weights from a local disk, and kernels compiled at the first start, also while the cores are busy."""
DOWNLOAD_TIMEOUT_S = 3600.0  # if a model must be downloaded from the hub


@dataclass(frozen=True, slots=True)
class Progress:
    """Numbers of instances by kind: registered (ready) and expected. instances: ids of the registered ones. loading: by kind,
    how far the models of workers are loaded. gives_logprobs: whether a tier's replies come with log-probabilities."""

    ready: dict[str, int]
    expected: dict[str, int]
    instances: tuple[str, ...] = ()
    loading: dict[str, str] = field(default_factory=dict)
    gives_logprobs: dict[str, bool | None] = field(default_factory=dict)

    @property
    def missing(self) -> dict[str, int]:
        """Number of instances that are not registered yet, by kind."""
        short = {kind: count - self.ready.get(kind, 0) for kind, count in self.expected.items()}
        return {kind: count for kind, count in short.items() if count > 0}


def start_timeout_s(mesh: MeshFile, mesh_file: Path) -> float:
    """Time limit of a start: the largest of the engines' own limits."""
    limits = [START_TIMEOUT_S, *(engine_of(mesh, tier).start_limit_s(tier, mesh) for tier in mesh.tiers)]
    if needs_hub(mesh, mesh_file):
        limits.append(DOWNLOAD_TIMEOUT_S)
    return max(limits)


def needs_hub(mesh: MeshFile, mesh_file: Path) -> bool:
    """Whether any model is an id at the hub."""
    settings = ServiceSettings.load(mesh_file=mesh_file)
    return any(is_hub_id(settings, model) for model in _models(mesh))


def _models(mesh: MeshFile) -> Iterator[str]:
    """The models and adapters that processes load, as given in the mesh file."""
    for tier in mesh.tiers:
        yield from (model for _, model in engine_of(mesh, tier).models(tier) if model)
    for scorer in mesh.judge.scorers if mesh.judge.replicas else ():
        yield from (model for _, model in scorer_of(mesh, scorer).models() if model)
