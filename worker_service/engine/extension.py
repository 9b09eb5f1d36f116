"""What an engine registers as an entry point of `penstock.engines`: its options, which build it."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.services.extensions.engines import EngineOptions, ServerContainer
from penstock.services.field_problems import SettingsError
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.services.mesh_schema.tiers import MeshTier
from penstock.services.settings import ServiceSettings

if TYPE_CHECKING:
    from penstock.worker_service.engine.held_tokens import OutputCoalescing
    from penstock.worker_service.engine.interface import Engine


Progress = Callable[[float], None]
"""Told the share of the weights that are loaded, from any thread."""


def untold(share: float) -> None:
    """Ignore the progress of loading."""


@dataclass(frozen=True, slots=True)
class EngineSite:
    """The worker that an engine is for: a tier of a mesh, and the settings of the process. hold: how output is joined."""

    mesh: MeshFile
    tier: MeshTier
    settings: ServiceSettings
    hold: "OutputCoalescing | None" = None
    progress: Progress = untold

    def device(self, each: int = 1) -> str:
        """The worker's own device. With `cuda`, each worker of the tier takes the next `each` GPUs."""
        device = self.tier.device
        return f"cuda:{self.settings.worker_index * each}" if device == "cuda" else device


class EngineExtension(EngineOptions):
    """The options of an engine, and how it is built from them. Importing it must import nothing heavy; building it may."""

    @abstractmethod
    def build(self, site: EngineSite) -> "Engine":
        """The engine, not started.

        Raises:
            SettingsError: Something that the options name is missing.
        """

    def server_part(self, site: EngineSite) -> ServerContainer:
        """What runs on a node of a worker's server that is not the worker's own, by `site.settings.server_node`.

        Raises:
            SettingsError: The engine has no such servers.
        """
        raise SettingsError(f"PENSTOCK_WORKER_NODE: the {site.tier.engine} engine has no servers over several nodes")
