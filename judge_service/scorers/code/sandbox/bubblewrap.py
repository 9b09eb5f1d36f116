"""A sandbox for code that models wrote: bubblewrap (`bwrap`), which Debian, Fedora and Flatpak ship.

A program runs in namespaces of its own as a user without rights. It has no network, sees no other processes and no files but
/usr and the Python that runs it (read-only) and an empty /tmp in memory, and has limits on time, memory, processes and file
size. What this does not protect from: bugs of the kernel, whose system calls are not filtered; many processes until the time
is up, if the judge runs as root, for whom the kernel does not limit them; a program that inspects the frames of its runner to
pretend that its tests passed.
"""

import asyncio
import contextlib
import json
import math
import secrets
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

PROGRAM = "bwrap"
MAX_REPORT_BYTES = 256  # a report has two short lines
STARTED = b"started"
LIMITS = {"memory_bytes": 512 << 20, "processes": 16, "file_bytes": 16 << 20}
"""Of what runs in a sandbox: memory of each process, processes at once, size of files."""
_RUNNER = Path(__file__).with_name("runner.py")


class SandboxUnavailable(Exception):
    """The sandbox cannot be used on this machine; the message says why."""


class Sandbox:
    """Runs programs with their tests.

    wall_s: after which a run is ended. A process may use as much CPU time, rounded up.
    """

    def __init__(self, wall_s: float) -> None:
        self._wall_s = wall_s

    async def start(self) -> None:
        """Make sure that programs can be run.

        Raises:
            SandboxUnavailable: bubblewrap is not installed, or may not create namespaces here.
        """
        if shutil.which(PROGRAM) is None:
            raise SandboxUnavailable(f"{PROGRAM} is not installed: install bubblewrap")
        if await self.passed("", [""]) != 1:
            raise SandboxUnavailable("an empty program fails in the sandbox")

    async def passed(self, program: str, tests: Sequence[str], preamble: str = "") -> int:
        """How many tests pass after a Python program in its namespace, all together within the limits; 0 if it fails.

        preamble: code before the program, which may fail.

        Raises:
            SandboxUnavailable: The program could not be started.
        """
        mark = secrets.token_hex(16)
        program_and_tests = {"preamble": preamble, "program": program, "tests": list(tests), "mark": mark}
        job = {**program_and_tests, "cpu_s": math.ceil(self._wall_s), **LIMITS}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command(), stdin=pipe, stdout=pipe, stderr=pipe)
        report, errors = b"", b""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._wall_s):
                    report = await _report(process, json.dumps(job).encode())
                    if STARTED not in report and process.stderr is not None:
                        errors = await process.stderr.read(MAX_REPORT_BYTES)
                    if len(report) < MAX_REPORT_BYTES:
                        await process.wait()
        finally:
            await _end(process)
        lines = report.split(b"\n")
        if errors:
            raise SandboxUnavailable(f"{PROGRAM}: {errors.decode(errors='replace').strip()}")
        return next((int(line.split()[1]) for line in lines if line.startswith(mark.encode() + b" ")), 0)


async def _report(process: asyncio.subprocess.Process, job: bytes) -> bytes:
    """What the runner reports on a job; further output is not read, so that a program that writes without end must wait."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(job)
        await process.stdin.drain()
        process.stdin.close()
    report = b""
    while len(report) < MAX_REPORT_BYTES and (part := await process.stdout.read(MAX_REPORT_BYTES)):
        report += part
    return report


async def _end(process: asyncio.subprocess.Process) -> None:
    """End bwrap, and with it everything inside, if it is still running."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    for stream in (process.stdout, process.stderr):
        if stream is not None:  # wait() returns when the pipes have been read to their end
            await stream.read()
    await process.wait()


def command() -> list[str]:
    """The command line that runs the runner in the sandbox."""
    python = str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}")
    arguments = ["--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    arguments += ["--uid", "65534", "--gid", "65534", "--hostname", "sandbox", "--proc", "/proc", "--dev", "/dev"]
    arguments += ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "lib", "lib64"):
        link = Path("/") / name
        if link.is_symlink():  # distributions that have merged /usr
            arguments += ["--symlink", str(link.readlink()), str(link)]
        elif link.is_dir():
            arguments += ["--ro-bind", str(link), str(link)]
    if not sys.base_prefix.startswith("/usr"):
        arguments += ["--ro-bind", sys.base_prefix, sys.base_prefix]
    arguments += ["--tmpfs", "/tmp", "--chdir", "/tmp", "--remount-ro", "/"]
    return [PROGRAM, *arguments, "--", python, "-I", "-S", "-c", _RUNNER.read_text()]
