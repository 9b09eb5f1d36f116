"""A server of our own: started, watched, started anew when it dies, stopped."""

import logging
import os
import signal

from services.processes import ProcessSpec, Watched, Watcher
from worker_service.engine.sglang.launch import ServerShape, command, environment

_log = logging.getLogger(__name__)

STOP_S = 10.0  # it has nothing to end by then: requests are drained before
LOST_CRASHES = 4  # in a row, none of them steady: another start would not help


class ServerProcess:
    """One SGLang server as a process of this one. It writes where this process does, and ends with it."""

    def __init__(self, shape: ServerShape, port: int) -> None:
        self._shape, self._port = shape, port
        self._watcher = Watcher()
        self._entry: Watched | None = None
        self.endpoint = f"http://127.0.0.1:{port}"

    async def start(self) -> None:
        """Start it and keep it running; it answers much later."""
        argv = command(self._shape, self._port)
        _log.info("starting %s", " ".join(argv))
        spec = ProcessSpec("sglang", argv, environment(self._shape), None, stop_order=0, stop_s=STOP_S)
        self._entry = await self._watcher.start(spec)

    async def stop(self) -> None:
        await self._watcher.stop_all()

    def kill(self) -> None:
        """End it as it is; it is started anew."""
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)

    @property
    def pid(self) -> int | None:
        """None while it is down."""
        return self._entry.pid if self._entry is not None else None

    @property
    def restarts(self) -> int:
        return self._entry.restarts if self._entry is not None else 0

    @property
    def lost(self) -> bool:
        """Whether it keeps dying."""
        return self._entry is not None and (self._entry.fatal.is_set() or self._entry.crashes >= LOST_CRASHES)
