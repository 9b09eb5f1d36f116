"""Processes that serve as one: started together, restarted, drained together, and never a secret guest on another's port."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.services.process_group import MAX_CRASHES
from penstock.services.process_heartbeat import HEARTBEAT_S, HeartbeatMonitor
from penstock.services.process_slot import ProcessSlot
from penstock.services.processes import free_port
from penstock.services.shared_port import SharedPort
from tests.conftest import ROOT
from tests.support.measured import metrics_page
from tests.support.waiting import runs, until_now

TIMEOUT_S = 120.0
STUCK_S = 4.0  # more than a process waits for the CPU on a busy machine
PARENT = """
import os, sys
from dataclasses import replace
from penstock.services.domain.instances import Role
from penstock.services import process_group, processes
from penstock.services.process_group import run_group
from penstock.services.processes import exits_on_unusable_settings
from penstock.services.settings import ServiceSettings
process_group.STUCK_S = float(os.environ.get("STUCK_S", process_group.STUCK_S))
processes.RESTART = replace(processes.RESTART, first_s=0.05)
with exits_on_unusable_settings("router"):
    sys.exit(run_group(Role.ROUTER, "tests.support.slot_process", ServiceSettings.load(), 2))
"""


class Parent:
    """A group of two processes and its parent."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.crash_log = folder / "crashes"
        self.grpc_port, self.http_port, self.metrics_port = (free_port() for _ in range(3))
        own = {
            "PENSTOCK_GRPC_PORT": str(self.grpc_port),
            "PENSTOCK_HTTP_PORT": str(self.http_port),
            "PENSTOCK_METRICS_PORT": str(self.metrics_port),
            "PENSTOCK_DRAIN_S": "5",
            "CRASH_LOG": str(self.crash_log),
        }
        self.environment = os.environ | own | environment
        self.process = self.another()

    def another(self) -> "subprocess.Popen[str]":
        """One more parent with the same settings."""
        return subprocess.Popen(
            [sys.executable, "-c", PARENT], cwd=ROOT, env=self.environment, stderr=subprocess.PIPE, text=True
        )

    def ask(self, port: int) -> tuple[int, int] | None:
        """(index, process id) of the process that a new connection reaches; None where none listens."""
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
                index, _, pid = connection.recv(64).decode().partition(" ")
        except OSError:
            return None
        return (int(index), int(pid)) if pid else None

    def pids(self, port: int, count: int = 2) -> dict[int, int]:
        """Process ids by index, once so many processes have answered."""
        found: dict[int, int] = {}

        def complete() -> bool:
            if (answer := self.ask(port)) is not None:
                found[answer[0]] = answer[1]
            return len(found) == count

        until_now(complete)
        return found

    def metrics(self) -> str:
        return metrics_page(f"127.0.0.1:{self.metrics_port}")

    def end(self) -> tuple[int, str]:
        """Exit status and what it wrote, once it has ended."""
        _, errors = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, errors


@contextmanager
def group(folder: Path, **environment: str) -> Iterator[Parent]:
    parent = Parent(folder, environment)
    try:
        yield parent
    finally:
        parent.process.terminate()
        parent.process.communicate()


def test_all_share_both_ports_and_a_page_of_metrics_and_end_together(tmp_path: Path) -> None:
    """One that is stopped costs its own samples only; one that is killed is started again, and the other serves on."""
    restarts = "penstock_router_process_restarts_total"
    with group(tmp_path) as parent:
        pids = parent.pids(parent.grpc_port)
        assert parent.pids(parent.http_port) == pids
        assert set(pids) == {0, 1}
        page = parent.metrics()
        assert samples(page, "served_total") == {"0": 1.0, "1": 2.0}
        assert samples(page, "penstock_router_process_up") == {"0": 1.0, "1": 1.0}
        os.kill(pids[1], signal.SIGSTOP)
        page = parent.metrics()
        assert samples(page, "served_total") == {"0": 1.0}
        assert samples(page, "penstock_router_process_up") == {"0": 1.0, "1": 0.0}
        os.kill(pids[1], signal.SIGKILL)
        until_now(lambda: samples(parent.metrics(), restarts) == {"0": 0.0, "1": 1.0})
        until_now(lambda: parent.pids(parent.grpc_port)[1] != pids[1])
        pids = parent.pids(parent.grpc_port) | {0: pids[0]}
        parent.process.terminate()
        status, errors = parent.end()
        assert status == 0, errors
        assert not any(runs(pid) for pid in pids.values())
        assert parent.ask(parent.grpc_port) is None


@pytest.mark.slow
def test_when_the_parent_is_killed_its_processes_end_and_a_new_parent_gets_the_ports(tmp_path: Path) -> None:
    with group(tmp_path) as parent:
        pids = parent.pids(parent.grpc_port)
        parent.process.kill()
        parent.process.communicate()
        until_now(lambda: not any(runs(pid) for pid in pids.values()))
        parent.process = parent.another()
        assert not set(parent.pids(parent.grpc_port).values()) & set(pids.values())


@pytest.mark.slow
def test_one_that_crashes_again_and_again_takes_nothing_from_the_other(tmp_path: Path) -> None:
    with group(tmp_path, CRASHES="1") as parent:
        pid = parent.pids(parent.grpc_port, 1)[0]
        until_now(lambda: parent.crash_log.exists() and len(parent.crash_log.read_text().split()) > MAX_CRASHES)
        assert parent.process.poll() is None
        assert parent.pids(parent.grpc_port, 1) == {0: pid}


