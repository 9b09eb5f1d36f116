"""The values of the Helm chart for a mesh file: what is placed, and with which flags. The mesh file itself is one of them."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from penstock.services.extensions.engines import engine_of
from penstock.services.field_problems import SettingsError
from penstock.services.mesh_file import load_mesh_file
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.services.mesh_schema.tiers import MeshTier
from penstock.services.settings import ServiceSettings

SERVER_PORT = 30000
START_S = 600.0
"""How long a worker may take to start at least, before it is restarted."""


def values_of(mesh_path: Path) -> dict[str, Any]:
    """The values for a mesh file.

    Raises:
        SettingsError: The file is unsound; names the fields.
    """
    mesh, settings = load_mesh_file(mesh_path), ServiceSettings.load(mesh_file=mesh_path)
    return chart_values(mesh, mesh_path.read_text(), [worker_values(mesh, tier, settings) for tier in mesh.tiers])


def chart_values(mesh: MeshFile, text: str, workers: list[dict[str, Any]]) -> dict[str, Any]:
    """The values. text: of the mesh file. workers: of `worker_values`, whose names must differ.

    Raises:
        SettingsError: Two tiers have the same name in Kubernetes.
    """
    names = [entry["name"] for entry in workers]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise SettingsError(f"tiers: two have the name {name} in Kubernetes, which allows letters, digits and -")
    return {
        "meshName": mesh.name,
        "routers": mesh.router.replicas,
        "judges": mesh.judge.replicas,
        "planners": mesh.planner.replicas,
        "workers": workers,
        "mesh": text,
    }


@dataclass(frozen=True, slots=True)
class Replicas:
    """Equal workers. gpu_type: of the nodes that they run on; empty: any. nodes: that the server of one worker spans."""

    name: str
    count: int
    gpu_type: str = ""
    nodes: int = 1


def worker_values(
    mesh: MeshFile, tier: MeshTier, settings: ServiceSettings, replicas: Replicas | None = None
) -> dict[str, Any]:
    """Equal workers of a tier, each with its server if it has one. replicas: default: as the mesh file has them.

    Raises:
        SettingsError: The options of the tier's engine are bad; names the fields.
    """
    replicas = replicas or Replicas(dns_name(tier.name), tier.workers)
    engine = engine_of(mesh, tier)
    server = engine.server(tier, settings, "0.0.0.0" if replicas.nodes > 1 else "127.0.0.1", SERVER_PORT)
    values: dict[str, Any] = {
        "name": replicas.name,
        "tier": tier.name,
        "replicas": replicas.count,
        "gpus": engine.gpu_count(tier) // replicas.nodes,
        "gpuType": replicas.gpu_type,
        "nodes": replicas.nodes,
        "startSeconds": int(max(START_S, engine.start_limit_s(tier, mesh))),
    }
    return values if server is None else values | {"server": asdict(server)}


def dns_name(tier: str) -> str:
    """A tier's name as part of a host name."""
    return tier.replace("_", "-").replace(".", "-")


def to_yaml(value: object) -> str:
    """YAML without anchors, and with texts of several lines as they are."""

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    Dumper.add_representer(
        str,
        lambda dumper, text: dumper.represent_scalar(
            "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
        ),
    )
    return yaml.dump(value, Dumper=Dumper, sort_keys=False, width=120)
