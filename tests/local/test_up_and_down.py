"""`penstock up` and `down`: one mesh per folder, signals for no process but ours, a start that says what it waits for."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.cli.local import REPEAT_S, ProgressLines
from penstock.local.mesh import LocalMesh
from penstock.local.runfile import (
    METRICS_NAME,
    FolderInUse,
    FolderLock,
    ProcessId,
    RunFile,
    lock_holder,
    read_run_file,
    stale_run_file,
)
from penstock.placement import start
from penstock.placement.mesh import MeshFailed
from penstock.placement.mesh_input import MeshOptions
from penstock.placement.start import Progress, start_timeout_s
from penstock.services.field_problems import SettingsError
from penstock.services.mesh_file import load_mesh_file
from penstock.services.processes import rotate
from penstock.worker_service.engine.sglang.extension import SERVER_MARGIN_S
from tests.conftest import FAMILY
from tests.local.test_local_mesh import simulated_mesh
from tests.support.cli import penstock, penstock_process
from tests.support.measured import metrics_page
from tests.support.present import present
from tests.support.waiting import until_now

PENSTOCK = [sys.executable, "-m", "penstock.cli.main"]


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with a mesh."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def run_file(process: ProcessId) -> RunFile:
    return RunFile(process.pid, process.started, "mesh.yaml", "redis://x", ("h:1",), ("h:2",), ("h:4",), "h:3")


def test_a_process_is_known_by_its_start_as_well_as_its_id(other: subprocess.Popen[bytes]) -> None:
    known = present(ProcessId.of(other.pid))
    assert known.runs
    before = replace(known, started="an-earlier-boot/1")
    assert not before.runs
    assert not before.send(signal.SIGKILL)
    assert other.poll() is None, "a process that only has the id of one that was ours is never signalled"
    assert known.send(signal.SIGTERM)
    until_now(lambda: not known.runs)  # also before anybody has waited for it
    assert not known.send(signal.SIGTERM)
    other.wait()
    assert ProcessId.of(other.pid) is None


def test_down_leaves_a_process_alone_that_got_the_id_of_a_dead_mesh(
    other: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """The run file of a mesh that was killed is said to be stale."""
    run_file(ProcessId(other.pid, "an-earlier-boot/1")).write(tmp_path)
    assert read_run_file(tmp_path) is None
    down = penstock("down", "--folder", str(tmp_path))
    assert down.returncode == 1
    said = " ".join(down.stderr.split())
    assert f"run.json is stale: its mesh, process {other.pid}, has ended without removing it" in said
    assert "another process has its id now" in said
    assert other.poll() is None


def test_a_run_file_that_cannot_be_read_is_stale(tmp_path: Path, other: subprocess.Popen[bytes]) -> None:
    assert stale_run_file(tmp_path) is None
    for content in ("", "{}", "[1]", json.dumps({"pid": other.pid, "mesh_file": "of an earlier version"})):
        (tmp_path / "run.json").write_text(content)
        assert read_run_file(tmp_path) is None
        assert "cannot be read" in (stale_run_file(tmp_path) or "")
    known = present(ProcessId.of(other.pid))
    run_file(known).write(tmp_path)
    assert read_run_file(tmp_path) == run_file(known)
    assert stale_run_file(tmp_path) is None


def test_a_folder_is_locked_by_one_at_a_time_and_freed_by_the_kernel(tmp_path: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
from penstock.local.runfile import FolderLock
lock = FolderLock(Path({str(tmp_path)!r}))
lock.acquire()
print("held", flush=True)
time.sleep(600)
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert present(holder.stdout).readline() == "held\n"
        with pytest.raises(FolderInUse, match=f"process {holder.pid}"):
            FolderLock(tmp_path).acquire()
    finally:
        holder.kill()
        holder.wait()
    assert lock_holder(tmp_path) is None
    lock = FolderLock(tmp_path)
    lock.acquire()
    assert lock_holder(tmp_path) == ProcessId.of(os.getpid())
    with pytest.raises(FolderInUse):
        FolderLock(tmp_path).acquire()
    lock.release()
    assert lock_holder(tmp_path) is None
    again = FolderLock(tmp_path)
    again.acquire()
    again.release()


@pytest.mark.slow
def test_of_two_up_at_once_one_runs_and_replaces_a_stale_run_file(tmp_path: Path) -> None:
    """The other says whose folder it is; progress is shown, instance by instance."""
    file, folder = simulated_mesh(tmp_path), tmp_path / "run"
    folder.mkdir()
    run_file(ProcessId(1, "an-earlier-boot/1")).write(folder)
    command = [*PENSTOCK, "up", "--detach", "--mesh", str(file), "--folder", str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    try:
        said = [process.communicate(timeout=400) for process in both]
        outcomes = sorted(zip((p.returncode for p in both), said, strict=True))
        assert [outcome[0] for outcome in outcomes] == [0, 1], said
        served, refused = outcomes[0][1][0], " ".join(outcomes[1][1][1].split())
        assert "starting or running from" in refused or "a mesh is running from" in refused
        assert "Traceback" not in refused
        assert "run.json is stale" in served
        assert "replacing it" in served
        assert "waiting for " in served
        assert "worker-small-" in served
        found = present(read_run_file(folder))
        assert found.pid != 1
        assert "Ctrl-C" not in served, "it runs in the background"
        assert f"penstock --folder {folder} down" in " ".join(served.split())
        pages = {
            page["labels"]["instance"]: page["targets"][0] for page in json.loads((folder / METRICS_NAME).read_text())
        }
        assert {name.partition("-")[0] for name in pages} == {"router", "planner", "worker", "judge"}
        for address in pages.values():
            assert "target_info" in metrics_page(address)
    finally:
        down = penstock("down", "--folder", str(folder))
    assert down.returncode == 0, down.stderr
    assert not (folder / "run.json").exists()


def service_in(folder: Path, module: str) -> ProcessId | None:
    """The process of a mesh in this folder that runs the module.

    None also at the moment when that process replaces its program: then it has no command line.
    """
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if module.encode() in words and any(str(folder) in str(fd.readlink()) for fd in (entry / "fd").iterdir()):
                return ProcessId.of(int(entry.name))
        except OSError:
            continue
    return None


def test_a_lock_that_is_handed_over_always_names_a_holder(tmp_path: Path) -> None:
    lock, done = FolderLock(tmp_path), threading.Event()
    lock.acquire()

    def hand_over() -> None:
        while not done.is_set():
            lock._name_holder(os.getppid())
            lock._name_holder(os.getpid())

    thread = threading.Thread(target=hand_over)
    thread.start()
    found = {lock_holder(tmp_path) for _ in range(3000)}
    done.set()
    thread.join()
    lock.release()
    assert found <= {ProcessId.of(os.getpid()), ProcessId.of(os.getppid())}


STANDS_STILL = """
import os, pathlib, signal, sys
if os.environ.get("PENSTOCK_TIER") == "large" and "penstock.worker_service" in sys.orig_argv:
    pathlib.Path({file!r}).write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def stopped_process(file: Path) -> ProcessId | None:
    """The process whose id is in the file, if it stands still."""
    try:
        pid = int(file.read_text())
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, ValueError):
        return None
    return ProcessId.of(pid) if state == "T" else None


