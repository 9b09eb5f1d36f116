"""Runs inside the sandbox: sets limits, executes a program and then each test, and reports on the first standard output.

Executed by its text (`python -I -S -c`), for the sandbox contains no file of this project. Standard input is JSON:
`preamble`, `program`, `tests` (a list), `mark`, and the limits `cpu_s`, `memory_bytes`, `file_bytes`, `processes`. Writes a
line `started` and, if the program ended without an exception, at the end of all tests a line with the mark, which the program
is not given, and the number of tests that ended without one. The preamble is for what the program may lack; it may fail.
"""

import contextlib
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
    with contextlib.suppress(Exception):
        exec(compile(job["preamble"], "preamble", "exec"), names)
    exec(compile(job["program"], "answer", "exec"), names)
    passed = 0
    for test in job["tests"]:
        with contextlib.suppress(Exception):
            exec(compile(test, "test", "exec"), names)
            passed += 1
    os.write(report, f"{job['mark']} {passed}\n".encode())


if __name__ == "__main__":
    main()
