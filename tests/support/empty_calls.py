"""Calls without a message: what a server answers before it has read anything."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc import aio

LIMIT_S = 60.0


async def status_of_empty_call(channel: aio.Channel, method: str) -> grpc.StatusCode:
    """The status of a call that ends without a message; OK if it is served."""
    multi: Any = channel.stream_stream(method)
    while True:
        call = multi(_nothing(), timeout=LIMIT_S)
        try:
            async for _ in call:
                call.cancel()
                break
        except aio.AioRpcError as error:
            return error.code()
        except asyncio.CancelledError:  # gRPC's own, where the connection fails while the request is being sent
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            await asyncio.sleep(0.05)
            continue
        return grpc.StatusCode.OK


async def _nothing() -> AsyncIterator[bytes]:
    for message in list[bytes]():
        yield message
