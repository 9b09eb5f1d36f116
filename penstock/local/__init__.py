"""A mesh on one machine: Redis, services and workers as supervised processes.

The CLI reads the run file to find the mesh; that works without the `mesh` extra.
"""

import importlib
from typing import TYPE_CHECKING, Any

from penstock.local.runfile import RunFile, read_run_file

if TYPE_CHECKING:
    from penstock.local.mesh import LocalMesh
    from penstock.placement.mesh import MeshFailed
    from penstock.placement.mesh_input import MeshOptions

__all__ = ["LocalMesh", "MeshFailed", "MeshOptions", "RunFile", "read_run_file"]


_MODULES = {
    "LocalMesh": "penstock.local.mesh",
    "MeshFailed": "penstock.placement.mesh",
    "MeshOptions": "penstock.placement.mesh_input",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
