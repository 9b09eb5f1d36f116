"""Cluster file, models file and the profiles that it names, read as the site to plan for."""

from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from planner_service.files.cascade import CascadeFile
from planner_service.files.cluster import cluster_types
from planner_service.files.errors import FileError
from planner_service.files.yaml_files import error_line, read_yaml
from planner_service.profiles import ProfileError, read_profile
from planner_service.simulator import Replica
from planner_service.site import Site
from services.domain.hardware import ClusterSpec


def read_site(cluster: Path, models: Path) -> Site:
    """FileError names the file and every field at fault."""
    try:
        where = cluster_types(read_yaml(cluster))
    except (ValidationError, ValueError) as error:
        raise FileError(f"{cluster}: {error_line(error)}") from None
    try:
        cascade = CascadeFile.model_validate(read_yaml(models))
        specs = tuple(tier.spec() for tier in cascade.tiers)
        remotes = cascade.remotes(where)
        measured = tuple(
            tuple(
                _measured(models.parent / path, where, f"tiers.{i}.profiles.{j}") for j, path in enumerate(t.profiles)
            )
            for i, t in enumerate(cascade.tiers)
        )
    except (ValidationError, ValueError, ProfileError) as error:
        raise FileError(f"{models}: {error_line(error)}") from None
    names = tuple(tier.name for tier in cascade.tiers)
    return Site(
        where[0],
        names,
        specs,
        cascade.runtime.spec(),
        cascade.engine.spec(),
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
