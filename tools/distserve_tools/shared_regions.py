"""Names in /dev/shm: each server claims those it uses, and what the claims of dead ones cover is removed.

A process id in a name says nothing: /dev/shm may be shared by containers that each count their own. A claim
is a file with a lock, which a server and its stubs inherit: it is free when the last of them is gone.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path

SHM = Path("/dev/shm")
_CLAIM = "claim"


class SharedRegions:
    """The regions of one server, whose names begin with `prefix`."""

    def __init__(self, folder: Path = SHM) -> None:
        self._folder = folder
        self._lock: int | None = None
        self.prefix = f"distserve_{os.getpid()}_{secrets.token_hex(4)}_"

    @property
    def inherited(self) -> tuple[int, ...]:
        """File descriptors that the server's process has to inherit."""
        return () if self._lock is None else (self._lock,)

    def claim(self) -> None:
        """Until `release`; before, what dead servers have left is removed."""
        sweep(self._folder)
        path = self._folder / f"{self.prefix}{_CLAIM}"
        while self._lock is None:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if _take(lock) and os.fstat(lock).st_nlink:
                self._lock = lock
            else:  # another one is sweeping just now
                os.close(lock)

    def clear(self) -> None:
        """Removes the regions of a server that has ended; the next one may use the names."""
        _remove(self._folder, self.prefix)

    def release(self) -> None:
        """The end: nothing is left. A second call does nothing."""
        self.clear()
        if self._lock is not None:
            (self._folder / f"{self.prefix}{_CLAIM}").unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None


def sweep(folder: Path = SHM) -> None:
    """Removes regions whose claim nobody holds any more. Other users' are left alone."""
    for path in folder.glob(f"distserve_*_{_CLAIM}"):
        try:
            lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if _take(lock):
                _remove(folder, path.name.removesuffix(_CLAIM))
                path.unlink(missing_ok=True)
        finally:
            os.close(lock)


def _take(lock: int) -> bool:
    """Whether nobody else holds it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(folder: Path, prefix: str) -> None:
    for path in folder.glob(f"{prefix}*"):
        if path.name != f"{prefix}{_CLAIM}":
            path.unlink(missing_ok=True)
