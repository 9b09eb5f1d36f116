"""Traces, metrics and logs with OpenTelemetry.

Spans and metrics are exported to an OTLP collector if OTEL_EXPORTER_OTLP_ENDPOINT is set. Metrics are also served for
Prometheus, and spans are also stored in Redis, where `penstock trace` reads them. Names follow OpenTelemetry's GenAI and RPC
conventions.
"""

import json
import logging
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from wsgiref.simple_server import WSGIServer

import redis
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import Meter, Observation
from opentelemetry.sdk.environment_variables import OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, StatusCode, Tracer, format_span_id, format_trace_id
from opentelemetry.util.types import Attributes
from prometheus_client import CollectorRegistry, start_http_server

from penstock.services import background
from penstock.services.domain.errors import PenstockError
from penstock.services.domain.instances import Role
from penstock.services.field_problems import SettingsError
from penstock.services.settings import ServiceSettings
from penstock.services.state.connection import connect_blocking
from penstock.services.state.keys import Keys
from penstock.services.state.traces import SpanRecord, write_spans
from penstock.services.trace_sampling import NOTHING, Caller, SamplingLimits, TraceSampler
from penstock.types.mesh_status import SpanEvent

_log = logging.getLogger(__name__)

# Bucket boundaries from OpenTelemetry's GenAI conventions: seconds.
_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TIME_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)

MAX_ATTRIBUTE_CHARS = 4096
"""Limit on attribute values of spans: errors may quote peers and clients. OpenTelemetry limits the numbers of attributes and
events of a span (128 each) and its variables override all of these limits."""


