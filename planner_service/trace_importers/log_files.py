"""Files of logs: lines, JSON, and the numbers in their fields. FileError names the place and the field."""

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from penstock.planner_service.simulator.workload import MAX_TOKENS
from penstock.question_files.csv_files import whole_number
from penstock.question_files.errors import FileError
from penstock.types.ranges import Within

TOKENS = Within(0, MAX_TOKENS)
TOO_MANY_DIGITS = "a whole number has too many digits"

Entry = tuple[str, Mapping[str, Any]]
"""What a log has of a request: the place, and the fields."""


def is_csv(path: Path) -> bool:
    """Whether the file is CSV by its name."""
    return path.name.removesuffix(".gz").endswith(".csv")


def opened(path: Path) -> TextIO:
    try:
        if path.suffix == ".gz":
            return gzip.open(path, "rt", encoding="utf-8", errors="replace")
        return path.open(encoding="utf-8", errors="replace")
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from None


def numbered(path: Path, file: TextIO) -> Iterator[tuple[int, str]]:
    """(number, text) of each line."""
    try:
        yield from enumerate(file, 1)
    except (OSError, EOFError) as error:
        raise FileError(f"{path}: {error}") from None


def read_json(path: Path) -> Any:
    """A JSON list or object."""
    with opened(path) as file:
        text = "".join(line for _, line in numbered(path, file))
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise FileError(f"{path}: line {error.lineno}: no JSON: {error.msg}") from None
    except RecursionError:
        raise FileError(f"{path}: no JSON: nested too deeply") from None
    except ValueError:  # Python limits the digits of an int
        raise FileError(f"{path}: no usable JSON: {TOO_MANY_DIGITS}") from None
    if not isinstance(content, dict | list):
        raise FileError(f"{path}: must be a JSON list or object")
    return content


def list_of(place: str, owner: Any, name: str) -> list[Any]:
    value = owner.get(name) if isinstance(owner, dict) else None
    if not isinstance(value, list):
        raise FileError(f"{place}: {'is missing' if value is None else 'must be a list'}")
    return value


def objects(place: str, values: list[Any]) -> Iterator[Entry]:
    """Of a JSON list."""
    for i, value in enumerate(values):
        if not isinstance(value, dict):
            raise FileError(f"{place}[{i}]: must be an object")
        yield f"{place}[{i}]", value


def token_count(at: str, entry: Mapping[str, Any], name: str) -> int:
    return whole_number(at, entry, name, TOKENS)
