"""`python parent_death_signal.py PARENT COMMAND ...`: run COMMAND, and end it when the process PARENT ends.

A separate program instead of code between fork and exec, because the parent may have threads, and Python code in a forked
child of a process with threads can hang or crash.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):  # the parent has ended already
        sys.exit(1)
    os.execvp(sys.argv[2], sys.argv[2:])
