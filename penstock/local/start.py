"""Progress and time limits of the start of a mesh."""

from dataclasses import dataclass
from pathlib import Path

from services.mesh_schema import MeshFile
from services.model_folder import is_hub_id
from services.settings import ServiceSettings

START_TIMEOUT_S = 600.0
"""For imports, weights from a local disk, and kernels compiled at the first start, also while the cores are busy."""
DOWNLOAD_TIMEOUT_S = 3600.0  # if a model must be downloaded from the hub
SERVER_MARGIN_S = 60.0  # more than a server's own start time-out, so that its worker can report the error


@dataclass(frozen=True, slots=True)
class Progress:
    """Numbers of instances by kind: registered (ready) and expected. instances: ids of the registered ones."""

    ready: dict[str, int]
    expected: dict[str, int]
    instances: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        return not self.missing

    @property
    def missing(self) -> dict[str, int]:
        """Number of instances that are not registered yet, by kind."""
        short = {kind: count - self.ready.get(kind, 0) for kind, count in self.expected.items()}
        return {kind: count for kind, count in short.items() if count > 0}


def start_timeout_s(mesh: MeshFile, mesh_file: Path) -> float:
    """Time limit of a start: the largest of the engines' own limits."""
    limits = [START_TIMEOUT_S]
    # servers that share a store start one after the other
    in_turn = sum(tier.workers for tier in mesh.tiers if tier.engine == "sglang" and tier.sglang.kv_store)
    limits += [
        tier.sglang.start_timeout_s * (max(1, in_turn) if tier.sglang.kv_store else 1) + SERVER_MARGIN_S
        for tier in mesh.tiers
        if tier.engine == "sglang"
    ]
    if needs_hub(mesh, mesh_file):
        limits.append(DOWNLOAD_TIMEOUT_S)
    return max(limits)


def needs_hub(mesh: MeshFile, mesh_file: Path) -> bool:
    """Whether any model is an id at the hub."""
    settings = ServiceSettings.load(mesh_file=mesh_file)
    return any(is_hub_id(settings, model) for model in _models(mesh))


def _models(mesh: MeshFile) -> list[str]:
    """The models and adapters that processes load, as given in the mesh file, tiers first."""
    tiers = [tier.model for tier in mesh.tiers if tier.engine != "simulated"]
    adapters = [tier.sglang.adapter for tier in mesh.tiers if tier.sglang.adapter]
    return tiers + adapters + [scorer.model for scorer in mesh.judge.scorers if scorer.kind == "judge-model"]
