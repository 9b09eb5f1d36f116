"""Keeps the run file of a mesh true: other commands find the mesh by it."""

import os
from pathlib import Path

from penstock.local import runfile
from penstock.local.runfile import ProcessId, RunFile
from penstock.placement.mesh import Addresses
from penstock.placement.mesh_input import MeshOptions
from penstock.services.state.connection import without_password


class KeptRunFile:
    """The run file, and the file of metrics addresses. redis_url: may have a password, which is not written."""

    def __init__(self, options: MeshOptions, redis_url: str, tls_folder: Path | None) -> None:
        self._options, self._redis_url, self._tls_folder = options, without_password(redis_url), tls_folder
        self._written: Addresses | None = None

    def update(self, addresses: Addresses) -> None:
        """Write where the mesh is reached now, if that has changed. Without a router, the last addresses remain."""
        if addresses == self._written or not addresses.grpc:
            return
        self._written = addresses
        process = ProcessId.of(os.getpid())
        assert process is not None
        RunFile(
            pid=process.pid,
            started=process.started,
            mesh_file=str(self._options.mesh_file.resolve()),
            redis_url=self._redis_url,
            grpc=addresses.grpc,
            http=addresses.http,
            admin=addresses.admin,
            planner=addresses.planner,
            tls_folder=str(self._tls_folder or ""),
        ).write(self._options.folder)
        runfile.write_metrics(self._options.folder, addresses.metrics)
