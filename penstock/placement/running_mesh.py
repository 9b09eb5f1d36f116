"""A mesh of `penstock up` as a context: while it lasts, its folder is locked and its run file is true."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Self

from penstock.local import runfile
from penstock.local.runfile import ProcessId, RunFile, held
from penstock.placement.mesh import Addresses
from penstock.placement.mesh_input import MeshInput, MeshOptions
from penstock.placement.start import Progress
from penstock.services.redis_url import without_password


class RunningMesh(ABC):
    """What the back ends of `penstock up` have in common. tls_folder: of the mesh's certificates; None without TLS."""

    redis_url = ""
    """With the password of the user that follows the mesh, if this mesh has started its Redis."""
    gives_logprobs: Mapping[str, bool | None]
    """Whether replies come with log-probabilities, by tier, as one of its workers has found out."""

    def __init__(self, options: MeshOptions, on_progress: Callable[[Progress], None], *, here: bool) -> None:
        """here: whether the processes will run on this machine."""
        self._input = MeshInput.read(options, here=here)
        self._options, self._on_progress = options, on_progress
        self.mesh, self.tls_folder = self._input.mesh, self._input.tls_folder
        self._stack = AsyncExitStack()
        self._ready = False
        self._written: Addresses | None = None

    @abstractmethod
    async def _start(self) -> None:
        """Return when the mesh is ready. What ends it is pushed on the stack."""

    @property
    @abstractmethod
    def addresses(self) -> Addresses:
        """Where the mesh is reached now."""

    async def __aenter__(self) -> Self:
        async with self._stack:
            self._stack.enter_context(held(self._options.folder))
            await self._start()
            self._ready = True
            self._update_run_file()
            self._stack = self._stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ready = False
        runfile.remove(self._options.folder)
        await self._stack.aclose()

    def _report(self, progress: Progress) -> None:
        self.gives_logprobs = progress.gives_logprobs
        self._on_progress(progress)

    def _update_run_file(self) -> None:
        """Write where the mesh is reached now, if that has changed. Without a router, the last addresses remain."""
        if not self._ready or not (where := self.addresses).grpc or where == self._written:
            return
        self._written = where
        process = ProcessId.of(os.getpid())
        assert process is not None
        folder, mesh_file = self._options.folder, str(self._options.mesh_file.resolve())
        redis_url, tls_folder = without_password(self.redis_url), str(self.tls_folder or "")
        reached = (where.grpc, where.http, where.admin, where.planner)
        RunFile(process.pid, process.started, mesh_file, redis_url, *reached, tls_folder).write(folder)
        runfile.write_metrics(folder, where.metrics)
