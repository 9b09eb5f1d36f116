"""Finds extensions: what installed packages register as the entry points of a group."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

import penstock
from penstock.services.field_problems import SettingsError, field_problems, joined
from penstock.types.problems import FieldProblem

ENGINES, SCORERS, DRAFTERS = "penstock.engines", "penstock.scorers", "penstock.drafters"
DISTRIBUTION = "penstock-mesh"

Options = TypeVar("Options", bound=BaseModel)


@cache
def entry_points_of(group: str) -> Mapping[str, metadata.EntryPoint]:
    """The entry points of a group by name, of all installed packages.

    Where this package runs from its source tree, the tree's pyproject.toml says what it registers: its installation is
    editable and may be of another day, or there is none.

    Raises:
        SettingsError: Two packages register the same name.
    """
    own = _of_source_tree(group)
    installed = metadata.entry_points(group=group)
    others = [p for p in installed if own is None or p.dist is None or p.dist.name != DISTRIBUTION]
    points: dict[str, metadata.EntryPoint] = {}
    for point in [*(own or ()), *others]:
        if (other := points.setdefault(point.name, point)).value != point.value:
            raise SettingsError(f"two packages register '{point.name}' in {group}: {other.value} and {point.value}")
    return points


def _of_source_tree(group: str) -> list[metadata.EntryPoint] | None:
    """What the source tree registers that this package runs from; None where it is installed."""
    project = Path(penstock.__file__).parent.parent / "pyproject.toml"
    if not project.is_file():
        return None
    table: dict[str, str] = tomllib.loads(project.read_text())["project"]["entry-points"].get(group, {})
    return [metadata.EntryPoint(name, value, group) for name, value in table.items()]


def extension(group: str, name: str, kind: type[Options], field: str) -> type[Options]:
    """The extension of a group with this name. kind: what it must be derived from. field: where the mesh file names it.

    Raises:
        SettingsError: There is none, or it cannot be imported.
    """
    points = entry_points_of(group)
    if name not in points:
        raise _problem(field, f"no '{name}' is installed: there are {', '.join(sorted(points))}")
    try:
        loaded: Any = points[name].load()
    except (ImportError, AttributeError) as error:
        raise _problem(field, f"'{name}' cannot be loaded from {points[name].value}: {error}") from error
    if not (isinstance(loaded, type) and issubclass(loaded, kind)):
        raise _problem(field, f"'{name}' is {points[name].value}, which is not derived from {kind.__name__}")
    return loaded


def validated(kind: type[Options], options: Mapping[str, Any], field: str) -> Options:
    """Options as an extension reads them. field: where they are in the mesh file.

    Raises:
        SettingsError: They are bad; names every bad field.
    """
    try:
        return kind.model_validate(options)
    except ValidationError as error:
        problems = within(field, field_problems(error, kind))
        raise SettingsError(joined(problems), problems) from None


def within(field: str, problems: "list[FieldProblem]") -> list[FieldProblem]:
    """Problems of a part, with the paths of their fields in the whole."""
    return [FieldProblem(f"{field}.{p.field}" if p.field else field, p.problem) for p in problems]


def _problem(field: str, problem: str) -> SettingsError:
    problems = [FieldProblem(field, problem)]
    return SettingsError(joined(problems), problems)
