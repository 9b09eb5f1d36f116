"""A mesh of `penstock up` as a context: while it lasts, its folder is locked and its run file is true."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from penstock.local import runfile
from penstock.local.runfile import held
from penstock.placement.mesh import Addresses
from penstock.placement.mesh_input import MeshInput, MeshOptions
from penstock.placement.run_file import KeptRunFile
from penstock.placement.start import Progress


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
