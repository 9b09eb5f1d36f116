"""Output of the commands: tables, JSON with --json, errors in one line."""

import dataclasses
import enum
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from penstock.client.errors import InvalidRequestError, PenstockError, UnavailableError

DISTRIBUTION = "penstock-mesh"

console = Console()
errors = Console(stderr=True)


def print_json(value: object, *, indent: int | None = 2) -> None:
    """Print a value with dataclasses, enums and bytes in it."""
    sys.stdout.write(json.dumps(value, indent=indent, default=_json_value) + "\n")
    sys.stdout.flush()


def _json_value(value: object) -> Any:
    """Of what JSON has no form for."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    assert isinstance(value, enum.Enum), value
    return value.value


def print_line(text: str, *, style: str | None = None, to: Console = console) -> None:
    """Print text as it is. Lines are never wrapped, so that paths and ids can be copied."""
    to.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def print_written(*paths: Path | None) -> None:
    """List the files that were written."""
    print_line(f"written: {', '.join(str(path) for path in paths if path is not None)}")


def table_of(*columns: str, words: int = 1, **options: Any) -> Table:
    """A table with these columns: the first `words` of them to the left, numbers to the right. options: of the table."""
    table = Table(**options)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < words else "right")
    return table


def progress(*, quiet: bool, transient: bool = True) -> Progress:
    """Bars of work that is counted, on stderr; none if `quiet`."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=errors, transient=transient, disable=quiet)


def spinner(*, quiet: bool) -> Progress:
    """What runs and for how long, on stderr; nothing if `quiet`."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=errors, transient=True, disable=quiet)


def fail(message: str, status: int = 1) -> NoReturn:
    """End the command with one line on stderr."""
    print_line(f"penstock: {message}", style="red", to=errors)
    raise typer.Exit(status)


@contextmanager
def failing_on(*kinds: type[Exception], status: int = 1) -> Iterator[None]:
    """End the command with one line on errors of these kinds."""
    try:
        yield
    except kinds as error:
        fail(str(error), status)


@contextmanager
def cli_error_handling(target: str) -> Iterator[None]:
    """End the command with one line on an error of the SDK."""
    try:
        yield
    except UnavailableError as error:
        fail(
            f"no response from {target} ({error}); is the mesh running? Start it with `penstock up`; "
            "one that was started with --folder is found by `penstock --folder FOLDER ...`"
        )
    except InvalidRequestError as error:
        fail("; ".join(f"{name}: {problem}" for name, problem in error.fields.items()) or str(error), 2)
    except PenstockError as error:
        fail(str(error))


@contextmanager
def planner_error_handling(*, json: bool = False) -> Iterator[None]:
    """End the command with one line on an error of the planner: status 2 for bad input, 3 if no plan meets the target.

    json: then also say on standard output which target binds, and the nearest that can be had.
    """
    from penstock.planner_service.routing.solution import Unreachable
    from penstock.question_files.errors import FileError
    from penstock.services.domain.errors import InvalidRequest

    try:
        yield
    except (FileError, InvalidRequest) as error:
        fail(str(error), 2)
    except Unreachable as error:
        if json:
            known = math.isfinite(error.best)
            nearest = {error.binds.value: error.best} if known and error.binds.value != "gpus" else None
            print_json({"feasible": False, "binds": error.binds.value, "nearest": nearest, "reason": str(error)})
        fail(str(error), 3)


@contextmanager
def needs_extra(command: str, extra: str) -> Iterator[None]:
    """Decorate `command`: if a package of `extra` is missing, it ends with status 2 and one line that names the extra.

    Such commands import these packages in their body, so that other commands start without them.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = "penstock-demo" if error.name == "penstock.demo_data" else (error.name or "").partition(".")[0]
        if package == "penstock":
            raise  # a bug of Penstock: no extra would help
        needed = f'penstock {command} needs the {extra} extra: pip install "{DISTRIBUTION}[{extra}]"'
        fail(f"{needed} ({package} is not installed)", 2)


def seconds(value: float | None) -> str:
    """A duration with its unit."""
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"
