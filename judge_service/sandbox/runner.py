"""Runs inside the sandbox: sets limits, executes a program and then its tests, and reports on the first standard output.

Executed by its text (`python -I -S -c`), for the sandbox contains no file of this project. Standard input is JSON:
`program`, `tests`, `mark`, and the limits `cpu_s`, `memory_bytes`, `file_bytes`, `processes`. Writes a line `started` and, if
program and tests ended without an exception, a line with the mark, which the program is not given.
"""

import json
import os
import resource
import sys


def main() -> None:
    job = json.load(sys.stdin)
    report = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    for limit, value in (
        (resource.RLIMIT_CPU, job["cpu_s"]),
        (resource.RLIMIT_AS, job["memory_bytes"]),
        (resource.RLIMIT_FSIZE, job["file_bytes"]),
        (resource.RLIMIT_NPROC, job["processes"]),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    os.write(report, b"started\n")
    names = {"__name__": "answer"}
    exec(compile(job["program"], "answer", "exec"), names)
    exec(compile(job["tests"], "tests", "exec"), names)
    os.write(report, job["mark"].encode() + b"\n")


if __name__ == "__main__":
    main()
