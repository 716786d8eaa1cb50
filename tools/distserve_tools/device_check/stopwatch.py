"""Times work on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

FLUSH_BYTES = (
    1 << 30
)  # more than any L2 cache, and 0.2 ms of an H200: longer than the host takes for a launch
BUDGET_S = 0.25
LEAST, MOST = 5, 50


class Stopwatch:
    """On a GPU by events around each call, with its cache emptied before; on a CPU by the clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flush = torch.zeros(FLUSH_BYTES // 4 if device.type == "cuda" else 0, device=device)

    def seconds(self, work: Callable[[], object]) -> float:
        """Median of as many calls as fit a quarter of a second, at least 5; one before is not counted."""
        work()
        self.wait()
        began = time.perf_counter()
        work()
        self.wait()
        once = max(time.perf_counter() - began, 1e-6)
        count = min(MOST, max(LEAST, int(BUDGET_S / once)))
        if self._device.type == "cuda":
            return self._by_events(work, count)
        times = []
        for _ in range(count):
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _by_events(self, work: Callable[[], object], count: int) -> float:
        cuda: Any = torch.cuda  # untyped in torch
        pairs = [(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)) for _ in range(count)]
        for start, end in pairs:
            self._flush.sum()  # a cache full of what was written would be written back beside the work
            start.record()
            work()
            end.record()
        self.wait()
        return float(statistics.median(start.elapsed_time(end) for start, end in pairs)) / 1e3