@pytest.mark.slow
@pytest.mark.parametrize("way", ["down", "interrupt"])
def test_a_mesh_that_is_starting_can_be_stopped(tmp_path: Path, way: str) -> None:
    """By `down`, which finds it by the lock, or by Ctrl-C of `up --detach`. A worker stops itself before it does anything:
    the start cannot end."""
    path, file = tmp_path / "first", tmp_path / "stopped"
    path.mkdir()
    (path / "sitecustomize.py").write_text(STANDS_STILL.format(file=str(file)))  # every Python process runs this first
    up = subprocess.Popen(
        [*PENSTOCK, "up", "--detach", "--mesh", str(simulated_mesh(tmp_path)), "--folder", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(path), *filter(None, [os.environ.get("PYTHONPATH")])])},
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # what a shell starts in the background ignores it
    )
    until_now(lambda: lock_holder(tmp_path) is not None)
    holder = present(lock_holder(tmp_path))  # while one process hands the lock to the next, one of them is named
    worker = present(until_now(lambda: stopped_process(file)))
    router = present(until_now(lambda: service_in(tmp_path, "penstock.router_service")))
    until_now(lambda: "waiting for" in (tmp_path / "up.log").read_text())
    down = None
    if way == "down":
        down = subprocess.Popen([*PENSTOCK, "down", "--folder", str(tmp_path)])
    else:
        up.send_signal(signal.SIGINT)
    until_now(lambda: not router.runs)
    worker.send(signal.SIGCONT)
    _, said = up.communicate(timeout=400)
    assert down is None or down.wait(400) == 0
    assert up.returncode == (1 if way == "down" else 130), said
    until_now(lambda: not holder.runs)
    assert read_run_file(tmp_path) is None


