"""A TCP proxy that a test can cut or blackhole: the network between one process and its server."""

import asyncio
import contextlib
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any

from penstock.services.background import end
from tests.support.present import present

CHUNK_BYTES = 65_536


class TcpProxy(AbstractAsyncContextManager["TcpProxy"]):
    """Forwards connections to a port of this machine, as long as the context lasts.

    `cut` resets every connection and each new one. `blackhole` keeps connections open and accepts new ones, but no byte
    passes; what was sent meanwhile arrives after `restore`, as TCP would send it again.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._connections: dict[asyncio.Task[Any], list[asyncio.StreamWriter]] = {}
        self._refusing = False
        self._passing = asyncio.Event()
        self._passing.set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def __aenter__(self) -> "TcpProxy":
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        present(self._server).close()
        self._reset_all()
        if self._connections:
            await end(*self._connections)

    def cut(self) -> None:
        """Reset every connection, now and until `restore`."""
        self._refusing = True
        self._reset_all()

    def blackhole(self) -> None:
        """Let no byte pass until `restore`."""
        self._passing.clear()

    def restore(self) -> None:
        self._refusing = False
        self._passing.set()

    def _reset_all(self) -> None:
        for writers in self._connections.values():
            for writer in writers:
                writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = present(asyncio.current_task())
        writers = self._connections[task] = [writer]
        try:
            if self._refusing:
                return
            with contextlib.suppress(OSError):
                upstream, to_server = await asyncio.open_connection("127.0.0.1", self._target_port)
                writers.append(to_server)
                await asyncio.gather(self._pump(reader, to_server), self._pump(upstream, writer))
        finally:
            del self._connections[task]
            for each in writers:
                each.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(CHUNK_BYTES):
            await self._passing.wait()
            sink.write(data)
            await sink.drain()
        sink.close()
