"""Calls without a message: what a server answers before it has read anything."""

import asyncio
from typing import Any

import grpc
from grpc import aio

LIMIT_S = 60.0
MAX_TRIES = 100


async def status_of_empty_call(channel: aio.Channel, method: str) -> grpc.StatusCode:
    """The status of a call that ends without a message; OK if it is served."""
    multi: Any = channel.stream_stream(method)
    for _ in range(MAX_TRIES):
        call = multi(timeout=LIMIT_S)
        try:
            await (
                call.wait_for_connection()
            )  # writing to a call whose connection fails would cancel it, and hide the status
            await call.done_writing()
            if await call.read() is not aio.EOF:
                call.cancel()
        except aio.AioRpcError as error:
            return error.code()
        except asyncio.CancelledError:  # gRPC's own, where the connection fails between these steps
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            await asyncio.sleep(0.05)
            continue
        return grpc.StatusCode.OK
    return grpc.StatusCode.CANCELLED
