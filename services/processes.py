"""Starts, supervises, restarts and stops processes."""

import asyncio
import contextlib
import fcntl
import logging
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from penstock.services.background import Restart, end, supervise
from penstock.services.field_problems import SettingsError

_log = logging.getLogger(__name__)

RESTART = Restart(first_s=0.5, most_s=10.0, steady_s=60.0)
UNUSABLE_SETTINGS = 2
"""Exit status for bad settings: a restart would not help."""
ANY_STATUS = range(-signal.NSIG, 256)
LOG_TAIL_LINES = 20
MAX_LOG_BYTES = 64 << 20  # of one process; as much again is kept in a second file
LOG_CHECK_S = 30.0
_PORTS = range(20_000, 30_000)

_WITH_PARENT_DEATH_SIGNAL = (sys.executable, "-I", "-S", str(Path(__file__).with_name("parent_death_signal.py")))
"""Runs a command that ends with the watcher."""


@contextlib.contextmanager
def exits_on_unusable_settings(service: str) -> Iterator[None]:
    """End the process with status UNUSABLE_SETTINGS, and the reason on stderr, at a SettingsError."""
    try:
        yield
    except SettingsError as error:
        print(f"penstock {service}: {error}", file=sys.stderr)
        sys.exit(UNUSABLE_SETTINGS)


def free_port() -> int:
    """Reserve a free loopback port below the range of ephemeral ports.

    Neither another process that binds "any port" nor another call of this function can get it before the intended server has
    bound it. The reservation is a file lock for the lifetime of this process.

    Raises:
        OSError: No port of the range is free.
    """
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            if _reserve(port):
                return port
    raise OSError(f"no free port between {_PORTS.start} and {_PORTS.stop}")


def _reserve(port: int) -> bool:
    """Lock a port for this process; False if another process of this user holds it."""
    folder = Path(tempfile.gettempdir()) / f"penstock-ports-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    lock = os.open(folder / str(port), os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return False
    return True  # `lock` remains open


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to run.

    log: None: the output of this process. stop_order: lower ones are stopped first. stop_s: time between SIGTERM and SIGKILL.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log: Path | None
    stop_order: int
    stop_s: float


@dataclass(slots=True)
class Watched:
    """A supervised process. fatal: set once it will not be restarted. ended: it has ended and is not restarted yet.

    status: exit status of the last process that ended by itself; `died` is set then.
    """

    spec: ProcessSpec
    process: asyncio.subprocess.Process | None = None
    crashes: int = 0
    restarts: int = 0
    started_at: float = 0.0
    ended: bool = False
    status: int | None = None
    fatal: asyncio.Event = field(default_factory=asyncio.Event)
    died: asyncio.Event = field(default_factory=asyncio.Event)
    task: "asyncio.Task[None] | None" = None

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None and self.process.returncode is None else None

    def log_tail(self) -> str:
        """The last lines of its log."""
        if self.spec.log is None or not self.spec.log.exists():
            return ""
        return "\n".join(self.spec.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])


def rotate(log: Path, limit_bytes: int = MAX_LOG_BYTES) -> None:
    """Move the content of a log that has grown beyond the limit to `<log>.1`, in place of what is there.

    By copying and truncating, as processes keep the file open for appending: lines written in between are lost.
    """
    with contextlib.suppress(FileNotFoundError):
        if log.stat().st_size > limit_bytes:
            shutil.copyfile(log, log.with_name(f"{log.name}.1"))
            os.truncate(log, 0)


def _end_group(pid: int) -> None:
    """Kill the processes that a process that has ended may have left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class Watcher:
    """Keeps processes running until they are stopped."""

    def __init__(
        self,
        on_end: Callable[[Watched], None] = lambda _: None,
        *,
        final: Collection[int] = (UNUSABLE_SETTINGS,),
        prepare: Callable[[Watched], Awaitable[ProcessSpec]] | None = None,
    ) -> None:
        """on_end: called with a process that ended by itself, before it is restarted.

        final: exit statuses after which a process is not restarted. prepare: awaited before each start; says how it is run.
        """
        self._on_end, self._final, self._prepare = on_end, final, prepare
        self.watched: dict[str, Watched] = {}

    async def start(self, spec: ProcessSpec) -> Watched:
        """Start a process and keep it running."""
        if spec.log is not None:
            spec.log.parent.mkdir(parents=True, exist_ok=True)
            spec.log.write_bytes(b"")
        entry = Watched(spec)
        self.watched[spec.name] = entry
        await self._spawn(entry)
        entry.task = supervise("process-watch", lambda: self._keep(entry), endless=False)
        return entry

    async def stop(self, name: str) -> None:
        """Send SIGTERM, and SIGKILL after `stop_s`."""
        entry = self.watched.pop(name, None)
        if entry is None:
            return
        if entry.task is not None:
            await end(entry.task)
        process = entry.process
        if process is not None and entry.pid is not None:
            process.terminate()
            try:
                async with asyncio.timeout(entry.spec.stop_s):
                    await process.wait()
            except TimeoutError:
                _log.warning("%s did not end within %g s and was killed", name, entry.spec.stop_s)
                process.kill()
                await process.wait()
            _end_group(process.pid)

    async def stop_all(self) -> None:
        """Stop all processes in groups by `stop_order`."""
        while self.watched:
            first = min(entry.spec.stop_order for entry in self.watched.values())
            group = [name for name, entry in self.watched.items() if entry.spec.stop_order == first]
            await asyncio.gather(*(self.stop(name) for name in group))

    async def _spawn(self, entry: Watched) -> None:
        if self._prepare is not None:
            entry.spec = await self._prepare(entry)
        log_file = entry.spec.log.open("ab") if entry.spec.log is not None else contextlib.nullcontext()
        with log_file as log:
            entry.process = await asyncio.create_subprocess_exec(
                *_WITH_PARENT_DEATH_SIGNAL,
                str(os.getpid()),
                *entry.spec.argv,
                env={**os.environ, **entry.spec.env},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C must only reach this process. Not a new session: Linux divides cores between sessions
                # (autogroups), so a process could wait a second for a core while others compute.
                process_group=0,
            )
        entry.started_at, entry.ended = time.monotonic(), False

    async def rotate_logs(self) -> NoReturn:
        """Keep each log at about `MAX_LOG_BYTES`, and as much of it in a second file, forever."""
        while True:
            await asyncio.sleep(LOG_CHECK_S)
            for log in {entry.spec.log for entry in self.watched.values() if entry.spec.log is not None}:
                await asyncio.to_thread(rotate, log)

    async def _keep(self, entry: Watched) -> None:
        while True:
            if entry.ended:  # the last restart failed
                await self._spawn(entry)
            assert entry.process is not None
            status = await entry.process.wait()
            entry.ended = True
            _end_group(entry.process.pid)
            entry.status = status
            entry.died.set()
            if status in self._final:
                entry.fatal.set()
                self._on_end(entry)
                return
            entry.crashes = RESTART.in_a_row(entry.crashes, time.monotonic() - entry.started_at)
            self._on_end(entry)
            pause_s = RESTART.pause_s(entry.crashes)
            _log.warning("%s ended with status %d; restarting in %g s", entry.spec.name, status, pause_s)
            await asyncio.sleep(pause_s)
            await self._spawn(entry)
            entry.restarts += 1
