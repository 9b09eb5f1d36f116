"""A trace made of a log."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.planner_service.simulator import Workload
from penstock.question_files.errors import FileError

EVENLY = "arrivals are known to {width} only; those of the same {width} are spread evenly over it"


@dataclass(frozen=True, slots=True)
class ImportedTrace:
    """requests: ordered by arrival, in seconds since the first. left_out: entries without prompt or output tokens.

    spread: what was assumed about arrivals that the log does not have; empty if it has them all.
    """

    requests: Workload
    left_out: int = 0
    spread: str = ""


Row = tuple[float, int, int, int]
"""Arrival in any epoch, tokens of the prompt, of the output, and of the prompt those that were cached."""


def trace_of(path: Path, rows: list[Row], left_out: int, spread: str = "") -> ImportedTrace:
    if not rows:
        raise FileError(f"{path}: no requests with prompt and output tokens")
    rows.sort(key=lambda row: row[0])
    arrivals, *tokens = zip(*rows, strict=True)
    inputs, outputs, cached = (np.array(column, np.int64) for column in tokens)
    work = Workload(np.array(arrivals, float) - arrivals[0], inputs, outputs, cached_tokens=cached)
    return ImportedTrace(work, left_out, spread)


def evenly(start_s: float, width_s: float, count: int) -> list[float]:
    """`count` arrivals, each in the middle of its share of the time."""
    return [start_s + width_s * (i + 0.5) / count for i in range(count)]
