"""Background tasks have an owner that ends them."""

import asyncio
from typing import Any


async def end(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel tasks and return once they have ended, whatever they end with.

    They are cancelled again until they have: a library may swallow a cancellation that comes together with what it was
    waiting for (seen with redis-py 8.1 when a reply to a pipeline has just arrived).
    """
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=0.2)
