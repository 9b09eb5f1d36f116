"""Tracing, error mapping, durations and logs of every RPC of a server."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, aclosing
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, status_pb2
from grpc import aio
from grpc_status import rpc_status
from opentelemetry.metrics import Histogram
from opentelemetry.trace import Span, StatusCode

from penstock.services import errors
from penstock.services.access.guard import CallGuard
from penstock.services.domain.errors import (
    InvalidRequest,
    Overloaded,
    PenstockError,
    PermissionDenied,
    Unauthenticated,
    invalid,
)
from penstock.services.grpc_types import Context, Handler
from penstock.services.telemetry import NO_SPAN, Telemetry
from penstock.services.write_timeouts import WriteTimeouts

_log = logging.getLogger(__name__)

# Polled frequently; not useful in traces.
UNTRACED = (
    "grpc.health.v1.",
    "grpc.reflection.",
    "penstock.router.v1.MeshService/",
    "penstock.router.v1.RouterService/ListModels",
    "penstock.judge.v1.JudgeService/ListScorers",
    "penstock.planner.v1.PlannerService/WatchPlan",
    "penstock.worker.v1.WorkerService/GenerateMany",  # its replies are traced one by one
    "penstock.worker.v1.WorkerService/GetLoad",
    "penstock.worker.v1.WorkerService/GetInfo",
)


Refusal = Callable[[], Overloaded | None]
"""Called when a call comes: the error that refuses it, if there is no room. It counts the refusals."""


class CallRecorder:
    """Traces calls by the RPC conventions, and records their durations and statuses."""

    def __init__(self, measured: Telemetry) -> None:
        self._measured = measured
        self._duration = measured.meter.create_histogram(
            "rpc.server.duration", unit="s", description="Time of each RPC."
        )

    def begin(self, method: str, headers: Mapping[str, str]) -> "RecordedCall":
        """method: `package.Service/Method`, one that is served. headers: where the caller's trace context is."""
        return RecordedCall(self._measured, self._duration, method, headers)


class RecordedCall:
    """One active call."""

    __slots__ = ("_began", "_duration", "_headers", "_measured", "_method")

    def __init__(self, measured: Telemetry, duration: Histogram, method: str, headers: Mapping[str, str]) -> None:
        self._measured, self._duration, self._method, self._headers = measured, duration, method, headers
        self._began = time.monotonic()

    def span(self) -> AbstractContextManager[Span]:
        """The current span as long as the context lasts; INVALID_SPAN, and none, where the call is not traced."""
        if self._method.startswith(UNTRACED):
            return NO_SPAN
        attributes = {"rpc.system": "grpc", "rpc.method": self._method}
        return self._measured.server_span(self._method, self._headers, attributes)

    def end(self, code: str) -> None:
        labels = {"rpc.method": self._method, "rpc.response.status_code": code}
        self._duration.record(time.monotonic() - self._began, labels)

    def failed(self, error: BaseException, span: Span) -> status_pb2.Status | None:
        """The status for `error`; None for a call that was cancelled or already aborted with a status.

        Any exception that is not a PenstockError is a bug: it is logged with its traceback, and the caller gets INTERNAL
        without details.
        """
        if isinstance(error, (asyncio.CancelledError, GeneratorExit, aio.AbortError)):
            self.end("CANCELLED")
            span.set_status(StatusCode.ERROR, "cancelled")
            return None
        if isinstance(error, PenstockError):
            code = errors.grpc_code(error)
            self.end(code.name)
            span.set_attribute("rpc.response.status_code", code.name)
            span.set_attribute("error.type", error.reason)
            if code.name not in ("INVALID_ARGUMENT", "NOT_FOUND"):
                span.set_status(StatusCode.ERROR, errors.message_of(error))
            level = logging.DEBUG if isinstance(error, Overloaded) else logging.INFO
            _log.log(level, "%s: %s: %s", self._method, code.name, errors.message_of(error))
            return errors.to_proto(error)
        self.end("INTERNAL")
        span.record_exception(error)
        span.set_status(StatusCode.ERROR, repr(error))
        _log.error("%s failed", self._method, exc_info=error)
        return status_pb2.Status(code=code_pb2.INTERNAL, message="internal error; the log has more")


