"""A mesh of `penstock up` as a context: while it lasts, its folder is locked and its run file is true."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.local import runfile
from penstock.local.runfile import ProcessId, RunFile, held
from penstock.placement.mesh import Addresses
from penstock.placement.mesh_input import MeshInput, MeshOptions
from penstock.placement.start import Progress
from penstock.services.redis_url import without_password


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


class RunningMesh(ABC):
    """What the back ends of `penstock up` have in common. tls_folder: of the mesh's certificates; None without TLS."""

    redis_url = ""
    """With the password of the user that follows the mesh, if this mesh has started its Redis."""

    def __init__(self, options: MeshOptions, on_progress: Callable[[Progress], None], *, here: bool) -> None:
        """here: whether the processes will run on this machine."""
        self._input = MeshInput.read(options, here=here)
        self._options, self._on_progress = options, on_progress
        self.mesh, self.tls_folder = self._input.mesh, self._input.tls_folder
        self._stack = AsyncExitStack()
        self._run_file: KeptRunFile | None = None

    @abstractmethod
    async def _start(self) -> None:
        """Return when the mesh is ready. What ends it is pushed on the stack."""

    @property
    @abstractmethod
    def addresses(self) -> Addresses:
        """Where the mesh is reached now."""

    @property
    @abstractmethod
    def gives_logprobs(self) -> dict[str, bool | None]:
        """Whether replies come with log-probabilities, by tier, as one of its workers has found out."""

    async def __aenter__(self) -> Self:
        await self._stack.__aenter__()
        try:
            self._stack.enter_context(held(self._options.folder))
            await self._start()
            self._run_file = KeptRunFile(self._options, self.redis_url, self.tls_folder)
            self._update_run_file()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run_file = None
        runfile.remove(self._options.folder)
        await self._stack.aclose()

    def _update_run_file(self) -> None:
        if self._run_file is not None:
            self._run_file.update(self.addresses)

    @property
    def grpc_addresses(self) -> tuple[str, ...]:
        """The routers' gRPC addresses. The processes of one router have the same."""
        return self.addresses.grpc

    @property
    def http_addresses(self) -> tuple[str, ...]:
        """The routers' OpenAI-compatible APIs."""
        return self.addresses.http

    @property
    def admin_addresses(self) -> tuple[str, ...]:
        """The routers' administrative listeners, in the order of `grpc_addresses`."""
        return self.addresses.admin
