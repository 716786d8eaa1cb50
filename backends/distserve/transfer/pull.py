"""One pull, over all source ranks that it needs."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from distserve.transfer.errors import TransferError
from distserve.transfer.handle import Handle


@dataclass(frozen=True, slots=True)
class TransferStats:
    """`wait_s`: until the last source rank had accepted; `wire_s`: from there until all KV was in place."""

    bytes: int
    wait_s: float
    wire_s: float


class Pull:
    """Shared by the receivers that work on it; the last one to end sets the future.

    `event`: point in the caller's stream that copies come after (`copies.mark`).
    """

    def __init__(self, handle: Handle, blocks: Tensor, event: Any, deadline: float, parts: int) -> None:
        self.handle = handle
        self.blocks = blocks
        self.event = event
        self.deadline = deadline
        self.future: Future[TransferStats] = Future()
        self.future.set_running_or_notify_cancel()  # `Future.cancel` cannot tell when the copy has ended
        self._lock = threading.Lock()
        self._parts = parts
        self._bytes = 0
        self._start = self._accepted = time.monotonic()
        self._error: TransferError | None = None

    @property
    def error(self) -> TransferError | None:
        """Why this pull will fail (a new object each time); receivers stop at the next message boundary."""
        with self._lock:
            return _copy(self._error)

    def abandon(self, error: TransferError) -> None:
        """The first reason stays."""
        with self._lock:
            self._error = self._error or _copy(error)

    def accepted(self) -> None:
        """A source rank has accepted."""
        with self._lock:
            self._accepted = time.monotonic()

    def part_ended(self, size: int) -> None:
        """A receiver has ended its part, well (`size` bytes are in place) or not (after `abandon`)."""
        with self._lock:
            self._parts -= 1
            self._bytes += size
            if self._parts:
                return
            error, end = self._error, time.monotonic()
            stats = TransferStats(self._bytes, self._accepted - self._start, end - self._accepted)
        if error is None:
            self.future.set_result(stats)
        else:
            self.future.set_exception(error)


def _copy(error: TransferError | None) -> TransferError | None:
    """Without the traceback, whose frames would keep buffers and groups alive that are to go."""
    return None if error is None else TransferError(error.code, error.reason, str(error))
