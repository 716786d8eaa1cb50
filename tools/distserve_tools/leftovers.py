"""What a server leaves behind when it ends, and above all when it is killed: processes and shared memory."""

from __future__ import annotations

import contextlib
from pathlib import Path

from distserve_tools.processes import ProcessId, descendants, session_members, wait_gone

_SHM = Path("/dev/shm")
_BY_THEMSELVES_S = 2.0
_KILLED_S = 5.0


class Leftovers:
    """Of a server that leads a session of its own, and whose regions in /dev/shm begin with `shm_prefix`."""

    def __init__(self, shm_prefix: str) -> None:
        self._shm_prefix = shm_prefix
        self._seen: set[ProcessId] = set()

    def note(self, pid: int) -> None:
        """Remembers the processes of the server `pid` that live now: orphans can't be told later."""
        self._seen |= descendants(pid) | session_members(pid)

    def clear(self, pid: int) -> None:
        """The server `pid` has ended. Its stubs and engines end by themselves; one that hangs is killed."""
        left = wait_gone(self._seen | session_members(pid), _BY_THEMSELVES_S)
        for straggler in left | session_members(pid):
            straggler.kill()
        wait_gone(left, _KILLED_S)
        self._seen.clear()
        for path in _SHM.glob(f"{self._shm_prefix}*"):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
