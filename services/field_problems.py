"""Turns pydantic's errors into problems that name their fields as people write them: `tiers[0].workers`."""

import difflib
import functools
from collections.abc import Hashable, Sequence
from typing import Any, TypeVar, cast, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError

from penstock.types.problems import FieldProblem


class SettingsError(Exception):
    """Bad settings. The message names every bad field; `problems` lists the same one by one."""

    def __init__(self, message: str, problems: Sequence[FieldProblem] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems) or (FieldProblem("", message),)


_T = TypeVar("_T")


def from_json(kind: type[_T], data: str | bytes) -> _T:
    """A dataclass from JSON; keys that it does not know are ignored.

    Raises:
        ValueError: Names every bad field.
    """
    try:
        reader: TypeAdapter[_T] = _reader(cast(Hashable, kind))
        return reader.validate_json(data)
    except ValidationError as error:
        problems = [FieldProblem(_field_path(fault["loc"]), fault["msg"]) for fault in error.errors(include_url=False)]
        raise ValueError(joined(problems)) from None


@functools.cache
def _reader(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def field_problems(error: ValidationError, model: type[BaseModel]) -> list[FieldProblem]:
    """Every problem of data that `model` refused. An unknown field comes with the most similar one that exists."""
    problems: list[FieldProblem] = []
    for fault in error.errors():
        problem = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(fault["loc"][-1]), _field_names(model, fault["loc"][:-1]), n=1)
            problem = "no such field" + (f": did you mean '{near[0]}'?" if near else "")
        problems.append(FieldProblem(_field_path(fault["loc"]), problem))
    return problems


def joined(problems: Sequence[FieldProblem]) -> str:
    """Problems in one line."""
    return "; ".join(f"{p.field}: {p.problem}" if p.field else p.problem for p in problems)


def _field_path(location: Sequence[str | int]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")


def _field_names(model: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """The fields of the part of a model at `location`."""
    for name in (part for part in location if isinstance(part, str)):
        annotation = model.model_fields[name].annotation
        model = next(kind for kind in (annotation, *get_args(annotation)) if _is_model(kind))
    return list(model.model_fields)


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
