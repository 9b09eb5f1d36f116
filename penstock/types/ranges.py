"""Ranges that are part of a field's type, and the one place that checks them and `AtMost`."""

import enum
import math
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from penstock.types.limits import AtMost
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
_PLAIN = (str, bytes, bool, int, float, enum.Enum)


def range_problems(value: Any, path: str = "") -> Iterator[FieldProblem]:
    """The problems of a value and of the values in it.

    path: of the value itself, as `cluster`; parts are `cluster.types[0].nodes`.
    """
    yield from own_range_problems(value, path)
    for name in _limits(value.__class__).parts:
        part, at = getattr(value, name), _under(path, name)
        if isinstance(part, (tuple, list)):
            for i, each in enumerate(part):
                yield from range_problems(each, f"{at}[{i}]")
        elif part is not None:
            yield from range_problems(part, at)


def own_range_problems(value: Any, path: str = "") -> Iterator[FieldProblem]:
    """A problem for each field of a value that is out of its range, or has too many entries."""
    for name, within, limit in _limits(value.__class__).own:
        part = getattr(value, name)
        if part is None:
            continue
        if limit is not None and len(part) > limit.count:
            yield FieldProblem(_under(path, name), limit.problem(len(part)))
        elif within is not None:
            yield from _number_problems(part, within, _under(path, name))


def _number_problems(value: Any, within: Within, at: str) -> Iterator[FieldProblem]:
    """A problem of a number, or of the first unsound one of several."""
    if not isinstance(value, (tuple, list)):
        if not within.holds(value):
            yield FieldProblem(at, f"must be {within}, not {_shown(value)}")
    elif value and not (within.holds(min(value)) and within.holds(max(value)) and all(map(math.isfinite, value))):
        place, unsound = next((i, each) for i, each in enumerate(value) if not within.holds(each))
        yield FieldProblem(f"{at}[{place}]", f"must be {within}, not {_shown(unsound)}")


def _under(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def range_of(kind: type, field: str) -> Within:
    """The range of a field of a type."""
    return next(within for name, within, _ in _limits(kind).own if name == field and within is not None)


@dataclass(frozen=True, slots=True)
class _Limits:
    """What is checked of a type. own: its fields with a range, a limit or both. parts: fields that are values themselves."""

    own: tuple[tuple[str, Within | None, AtMost | None], ...]
    parts: tuple[str, ...]


@cache
def _limits(kind: Any) -> _Limits:
    own, parts = list[tuple[str, Within | None, AtMost | None]](), list[str]()
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        about = getattr(hint, "__metadata__", ())
        within = next((each for each in about if isinstance(each, Within)), None)
        limit = next((each for each in about if isinstance(each, AtMost)), None)
        if within is not None or limit is not None:
            own.append((name, within, limit))
        if within is None and not any(isinstance(part, type) and issubclass(part, _PLAIN) for part in _leaves(hint)):
            parts.append(name)
    return _Limits(tuple(own), tuple(parts))


def _leaves(hint: Any) -> Iterator[Any]:
    """The types that a field's type is made of: `int` of `tuple[int, ...] | None`."""
    arguments = typing.get_args(hint)
    if not arguments:
        yield hint
    for part in arguments:
        yield from _leaves(part)


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