NO_SPAN = nullcontext(INVALID_SPAN)
"""Of what is not traced."""


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Tracer, meter and exporters of a service."""

    tracer: Tracer
    meter: Meter
    metrics_address: str
    sampler: TraceSampler | None
    """Decides which requests are traced; None where only traces that a caller has begun continue."""
    _tracers: TracerProvider
    _meters: MeterProvider
    _server: WSGIServer | None = None

    def is_traced(self, traceparent: str | None) -> bool:
        """Whether a call is traced. traceparent: its caller's header."""
        caller = Caller.of(traceparent)
        if self.sampler is None:
            return caller is Caller.SAMPLED
        return self.sampler.samples(caller, time.monotonic())

    def server_span(
        self, name: str, headers: Mapping[str, str], attributes: Mapping[str, str]
    ) -> AbstractContextManager[Span]:
        """The current span of a call as long as the context lasts; INVALID_SPAN, without a context, if it is not traced.

        headers: of the call, with its caller's trace context.
        """
        if not self.is_traced(headers.get("traceparent")):
            return NO_SPAN
        return self.tracer.start_as_current_span(
            name,
            context=propagate.extract(headers),
            kind=SpanKind.SERVER,
            attributes=attributes,
            record_exception=False,
            set_status_on_exception=False,
        )

    def keeps_trace(self) -> bool:
        """Whether there is room for the trace of an untraced request that has failed or was slow."""
        return self.sampler is not None and self.sampler.keeps(time.monotonic())

    def close(self) -> None:
        """Flush the exporters, within a few seconds, and stop the Prometheus endpoint."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        self._tracers.force_flush(2000)
        self._tracers.shutdown()
        self._meters.shutdown(timeout_millis=2000)


def set_up(
    service: str,
    instance_id: str,
    settings: ServiceSettings,
    *,
    state_url: str,
    keys: Keys,
    metrics_host: str = "",
    sampling: SamplingLimits | None = None,
) -> Telemetry:
    """Set up the telemetry of this process and start the Prometheus endpoint.

    metrics_host: the address that the endpoint listens on, if not bind_host. sampling: for a service that clients call.
    """
    resource = Resource.create(
        {"service.name": f"penstock-{service}", "service.instance.id": instance_id, "service.namespace": keys.mesh}
    )
    tracers = TracerProvider(resource=resource, span_limits=span_limits())
    if settings.trace_keep:
        redis_exporter = _RedisSpanExporter(connect_blocking(state_url), keys, service, settings.trace_keep)
        tracers.add_span_processor(BatchSpanProcessor(redis_exporter, schedule_delay_millis=500))
    registry = CollectorRegistry()
    readers: list[MetricReader] = [PrometheusMetricReader(registry=registry)]
    exported = bool(settings.trace_keep or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"))
    if os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        readers.append(PeriodicExportingMetricReader(OTLPMetricExporter()))
    views = [
        View(instrument_name="*.time_to_first_token", aggregation=ExplicitBucketHistogramAggregation(_TTFT_BUCKETS)),
        View(instrument_name="*.time_per_output_token", aggregation=ExplicitBucketHistogramAggregation(_TPOT_BUCKETS)),
        View(instrument_name="*.duration", aggregation=ExplicitBucketHistogramAggregation(_TIME_BUCKETS)),
    ]
    meters = MeterProvider(metric_readers=readers, resource=resource, views=views)
    meters.get_meter("penstock").create_observable_counter(
        "penstock.background.failures",
        callbacks=[lambda _: [Observation(n, {"penstock.task": name}) for name, n in background.failures.items()]],
        unit="{failure}",
        description="Failures of background tasks of this process, by task.",
    )
    server = serve_metrics(registry, metrics_host or settings.bind_host, settings.metrics_port)
    sampler = None
    if sampling is not None:
        sampler = TraceSampler(sampling if exported else NOTHING, time.monotonic(), random.random)
    tracer, meter = tracers.get_tracer("penstock"), meters.get_meter("penstock")
    address = f"{settings.reachable_host}:{server.server_port}"
    return Telemetry(tracer, meter, address, sampler, tracers, meters, server)


def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> WSGIServer:
    """Start the Prometheus endpoint.

    Raises:
        SettingsError: It cannot listen there.
    """
    try:
        return start_http_server(port, addr=host, registry=registry)[0]
    except OSError as error:
        raise SettingsError(f"metrics_port: cannot listen on {host}:{port}: {error.strerror}") from None


def span_limits() -> SpanLimits:
    if OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT in os.environ:
        return SpanLimits()
    return SpanLimits(max_span_attribute_length=MAX_ATTRIBUTE_CHARS)


class _RedisSpanExporter(SpanExporter):
    """Stores recent traces in Redis. Spans that cannot be written are dropped."""

    def __init__(self, client: redis.Redis, keys: Keys, service: str, keep: int) -> None:
        self._client, self._keys, self._service, self._keep = client, keys, service, keep

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            write_spans(self._client, self._keys, [_record(span, self._service) for span in spans], self._keep)
        except PenstockError:
            return SpanExportResult.FAILURE
        except Exception as error:
            background.record_failure("span-exporter", error, f"{len(spans)} spans are dropped")
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._client.close()


def _record(span: ReadableSpan, service: str) -> SpanRecord:
    context, start, end = span.get_span_context(), span.start_time or 0, span.end_time or 0
    assert context is not None
    return SpanRecord(
        trace_id=format_trace_id(context.trace_id),
        span_id=format_span_id(context.span_id),
        parent_span_id=format_span_id(span.parent.span_id) if span.parent is not None else "",
        name=span.name,
        service=service,
        start_s=start / 1e9,
        duration_s=(end - start) / 1e9,
        entry=service == Role.ROUTER.value and span.parent is not None and span.parent.is_remote,
        failed=span.status.status_code is StatusCode.ERROR,
        status_message=span.status.description or "",
        attributes=_texts(span.attributes),
        events=tuple(
            SpanEvent(event.name, (event.timestamp - start) / 1e9, _texts(event.attributes)) for event in span.events
        ),
    )


def _texts(attributes: Attributes) -> dict[str, str]:
    return {name: str(value) for name, value in (attributes or {}).items()}


def observe_state_link(meter: Meter, connected: Callable[[], bool]) -> None:
    """Export a gauge that is 1 if this process can reach Redis, else 0."""
    meter.create_observable_gauge(
        "penstock.state.connected",
        callbacks=[lambda _: [Observation(int(connected()))]],
        description="1 if this process can reach Redis; 0 while it serves with the last known state of the mesh.",
    )


def observe_unusable_entries(meter: Meter, entries: Callable[[], int]) -> None:
    """Export how many entries of instances were not used, because they are not what they should be."""
    meter.create_observable_counter(
        "penstock.state.unusable_entries",
        callbacks=[lambda _: [Observation(entries())]],
        unit="{entry}",
        description="Entries of instances in Redis that were ignored because they are damaged or not valid.",
    )


def inject(context: Context | None = None) -> tuple[tuple[str, str], ...]:
    """A trace context, or the current one, as gRPC metadata. Nothing where it is not traced."""
    if not is_traced(context):
        return ()
    carrier: dict[str, str] = {}
    propagate.inject(carrier, context)
    return tuple(carrier.items())


def child_span(
    tracer: Tracer,
    name: str,
    attributes: Mapping[str, str | int | float],
    *,
    parent: Context | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
) -> Span:
    """Begin a span under the parent's, or the current one. INVALID_SPAN where that is not traced."""
    if not is_traced(parent):
        return INVALID_SPAN
    return tracer.start_span(name, context=parent, kind=kind, attributes=attributes)


