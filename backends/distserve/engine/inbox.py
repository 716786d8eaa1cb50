"""What other threads have for the engine loop: calls of the owners, ended transfers, the wish to stop."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """Many writers, one reader that sleeps on a condition while there is nothing to do."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        # re-entrant, since `stop` is called from a signal handler of the thread that waits here
        self._changed = threading.Condition(threading.RLock())
        self._stop_reason: str | None = None
        self._poked = False

    def post(self, item: T) -> None:
        with self._changed:
            self._items.append(item)
            self._changed.notify()

    def poke(self) -> None:
        """Wakes the reader without an item: something it looks at itself has changed."""
        with self._changed:
            self._poked = True
            self._changed.notify()

    def stop(self, reason: str) -> None:
        """Ends the reader's loop after its current step."""
        with self._changed:
            self._stop_reason = self._stop_reason or reason
            self._changed.notify()

    @property
    def stopped(self) -> str | None:
        """Why the loop is to end, or None."""
        return self._stop_reason

    def take(self, wait_s: float) -> list[T]:
        """All items, in order; waits up to `wait_s` seconds for the first. A poke or stop ends the wait."""
        with self._changed:
            if wait_s > 0:
                self._changed.wait_for(
                    lambda: self._items or self._poked or self._stop_reason is not None, wait_s
                )
            self._poked = False
            items = list(self._items)
            self._items.clear()
            return items
