"""The trace: a CSV file of arrivals with their lengths."""

from pathlib import Path

import numpy as np

from planner_service.files.csv_files import csv_count, csv_number, csv_rows
from planner_service.simulator import Workload


def read_trace(path: Path) -> Workload:
    """Columns arrival_s, input_tokens, output_tokens; other columns are passed over. Ordered by arrival."""
    rows = [
        (
            csv_number(path, line, row, "arrival_s"),
            csv_count(path, line, row, "input_tokens", 1),
            csv_count(path, line, row, "output_tokens", 1),
        )
        for line, row in csv_rows(path, ("arrival_s", "input_tokens", "output_tokens"))
    ]
    rows.sort(key=lambda row: row[0])
    arrivals, inputs, outputs = zip(*rows, strict=True)
    return Workload(np.array(arrivals, float), np.array(inputs, np.int64), np.array(outputs, np.int64))
