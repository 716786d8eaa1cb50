"""Says how far a load has come."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from distserve.models.weights import WeightSource

logger = logging.getLogger(__name__)

EVERY_S = 5.0

Report = Callable[[int, int, float], None]
"""Gets elements read, elements of the whole, and seconds since the start."""


class ReportedSource:
    """A `WeightSource` that reports now and then what has been read through it."""

    def __init__(
        self,
        weights: WeightSource,
        total: int,
        report: Report,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`total`: elements that this rank will read, about."""
        self._weights = weights
        self._total = total
        self._report = report
        self._every_s = every_s
        self._clock = clock
        self._read = 0
        self._began = self._last = clock()

    def has(self, name: str) -> bool:
        return self._weights.has(name)

    def read(
        self, name: str, shape: Sequence[int], rows: range | None = None, cols: range | None = None
    ) -> Tensor:
        """See `WeightSource.read`."""
        tensor = self._weights.read(name, shape, rows, cols)
        self._read += tensor.numel()
        now = self._clock()
        if now - self._last >= self._every_s:
            self._last = now
            self._report(min(self._read, self._total), self._total, now - self._began)
        return tensor


def log_progress(what: str) -> Report:
    """Reports as a line of the log."""

    def report(read: int, total: int, seconds: float) -> None:
        speed = read / seconds / 1e9 if seconds > 0 else 0.0
        logger.info("%s: %d %% of %.2f G weights, %.2f G/s", what, 100 * read // total, total / 1e9, speed)

    return report
