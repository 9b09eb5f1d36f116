"""CPU time of processes: it counts what a process and all below it have used, those that have ended included."""

import subprocess
import sys

import pytest

from benchmarks.cpu_time import cpu_s, scheduled_s
from penstock.local.cpu_time import descendants, group_cpu_s
from tests.support.present import present

USED_S = 0.2
BURN = f"import time\nwhile time.process_time() < {USED_S}: pass\n"
PARENT = (
    f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN!r}], check=True)\n"
    "print('done', flush=True)\ninput()"
)
TICK_S = 0.02  # two of the kernel's ticks: what /proc may not show yet


CHILD = f"{BURN}print('done', flush=True)\ninput()"


@pytest.mark.parametrize(
    ("code", "running"),
    [(PARENT, 0), (f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {CHILD!r}])", 1)],
)
def test_children_count_for_their_parent_whether_they_have_ended_or_run(code: str, running: int) -> None:
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert present(process.stdout).readline() == b"done\n"
        assert len(descendants(process.pid)) == running
        assert group_cpu_s([process.pid]) >= cpu_s(process.pid) + USED_S - TICK_S
        process.communicate(b"\n")


def test_threads_of_a_process_are_told_apart() -> None:
    code = f"""
import threading, time
def burn():
    while time.thread_time() < {USED_S}: pass
    print('done', flush=True)
    input()
threading.Thread(target=burn).start()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert present(process.stdout).readline() == b"done\n"
        times = scheduled_s(process.pid)
        process.communicate(b"\n")
    if not times:
        pytest.skip("this kernel does not tell how long threads ran")
    burnt = {thread: ran_s for thread, (ran_s, _) in times.items() if thread != process.pid}
    assert len(burnt) == 1
    assert min(burnt.values()) >= USED_S - TICK_S
    assert all(waited_s >= 0 for _, waited_s in times.values())


def test_a_process_that_does_not_exist_has_used_nothing() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert cpu_s(process.pid) == 0
    assert group_cpu_s([process.pid]) == 0
    assert descendants(process.pid) == []
    assert scheduled_s(process.pid) == {}