@pytest.mark.slow
def test_up_in_the_background_says_why_it_could_not(tmp_path: Path) -> None:
    """The reason is the end of the log of the process that ended; nothing is left."""
    file = simulated_mesh(tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    file.write_text(file.read_text().replace("kind: confidence", "kind: judge-model\n    model: broken"))
    up = penstock_process("up", "--detach", "--mesh", str(file), "--folder", str(tmp_path))
    assert up.returncode == 1
    assert "judge-0" in up.stderr
    assert "judge.scorers: confidence: " in up.stderr
    assert "Traceback (most recent call last)" not in up.stderr
    assert lock_holder(tmp_path) is None
    assert read_run_file(tmp_path) is None


async def test_a_process_that_dies_while_the_mesh_starts_ends_the_start_at_once(tmp_path: Path) -> None:
    killed: list[int] = []

    def kill(_: Progress) -> None:
        pid = mesh.watcher.watched["worker-large-0"].pid
        if pid is not None and not killed:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    mesh = LocalMesh(MeshOptions(simulated_mesh(tmp_path), tmp_path), kill)
    with pytest.raises(MeshFailed, match="worker-large-0 ended with status -9 while the mesh started"):
        async with mesh:
            pass
    assert lock_holder(tmp_path) is None


async def test_a_start_that_takes_too_long_says_what_did_not_come_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "START_TIMEOUT_S", 0.05)
    with pytest.raises(MeshFailed, match=r"not ready after 0.05 s: 1 of router, .*1 of worker large.* missing"):
        async with LocalMesh(MeshOptions(simulated_mesh(tmp_path), tmp_path)):
            pass


def mesh_of(folder: Path, *tiers: dict[str, Any]) -> Path:
    path = folder / "mesh.yaml"
    judge = {"scorers": [{"name": "confidence", "kind": "confidence"}], "default_scorer": "confidence"}
    path.write_text(yaml.safe_dump({"tiers": list(tiers), "judge": judge}))
    return path


SIMULATED = {"name": "large", "model": "l", "engine": "simulated"}
HUB = {"name": "large", "model": "nobody/nothing", "engine": "torch"}
LOCAL = {"name": "large", "model": str(FAMILY / "small"), "engine": "torch"}


def test_a_start_may_take_as_long_as_its_slowest_engine(tmp_path: Path) -> None:
    def limit_s(tier: dict[str, Any]) -> float:
        path = mesh_of(tmp_path, tier)
        return start_timeout_s(load_mesh_file(path), path)

    assert limit_s(SIMULATED) == limit_s(LOCAL) == start.START_TIMEOUT_S
    sglang = LOCAL | {"engine": "sglang", "sglang": {"start_timeout_s": 1500.0}}
    assert limit_s(sglang) == 1500.0 + SERVER_MARGIN_S
    assert limit_s(HUB) == start.DOWNLOAD_TIMEOUT_S


@pytest.mark.parametrize(
    ("tier", "users", "given"),
    [
        (LOCAL, None, "1"),  # nothing is to be asked of the hub
        (SIMULATED, None, "1"),
        (HUB, None, None),  # it has to be fetched
        (LOCAL, "0", "0"),
        (HUB, "1", "1"),
        (HUB, "0", "0"),
    ],
)
def test_whether_the_hub_is_asked_is_the_users_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: dict[str, Any], users: str | None, given: str | None
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    if users is not None:
        monkeypatch.setenv("HF_HUB_OFFLINE", users)
    mesh = LocalMesh(MeshOptions(mesh_of(tmp_path, tier), tmp_path))
    seen = {(os.environ | dict(spec.env)).get("HF_HUB_OFFLINE") for spec in map(mesh.spec_of, mesh.processes)}
    assert seen == {given}


