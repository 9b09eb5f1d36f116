"""Public data for benchmarks that cannot be part of this project: step-time tables, traces, judged prompts.

They are read from the folder PENSTOCK_DATA, by default ../shared/data, with the names in its INDEX.md.
"""

import os
from pathlib import Path

NO_GPU_STATUS = 4
"""Exit status of a command for which there is no GPU."""

DATA = Path(os.environ.get("PENSTOCK_DATA", "../shared/data"))


class DataMissing(Exception):
    """A benchmark cannot run without this file."""


class GpuMissing(Exception):
    """A benchmark needs a GPU."""


def public(name: str) -> Path:
    """The path of a data file.

    Raises:
        DataMissing: It does not exist.
    """
    path = DATA / name
    if not path.exists():
        raise DataMissing(f"needs {path}; set PENSTOCK_DATA to the folder that holds {name}")
    return path