def is_traced(context: Context | None = None) -> bool:
    """Whether what happens in a context, or the current one, is traced."""
    if context is _UNTRACED:
        return False
    span = trace.get_current_span(context)
    return span is not INVALID_SPAN and span.get_span_context().trace_flags.sampled


def context_of(span: Span, context: Context | None = None) -> Context:
    """A context, or the current one, with `span` as its span."""
    return _UNTRACED if span is INVALID_SPAN else trace.set_span_in_context(span, context)


_UNTRACED = Context()


class SpanBudget:
    """Limits the number of spans of an operation that may repeat without limit."""

    def __init__(self, most: int) -> None:
        self._left = most

    def take(self, parent: Context) -> Context:
        """The parent of one more span; a context that is not traced if there are no more."""
        self._left -= 1
        return parent if self._left >= 0 else _UNTRACED


@contextmanager
def client_span(tracer: Tracer, method: str, **attributes: str | int | float) -> Iterator[Span]:
    """A CLIENT span around one RPC, with name and attributes by the RPC conventions. `method` is `package.Service/Method`."""
    described = {"rpc.system": "grpc", "rpc.method": method, **attributes}
    with trace.use_span(child_span(tracer, method, described, kind=SpanKind.CLIENT), end_on_exit=True) as span:
        yield span


def current_trace_id() -> str:
    """The current trace's id in hex; empty outside any trace."""
    context = trace.get_current_span().get_span_context()
    return format_trace_id(context.trace_id) if context.is_valid else ""


class _Formatter(logging.Formatter):
    """as_json: an object per line for log collectors, else text for people."""

    def __init__(self, service: str, *, as_json: bool) -> None:
        super().__init__()
        self._service, self._as_json = service, as_json

    def format(self, record: logging.LogRecord) -> str:
        level, message, trace_id = record.levelname.lower(), record.getMessage(), current_trace_id()
        exception = self.formatException(record.exc_info) if record.exc_info else ""
        if self._as_json:
            data = {"time": record.created, "level": level, "service": self._service, "logger": record.name}
            data["message"] = message
            if trace_id:
                data["trace_id"] = trace_id
            if exception:
                data["exception"] = exception
            return json.dumps(data)
        when = time.strftime("%H:%M:%S", time.localtime(record.created))
        traced = f" trace={trace_id}" if trace_id else ""
        line = f"{when}.{int(record.msecs):03d} {level:7} {self._service} {message}{traced}"
        return f"{line}\n{exception}" if exception else line


def set_up_logging(service: str, settings: ServiceSettings) -> None:
    """Log to stderr with trace ids."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(service, as_json=settings.log_format == "json"))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)


def make_instance_id(service: str, tier: str) -> str:
    """A unique name for this process: role, tier, host and process id."""
    return "-".join(part for part in (service, tier, socket.gethostname(), str(os.getpid())) if part)
