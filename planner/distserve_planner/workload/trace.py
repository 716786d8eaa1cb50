"""A trace: when each request arrives, and how many tokens go in and come out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from distserve.core.parsing import ConfigError


class TraceError(ConfigError):
    """A trace that cannot be used. The message names the row, its value and the fix."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Arrays of equal length, in order of arrival.

    arrival_s: float64 [n], seconds from the start, not falling; input_tokens, output_tokens: int64 [n], at
    least 1. `timed` is False for a file that has lengths only: then `arrival_s` is all zero.
    """

    arrival_s: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    name: str = "trace"
    timed: bool = True

    def __post_init__(self) -> None:
        if len({len(self.arrival_s), len(self.input_tokens), len(self.output_tokens)}) != 1:
            raise TraceError(f"{self.name}: arrivals, inputs and outputs differ in length")
        check_rows(self.arrival_s, self.input_tokens, self.output_tokens, self.name)

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last."""
        return float(self.arrival_s[-1] - self.arrival_s[0])

    @property
    def rate_rps(self) -> float:
        """Mean arrivals per second: (n - 1) gaps over their sum. Raises `TraceError` if there is no time."""
        if not self.timed or self.duration_s <= 0:
            raise TraceError(f"{self.name}: has no arrival times that differ, so no rate; give one (--rate)")
        return (len(self) - 1) / self.duration_s

    def at_rate(self, rate_rps: float) -> Trace:
        """The same requests with all gaps scaled so that the mean rate is `rate_rps`."""
        if not rate_rps > 0:
            raise TraceError(f"rate={rate_rps}: must be above 0")
        start = self.arrival_s[0]
        return replace(self, arrival_s=(self.arrival_s - start) * (self.rate_rps / rate_rps))

    def head(self, count: int) -> Trace:
        """The first `count` requests."""
        return replace(
            self,
            arrival_s=self.arrival_s[:count],
            input_tokens=self.input_tokens[:count],
            output_tokens=self.output_tokens[:count],
        )


def check_rows(
    times: NDArray[np.float64],
    inputs: NDArray[np.int64],
    outputs: NDArray[np.int64],
    where: str,
    lines: NDArray[np.int64] | None = None,
) -> None:
    """Raises `TraceError` for the first row that is out of range or out of order.

    lines: line numbers of the rows in their file; without them rows are counted from 0.
    """
    if not len(times):
        raise TraceError(f"{where}: empty trace; at least one request is needed")

    def row(index: int) -> str:
        return f"row {index}" if lines is None else f"line {lines[index]}"

    bad = _first(~np.isfinite(times) | (times < 0))
    if bad is not None:
        raise TraceError(
            f"{where}: {row(bad)}: arrival time {times[bad]:g} s: must be 0 or later; "
            "shift the times to start at 0, or drop such rows (--drop-invalid)"
        )
    for field, values in (("input_tokens", inputs), ("output_tokens", outputs)):
        bad = _first(values < 1)
        if bad is not None:
            what = "a prompt" if field == "input_tokens" else "an answer"
            raise TraceError(
                f"{where}: {row(bad)}: {field}={values[bad]}: {what} has at least 1 token; "
                "drop such rows (--drop-invalid)"
            )
    bad = _first(np.diff(times) < 0)
    if bad is not None:
        raise TraceError(
            f"{where}: {row(bad + 1)}: arrives at {times[bad + 1]:g} s, before the row above "
            f"({times[bad]:g} s); sort the rows by arrival time (--sort)"
        )


def _first(mask: NDArray[np.bool_]) -> int | None:
    hits = np.flatnonzero(mask)
    return int(hits[0]) if len(hits) else None
