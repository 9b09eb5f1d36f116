"""Value types that are created for every request, event or frame.

A frozen dataclass sets each field by a call, three to four times as slow as an assignment: that was a tenth of the router's
CPU time per request (docs/adr/0036). So these types are frozen for the type checker, which refuses assignments, and plain at
run time. Use `dataclass(frozen=True)` for everything that is not created many times per second.
"""

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["replaced", "value_type"]

_T = TypeVar("_T")

if TYPE_CHECKING:
    from dataclasses import dataclass as value_type
else:

    def value_type(*, frozen: bool, slots: bool) -> Callable[[type[_T]], type[_T]]:
        """A dataclass with slots, equality and hash, which must not be changed. Both arguments must be True.

        They are given because the type checker reads them.

        Raises:
            ValueError: One of them is False.
        """
        if not (frozen and slots):
            raise ValueError("value_type: frozen and slots must be True")
        return dataclasses.dataclass(slots=True, unsafe_hash=True)


_layouts: dict[type[Any], tuple[Callable[[Any], tuple[Any, ...]], dict[str, int]]] = {}


def replaced(value: _T, **changes: object) -> _T:
    """A copy of a dataclass instance with some fields changed: `dataclasses.replace` in a quarter of its time.

    Raises:
        TypeError: It has no such field.
    """
    kind = type(value)
    layout = _layouts.get(kind)
    if layout is None:
        names = [field.name for field in dataclasses.fields(value)]  # type: ignore[arg-type]
        layout = _layouts[kind] = attrgetter(*names), {name: number for number, name in enumerate(names)}
    read, numbers = layout
    values = [*read(value)]
    for name, change in changes.items():
        if name not in numbers:
            raise TypeError(f"{kind.__name__} has no field {name}")
        values[numbers[name]] = change
    return kind(*values)
