"""Counters for what is counted often: adding is cheap, and the sums are read when metrics are collected."""

from collections import defaultdict
from collections.abc import Iterable

from opentelemetry.metrics import CallbackOptions, Meter, Observation


class LabelledCounter:
    """A counter of OpenTelemetry with fixed labels. An empty value leaves its label out, as Prometheus has it."""

    def __init__(self, meter: Meter, name: str, labels: tuple[str, ...], *, unit: str, description: str = "") -> None:
        self._labels = labels
        self._sums: defaultdict[tuple[str, ...], float] = defaultdict(int)
        meter.create_observable_counter(name, callbacks=[self._observed], unit=unit, description=description)

    def add(self, amount: float, *values: str) -> None:
        """values: of the labels, in their order. ValueError if they are not as many."""
        if len(values) != len(self._labels):
            raise ValueError(f"{len(values)} values for the labels {self._labels}")
        self._sums[values] += amount

    def _observed(self, _: CallbackOptions) -> Iterable[Observation]:
        """From another thread."""
        for values, amount in [*self._sums.items()]:
            labels = {label: value for label, value in zip(self._labels, values, strict=True) if value}
            yield Observation(amount, labels)
