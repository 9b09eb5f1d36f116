"""Meshes of real processes, by the content of their mesh files."""

import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from penstock.local.mesh import LocalMesh
from penstock.placement.mesh_input import MeshOptions

CONFIDENCE = {"scorers": [{"name": "confidence", "kind": "confidence"}], "default_scorer": "confidence"}
"""A judge that needs no model."""


@asynccontextmanager
async def mesh_of(content: Mapping[str, Any], *, any_ports: bool = True) -> AsyncIterator[LocalMesh]:
    """A mesh of processes in a temporary folder. any_ports: on free ports, whatever the content says."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        file = folder / "mesh.yaml"
        file.write_text(yaml.safe_dump(dict(content)))
        async with LocalMesh(MeshOptions(file, folder, any_ports=any_ports, log_level="warning")) as mesh:
            yield mesh


def absolute_paths(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The content of a mesh file in `folder`, with the files and folders that it names found from anywhere.

    A model without a folder there is left as it is: an id at the hub.
    """

    def found(name: str) -> str:
        place = folder / name
        return str(place.resolve()) if place.exists() else name

    def entry(given: dict[str, Any]) -> dict[str, Any]:
        return given | {key: found(given[key]) for key in ("model", "calibration") if given.get(key)}

    result = content | {"tiers": [entry(tier) for tier in content["tiers"]]}
    if scorers := content.get("judge", {}).get("scorers"):
        result["judge"] = content["judge"] | {"scorers": [entry(scorer) for scorer in scorers]}
    if predictor := content.get("router", {}).get("score_predictor"):
        result["router"] = content["router"] | {"score_predictor": found(predictor)}
    return result
