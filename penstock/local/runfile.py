"""The run file and the lock of `penstock up`: other commands find the mesh by the first, the second excludes another `up`.

Processes are identified by id and start time, because ids are reused. Needs only the standard library.
"""

import contextlib
import fcntl
import json
import logging
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from penstock.local.cpu_time import stat_fields
from penstock.services.private_files import replace_file

NAME, LOCK_NAME, METRICS_NAME = "run.json", "up.lock", "metrics.json"
HOLDER_BYTES = 256
_log = logging.getLogger(__name__)
LOCK_VARIABLE = "PENSTOCK_UP_LOCK"  # environment variable with the descriptor of a lock inherited from the parent


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process of this machine. started: boot id and clock tick of its start, from `/proc`."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> "ProcessId | None":
        """The current process with this id; None if there is none, or it is a zombie."""
        fields = stat_fields(str(pid))
        if not fields or fields[0] in "ZX":
            return None
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(pid, f"{boot}/{fields[19]}")

    @property
    def runs(self) -> bool:
        """Whether this process is still running."""
        return ProcessId.of(self.pid) == self

    def send(self, number: signal.Signals) -> bool:
        """Send a signal; False if the process has ended. A process that reused the id is never signalled."""
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(self.pid)  # pins the current process with this id
            try:
                if self.runs:
                    signal.pidfd_send_signal(handle, number)
                    return True
            finally:
                os.close(handle)
        return False


@dataclass(frozen=True, slots=True)
class RunFile:
    """A running local mesh. pid, started: `penstock up`, as in `ProcessId`. grpc, http: the routers' addresses.

    admin: their administrative listeners. redis_url: without a password; planner: its administrative listener.
    tls_folder: the folder of the certificates, empty without TLS.
    """

    pid: int
    started: str
    mesh_file: str
    redis_url: str
    grpc: tuple[str, ...]
    http: tuple[str, ...]
    admin: tuple[str, ...]
    planner: str
    tls_folder: str = ""

    @property
    def process(self) -> ProcessId:
        return ProcessId(self.pid, self.started)

    def write(self, folder: Path) -> None:
        _write(folder / NAME, asdict(self))


def read_run_file(folder: Path) -> RunFile | None:
    """The running mesh of `folder`; None if there is none, even if there is a stale run file."""
    run_file = _read(folder)
    return run_file if run_file is not None and run_file.process.runs else None


def stale_run_file(folder: Path) -> str | None:
    """Why the run file in `folder` is stale, as a message; None if there is none or its mesh is running."""
    path = folder / NAME
    if not path.exists() or read_run_file(folder) is not None:
        return None
    run_file = _read(folder)
    if run_file is None:
        return f"{path} is stale: it cannot be read or has another version"
    cause = "another process has its id now" if ProcessId.of(run_file.pid) is not None else "it was killed"
    return f"{path} is stale: its mesh, process {run_file.pid}, has ended without removing it ({cause})"


def remove(folder: Path) -> None:
    for name in (NAME, METRICS_NAME):
        (folder / name).unlink(missing_ok=True)


def write_metrics(folder: Path, pages: Mapping[str, str]) -> None:
    """Write where the metrics of each instance are, address by instance, as Prometheus' `file_sd_configs` read it."""
    groups = [{"targets": [address], "labels": {"instance": name}} for name, address in sorted(pages.items())]
    _write(folder / METRICS_NAME, groups)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. A stale run file is removed.

    Raises:
        FolderInUse: Another process holds it.
    """
    lock = FolderLock(folder)
    lock.acquire()
    try:
        if (stale := stale_run_file(folder)) is not None:
            _log.warning("%s; replacing it", stale)
            remove(folder)
        yield
    finally:
        lock.release()


class FolderInUse(Exception):
    """Another `penstock up` uses the folder. holder: its process, if known."""

    def __init__(self, folder: Path, holder: ProcessId | None) -> None:
        self.holder = holder
        who = f" (process {holder.pid})" if holder is not None else ""
        super().__init__(f"a mesh is starting or running from {folder} already{who}; stop it with `penstock down`")


class FolderLock:
    """A lock for one `penstock up` at a time. The kernel releases it when the process ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: int | None = None

    def acquire(self) -> None:
        """Acquire the lock without waiting, or take over a lock that was inherited from the parent process.

        Raises:
            FolderInUse: Another process holds the lock.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        if (descriptor := os.environ.pop(LOCK_VARIABLE, "")) and self._is_ours(int(descriptor)):
            self._file = int(descriptor)
            os.set_inheritable(self._file, False)
            return
        file = os.open(self._folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise FolderInUse(self._folder, lock_holder(self._folder)) from None
        except OSError:
            os.close(file)
            raise
        self._file = file
        self._name_holder(os.getpid())

    def start_holder(self, arguments: list[str], log: BinaryIO) -> "subprocess.Popen[bytes]":
        """Start a process in its own session and hand the lock over to it."""
        assert self._file is not None
        child = subprocess.Popen(
            arguments,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[self._file],
            env=os.environ | {LOCK_VARIABLE: str(self._file)},
        )
        self._name_holder(child.pid)
        os.close(self._file)  # the child holds the same lock
        self._file = None
        return child

    def release(self) -> None:
        if self._file is not None:
            os.truncate(self._file, 0)  # the file is not deleted: that could delete the lock file of the next holder
            os.close(self._file)
            self._file = None

    def _name_holder(self, pid: int) -> None:
        """In one write of always the same length: who reads finds the holder of before or this one, never half of it."""
        assert self._file is not None
        holder = ProcessId.of(pid)
        text = json.dumps(asdict(holder)) if holder is not None else ""
        os.pwrite(self._file, text.ljust(HOLDER_BYTES).encode(), 0)

    def _is_ours(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), (self._folder / LOCK_NAME).stat())
        except OSError:
            return False


def lock_holder(folder: Path) -> ProcessId | None:
    """The process that holds the folder's lock. A starting mesh has a lock but no run file."""
    try:
        holder = ProcessId(**json.loads((folder / LOCK_NAME).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return holder if holder.runs else None


def _write(path: Path, content: object) -> None:
    replace_file(path, json.dumps(content, indent=1) + "\n", mode=0o644)


def _read(folder: Path) -> RunFile | None:
    try:
        data: dict[str, Any] = json.loads((folder / NAME).read_text())
        run_file = RunFile(**{name: tuple(v) if isinstance(v, list) else v for name, v in data.items()})  # type: ignore[arg-type]
        return run_file if isinstance(run_file.pid, int) else None
    except (OSError, ValueError, AttributeError, TypeError):
        return None
