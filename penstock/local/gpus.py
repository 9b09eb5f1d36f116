"""The GPUs of this machine."""

import os
from collections.abc import Mapping
from pathlib import Path

from penstock.services.mesh_schema.mesh import MeshFile

DRIVER = Path("/proc/driver/nvidia/gpus")
"""Has a folder for each GPU of NVIDIA's."""


def tier_gpus(mesh: MeshFile) -> Mapping[str, int]:
    """How many GPUs the workers of each tier share out: those that the mesh file lists for it, or all that processes see.

    A tier is missing that uses none, or one device for all of its workers, or where their number is not known.
    """
    listed = {tier.name: len(gpus) for tier in mesh.tiers if (gpus := tier.options.get("gpus"))}
    seen = visible_gpus()
    return {tier.name: seen for tier in mesh.tiers if tier.device == "cuda" and seen is not None} | listed


def visible_gpus() -> int | None:
    """How many GPUs processes of this one see; None if that is not known."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([name for name in chosen.split(",") if name.strip()])
    return len([*DRIVER.iterdir()]) if DRIVER.is_dir() else None
