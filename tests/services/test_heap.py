"""Freed memory goes back to the system; each law in a process of its own, since the heap belongs to the process."""

import subprocess
import sys

from services.heap import HeapRelease

_FRAGMENTED = """
import os, threading
from pathlib import Path
from services.heap import HeapRelease, use_one_arena

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
