"""Public data that benchmarks read and that cannot be part of this project: step-time tables, traces, judged prompts.

They are looked for in the folder PENSTOCK_DATA, by default ../shared/data, under the names that its INDEX.md gives.
"""

import os
from pathlib import Path

DATA = Path(os.environ.get("PENSTOCK_DATA", "../shared/data"))


class DataMissing(Exception):
    """A benchmark cannot run without this file."""


def public(name: str) -> Path:
    """The path of a data file; DataMissing where there is none."""
    path = DATA / name
    if not path.exists():
        raise DataMissing(f"needs {path}; set PENSTOCK_DATA to the folder that holds {name}")
    return path
