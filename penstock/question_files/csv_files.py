"""CSV files: rows, and the numbers in their columns. FileError names file, line and column."""

import csv
import gzip
import math
from collections.abc import Iterator
from pathlib import Path

from penstock.question_files.errors import FileError


def csv_rows(path: Path, expected: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """(line number, row) of a CSV file, gzip or not; FileError for missing columns or no rows."""
    try:
        with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as file:
            reader = csv.DictReader(file)
            missing = [column for column in expected if column not in (reader.fieldnames or ())]
            if missing:
                raise FileError(f"{path}: line 1: no column {', '.join(missing)}")
            empty = True
            for row in reader:
                empty = False
                yield reader.line_num, row
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise FileError(f"{path}: {error}") from None
    if empty:
        raise FileError(f"{path}: no rows")


def csv_number(
    path: Path, line: int, row: dict[str, str], column: str, least: float = -math.inf, most: float = math.inf
) -> float:
    text = row[column]
    try:
        value = float(text)
    except (TypeError, ValueError):
        message = "is missing" if text in (None, "") else f"'{text}' is not a number"
        raise FileError(f"{path}: line {line}: {column} {message}") from None
    if not least <= value <= most or not math.isfinite(value):
        raise FileError(f"{path}: line {line}: {column} must be from {least:g} to {most:g}, not {text}")
    return value


def csv_count(path: Path, line: int, row: dict[str, str], column: str, least: float = -math.inf) -> int:
    value = csv_number(path, line, row, column, least)
    if value != int(value):
        raise FileError(f"{path}: line {line}: {column} must be a whole number, not {row[column]}")
    return int(value)
