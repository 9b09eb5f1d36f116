"""The trace of a file, as the simulator has it."""

from pathlib import Path

from penstock.planner_service.files.measured import workload_of
from penstock.planner_service.simulator import Workload
from penstock.question_files.tables import load_trace


def read_trace(path: Path) -> Workload:
    """See load_trace for the columns."""
    return workload_of(load_trace(path))
