"""A mesh on one machine: Redis, services and workers as supervised processes.

The CLI reads the run file to find the mesh; that works without the `mesh` extra.
"""

from typing import TYPE_CHECKING, Any

from penstock.local.runfile import RunFile, read_run_file

if TYPE_CHECKING:
    from penstock.local.mesh import LocalMesh, MeshFailed, MeshOptions

__all__ = ["LocalMesh", "MeshFailed", "MeshOptions", "RunFile", "read_run_file"]


def __getattr__(name: str) -> Any:
    if name not in ("LocalMesh", "MeshFailed", "MeshOptions"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from penstock.local import mesh

    return getattr(mesh, name)
