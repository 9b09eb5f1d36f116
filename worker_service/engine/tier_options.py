"""What the mesh file says of a tier of the built-in engine: its options, and the models that draft."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from penstock.services.extensions.lookup import DRAFTERS, entry_points_of
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.services.mesh_schema.tiers import MeshTier
from penstock.services.model_folder import model_folder
from penstock.types.problems import FieldProblem
from penstock.worker_service.engine.extension import EngineSite

if TYPE_CHECKING:
    from penstock.worker_service.speculation.sources import Drafter

CHAINS = "chains"
"""The entry point of `penstock.drafters`: it makes the drafter of a core from the models that draft."""


def chains() -> "Callable[..., Drafter]":
    """What makes a drafter of loaded models. The tier has no `drafter_problems`."""
    return cast("Callable[..., Drafter]", entry_points_of(DRAFTERS)[CHAINS].load())


def drafter_problems(tier: MeshTier, mesh: MeshFile) -> Iterator[FieldProblem]:
    """What is wrong with the drafters."""
    if tier.speculation.drafters and CHAINS not in entry_points_of(DRAFTERS):
        yield FieldProblem("speculation.drafters", "nothing that lets models draft is installed")
    if tier.speculation.drafters == "auto":
        return
    models = {other.name: other.model for other in mesh.tiers}
    for j, drafter in enumerate(tier.speculation.drafters):
        model, field = models.get(drafter, drafter), f"speculation.drafters[{j}]"
        if drafter == tier.name or model == tier.model:
            yield FieldProblem(field, "must be another model than the tier's own")
        elif not model:
            yield FieldProblem(field, f"tier '{drafter}' has no model")


def drafter_folders(site: EngineSite) -> tuple[Path, ...]:
    """The folders of the models that draft for the tier. Tiers may share a model, which is loaded once.

    Raises:
        SettingsError: A model cannot be downloaded.
    """
    models = {other.name: other.model for other in site.mesh.tiers}
    drafters = site.mesh.drafters(site.tier)
    return tuple(dict.fromkeys(model_folder(site.settings, models.get(name, name)) for name in drafters))


def own_step_options(site: EngineSite) -> dict[str, Any]:
    """The options of the built-in engine that are fields of the tier, by their names in `assembly.EngineOptions`."""
    from penstock.worker_service.scheduling.policies import PolicyName

    tier = site.tier
    names = ("kv_tokens", "kv_block_tokens", "max_running", "max_queued", "max_step_tokens", "max_context_tokens")
    return {
        name: getattr(tier, name) for name in (*names, "threads", "tool_format", "best_effort_reserve", "measuring_s")
    } | {
        "name": tier.served_name,
        "batch_policy": PolicyName(tier.batch_policy),
        "drafters": drafter_folders(site),
        "skips_drafters": tier.speculation.drafters == "auto",
        "max_window": tier.speculation.max_window,
        "progress": site.progress,
    }
