"""CSV files: rows, and the numbers in their columns, or in the fields of other files. FileError names place and column."""

import csv
import gzip
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.question_files.errors import FileError
from penstock.types.ranges import Within

ANY = Within()


def csv_rows(path: Path, expected: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str]]]:
    """(place, row) of a CSV file, gzip or not; FileError for missing columns or no rows."""
    try:
        with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as file:
            reader = csv.DictReader(file)
            missing = [column for column in expected if column not in (reader.fieldnames or ())]
            if missing:
                raise FileError(f"{path}: line 1: no column {', '.join(missing)}")
            empty = True
            for row in reader:
                empty = False
                yield f"{path}: line {reader.line_num}", row
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise FileError(f"{path}: {error}") from None
    if empty:
        raise FileError(f"{path}: no rows")


def number_of(at: str, entry: Mapping[str, Any], name: str, within: Within = ANY) -> float:
    """A number of a row, or of another entry of a file. at: where that is."""
    value = entry.get(name)
    if value is None or value == "":
        raise FileError(f"{at}: {name} is missing")
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise FileError(f"{at}: {name} '{str(value)[:80]}' is not a number")
    if not within.holds(number):
        raise FileError(f"{at}: {name} must be {within}, not {value}")
    return number


def whole_number(at: str, entry: Mapping[str, Any], name: str, within: Within = ANY) -> int:
    number = number_of(at, entry, name)
    if number != int(number) or not within.holds(number):
        bounds = "" if within == ANY else f" {within}"
        raise FileError(f"{at}: {name} must be a whole number{bounds}, not {number:g}")
    return int(number)
