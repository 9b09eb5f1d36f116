"""What services measured: pages of metrics, and traces."""

import urllib.request
from collections.abc import Callable

from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from penstock import AsyncClient, NotFoundError, Trace
from tests.support.waiting import until_answered


def metrics_page(address: str) -> str:
    """The page that Prometheus reads at an address."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as response:
        return str(response.read().decode())


def sums(reader: InMemoryMetricReader, name: str) -> dict[frozenset[tuple[str, object]], float]:
    """The values of one counter so far, by the labels of each."""
    data = reader.get_metrics_data()
    points = [
        point
        for resource in (data.resource_metrics if data is not None else ())
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == name
        for point in metric.data.data_points
    ]
    return {frozenset((point.attributes or {}).items()): point.value for point in points}  # type: ignore[union-attr]


async def trace_with(client: AsyncClient, trace_id: str, is_complete: Callable[[Trace], object]) -> Trace:
    """A trace, once all of it that a test needs has arrived."""

    async def found() -> Trace | None:
        try:
            (trace,) = await client.traces(trace_id=trace_id)
        except NotFoundError:  # none of its spans has arrived yet
            return None
        return trace if is_complete(trace) else None

    trace = await until_answered(found)
    assert trace is not None
    return trace
