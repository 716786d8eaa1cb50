"""The event queue."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Clock:
    """Events in order of time; those of one time in the order they were planned."""

    __slots__ = ("_planned", "heap", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self.heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._planned = 0

    def at(self, time: float, action: Callable[[Any], None], argument: Any) -> None:
        """Plans `action(argument)`; `time` is not before now."""
        self._planned += 1
        heappush(self.heap, (time, self._planned, action, argument))

    def step(self) -> None:
        """Runs the next event."""
        self.now, _, action, argument = heappop(self.heap)
        action(argument)
