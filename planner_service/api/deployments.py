"""What is done with plan files: manifests, and the values of the chart."""

from pathlib import Path
from typing import Any

from penstock.planner_service.api.simulations import deployment_of, planned_site, shapes_of
from penstock.planner_service.codecs.plan_file import PlanFile
from penstock.planner_service.manifests.render import (
    SCORE_PREDICTOR,
    compose,
    groups,
    mesh_file,
    planned_tiers,
    rules_in_mesh,
    tier_of,
)
from penstock.planner_service.question.site import Site
from penstock.services.acceptance.pipeline import OF_PLANS, predicting
from penstock.services.chart import Replicas, chart_values, to_yaml, worker_values
from penstock.services.domain.errors import invalid
from penstock.services.mesh_file import load_mesh_file, read_mesh_data
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.services.settings import ServiceSettings


def manifests(file: PlanFile, mesh_name: str) -> dict[str, str]:
    """The manifests of a plan as YAML, by the end of the file's name. mesh_name: of the mesh file.

    Raises:
        FileError: An input file of the plan cannot be used.
        InvalidRequest: The plan cannot be rendered.
    """
    site, shapes = planned_site(file), shapes_of(deployment_of(file.plan))
    mesh = _mesh(file, site, None)
    return {".mesh.yaml": to_yaml(mesh), ".compose.yaml": to_yaml(compose(site, shapes, mesh, f"./{mesh_name}"))}


def planned_values(file: PlanFile, base: Path | None) -> dict[str, Any]:
    """The values of the Helm chart for a plan.

    base: a mesh file, which gets the plan's thresholds, counts and shapes; None: one is written for the plan.

    Raises:
        FileError: An input file of the plan cannot be used.
        SettingsError: The mesh file is unsound.
        InvalidRequest: The plan cannot be rendered, or is for other tiers.
    """
    site, shapes = planned_site(file), shapes_of(deployment_of(file.plan))
    settings = ServiceSettings.load(**({} if base is None else {"mesh_file": base}))
    mesh = _mesh(file, site, base)
    whole, placed = MeshFile.model_validate(mesh), groups(site, shapes)
    workers = []
    for i, tier in enumerate(whole.tiers):
        workers += [worker_values(whole, tier, settings)] if site.remote_of(i) is not None else []
        for group in (each for each in placed if each.tier == i):
            replicas = Replicas(group.name, group.count, group.shape.gpu, group.nodes)
            workers.append(worker_values(whole, tier_of(mesh, site, group), settings, replicas))
    return chart_values(whole, to_yaml(mesh), workers)


def _mesh(file: PlanFile, site: Site, base: Path | None) -> dict[str, Any]:
    """The mesh file of a plan: `base` with what the plan says of it, or one that is written for the plan."""
    tiers = planned_tiers(file.plan)
    if base is None:
        mesh = mesh_file(site, tiers)
    else:
        mesh = read_mesh_data(base)
        names = [tier.name for tier in load_mesh_file(base).tiers]
        if names != list(site.tiers):
            raise invalid("tiers", f"{base} has {', '.join(names)}, the plan {', '.join(site.tiers)}")
        mesh["tiers"] = [tier | planned for tier, planned in zip(mesh["tiers"], tiers, strict=True)]
    if any(map(predicting, file.plan.tiers)):
        if base is not None and not mesh.get("router", {}).get("score_predictor"):
            problem = f"is needed by the plan, which skips by predicted scores, and not set in {base}"
            raise invalid("router.score_predictor", problem)
        mesh["router"] = {"score_predictor": SCORE_PREDICTOR} | mesh.get("router", {})
    if rules := rules_in_mesh(OF_PLANS, file.plan):
        mesh["planner"] = mesh.get("planner", {}) | rules
    return mesh
