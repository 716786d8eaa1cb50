"""Replaces itself by a program that is killed when its parent dies. Arguments: PARENT_PID PROGRAM ARGS.

A small program of its own, because code between fork and exec is unsafe in a process with threads, and a
program that sets this by itself later may have lost its parent by then. The parent is the *thread* that
spawned it.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != int(sys.argv[1]):  # it died before the call
        sys.exit(1)
    os.execv(sys.argv[2], sys.argv[2:])
