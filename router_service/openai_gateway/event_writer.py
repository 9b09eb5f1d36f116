"""Server-sent events of one response: written at once, buffered only while the client does not read."""

import asyncio
import contextvars
from contextlib import AbstractAsyncContextManager, suppress
from types import TracebackType

from aiohttp import web
from aiohttp.http import HttpVersion11

from penstock.services.background import end
from penstock.services.domain.errors import PeerNotReading
from penstock.services.write_timeouts import WriteTimeouts

MAX_WRITE_BYTES = 1 << 16  # of one write of buffered events: each write has the write time-out


class EventWriter(AbstractAsyncContextManager["EventWriter"]):
    """Writes one response. `send` never waits; leaving the context discards unwritten events.

    A write to a client that reads costs one call of the transport, and no task, timer or iteration of the event loop. When
    the transport's buffer is full, a task takes over until everything is written.

    Raises:
        PeerNotReading: From the context, if a write took longer than the write time-out, or not everything was written at the
            deadline.
    """

    def __init__(
        self, request: web.Request, response: web.StreamResponse, timeouts: WriteTimeouts, deadline_s: float
    ) -> None:
        """deadline_s: on the event loop's clock."""
        self._request, self._response = request, response
        self._protocol, self._transport = request.protocol, request.transport
        self._watched, self._deadline_s = timeouts.watched(), deadline_s
        self._chunked = request.version >= HttpVersion11  # as aiohttp decides it
        self._buffered: list[bytes] = []
        self._task: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self.closed = False
        """Whether the response has ended, or the context has been left."""
        self._silent = False  # nothing has been sent since the last round of `IdleComments`
        self._direct = False  # nothing is buffered, and the headers have been sent
        self._context = contextvars.copy_context()  # the deadline of the request's writes is in it
        self.begun = False
        """Whether anything has been sent: the status of the response is fixed."""

    async def __aenter__(self) -> "EventWriter":
        self._owner = asyncio.current_task()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closed, self._direct = True, False
        if self._task is not None:
            await end(self._task)
        if self._error is not None and isinstance(error, asyncio.CancelledError):
            assert self._owner is not None
            if self._owner.uncancel() == 0:  # otherwise another caller has also cancelled the request
                raise self._error from None

    def send(self, event: bytes) -> None:
        """Send one event, complete with its empty line; do nothing after the context."""
        self._silent = False
        if self._direct and not self._protocol.writing_paused:
            self._write(event)
            return
        if self.closed:
            return
        self.begun, self._direct = True, False
        self._buffered.append(event)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._write_buffered(), context=self._context)

    def send_if_silent(self, event: bytes) -> None:
        """Send an event if none was sent since the last call, and none waits for the client to read."""
        if self._silent and self._task is None:
            self.send(event)
        self._silent = True

    async def end(self, events: bytes) -> None:
        """Send the last events, together with the end of the response if the client reads; return when they are written."""
        if self._direct and not self._protocol.writing_paused:
            self.closed, self._direct = True, False  # no comment may follow while the client is waited for
            with suppress(ConnectionError), self._watched:  # aiohttp sees a lost connection by itself
                await self._response.write_eof(events)
        elif events:
            self.send(events)
            await self.sent()

    async def sent(self) -> None:
        """Return when everything has been written to the transport and its buffer has room."""
        while self._task is not None:
            await asyncio.wait([self._task])

    def _write(self, data: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return  # aiohttp sees a lost connection by itself and cancels the request
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    async def _write_buffered(self) -> None:
        try:
            with suppress(ConnectionError):
                if not self._response.prepared:
                    await self._response.prepare(self._request)
                    with self._watched:
                        await self._response.write(self._take())  # with the headers
                while self._buffered or self._protocol.writing_paused:
                    if asyncio.get_running_loop().time() >= self._deadline_s:
                        raise PeerNotReading("the deadline passed while the client was reading")
                    with self._watched:
                        await self._request.writer.drain()
                    if self._buffered:
                        self._write(self._take())
        except Exception as error:
            self._error = error
            assert self._owner is not None
            self._owner.cancel()
        finally:
            self._task, self._direct = None, not self.closed

    def _take(self) -> bytes:
        """Remove and return the first buffered events, at least one."""
        count, size = 0, 0
        while count < len(self._buffered) and (count == 0 or size + len(self._buffered[count]) <= MAX_WRITE_BYTES):
            size += len(self._buffered[count])
            count += 1
        data = b"".join(self._buffered[:count])
        del self._buffered[:count]
        return data
