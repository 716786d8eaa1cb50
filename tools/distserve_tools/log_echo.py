"""Copies a server's log to stderr while it runs, for containers, whose log is what they print."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

_INTERVAL_S = 0.25
_KEPT_BYTES = 16 << 20  # the file is emptied beyond, once it is copied


class LogEcho:
    """A context manager; the file may appear later. At the end what was written last is still copied."""

    def __init__(self, path: Path, to: BinaryIO | None = None) -> None:
        self._path = path
        self._to = to or sys.stderr.buffer
        self._position = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-echo", daemon=True)

    def __enter__(self) -> LogEcho:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            self._copy()
        self._copy()

    def _copy(self) -> None:
        try:
            with self._path.open("r+b") as file:
                size = file.seek(0, 2)
                if size < self._position:  # begun anew
                    self._position = 0
                file.seek(self._position)
                while piece := file.read(1 << 16):
                    self._to.write(piece)
                self._position = file.tell()
                if self._position > _KEPT_BYTES:
                    file.truncate(0)  # the server appends
                    self._position = 0
            self._to.flush()
        except FileNotFoundError:
            pass
        except (OSError, ValueError):  # nobody reads any more
            self._stop.set()
