"""Share of requests that met their objectives, over the last seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Objectives:
    """Seconds; None: any time will do."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def any(self) -> bool:
        return self.ttft_s is not None or self.tpot_s is not None

    def or_else(self, defaults: Objectives) -> Objectives:
        """A request's own objectives, the others from `defaults`."""
        ttft_s = defaults.ttft_s if self.ttft_s is None else self.ttft_s
        return Objectives(ttft_s, defaults.tpot_s if self.tpot_s is None else self.tpot_s)

    def met(self, ttft_s: float, tpot_s: float, tokens: int) -> tuple[bool, bool]:
        """Of TTFT and TPOT; a one-token output meets any TPOT."""
        return (
            self.ttft_s is None or ttft_s <= self.ttft_s,
            self.tpot_s is None or tokens < 2 or tpot_s <= self.tpot_s,
        )


class Attainment:
    """A sliding window of `window_s` seconds. Refused and failed requests have met nothing."""

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._ends: deque[tuple[float, bool, bool]] = deque()
        self._ttft = self._tpot = self._both = 0

    def note(self, now: float, ttft: bool, tpot: bool) -> None:
        self._ends.append((now, ttft, tpot))
        self._count(ttft, tpot, 1)

    def summary(self, now: float) -> Mapping[str, float]:
        """Shares `ttft`, `tpot` and `both` of so many `requests`; 1 if there were none."""
        while self._ends and self._ends[0][0] < now - self.window_s:
            _, ttft, tpot = self._ends.popleft()
            self._count(ttft, tpot, -1)
        count = len(self._ends)
        met = {"ttft": self._ttft, "tpot": self._tpot, "both": self._both}
        return {**{name: value / count if count else 1.0 for name, value in met.items()}, "requests": count}

    def _count(self, ttft: bool, tpot: bool, one: int) -> None:
        self._ttft += one * ttft
        self._tpot += one * tpot
        self._both += one * (ttft and tpot)
