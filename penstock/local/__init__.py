"""A whole mesh on one machine: Redis, services and workers as separate processes, watched over."""

from penstock.local.mesh import LocalMesh, MeshFailed, MeshOptions
from penstock.local.runfile import RunFile, read_run_file

__all__ = ["LocalMesh", "MeshFailed", "MeshOptions", "RunFile", "read_run_file"]
