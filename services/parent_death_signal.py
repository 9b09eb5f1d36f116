"""`python parent_death_signal.py PARENT COMMAND ...`: become COMMAND, and end when the process PARENT does.

A program of its own, and not something done between fork and exec: the watcher may have threads, and Python code in a
forked child of a threaded process can hang or crash.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):  # it ended before we could ask
        sys.exit(1)
    os.execvp(sys.argv[2], sys.argv[2:])
