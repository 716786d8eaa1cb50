"""Goodput of a running server: the highest rate at which enough requests meet both objectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distserve_tools.load.summary import Summary


@dataclass(frozen=True)
class Probe:
    """One rate with all its repeats."""

    rate_rps: float
    runs: Sequence[Summary]

    @property
    def attainment(self) -> float:
        """Over the requests of all repeats together."""
        total = sum(run.requests for run in self.runs)
        return sum(run.attainment * run.requests for run in self.runs) / total


def find_goodput(
    measure: Callable[[float], Sequence[Summary]],
    target: float,
    low_rps: float,
    high_rps: float,
    step: float = 0.08,
) -> tuple[float, list[Probe]]:
    """Bisects between a rate that should pass and one that should fail.

    The bounds are moved outwards by doubling while they do not. Ends when they are within a factor of
    1 + `step`. Returns the highest rate that passed (0 if `low_rps` / 16 fails) and all probes.
    """
    probes: list[Probe] = []

    def passes(rate: float) -> bool:
        probes.append(Probe(rate, measure(rate)))
        return probes[-1].attainment >= target

    low, high = low_rps, high_rps
    while not passes(low):
        low, high = low / 2, low
        if low < low_rps / 16:
            return 0.0, probes
    while passes(high):
        low, high = high, high * 2
    while high / low > 1 + step:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low, probes
