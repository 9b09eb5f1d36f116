"""Runs an SGLang server as a supervised process."""

import asyncio
import fcntl
import logging
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.services.processes import ANY_STATUS, ProcessSpec, Watched, Watcher
from penstock.worker_service.engine.sglang.launch import ServerShape, command, environment

_log = logging.getLogger(__name__)

TURN_POLL_S = 0.5
STOP_S = 10.0  # requests are drained before
LOST_CRASHES = 4  # consecutive crashes after which a restart would not help


@asynccontextmanager
async def start_turn() -> AsyncIterator[None]:
    """Wait until no other server of this user is being started on this machine, and keep others waiting meanwhile.

    A server with a hierarchical cache reserves host memory by what is free: two at once would both reserve the same.
    """
    path = Path(tempfile.gettempdir()) / f"penstock-sglang-start-{os.getuid()}"
    lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                await asyncio.sleep(TURN_POLL_S)
        yield
    finally:
        os.close(lock)


class ServerProcess:
    """An SGLang server as a child process, which shares the output of this process and ends with it."""

    def __init__(self, shape: ServerShape, port: int) -> None:
        self._shape, self._port = shape, port
        # all parts of a server over several nodes start again together: not by this worker
        self._watcher = Watcher(final=ANY_STATUS) if shape.node is not None else Watcher()
        self._entry: Watched | None = None
        self.endpoint = f"http://127.0.0.1:{port}"

    async def start(self) -> None:
        """Start the server and keep it running. It is ready much later."""
        argv = command(self._shape, self._port)
        _log.info("starting %s", " ".join(argv))
        spec = ProcessSpec("sglang", argv, environment(self._shape), None, stop_order=0, stop_s=STOP_S)
        self._entry = await self._watcher.start(spec)

    async def stop(self) -> None:
        await self._watcher.stop_all()

    def kill(self) -> None:
        """Kill the server; it is restarted."""
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)

    @property
    def pid(self) -> int | None:
        """The process id; None while it is down."""
        return self._entry.pid if self._entry is not None else None

    @property
    def restarts(self) -> int:
        return self._entry.restarts if self._entry is not None else 0

    @property
    def lost(self) -> bool:
        """Whether the server keeps crashing."""
        return self._entry is not None and (self._entry.fatal.is_set() or self._entry.crashes >= LOST_CRASHES)
