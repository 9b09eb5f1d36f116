"""Arrivals and token counts of the last requests in Redis: written by routers, read for `penstock export-trace`, capped."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from redis.asyncio import Redis

from penstock.services.state.connection import as_bytes, state_errors
from penstock.services.state.keys import Keys
from penstock.services.state.stream_pages import page_of
from penstock.types.mesh_status import ServedRequest


class ServedRequestStore:
    """The last `stored` requests of the mesh, about: Redis trims whole nodes of the stream.

    Fields of an entry: `r`, a list of exactly the four values that earlier versions read, and what came later by its name.
    """

    def __init__(self, redis: Redis, keys: Keys, stored: int) -> None:
        self._redis, self._keys, self._stored = redis, keys, stored

    async def append(self, requests: Sequence[ServedRequest]) -> None:
        """Add requests at the end.

        Raises:
            StateUnavailable: Redis cannot be reached.
        """
        with state_errors():
            async with self._redis.pipeline(transaction=False) as pipe:
                for each in requests:
                    row = json.dumps([round(each.arrival_s, 6), each.prompt_tokens, each.output_tokens, each.tier])
                    cached = str(each.cached_prompt_tokens)
                    pipe.xadd(self._keys.requests, {"r": row, "cached": cached}, maxlen=self._stored, approximate=True)
                await pipe.execute()

    async def page(self, before: str, size: int) -> tuple[list[ServedRequest], str]:
        """(at most `size` requests, those that ended last first; the token of the next page).

        before: the token of the page before; empty for the first page. The returned token is empty at the end.

        Raises:
            InvalidRequest: The token is none of this store; names `page_token`.
            StateUnavailable: Redis cannot be reached.
        """
        rows, next_token = await page_of(self._redis, self._keys.requests, before, size)
        requests = [request for fields in rows if (request := _read(fields)) is not None]
        return requests, next_token


def _read(fields: Mapping[Any, Any]) -> ServedRequest | None:
    """A request of this version or another one, with the values that this version knows; None where some are missing."""
    row = json.loads(as_bytes(fields.get(b"r", b"[]")))
    if len(row) < 4:
        return None
    arrival_s, input_tokens, output_tokens, tier = row[:4]
    return ServedRequest(arrival_s, input_tokens, output_tokens, tier, int(as_bytes(fields.get(b"cached", b"0"))))