@pytest.mark.slow
def test_a_group_none_of_whose_processes_stays_up_ends_with_status_1(tmp_path: Path) -> None:
    with group(tmp_path, CRASHES="01") as parent:
        status, errors = parent.end()
        assert status == 1
        assert "giving up" in errors
        crashes = parent.crash_log.read_text().split()
        assert min(crashes.count("0"), crashes.count("1")) >= MAX_CRASHES


@pytest.mark.slow
def test_unusable_settings_end_a_group_with_status_2_where_no_process_can_use_them(tmp_path: Path) -> None:
    """One alone may have read a file that was edited meanwhile: it is tried again, and the other serves on."""
    with group(tmp_path, UNUSABLE="01") as parent:
        assert parent.end()[0] == 2
    with group(tmp_path, UNUSABLE="1") as parent:
        pid = parent.pids(parent.grpc_port, 1)[0]
        until_now(lambda: samples(parent.metrics(), "penstock_router_process_restarts_total")["1"] >= 2.0)
        assert parent.pids(parent.grpc_port, 1) == {0: pid}


@pytest.mark.slow
def test_a_process_that_is_stuck_is_killed_and_started_again(tmp_path: Path) -> None:
    with group(tmp_path, STUCK_S=str(STUCK_S)) as parent:
        before = parent.pids(parent.grpc_port)
        until_now(lambda: samples(parent.metrics(), "penstock_router_process_up") == {"0": 1.0, "1": 1.0})
        while runs(before[1]):  # until the parent has seen heartbeats of it, it is starting, and not stuck
            os.kill(before[1], signal.SIGCONT)
            time.sleep(2 * HEARTBEAT_S)
            os.kill(before[1], signal.SIGSTOP)
            for _ in range(30):
                if not runs(before[1]):
                    break
                time.sleep(STUCK_S / 10)
        until_now(lambda: parent.pids(parent.grpc_port)[1] != before[1])
        assert parent.pids(parent.grpc_port)[0] == before[0]


def test_a_process_is_stuck_whose_heartbeats_have_begun_and_stopped() -> None:
    monitor = HeartbeatMonitor(2)
    starting = [monitor.is_stuck(1, sign) for sign in (None, None, None, None)]
    alive = [monitor.is_stuck(1, sign) for sign in (10, 11, 11, 12)]
    stuck = [monitor.is_stuck(1, 12) for _ in range(3)]
    assert (starting, alive, stuck) == ([False] * 4, [False] * 4, [False, True, True])
    ended = [monitor.is_stuck(None, 12) for _ in range(4)]
    again = [monitor.is_stuck(2, sign) for sign in (12, 12, 12, 12, 13, 13)]
    assert (ended, again) == ([False] * 4, [False] * 6)
    assert monitor.is_stuck(2, 13)


@pytest.mark.slow
def test_a_port_that_somebody_has_is_refused_by_name(tmp_path: Path) -> None:
    """Another group has it: SO_REUSEPORT must not hide that."""
    with group(tmp_path) as first:
        first.pids(first.grpc_port)
        for field in ("grpc_port", "http_port", "metrics_port"):
            ports = {"PENSTOCK_GRPC_PORT": "0", "PENSTOCK_HTTP_PORT": "0", "PENSTOCK_METRICS_PORT": "0"}
            with group(tmp_path, **ports | {f"PENSTOCK_{field.upper()}": str(getattr(first, field))}) as second:
                status, errors = second.end()
            assert status == 2
            assert f"{field}: cannot listen on 127.0.0.1:{getattr(first, field)}" in errors
        assert len(first.pids(first.grpc_port)) == 2


def test_a_shared_port_is_one_holders_and_nobody_elses() -> None:
    """Also before anybody listens; with SO_REUSEPORT others of the same user may listen, and a later holder is refused."""
    holder = SharedPort("127.0.0.1", 0)
    with pytest.raises(OSError, match="in use"):
        SharedPort("127.0.0.1", holder.port)
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", holder.port))
    with pytest.raises(OSError, match="in use"):
        SharedPort("0.0.0.0", holder.port)
    port = holder.port
    with socket.create_server(("127.0.0.1", port), reuse_port=True):
        holder.close()
        with pytest.raises(OSError, match="in use"):
            SharedPort("127.0.0.1", port)
    SharedPort("127.0.0.1", port).close()


def test_a_slot_survives_its_command_line() -> None:
    slot = ProcessSlot("router-a", 1, 3, "/tmp/x", "h:9464")
    assert ProcessSlot.from_json(slot.to_json()) == slot
    assert (slot.name_of(2), slot.others(), slot.socket(0)) == ("router-a.2", [0, 2], "unix:/tmp/x/0.sock")
    for text in ("{}", "[]", "no json", '{"index":1}'):
        with pytest.raises(ValueError, match=r"."):
            ProcessSlot.from_json(text)


def samples(page: str, name: str) -> dict[str, float]:
    """Values of one metric by process."""
    found = [s for family in text_string_to_metric_families(page) for s in family.samples if s.name == name]
    return {sample.labels["penstock_process"]: sample.value for sample in found}


def test_a_parent_loads_no_grpc() -> None:
    """Its children are started by a process without gRPC's threads and fork handlers."""
    code = "import sys, penstock.router_service.__main__, penstock.services.process_group; print('grpc' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "False"
