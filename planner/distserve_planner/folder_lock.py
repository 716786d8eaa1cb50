"""Locks of a model repository: one change at a time, one watch.

A lock is let go with the process that holds it, whatever its end.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from distserve.core.parsing import ConfigError


class LockedError(RuntimeError):
    """Another process holds the lock."""


@contextlib.contextmanager
def exclusive(folder: Path, doing: Literal["changed", "watched"]) -> Iterator[None]:
    """Holds one of the locks of a model repository; the two do not exclude each other.

    Raises `LockedError` at once if it is held, `ConfigError` if there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"--model-repository {folder}: no such folder")
    with (folder / f".{doing}.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise LockedError(f"{folder}: is being {doing} by process {holder}") from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
