"""Connections never take all the files that a process may open."""

import subprocess
import sys

from services import open_files
from tests.conftest import ROOT

CODE = """
import resource
from services import open_files
{before}
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], open_files.connections(4096), open_files.connections(10))
"""


def under_limits(soft: int, hard: int, before: str = "") -> list[int]:
    """The soft limit, and the connections of a face that wants 4,096 and 10, in a process under such limits."""
    command = ["bash", "-c", f'ulimit -Sn {soft} && ulimit -Hn {hard} && exec "$0" -c "$1"', sys.executable]
    done = subprocess.run([*command, CODE.format(before=before)], capture_output=True, text=True, check=True, cwd=ROOT)
    return [int(number) for number in done.stdout.split()]


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    assert under_limits(256, 2048, "open_files.raise_limit()")[0] == 2048


def test_two_faces_leave_files_for_everything_else() -> None:
    """Where the limit is low, fewer connections are taken than the settings allow; else as many as they say."""
    soft, many, few = under_limits(1024, 1024)
    assert soft - 2 * many >= open_files.RESERVE
    assert few == 10
    assert under_limits(16_384, 16_384)[1] == 4096
