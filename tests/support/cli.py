"""The command line, inside the test's own process or as a process of its own.

The former is for most tests: a start of Python with the imports of a command takes half a second of CPU time.
"""

import subprocess
import sys
from dataclasses import dataclass

from typer.testing import CliRunner

from penstock.cli.main import app


@dataclass(frozen=True, slots=True)
class Ended:
    """What a command wrote, and its exit status."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        """Both, what went to stdout first."""
        return self.stdout + self.stderr


def penstock(*arguments: object, text: str = "", columns: int = 80) -> Ended:
    """Run a command to its end. text: its stdin. columns: the width of the terminal.

    Raises:
        Exception: Whatever the command does not handle; a user would see its traceback.
    """
    runner = CliRunner(env={"COLUMNS": str(columns)})
    done = runner.invoke(app, [str(argument) for argument in arguments], input=text, catch_exceptions=False)
    return Ended(done.exit_code, done.stdout, done.stderr)


def penstock_process(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The same as a process of its own, as users start it."""
    command = [sys.executable, "-m", "penstock.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=1_000, check=False)
