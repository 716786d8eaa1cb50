"""What a simulation notes about each request, and the figures that follow from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distserve.core.request import Request

STAGES = ("prefill queue", "prefill", "decode queue", "transfer", "decode")
UNSET = -1.0


class Tracked(Request):
    """A request with its index in the trace."""

    __slots__ = ("index",)

    index: int


class Records:
    """Times in seconds per request, by index in the trace; `UNSET` until they are known."""

    __slots__ = (
        "admitted",
        "arrival",
        "finish",
        "first",
        "output",
        "preemptions",
        "ready",
        "refused",
        "started",
    )

    def __init__(self, arrival: list[float], output: list[int]) -> None:
        count = len(arrival)
        self.arrival = arrival
        self.output = output
        self.started = [UNSET] * count  # prefill begins
        self.first = [UNSET] * count  # first token
        self.admitted = [UNSET] * count  # decode reserves blocks and begins to pull
        self.ready = [UNSET] * count  # KV has arrived
        self.finish = [UNSET] * count  # last token
        self.preemptions: dict[int, int] = {}
        self.refused: set[int] = set()  # longer than an instance's KV pool

    def window(self, first: int, last: int) -> Outcome:
        """Requests `first` to `last` - 1, all of which must have ended."""
        part = slice(first, last)
        refused = np.zeros(last - first, bool)
        refused[[i - first for i in self.refused if first <= i < last]] = True
        return Outcome(
            arrival=np.array(self.arrival[part]),
            started=np.array(self.started[part]),
            first=np.array(self.first[part]),
            admitted=np.array(self.admitted[part]),
            ready=np.array(self.ready[part]),
            finish=np.array(self.finish[part]),
            output=np.array(self.output[part]),
            refused=refused,
            preemptions=sum(n for i, n in self.preemptions.items() if first <= i < last),
        )


Times = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Outcome:
    """Times of a window of requests, float64 [n], seconds; infinite latencies where refused."""

    arrival: Times
    started: Times
    first: Times
    admitted: Times
    ready: Times
    finish: Times
    output: NDArray[np.int64]
    refused: NDArray[np.bool_]
    preemptions: int = 0

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def ttft_s(self) -> Times:
        """Arrival to first token. Refused requests never have one."""
        return np.where(self.refused, np.inf, self.first - self.arrival)

    @property
    def tpot_s(self) -> Times:
        """(last token - first token) / (n - 1); 0 for one-token outputs."""
        gaps = np.maximum(self.output - 1, 1)
        tpot = np.where(self.output > 1, (self.finish - self.first) / gaps, 0.0)
        return np.where(self.refused, np.inf, tpot)

    def stages_s(self) -> dict[str, Times]:
        """The five stages of each request that was served; they sum to arrival until last token."""
        served = ~self.refused
        marks = [
            t[served]
            for t in (self.arrival, self.started, self.first, self.admitted, self.ready, self.finish)
        ]
        return {name: marks[i + 1] - marks[i] for i, name in enumerate(STAGES)}

    def queue_at(self, times: Times) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Requests waiting for prefill, and for admission to decode, at each of `times`."""
        served = ~self.refused

        def between(begin: Times, end: Times) -> NDArray[np.int64]:
            entered = np.searchsorted(np.sort(begin[served]), times, side="right")
            return entered - np.searchsorted(np.sort(end[served]), times, side="right")

        return between(self.arrival, self.started), between(self.first, self.admitted)
