"""One change of a repository at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from distserve.core.parsing import ConfigError

LOCK = ".apply.lock"


class LockedError(RuntimeError):
    """Somebody else is changing the repository."""


@contextlib.contextmanager
def exclusive(repository: Path) -> Iterator[None]:
    """Holds the repository's lock; it is let go with the process that holds it, whatever its end.

    Raises `LockedError` at once if it is held, `ConfigError` if there is no such folder.
    """
    if not repository.is_dir():
        raise ConfigError(f"--model-repository {repository}: no such folder")
    with (repository / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise LockedError(f"{repository}: is being changed by process {holder}") from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
