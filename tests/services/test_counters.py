"""Counters that are read when metrics are collected."""

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from services.counters import LabelledCounter


def collected(reader: InMemoryMetricReader) -> dict[frozenset[tuple[str, object]], float]:
    data = reader.get_metrics_data()
    points = [
        point
        for resource in (data.resource_metrics if data is not None else ())
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    ]
    return {frozenset((point.attributes or {}).items()): point.value for point in points}  # type: ignore[union-attr]


def test_a_collection_has_the_sums_so_far_by_label_and_an_empty_value_leaves_its_label_out() -> None:
    reader = InMemoryMetricReader()
    counter = LabelledCounter(MeterProvider([reader]).get_meter("t"), "c", ("model", "tier"), unit="{request}")
    assert collected(reader) == {}
    counter.add(1, "m", "small")
    counter.add(2, "m", "small")
    counter.add(5, "m", "")
    both, model_only = frozenset({("model", "m"), ("tier", "small")}), frozenset({("model", "m")})
    assert collected(reader) == {both: 3, model_only: 5}
    counter.add(1, "m", "")
    assert collected(reader) == {both: 3, model_only: 6}


def test_every_label_needs_a_value() -> None:
    counter = LabelledCounter(MeterProvider().get_meter("t"), "c", ("model",), unit="{request}")
    with pytest.raises(ValueError, match="2 values"):
        counter.add(1, "m", "small")
