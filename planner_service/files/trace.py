"""The trace: a CSV file of arrivals with their lengths."""

from pathlib import Path

import numpy as np

from planner_service.files.csv_files import csv_count, csv_number, csv_rows
from planner_service.files.errors import FileError
from planner_service.simulator import Workload
from planner_service.simulator.workload import MAX_TOKENS


def read_trace(path: Path) -> Workload:
    """Columns arrival_s, input_tokens, output_tokens, and cached_tokens where it has them; other columns are passed over.

    Ordered by arrival.
    """
    rows = [
        (
            csv_number(path, line, row, "arrival_s"),
            csv_count(path, line, row, "input_tokens", 1, MAX_TOKENS),
            csv_count(path, line, row, "output_tokens", 1, MAX_TOKENS),
            _cached_tokens(path, line, row),
        )
        for line, row in csv_rows(path, ("arrival_s", "input_tokens", "output_tokens"))
    ]
    rows.sort(key=lambda row: row[0])
    arrivals, *tokens = zip(*rows, strict=True)
    inputs, outputs, cached = (np.array(column, np.int64) for column in tokens)
    return Workload(np.array(arrivals, float), inputs, outputs, cached_tokens=cached)


def _cached_tokens(path: Path, line: int, row: dict[str, str]) -> int:
    """0 where the file has no such column."""
    if "cached_tokens" not in row:
        return 0
    cached = csv_count(path, line, row, "cached_tokens", 0)
    if cached >= float(row["input_tokens"]):
        problem = f"must be less than input_tokens, {row['input_tokens']}, not {row['cached_tokens']}"
        raise FileError(f"{path}: line {line}: cached_tokens {problem}")
    return cached
