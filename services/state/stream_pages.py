"""Capped streams of Redis in pages, the newest entries first."""

import re
from collections.abc import Mapping
from typing import Any

from redis.asyncio import Redis

from penstock.services.domain.errors import invalid
from penstock.services.state.connection import as_bytes, state_errors

MAX_ID_PART = 2**64 - 1  # ids of stream entries are two of these
_ID = re.compile(r"(\d{1,20})-(\d{1,20})", re.ASCII)


async def page_of(
    redis: Redis, key: str, before: str, size: int, oldest: str = "-"
) -> tuple[list[Mapping[Any, Any]], str]:
    """(the fields of at most `size` entries, the token of the next page; empty at the end).

    before: the token of the page before; empty for the first page. oldest: the id of the oldest entry that is read.

    Raises:
        InvalidRequest: The token is none of such a stream; names `page_token`.
        StateUnavailable: Redis cannot be reached.
    """
    parts = _ID.fullmatch(before)
    if before and (parts is None or any(int(part) > MAX_ID_PART for part in parts.groups())):
        raise invalid("page_token", "must be the next_page_token of the page before")
    with state_errors():
        rows = await redis.xrevrange(key, max=f"({before}" if before else "+", min=oldest, count=size) or []
    next_token = as_bytes(rows[-1][0] or b"").decode() if len(rows) == size else ""
    return [fields for _, fields in rows if fields], next_token
