"""Replaces itself by a program that gets SIGTERM when its parent dies. Arguments: PARENT_PID PROGRAM ARGS.

Set in a small program of its own, because code between fork and exec is unsafe in a process with threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != int(sys.argv[1]):  # it died before the call
        sys.exit(1)
    os.execv(sys.argv[2], sys.argv[2:])
