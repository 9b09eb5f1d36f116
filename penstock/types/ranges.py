"""Ranges that are part of a field's type, and the one place that checks them."""

import dataclasses
import enum
import math
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from penstock.types.problems import FieldProblem


@dataclass(frozen=True, slots=True)
class Within:
    """Of a number, or of each number of a tuple: from `least` (excluded if `above`) to `most` (excluded if `below`).

    Infinities and NaN are never within.
    """

    least: float = -math.inf
    most: float = math.inf
    above: bool = False
    below: bool = False

    def holds(self, value: float) -> bool:
        inside = self.least <= value <= self.most and math.isfinite(value)
        return inside and not (self.above and value == self.least) and not (self.below and value == self.most)

    def __str__(self) -> str:
        """`over 0`, `from 0 to 100`, `at least 1`."""
        least = (
            "" if self.least == -math.inf else f"over {self.least:,g}" if self.above else f"at least {self.least:,g}"
        )
        if self.most == math.inf:
            return least or "finite"
        most = f"{'less than' if self.below else 'at most'} {_shown(self.most)}"
        if least and not self.above and not self.below:
            return f"from {_shown(self.least)} to {_shown(self.most)}"
        return f"{least} and {most}" if least else most


POSITIVE = Within(0, above=True)
NOT_NEGATIVE = Within(0)
COUNT = Within(1)
SCORE = Within(0, 100)


def range_problems(value: Any, path: str = "") -> Iterator[FieldProblem]:
    """A problem for each number of a value that is out of the range of its field.

    path: of the value itself, as `cluster`; parts are `cluster.types[0].nodes`.
    """
    for name, within in _ranges(value.__class__):
        part, at = getattr(value, name), f"{path}.{name}" if path else name
        if part is None:
            continue
        if isinstance(part, (tuple, list)):
            yield from _each_problems(part, within, at)
        elif within is not None:
            if not within.holds(part):
                yield FieldProblem(at, f"must be {within}, not {_shown(part)}")
        else:
            yield from range_problems(part, at)


def own_range_problems(value: Any, path: str) -> Iterator[FieldProblem]:
    """The problems of the numbers of a value itself, without those of its parts."""
    for name, within in _ranges(value.__class__):
        part = getattr(value, name)
        if within is not None and part is not None and not isinstance(part, (tuple, list)) and not within.holds(part):
            yield FieldProblem(f"{path}.{name}", f"must be {within}, not {_shown(part)}")


def _each_problems(parts: Sequence[Any], within: Within | None, at: str) -> Iterator[FieldProblem]:
    if not parts:
        return
    if within is None:
        if dataclasses.is_dataclass(parts[0]):
            for i, part in enumerate(parts):
                yield from range_problems(part, f"{at}[{i}]")
    elif not (within.holds(min(parts)) and within.holds(max(parts)) and all(map(math.isfinite, parts))):
        for i, part in enumerate(parts):
            if not within.holds(part):
                yield FieldProblem(f"{at}[{i}]", f"must be {within}, not {_shown(part)}")


def range_of(kind: type, field: str) -> Within:
    """The range of a field of a type."""
    within = dict(_ranges(kind))[field]
    assert within is not None
    return within


@cache
def _ranges(kind: Any) -> tuple[tuple[str, Within | None], ...]:
    """The fields of a type that have a range, and those that are values with ranges of their own: None."""
    result: list[tuple[str, Within | None]] = []
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        ranges = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Within)]
        plain = ranges or any(
            isinstance(part, type) and issubclass(part, (str, bytes, bool, int, float, enum.Enum))
            for part in _leaves(hint)
        )
        if ranges or not plain:
            result.append((name, ranges[0] if ranges else None))
    return tuple(result)


def _leaves(hint: Any) -> Iterator[Any]:
    """The types that a field's type is made of: `int` of `tuple[int, ...] | None`."""
    arguments = [part for part in typing.get_args(hint) if part not in (type(None), Ellipsis)]
    if not arguments:
        yield hint
    for part in arguments:
        if not isinstance(part, Within):
            yield from _leaves(part)


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
