"""A stream to a target, as the sender sees it."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from penstock.types.workers import ToSource, ToTarget


class Wire(Protocol):
    """A stream to a target. Its methods raise Unavailable when it is broken."""

    async def send(self, message: ToTarget) -> None: ...

    def answers(self) -> AsyncIterator[ToSource]:
        """The messages of the target, until the stream ends."""
        ...


Dial = Callable[[str], AbstractAsyncContextManager[Wire]]
"""Opens a stream to the target at an address; leaving the context closes it."""
