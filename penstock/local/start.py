"""How far the start of a mesh is, and how long it may take."""

from dataclasses import dataclass
from pathlib import Path

from services.model_folder import is_hub_id
from services.settings import MeshFile, ServiceSettings

START_TIMEOUT_S = 180.0  # of our own processes: imports, and weights from a disk
DOWNLOAD_TIMEOUT_S = 3600.0  # where a model has to be fetched from the hub first
SERVER_MARGIN_S = 60.0  # beyond a server's own start time-out, so that its worker can say what was wrong


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the start is: instances that are there, and that should be, by kind. instances: ids of those there."""

    ready: dict[str, int]
    wanted: dict[str, int]
    instances: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        return not self.missing

    @property
    def missing(self) -> dict[str, int]:
        """What is waited for: how many are not there yet, by kind."""
        short = {kind: count - self.ready.get(kind, 0) for kind, count in self.wanted.items()}
        return {kind: count for kind, count in short.items() if count > 0}


def start_timeout_s(mesh: MeshFile, mesh_file: Path) -> float:
    """How long a start may take: as long as the slowest engine's own time-out allows."""
    limits = [START_TIMEOUT_S]
    limits += [tier.sglang.start_timeout_s + SERVER_MARGIN_S for tier in mesh.tiers if tier.engine == "sglang"]
    if needs_hub(mesh, mesh_file):
        limits.append(DOWNLOAD_TIMEOUT_S)
    return max(limits)


def needs_hub(mesh: MeshFile, mesh_file: Path) -> bool:
    """Whether any model is not a folder but an id of the hub."""
    settings = ServiceSettings.load(mesh_file=mesh_file)
    return any(is_hub_id(settings, model) for model in _models(mesh))


def _models(mesh: MeshFile) -> list[str]:
    """What the mesh file says of each model that a process reads, tiers first."""
    tiers = [tier.model for tier in mesh.tiers if tier.engine != "simulated"]
    return tiers + [scorer.model for scorer in mesh.judge.scorers if scorer.kind == "judge-model"]
