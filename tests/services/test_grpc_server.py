"""A server under load takes new calls at once."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc import aio

from penstock.services import grpc_server
from penstock.services.channels import CHANNEL_OPTIONS, server_options
from penstock.services.domain.instances import Role
from penstock.services.grpc_types import Context

BUSY, NEW = 60, 240


async def served(**handlers: Any) -> tuple[aio.Server, str]:
    """A server of `test.Service`, and its address."""
    server = grpc_server.server((), server_options(Role.ROUTER))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


async def test_new_calls_do_not_wait_for_rounds_of_the_busy_streams() -> None:
    """However many streams write without pause, many new calls reach their handlers within a few rounds of them."""
    written, entered = 0, list[int]()
    all_entered, all_busy = asyncio.Event(), asyncio.Event()
    busy = 0

    async def write_until_all_entered(request: bytes, context: Context) -> AsyncIterator[bytes]:
        nonlocal written, busy
        busy += 1
        if busy == BUSY:
            all_busy.set()
        while not all_entered.is_set():
            yield b"x"
            written += 1

    async def enter(request: bytes, context: Context) -> bytes:
        entered.append(written)
        if len(entered) == NEW:
            all_entered.set()
        return b""

    server, address = await served(
        Busy=grpc.unary_stream_rpc_method_handler(write_until_all_entered),
        New=grpc.unary_unary_rpc_method_handler(enter),
    )
    async with aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        start_busy: Any = channel.unary_stream("/test.Service/Busy")
        start_new: Any = channel.unary_unary("/test.Service/New")

        async def read_all() -> None:
            async for _ in start_busy(b""):
                pass

        readers = [asyncio.create_task(read_all()) for _ in range(BUSY)]
        await all_busy.wait()
        await asyncio.gather(*(start_new(b"", timeout=60) for _ in range(NEW)))
        await asyncio.gather(*readers)
    await server.stop(0)
    rounds = (entered[-1] - entered[0]) / BUSY
    assert rounds < NEW / 8, "one new call per round of the busy streams, or fewer"


async def test_a_server_stops_and_its_calls_end() -> None:
    """Requests for calls that wait at the core keep no server from stopping; a call under way is told."""
    started = asyncio.Event()

    async def endless(request: bytes, context: Context) -> bytes:
        started.set()
        await asyncio.Event().wait()
        return b""

    server, address = await served(Endless=grpc.unary_unary_rpc_method_handler(endless))
    async with aio.insecure_channel(address) as channel:
        method: Any = channel.unary_unary("/test.Service/Endless")
        call = method(b"")
        await started.wait()
        async with asyncio.timeout(60):
            await server.stop(0)
            await server.wait_for_termination()
            with pytest.raises(aio.AioRpcError):
                await call


async def test_this_release_of_grpcio_is_built_as_the_server_expects() -> None:
    """The private names that the server builds on are there: else it would fall back to one call at a time."""
    assert isinstance(grpc_server.server((), server_options(Role.ROUTER)), grpc_server.Server)
