"""An OTLP collector inside the test: spans of whoever sends them, by gRPC."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class CollectedSpan:
    """Ids in hex. events: name and attributes."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_span_id: str
    events: tuple[tuple[str, dict[str, int]], ...]


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    address: str = ""
    spans: list[CollectedSpan] = field(default_factory=list)

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802 -- the RPC's name
        for resource in request.resource_spans:
            (service,) = (a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
            for scope in resource.scope_spans:
                for span in scope.spans:
                    events = tuple((e.name, {a.key: a.value.int_value for a in e.attributes}) for e in span.events)
                    ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
                    self.spans.append(CollectedSpan(service, span.name, *ids, events))
        return trace_service_pb2.ExportTraceServiceResponse()

    async def event(self, name: str, who: str) -> dict[str, int]:
        """Attributes of the last event of that name in a trace, as soon as it has come."""
        async with asyncio.timeout(60):
            while True:
                for span in reversed(self.spans):
                    for said, attributes in span.events:
                        if said == name and span.trace_id == who:
                            return attributes
                await asyncio.sleep(0.05)

    async def of_trace(self, trace_id: str, services: set[str]) -> list[CollectedSpan]:
        """A trace's spans, as soon as each of these services has sent one."""
        async with asyncio.timeout(60):
            while True:
                found = [span for span in self.spans if span.trace_id == trace_id]
                if services <= {span.service for span in found}:
                    return found
                await asyncio.sleep(0.05)


@contextmanager
def otlp_collector() -> Iterator[Collector]:
    """Listens as long as the context lasts."""
    server, collector = grpc.server(ThreadPoolExecutor(2)), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    collector.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0)
