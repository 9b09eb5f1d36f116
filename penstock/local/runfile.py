"""What `penstock up` leaves in its folder for the other commands: the run file, and the lock that excludes a second `up`.

A process is named by its id *and* the time it was started: an id alone may have been given to another process since. Nothing
here needs more than the standard library.
"""

import fcntl
import json
import os
import signal
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

NAME, LOCK_NAME = "run.json", "up.lock"
HANDED_OVER = "PENSTOCK_UP_LOCK"  # in the environment of a process that gets the lock from its parent: the descriptor


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process of this machine. started: the boot and the clock tick of its start, as `/proc` tells them."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> "ProcessId | None":
        """The process that has this id now; None if none has, or if it has ended and nobody has waited for it."""
        try:
            # "pid (name) state ...": the name may hold anything; state is field 3, the start time field 22
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return None
        return None if fields[0] in "ZX" else cls(pid, f"{boot}/{fields[19]}")

    @property
    def runs(self) -> bool:
        """Whether it is still this very process."""
        return ProcessId.of(self.pid) == self

    def send(self, number: signal.Signals) -> bool:
        """Send it a signal; False if it has ended. No other process that has got its id is ever signalled."""
        try:
            handle = os.pidfd_open(self.pid)  # holds on to the process that has the id now
        except ProcessLookupError:
            return False
        try:
            if not self.runs:
                return False
            signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(handle)
        return True


@dataclass(frozen=True, slots=True)
class RunFile:
    """A running local mesh. pid, started: `penstock up`, as in `ProcessId`. grpc, http: the routers' addresses."""

    pid: int
    started: str
    mesh_file: str
    redis_url: str
    grpc: tuple[str, ...]
    http: tuple[str, ...]
    planner: str

    @property
    def process(self) -> ProcessId:
        return ProcessId(self.pid, self.started)

    def write(self, folder: Path) -> None:
        path = folder / NAME
        path.with_suffix(".tmp").write_text(json.dumps(asdict(self), indent=1) + "\n")
        path.with_suffix(".tmp").replace(path)


def read_run_file(folder: Path) -> RunFile | None:
    """The mesh that runs from `folder`; None if none does, be there a stale run file or not."""
    found = _read(folder)
    return found if found is not None and found.process.runs else None


def stale_run_file(folder: Path) -> str | None:
    """Why the run file in `folder` is of no use, to be shown; None if there is none, or its mesh runs."""
    path = folder / NAME
    if not path.exists() or read_run_file(folder) is not None:
        return None
    found = _read(folder)
    if found is None:
        return f"{path} is stale: it cannot be read, or is of another version"
    now = "another process has that id now" if ProcessId.of(found.pid) is not None else "it was killed"
    return f"{path} is stale: its mesh, process {found.pid}, has ended without removing it ({now})"


def remove(folder: Path) -> None:
    (folder / NAME).unlink(missing_ok=True)


class FolderInUse(Exception):
    """Another `penstock up` starts or runs a mesh from the folder. holder: that process, where it is known."""

    def __init__(self, folder: Path, holder: ProcessId | None) -> None:
        self.holder = holder
        who = f" (process {holder.pid})" if holder is not None else ""
        super().__init__(f"a mesh starts or runs from {folder} already{who}; `penstock down` stops it")


class FolderLock:
    """Held by one `penstock up` at a time. The kernel frees it when the process ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: int | None = None

    def acquire(self) -> None:
        """Take the lock without waiting, or take over the one that the parent process holds for this one.

        Raises:
            FolderInUse: another process has it.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        if (descriptor := os.environ.pop(HANDED_OVER, "")) and self._is_ours(int(descriptor)):
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
        """Start a process, in a session of its own, that holds the lock from now on in place of this one."""
        assert self._file is not None
        child = subprocess.Popen(
            arguments,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[self._file],
            env=os.environ | {HANDED_OVER: str(self._file)},
        )
        self._name_holder(child.pid)
        os.close(self._file)  # the child has the same lock
        self._file = None
        return child

    def release(self) -> None:
        if self._file is not None:
            os.truncate(self._file, 0)  # the file stays: who removed it could remove the next holder's
            os.close(self._file)
            self._file = None

    def _name_holder(self, pid: int) -> None:
        assert self._file is not None
        holder = ProcessId.of(pid)
        os.truncate(self._file, 0)
        os.pwrite(self._file, json.dumps(asdict(holder)).encode() if holder is not None else b"", 0)

    def _is_ours(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), (self._folder / LOCK_NAME).stat())
        except OSError:
            return False


def lock_holder(folder: Path) -> ProcessId | None:
    """The process that holds the folder's lock: a mesh that is starting has no run file yet."""
    try:
        data: dict[str, Any] = json.loads((folder / LOCK_NAME).read_text())
        holder = ProcessId(data["pid"], data["started"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return holder if holder.runs else None


def _read(folder: Path) -> RunFile | None:
    try:
        data = json.loads((folder / NAME).read_text())
        return RunFile(
            int(data["pid"]),
            str(data["started"]),
            data["mesh_file"],
            data["redis_url"],
            tuple(data["grpc"]),
            tuple(data["http"]),
            data["planner"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
