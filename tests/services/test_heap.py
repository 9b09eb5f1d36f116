"""Freed memory goes back to the system, and the limit of open files; in processes of their own, whose they are."""

import subprocess
import sys

from penstock.services import open_files
from penstock.services.heap import HeapRelease
from tests.conftest import ROOT

_FRAGMENTED = """
import os, threading
from pathlib import Path
from penstock.services.heap import HeapRelease, use_one_arena

def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def fragment() -> None:
    blocks = [bytes(100_000) for _ in range(2000)]
    kept.extend(blocks[::20])  # one in twenty stays and holds the heap's top in place

kept = []
assert use_one_arena()
before = resident()
thread = threading.Thread(target=fragment)
thread.start()
thread.join()
after = resident()
assert HeapRelease(every_s=0.0).release_if_due()
print((after - before) >> 20, (resident() - before) >> 20)
"""


def test_free_pages_return_to_the_system() -> None:
    """200 MB allocated on a thread, a twentieth of it kept: the rest is resident until the release, and not afterwards."""
    done = subprocess.run([sys.executable, "-c", _FRAGMENTED], capture_output=True, text=True, check=True)
    kept, released = map(int, done.stdout.split())
    assert kept > 100
    assert released < 40


def test_releases_come_at_most_once_in_a_while() -> None:
    """Work in quick succession pays for one release."""
    heap = HeapRelease(every_s=5.0, clock=iter([0.0, 1.0, 4.9, 5.0, 5.1, 9.9, 10.0]).__next__)
    assert [heap.release_if_due() for _ in range(6)] == [False, False, True, False, False, True]


CODE = """
import resource
from penstock.services import open_files
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