def test_progress_names_what_came_up_and_what_is_waited_for() -> None:
    """Once per change; where nothing changes, again after a while."""
    lines = ProgressLines()
    wanted = {"router": 1, "worker large": 3}
    none = Progress({}, wanted)
    one = Progress({"worker large": 1}, wanted, ("worker-large-host-7",))
    assert lines.next(none, 0.0) == "   0 s  waiting for router, worker large (0 of 3)"
    assert lines.next(none, 1.0) is None
    assert lines.next(none, REPEAT_S) == f"{REPEAT_S:4.0f} s  waiting for router, worker large (0 of 3)"
    assert lines.next(one, 31.0) == "  31 s  worker-large-host-7 up; waiting for router, worker large (1 of 3)"
    whole = Progress({"worker large": 3, "router": 1}, wanted, ("r", "worker-large-host-7"))
    assert lines.next(whole, 32.0) == "  32 s  r up; all ready"


async def test_a_mesh_in_the_same_folder_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    lock.acquire()
    try:
        mesh = LocalMesh(MeshOptions(simulated_mesh(tmp_path), tmp_path))
        with pytest.raises(FolderInUse, match=f"process {os.getpid()}"):
            await mesh.__aenter__()
        assert mesh.watcher.watched == {}
    finally:
        lock.release()
    await asyncio.sleep(0)


def test_worker_counts_are_of_tiers_that_are_there_and_bounded(tmp_path: Path) -> None:
    file = simulated_mesh(tmp_path)
    with pytest.raises(SettingsError, match="no tier 'smal'"):
        LocalMesh(MeshOptions(file, tmp_path, {"smal": 1}))
    with pytest.raises(SettingsError, match=r"tier small: at most 64 \(planner.max_instances\), not 1000"):
        LocalMesh(MeshOptions(file, tmp_path, {"small": 1000}))
    LocalMesh(MeshOptions(file, tmp_path, {"small": 64}))


def test_a_folder_that_cannot_be_made_is_an_error_of_that_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    up = penstock("up", "--mesh", str(simulated_mesh(tmp_path)), "--folder", str(tmp_path / "file" / "run"))
    assert up.returncode == 2
    assert "--folder" in up.stderr
    assert "Not a directory" in " ".join(up.stderr.split())


def test_a_log_that_has_grown_is_kept_once_and_its_writer_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    with log.open("ab", buffering=0) as writer:
        for text in (b"first " * 10, b"second" * 10):
            writer.write(text)
            rotate(log, limit_bytes=50)
            assert log.read_bytes() == b""
            assert (tmp_path / "worker.log.1").read_bytes() == text
        writer.write(b"third")
        rotate(log, limit_bytes=50)
    assert log.read_bytes() == b"third"
    rotate(tmp_path / "none.log")


def test_every_command_finds_the_mesh_of_the_folder_that_is_named_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`penstock --folder X status` asks the listeners in the run file of X; so does PENSTOCK_FOLDER=X."""
    monkeypatch.setenv("PENSTOCK_FOLDER", "nowhere")  # and set back after the test
    process = present(ProcessId.of(os.getpid()))
    replace(run_file(process), admin=("127.0.0.1:1",)).write(tmp_path)
    found = penstock("--folder", str(tmp_path), "status")
    assert found.returncode == 1
    assert "no response from 127.0.0.1:1 " in " ".join(found.stderr.split())


def test_metrics_ports_follow_from_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One port cannot serve the pages of several processes: each gets its own, and keeps it."""
    monkeypatch.setenv("PENSTOCK_METRICS_PORT", "9464")
    mesh = LocalMesh(MeshOptions(simulated_mesh(tmp_path), tmp_path))
    ports = {
        spec.name: spec.env["PENSTOCK_METRICS_PORT"] for _ in range(2) for spec in map(mesh.spec_of, mesh.processes)
    }
    assert sorted(ports.values()) == [str(9464 + i) for i in range(len(ports))]
