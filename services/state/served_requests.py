"""Arrivals and token counts of the last requests in Redis: written by routers, read for `penstock export-trace`, capped."""

import json
from collections.abc import Sequence

from redis.asyncio import Redis

from services.domain.workload import ServedRequest
from services.state.connection import as_bytes, state_errors
from services.state.keys import Keys
from services.state.stream_pages import page_of


class ServedRequestStore:
    """The last `stored` requests of the mesh, about: Redis trims whole nodes of the stream."""

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
                    tokens = each.input_tokens, each.output_tokens
                    row = json.dumps([round(each.arrival_s, 6), *tokens, each.tier, each.cached_tokens])
                    pipe.xadd(self._keys.requests, {"r": row}, maxlen=self._stored, approximate=True)
                await pipe.execute()

    async def page(self, before: str, size: int) -> tuple[list[ServedRequest], str]:
        """(at most `size` requests, those that ended last first; the token of the next page).

        before: the token of the page before; empty for the first page. The returned token is empty at the end.

        Raises:
            InvalidRequest: The token is none of this store; names `page_token`.
            StateUnavailable: Redis cannot be reached.
        """
        rows, next_token = await page_of(self._redis, self._keys.requests, before, size)
        return [ServedRequest(*json.loads(as_bytes(fields[b"r"]))) for fields in rows], next_token
