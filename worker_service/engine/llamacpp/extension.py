"""The built-in engine on llama.cpp as an entry point: `llamacpp`."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.services.extensions.engines import ENGINE_FIELDS
from penstock.services.gguf import NotGguf, gguf_file, read_metadata
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.services.mesh_schema.tiers import MeshTier
from penstock.services.model_folder import model_folder
from penstock.services.settings import ServiceSettings
from penstock.types.problems import FieldProblem
from penstock.worker_service.engine.extension import EngineExtension, EngineSite
from penstock.worker_service.engine.llamacpp import binding
from penstock.worker_service.engine.tier_options import drafter_problems, own_step_options

if TYPE_CHECKING:
    from penstock.worker_service.engine.interface import Engine


class LlamaCpp(EngineExtension):
    """The library of llama.cpp after the tier's workers."""

    library: str = ""
    """The file of llama.cpp's library, for builds with GPUs: it must have the version that this engine is written for. Empty:
    the one that the package xllamacpp holds, which computes on CPUs."""

    tier_fields = ENGINE_FIELDS - {"adapter", "dtype"}
    batch_policies = ("decode_first", "prefill_first", "slo")

    def folder_problem(self, field: str, folder: Path) -> str:
        file = gguf_file(folder)
        if file is None:
            return f"{folder} is neither a GGUF file nor a folder with one model in this format"
        try:
            read_metadata(file)
            library = binding.load_library(binding.library_path(self.library))
        except (NotGguf, OSError) as error:
            return str(error)
        except binding.LibraryUnusable:  # found by `host_problems`
            return ""
        return binding.model_problem(library, file)

    def problems(self, tier: MeshTier, mesh: MeshFile) -> Iterator[FieldProblem]:
        yield from drafter_problems(tier, mesh)
        if not tier.device.startswith(("cpu", "cuda")):
            yield FieldProblem("device", f"'{tier.device}' is not for the llamacpp engine: cpu or cuda")

    def host_problems(self, tier: MeshTier, settings: ServiceSettings) -> Iterator[FieldProblem]:
        try:
            binding.load_library(binding.library_path(self.library))
        except binding.LibraryUnusable as error:
            yield FieldProblem("llamacpp.library" if self.library else "engine", str(error))

    def build(self, site: EngineSite) -> "Engine":
        from penstock.worker_service.engine.llamacpp.engine import LlamaCppEngineOptions, llamacpp_engine  # seconds

        tier, common = site.tier, own_step_options(site)
        folder = model_folder(site.settings, tier.model)
        common["drafters"] = tuple(gguf_file(each) or each for each in common["drafters"])
        options = LlamaCppEngineOptions(
            folder=gguf_file(folder) or folder, library=self.library, gpu=tier.device.startswith("cuda"), **common
        )
        return llamacpp_engine(options, site.hold)
