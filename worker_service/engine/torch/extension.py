"""The built-in engine on torch as an entry point: `torch`."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.services.extensions.engines import ENGINE_FIELDS
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.services.mesh_schema.tiers import MeshTier
from penstock.services.model_folder import model_folder
from penstock.types.problems import FieldProblem
from penstock.worker_service.engine.extension import EngineExtension, EngineSite
from penstock.worker_service.engine.tier_options import drafter_problems, own_step_options
from penstock.worker_service.engine.torch.supported import unsupported

if TYPE_CHECKING:
    from penstock.worker_service.engine.interface import Engine


class Torch(EngineExtension):
    """It has no options in addition to those of the tier."""

    tier_fields = ENGINE_FIELDS - {"adapter"}
    batch_policies = ("decode_first", "prefill_first", "slo")

    def folder_problem(self, field: str, folder: Path) -> str:
        return unsupported(folder)

    def problems(self, tier: MeshTier, mesh: MeshFile) -> Iterator[FieldProblem]:
        yield from drafter_problems(tier, mesh)

    def build(self, site: EngineSite) -> "Engine":
        from penstock.worker_service.engine.torch.engine import TorchEngineOptions, torch_engine  # seconds of imports

        options = TorchEngineOptions(
            folder=model_folder(site.settings, site.tier.model),
            device=site.device(),
            dtype=site.tier.dtype,
            **own_step_options(site),
        )
        return torch_engine(options, site.hold)
