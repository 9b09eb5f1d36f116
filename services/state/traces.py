"""The last traces, kept in Redis so that `penstock trace` works without a collector.

All spans go into one capped stream, so memory is bounded whatever the load; readers sort them by trace.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import Any

import redis
from redis.asyncio import Redis

from services.domain.errors import NotFound
from services.state.connection import state_errors
from services.state.keys import Keys

SPANS_PER_TRACE = 16  # a usual cascade request leaves 8 to 15
PAGE_SPANS = 50
"""Read at once: decoding them takes the event loop about a millisecond; all that are kept take a good part of a second."""
CLOCK_SKEW_S = 2.0
"""How far the clocks of Redis and of those who write spans may be apart."""

_TRACE_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """A span that has ended. Times in seconds: `start_s` since the epoch, events after the start."""

    trace_id: str
    span_id: str
    parent_span_id: str
    name: str
    service: str
    start_s: float
    duration_s: float
    failed: bool = False
    status_message: str = ""
    entry: bool = False
    """Whether the trace entered the mesh here: by a client's own trace, whose spans are not kept, it may have a parent."""
    attributes: dict[str, str] = field(default_factory=dict)
    events: list[tuple[str, float, dict[str, str]]] = field(default_factory=list)

    @property
    def is_root(self) -> bool:
        """Whether it is the first of the spans that are kept of its trace."""
        return self.entry or not self.parent_span_id


def write_spans(client: redis.Redis, keys: Keys, spans: list[SpanRecord], keep: int) -> None:
    """Append spans (blocking: called on the exporter's own thread), room being kept for about `keep` traces."""
    with state_errors():
        pipe = client.pipeline(transaction=False)
        for span in spans:
            data = json.dumps(asdict(span), separators=(",", ":"))
            pipe.xadd(keys.spans, {"span": data}, maxlen=keep * SPANS_PER_TRACE, approximate=True)
        pipe.execute()


class TraceStore:
    """Reads traces. Every method raises StateUnavailable when Redis is away."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis, self._keys = redis, keys
        self._reading = asyncio.Lock()  # several readers together would leave the event loop to nobody else

    async def last(self, limit: int) -> list[list[SpanRecord]]:
        """The spans of the last `limit` traces that have ended, newest first, each in order of start."""
        traces: dict[str, list[SpanRecord]] = {}
        roots_s: list[float] = []  # when traces that have ended began
        async with self._reading:
            async for page_s, page in self._pages():
                for data in page:
                    span = SpanRecord(**json.loads(data))
                    traces.setdefault(span.trace_id, []).append(span)
                    if span.is_root:
                        roots_s.append(span.start_s)
                # what was written before a trace began is neither of it nor of a later one
                if sum(page_s < start_s - CLOCK_SKEW_S for start_s in roots_s) >= limit:
                    break
        ended = [_in_order(spans) for spans in traces.values() if any(span.is_root for span in spans)]
        ended.sort(key=lambda spans: spans[0].start_s, reverse=True)
        return ended[:limit]

    async def get(self, trace_id: str) -> list[SpanRecord]:
        """The spans of one trace in order of start.

        Raises:
            NotFound: no span of it is there (any more).
        """
        found: list[SpanRecord] = []
        if _TRACE_ID.fullmatch(trace_id):  # nothing else can be there: it need not be looked for
            wanted = trace_id.encode()
            async with self._reading:
                async for _, page in self._pages():
                    found += [SpanRecord(**json.loads(data)) for data in page if wanted in data]
        spans = [span for span in found if span.trace_id == trace_id]
        if not spans:
            raise NotFound("trace", trace_id)
        return _in_order(spans)

    async def _pages(self) -> AsyncIterator[tuple[float, list[bytes]]]:
        """Every span that is kept, as JSON, newest first, in pages; with each, when its first span was written, in s.

        Others get their turn between the pages.
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
