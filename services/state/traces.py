"""The last traces, kept in Redis so that `penstock trace` works without a collector.

All spans go into one capped stream, so memory is bounded whatever the load; readers sort them by trace.
"""

import json
from dataclasses import asdict, dataclass, field

import redis
from redis.asyncio import Redis

from services.domain.errors import NotFound
from services.state.connection import state_errors
from services.state.keys import Keys

SPANS_PER_TRACE = 16  # a usual cascade request leaves 8 to 15


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
    attributes: dict[str, str] = field(default_factory=dict)
    events: list[tuple[str, float, dict[str, str]]] = field(default_factory=list)


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

    async def last(self, limit: int) -> list[list[SpanRecord]]:
        """The spans of the last `limit` traces that have ended, newest first, each in order of start."""
        traces = [spans for spans in (await self._all()).values() if any(not s.parent_span_id for s in spans)]
        traces.sort(key=lambda spans: spans[0].start_s, reverse=True)
        return traces[:limit]

    async def get(self, trace_id: str) -> list[SpanRecord]:
        """NotFound if no span of it is there (any more)."""
        spans = (await self._all()).get(trace_id)
        if spans is None:
            raise NotFound("trace", trace_id)
        return spans

    async def _all(self) -> dict[str, list[SpanRecord]]:
        with state_errors():
            rows = await self._redis.xrange(self._keys.spans)
        traces: dict[str, list[SpanRecord]] = {}
        for _, fields in rows or ():
            if not fields:
                continue
            span = SpanRecord(**json.loads(fields[b"span"]))
            traces.setdefault(span.trace_id, []).append(span)
        for spans in traces.values():
            spans.sort(key=lambda span: span.start_s)
        return traces
