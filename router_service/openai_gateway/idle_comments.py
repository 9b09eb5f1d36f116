"""Keeps streams alive that have nothing to send: proxies cut connections that are silent for half a minute or more."""

import asyncio
from typing import NoReturn

from penstock.router_service.openai_gateway.event_writer import EventWriter

COMMENT = b": waiting\n\n"
"""Clients of server-sent events ignore it."""


class IdleComments:
    """One task for all streams: a stream that was silent from one round to the next gets a comment, and its headers with it.

    So a stream is never silent for longer than `interval_s`.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._writers: set[EventWriter] = set()

    def watch(self, writer: EventWriter) -> None:
        """Keep a stream alive until its writer is closed."""
        self._writers.add(writer)

    async def run(self) -> NoReturn:
        while True:
            await asyncio.sleep(self._interval_s / 2)
            self._writers = {writer for writer in self._writers if not writer.closed}
            for writer in self._writers:
                writer.send_if_silent(COMMENT)
