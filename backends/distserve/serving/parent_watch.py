"""Ends a stub whose server has died, whatever hinders Triton's own watch.

That one asks whether the server's process id is taken, which it is until somebody reaps the dead server, and
in a container perhaps nobody does; and it waits for a lock in memory that a killed server may hold for ever.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

_CHECK_S = 1.0
_GRACE_S = 3.0  # for Triton's own watch, which is the better one where it works


def end_with_parent() -> None:
    """From now on, this process does not outlive the one that it is a child of now."""
    threading.Thread(target=_watch, args=(os.getppid(),), name="parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_CHECK_S)
    time.sleep(_GRACE_S)
    for argument in Path("/proc/self/cmdline").read_bytes().split(b"\0"):
        if argument and b"/" not in argument:  # one is the name of the region shared with the server
            with contextlib.suppress(OSError):
                (Path("/dev/shm") / os.fsdecode(argument)).unlink()
    os.kill(os.getpid(), signal.SIGKILL)  # its engine dies with it
