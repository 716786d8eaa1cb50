"""What a server leaves behind when it ends, and above all when it is killed: processes and shared memory."""

from __future__ import annotations

from distserve_tools.processes import ProcessId, descendants, session_members, wait_gone
from distserve_tools.shared_regions import SharedRegions

_BY_THEMSELVES_S = 2.0
_KILLED_S = 5.0


class Leftovers:
    """Of a server that leads a session of its own."""

    def __init__(self, regions: SharedRegions) -> None:
        self._regions = regions
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
        self._regions.clear()
