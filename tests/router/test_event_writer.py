"""Events written to clients that read, that stop reading for a while, and that never read again. Real connections."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing

import pytest
from aiohttp import web

from penstock.router_service.openai_gateway.event_writer import EventWriter
from penstock.services.domain.errors import PeerNotReading
from penstock.services.write_timeouts import WriteTimeouts
from tests.support.present import present
from tests.support.raw_http import connect, read_all

FOREVER_S = 3600.0
LARGE = b"x" * 100_000

Handle = Callable[[EventWriter], Awaitable[None]]


@asynccontextmanager
async def served(
    handle: Handle, timeout_s: float = FOREVER_S, deadline_s: float = FOREVER_S
) -> AsyncIterator[tuple[tuple[str, int], "asyncio.Future[BaseException | None]"]]:
    """A server of one response. Gives its address and how the response's context ended."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[BaseException | None] = loop.create_future()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        try:
            deadline = loop.time() + deadline_s
            async with EventWriter(request, response, WriteTimeouts(timeout_s), deadline) as writer:
                await handle(writer)
                await writer.sent()
        except BaseException as error:
            ended.set_result(error)
            present(request.transport).abort()
            raise
        ended.set_result(None)
        return response

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0], ended
    finally:
        await runner.cleanup()


async def connected(address: tuple[str, int], version: str = "1.1") -> socket.socket:
    """A connection whose receive buffer is soon full, with its request sent."""
    made = await connect(address)
    await asyncio.get_running_loop().sock_sendall(
        made, f"GET / HTTP/{version}\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
    )
    return made


def body_of(received: bytes) -> bytes:
    """The body, its chunks joined."""
    head, _, rest = received.partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == b"200"
    if b"chunked" not in head.lower():
        return rest
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            return body
        body, rest = body + rest[:length], rest[length + 2 :]


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_events_arrive_whole_and_in_order_and_a_client_that_reads_costs_one_task(version: str) -> None:
    """The task is the one that sends the headers with the first event."""
    events = [f"data: {number}\n\n".encode() for number in range(100)]
    tasks = 0

    async def handle(writer: EventWriter) -> None:
        nonlocal tasks
        loop, usual = asyncio.get_running_loop(), asyncio.get_running_loop().create_task

        def counted(*arguments: object, **options: object) -> object:
            nonlocal tasks
            tasks += 1
            return usual(*arguments, **options)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "create_task", counted)
            for event in events:
                writer.send(event)
                if event is events[10]:
                    await writer.sent()

    async with served(handle) as (address, ended), asyncio.timeout(60):
        with closing(await connected(address, version)) as connection:
            assert body_of(await read_all(connection)) == b"".join(events)
        assert await ended is None
    assert tasks == 1


async def test_what_a_client_has_not_read_waits_for_it_and_nothing_is_lost() -> None:
    sent, filled = bytearray(), asyncio.Event()

    async def handle(writer: EventWriter) -> None:
        writer.send(b"first")
        sent.extend(b"first")
        await writer.sent()
        while writer._direct:
            writer.send(LARGE)
            sent.extend(LARGE)
            await asyncio.sleep(0)
        for number in range(50):
            writer.send(b"%d," % number)
            sent.extend(b"%d," % number)
        filled.set()
        await writer.sent()
        writer.send(b"last")
        sent.extend(b"last")

    async with served(handle) as (address, ended), asyncio.timeout(60):
        with closing(await connected(address)) as connection:
            await filled.wait()
            assert not ended.done()
            assert body_of(await read_all(connection)) == bytes(sent)
        assert await ended is None


@pytest.mark.parametrize(("timeout_s", "deadline_s"), [(0.05, FOREVER_S), (FOREVER_S, 0.2)])
async def test_a_client_that_never_reads_again_ends_the_response(timeout_s: float, deadline_s: float) -> None:
    """By the write time-out, wherever the handler waits; a client that reads now and then, by the deadline."""

    async def handle(writer: EventWriter) -> None:
        writer.send(b"first")
        await writer.sent()
        while writer._direct:
            writer.send(LARGE)
            await asyncio.sleep(0)
        for _ in range(100):
            writer.send(LARGE)
        await asyncio.Event().wait()

    async with served(handle, timeout_s, deadline_s) as (address, ended), asyncio.timeout(60):
        with closing(await connected(address)) as connection:
            if deadline_s != FOREVER_S:
                while not ended.done():
                    await asyncio.get_running_loop().sock_recv(connection, 1024)
                    await asyncio.sleep(0.01)  # a slow reader: what it reads is over only long after the deadline
            assert isinstance(await ended, PeerNotReading)


async def test_a_client_that_leaves_ends_its_own_response_only_by_cancellation() -> None:
    async def handle(writer: EventWriter) -> None:
        writer.send(b"first")
        while True:
            writer.send(LARGE)
            await asyncio.sleep(0)

    async with served(handle) as (address, ended), asyncio.timeout(60):
        connection = await connected(address)
        await asyncio.get_running_loop().sock_recv(connection, 100)
        connection.close()
        assert isinstance(await ended, asyncio.CancelledError)


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_the_last_events_and_the_end_of_the_response_are_one_write(version: str) -> None:
    """With TLS a write is a record; each costs as much as a few tokens. Nothing follows the end."""
    writes: list[bytes] = []

    async def handle(writer: EventWriter) -> None:
        writer.send(b"data: 1\n\n")
        await writer.sent()
        transport = present(writer._request.transport)
        usual = transport.write

        def counted(data: bytes) -> None:
            writes.append(data)
            usual(data)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transport, "write", counted)
            await writer.end(b"data: 2\n\ndata: [DONE]\n\n")
            writer.send(b": a comment\n\n")

    async with served(handle) as (address, ended), asyncio.timeout(60):
        with closing(await connected(address, version)) as connection:
            assert body_of(await read_all(connection)) == b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
        assert await ended is None
    assert len(writes) == 1


async def test_the_last_events_of_a_response_that_has_not_begun_come_with_its_headers() -> None:
    async def handle(writer: EventWriter) -> None:
        await writer.end(b"data: only\n\n")

    async with served(handle) as (address, ended), asyncio.timeout(60):
        with closing(await connected(address)) as connection:
            assert body_of(await read_all(connection)) == b"data: only\n\n"
        assert await ended is None
