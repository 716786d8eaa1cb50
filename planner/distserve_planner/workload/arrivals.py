"""Arrival processes: Poisson, and gamma with a coefficient of variation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from distserve.core.parsing import ConfigError
from distserve_planner.workload.trace import Trace


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Independent gaps: exponential (`poisson`, cv = 1) or gamma with coefficient of variation `cv`.

    rate_rps: the rate at which the trace was recorded; None for a workload without its own rate.
    """

    process: Literal["poisson", "gamma"] = "poisson"
    cv: float = 1.0
    rate_rps: float | None = None

    def __post_init__(self) -> None:
        if not self.cv > 0:
            raise ConfigError(f"cv={self.cv}: must be above 0")
        if self.process == "poisson" and self.cv != 1.0:
            raise ConfigError(f"cv={self.cv}: a poisson process has cv=1; use process: gamma")
        if self.rate_rps is not None and not self.rate_rps > 0:
            raise ConfigError(f"rate_rps={self.rate_rps}: must be above 0")

    def unit_times(self, generator: np.random.Generator, count: int) -> NDArray[np.float64]:
        """Arrival times at one request per second on average, the first at 0.

        Divided by a rate they are that rate's arrivals, so that all rates share their random numbers. Gaps
        are gamma(1/cv^2, cv^2), as in the authors' simulator; fewer requests are a prefix of more.
        """
        if self.process == "poisson":
            gaps = generator.standard_exponential(max(0, count - 1))
        else:
            shape = 1 / self.cv**2
            gaps = generator.standard_gamma(shape, max(0, count - 1)) / shape
        return np.concatenate([np.zeros(min(1, count)), np.cumsum(gaps)])


def fit_arrivals(trace: Trace) -> Arrivals:
    """Rate and CV of the gaps, by moments; Poisson if the CV is within three standard errors of 1.

    For exponential gaps the standard error of the sample CV is about 1 / sqrt(n). A trace of lengths only,
    or one too short to tell (fewer than 3 gaps), counts as Poisson.
    """
    if not trace.timed or trace.duration_s <= 0:
        return Arrivals()
    gaps = np.diff(trace.arrival_s)
    if len(gaps) < 3:
        return Arrivals(rate_rps=trace.rate_rps)
    cv = float(gaps.std(ddof=1) / gaps.mean())
    if abs(cv - 1) < 3 / math.sqrt(len(gaps)) or cv <= 0:
        return Arrivals(rate_rps=trace.rate_rps)
    return Arrivals("gamma", cv, trace.rate_rps)
