"""The counters of one process of a router, and their sum over several processes. No I/O."""

import functools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from penstock.types.mesh_status import ProcessCounters


def total(parts: Iterable[ProcessCounters]) -> ProcessCounters:
    """The sum over several processes. Percentiles are those of all their last requests."""
    return functools.reduce(_sum, parts, ProcessCounters())


def _sum(one: ProcessCounters, other: ProcessCounters) -> ProcessCounters:
    names = [field.name for field in fields(ProcessCounters)]
    return ProcessCounters(**{name: _added(getattr(one, name), getattr(other, name)) for name in names})


def _added(one: Any, other: Any) -> Any:
    match one:
        case bool():
            return one or other
        case Mapping():
            return Counter(one) + Counter(other)
    return one + other
