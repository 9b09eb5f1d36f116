"""Recent traces in Redis, so that `penstock trace` works without a collector.

All spans are in one capped stream, which bounds memory; readers group them by trace.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Any

import redis
from redis.asyncio import Redis

from penstock.services.domain.errors import NotFound
from penstock.services.field_problems import from_json
from penstock.services.state.connection import state_errors
from penstock.services.state.keys import Keys
from penstock.types.mesh_status import Span

SPANS_PER_TRACE = 16  # a typical request of the cascade has 8 to 15
PAGE_SPANS = 50
"""Spans per page: decoding them takes about a millisecond, decoding all takes a good part of a second."""
CLOCK_SKEW_S = 2.0
"""Largest difference between the clocks of Redis and of the processes that write spans."""

_TRACE_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRecord(Span):
    """A finished span with its trace. entry: whether the trace entered the mesh with this span. It may have a parent in the
    client's trace, which is not stored."""

    trace_id: str
    entry: bool = False

    @property
    def is_root(self) -> bool:
        """Whether it is the root of the stored spans of its trace."""
        return self.entry or not self.parent_span_id


def write_spans(client: redis.Redis, keys: Keys, spans: list[SpanRecord], keep: int) -> None:
    """Append spans and cap the stream at about `keep` traces. Blocking; runs on the thread of the exporter."""
    with state_errors():
        pipe = client.pipeline(transaction=False)
        for span in spans:
            data = json.dumps(asdict(span), separators=(",", ":"))
            pipe.xadd(keys.spans, {"span": data}, maxlen=keep * SPANS_PER_TRACE, approximate=True)
        pipe.execute()


class TraceStore:
    """Reads traces. All methods raise StateUnavailable without Redis."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis, self._keys = redis, keys
        self._reading = asyncio.Lock()  # several concurrent readers would block the event loop

    async def last(self, limit: int) -> list[list[SpanRecord]]:
        """The spans of the last `limit` finished traces, newest first, each in order of start."""
        traces: dict[str, list[SpanRecord]] = {}
        roots_s: list[float] = []  # start times of finished traces
        async with self._reading:
            async for page_s, page in self._pages():
                for data in page:
                    span = from_json(SpanRecord, data)
                    traces.setdefault(span.trace_id, []).append(span)
                    if span.is_root:
                        roots_s.append(span.start_s)
                # spans written before a trace started belong to earlier traces
                if sum(page_s < start_s - CLOCK_SKEW_S for start_s in roots_s) >= limit:
                    break
        ended = [_in_order(spans) for spans in traces.values() if any(span.is_root for span in spans)]
        ended.sort(key=lambda spans: spans[0].start_s, reverse=True)
        return ended[:limit]

    async def get(self, trace_id: str) -> list[SpanRecord]:
        """The spans of one trace in order of start.

        Raises:
            NotFound: No span of it is stored.
        """
        spans: list[SpanRecord] = []
        if _TRACE_ID.fullmatch(trace_id):  # no other id can exist
            trace_id_bytes = trace_id.encode()
            async with self._reading:
                async for _, page in self._pages():
                    spans += [from_json(SpanRecord, data) for data in page if trace_id_bytes in data]
        spans = [span for span in spans if span.trace_id == trace_id]
        if not spans:
            raise NotFound("trace", trace_id)
        return _in_order(spans)

    async def _pages(self) -> AsyncIterator[tuple[float, list[bytes]]]:
        """All stored spans as JSON, newest first, in pages; each page with the time when its first span was written.

        Yields to the event loop between pages.
        """
        end = "+"
        while True:
            with state_errors():
                rows: list[Any] = await self._redis.xrevrange(self._keys.spans, max=end, count=PAGE_SPANS) or []
            if not rows:
                return
            first = rows[-1][0].decode()
            yield int(first.partition("-")[0]) / 1000, [fields[b"span"] for _, fields in rows if fields]
            end = f"({first}"


def _in_order(spans: list[SpanRecord]) -> list[SpanRecord]:
    return sorted(spans, key=lambda span: span.start_s)
