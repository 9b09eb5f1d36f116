"""Traces that are created at the end of a request.

Most requests are not traced while they run. One that failed or was slow gets a trace afterwards, from what the router knows
of it. The spans of other services are missing.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, format_trace_id, set_span_in_context
from opentelemetry.util.types import Attributes

from penstock.services.domain import errors
from penstock.services.errors import message_of

REASON = "penstock.trace.reason"
_REFUSED = (errors.InvalidRequest, errors.NotFound, errors.AlreadyRunning, errors.Overloaded, errors.NotServed)
"""Errors that a client must correct, or wait out: counted, not traced."""


@dataclass(frozen=True, slots=True)
class PastSpan:
    """The work of a tier. Times are the event loop's, in seconds. failure: empty if it did not fail."""

    name: str
    began_s: float
    ended_s: float
    attributes: Attributes
    failure: str


@dataclass(frozen=True, slots=True)
class PastRequest:
    """A request that has ended and was not traced."""

    request_id: str
    model: str
    began_s: float
    ended_s: float
    tiers: Iterable[PastSpan]


class LateTraces:
    """keeps: called for each trace; whether it may be created. slow_s: a request that took longer is slow."""

    def __init__(self, tracer: Tracer, keeps: Callable[[], bool], slow_s: float) -> None:
        self._tracer, self._keeps, self._slow_s = tracer, keeps, slow_s

    def failed(self, request: Callable[[], PastRequest], error: BaseException) -> None:
        """Trace a request that failed, unless the error is the client's."""
        if isinstance(error, _REFUSED) or not self._keeps():
            return
        reason = error.reason if isinstance(error, errors.PenstockError) else type(error).__name__
        message = message_of(error) if isinstance(error, errors.PenstockError) else repr(error)
        self._trace(request(), {REASON: "failed", "error.type": reason}, message)

    def ended(self, total_s: float, request: Callable[[], PastRequest]) -> str:
        """Trace a request if it was slow; return the trace's id, or an empty string."""
        if total_s <= self._slow_s or not self._keeps():
            return ""
        return self._trace(request(), {REASON: "slow"}, "")

    def _trace(self, request: PastRequest, attributes: dict[str, str], failure: str) -> str:
        attributes |= {"gen_ai.request.model": request.model, "penstock.request_id": request.request_id}
        whole = PastSpan("request", request.began_s, request.ended_s, attributes, failure)
        epoch_s = time.time() - asyncio.get_running_loop().time()
        root = self._span(whole, SpanKind.SERVER, Context(), epoch_s)
        for tier in request.tiers:
            self._span(tier, SpanKind.INTERNAL, set_span_in_context(root, Context()), epoch_s)
        return format_trace_id(root.get_span_context().trace_id)

    def _span(self, past: PastSpan, kind: SpanKind, parent: Context, epoch_s: float) -> Span:
        """Create a span with its start and end."""
        began_ns, ended_ns = (round((at_s + epoch_s) * 1e9) for at_s in (past.began_s, past.ended_s))
        span = self._tracer.start_span(past.name, parent, kind, past.attributes, start_time=began_ns)
        if past.failure:
            span.set_status(StatusCode.ERROR, past.failure)
        span.end(ended_ns)
        return span
