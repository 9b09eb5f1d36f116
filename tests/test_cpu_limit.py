"""Tests that need CPU time and are not marked `slow` are named at the end of a run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

TESTS = """
import subprocess, sys, time
import pytest

BURN = "import time\\nwhile time.process_time() < 0.3: pass"

def burn():
    end = time.process_time() + 0.3
    while time.process_time() < end: pass

@pytest.fixture
def prepared(): burn()

@pytest.fixture(scope="session")
def shared():
    burn()
    yield
    burn()

def test_quick(): pass
def test_first_of_the_session_to_use_it(shared): pass
def test_costly(): burn()
def test_costly_set_up(prepared): pass
def test_costly_process(): subprocess.run([sys.executable, "-c", BURN], check=True)
@pytest.mark.slow
def test_costly_and_marked(): burn()
def test_before_the_session_ends(): pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1], ids=["here", "in a worker of xdist"])
def test_costly_tests_without_the_mark_are_named(tmp_path: Path, workers: int) -> None:
    (tmp_path / "test_costs.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: costly\n")
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-n", str(workers)]
    command += ["-p", "tests.support.cpu_limit", "--cpu-limit", "0.15", str(tmp_path)]
    alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    run = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "more than 0.15 s of CPU time without the mark slow" in run.stdout
    report = run.stdout.partition("without the mark slow")[2]
    named = [line.partition("::")[2] for line in report.splitlines() if "::" in line]
    assert sorted(named) == ["test_costly", "test_costly_process", "test_costly_set_up"]