class ChassisInterceptor(aio.ServerInterceptor):
    """Records each RPC and turns errors into statuses with details.

    Every handler is wrapped as a handler of a request stream, because gRPC handles two cases badly: bytes that are not a
    message (UNKNOWN with the text of the exception), and a call that ends without a message (it hangs).
    """

    def __init__(self, measured: Telemetry, write_timeout_s: float, guard: CallGuard) -> None:
        """guard: refuses calls that their callers may not make."""
        self._calls, self.guard = CallRecorder(measured), guard
        self._refused = measured.meter.create_counter(
            "penstock.rpc.server.denied", unit="{call}", description="Calls that their callers may not make, by reason."
        )
        given_up = measured.meter.create_counter("penstock.rpc.server.write_timeouts", unit="{call}")
        self._writes = WriteTimeouts(write_timeout_s, lambda: given_up.add(1))
        self._handlers: dict[str, Handler] = {}  # by method: only those that are served, so they are few
        self._refusals: dict[str, Refusal] = {}

    def refuse_early(self, method: str, refusal: Refusal) -> None:
        """Ask `refusal` about each call of a method (`/package.Service/Method`), before anything of it is read.

        method: one with a stream of responses.
        """
        self._refusals[method] = refusal
        self._handlers.pop(method, None)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        method: str = handler_call_details.method
        handler = self._handlers.get(method)
        if handler is None and (plain := await continuation(handler_call_details)) is not None:
            handler = self._handlers[method] = self._recorded(method, plain)
        return handler

    def _recorded(self, method: str, handler: Handler) -> Handler:
        several, streams = handler.request_streaming, handler.response_streaming
        unary, streaming = handler.unary_unary, handler.unary_stream
        if several:
            unary, streaming = handler.stream_unary, handler.stream_stream
        inner: Any = streaming if streams else unary
        refusal, begin = self._refusals.get(method, _admit), partial(self._calls.begin, method.lstrip("/"))

        # Not a generator, so that the span is current only in here, even if the client disconnects.
        async def serve(requests: AsyncIterator[Any], context: Context) -> Any:
            if (refused := self._denied(method, context) or refusal()) is not None:
                await context.abort_with_status(errors.to_status(refused))
            call, write, response = begin(_trace_context(context)), self._writes.watched(), None
            with call.span() as span:
                try:
                    called = inner(await _request(requests, several=several), context)
                    if isinstance(called, Awaitable):  # also handlers of packages of grpc that write by themselves
                        response = await called
                    else:
                        async with aclosing(called) as responses:
                            async for each in responses:
                                with write:
                                    await context.write(each)
                except BaseException as error:
                    # The resources of the call are released before this: a peer that does not read delays its status.
                    if (status := call.failed(error, span)) is None:
                        raise
                    await context.abort_with_status(rpc_status.to_status(status))
                call.end("OK")
            return response

        make = grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler
        return make(serve, _checked(handler.request_deserializer), handler.response_serializer)

    def _denied(self, method: str, context: Context) -> PenstockError | None:
        """Why the caller may not make this call; None if it may. Nothing of the call has been read."""
        try:
            self.guard.check(method, context)
        except (PermissionDenied, Unauthenticated) as error:
            self._refused.add(1, {"rpc.method": method.lstrip("/"), "error.type": error.reason})
            return error
        return None


def _admit() -> None:
    """Refuse nothing."""


_NO_HEADERS: Mapping[str, str] = {}
_TRACE_HEADERS = ("traceparent", "tracestate", "baggage")


def _trace_context(context: Context) -> Mapping[str, str]:
    """What a call's metadata says of its caller's trace."""
    headers = [(key, str(value)) for key, value in context.invocation_metadata() or () if key in _TRACE_HEADERS]
    return dict(headers) if headers else _NO_HEADERS


def _checked(deserializer: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """A deserializer that returns an InvalidRequest for invalid bytes, because its exceptions bypass the interceptor."""
    if deserializer is None:
        return None

    def deserialize(data: bytes) -> Any:
        try:
            return deserializer(data)
        except DecodeError:
            return invalid("request", "is not a message of this method, or a string in it is not UTF-8")

    return deserialize


class _Messages:
    """The messages of a call. Not a generator, so that waiting for the next one can be cancelled and repeated.

    Raises:
        InvalidRequest: The bytes were not a message.
    """

    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self._requests = aiter(requests)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        request = await anext(self._requests)
        if isinstance(request, InvalidRequest):
            raise request
        return request


async def _request(requests: AsyncIterator[Any], *, several: bool) -> Any:
    """The argument of a handler: the iterator of messages, or the single message.

    Raises:
        InvalidRequest: The single message is missing, or its bytes were not a message.
    """
    messages = _Messages(requests)
    if several:
        return messages
    try:
        return await anext(messages)
    except StopAsyncIteration:
        raise invalid("request", "is missing: the call ended without a message") from None
