"""Latency objectives, and how many requests of a simulation meet them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from distserve.core.parsing import ConfigError
from distserve_planner.simulator.records import Outcome

BATCH = 100  # neighbouring requests whose results are taken together to see how far they depend on each other


@dataclass(frozen=True)
class Slo:
    """TTFT and TPOT objective in seconds, and the share of requests that must meet **both**.

    separate: the authors' rule instead: each objective by itself at that percentile, strictly below.
    """

    ttft_s: float
    tpot_s: float
    attainment: float = 0.9
    separate: bool = False

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)}: must be above 0 seconds")
        if not 0 < self.attainment < 1:
            raise ConfigError(f"attainment={self.attainment}: a share between 0 and 1, for example 0.9")

    def scaled(self, scale: float) -> Slo:
        """Both objectives times `scale` (below 1 is tighter)."""
        return replace(self, ttft_s=self.ttft_s * scale, tpot_s=self.tpot_s * scale)


def wilson(share: float, count: float, z: float) -> tuple[float, float]:
    """Wilson score interval of a share seen in `count` independent trials; `z` standard deviations wide."""
    if count <= 0:
        return 0.0, 1.0
    centre = share + z * z / (2 * count)
    spread = z * sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def independent_requests(met: NDArray[np.bool_]) -> float:
    """How many independent requests tell as much as these, which queued behind each other.

    From the variance of the means of batches of `BATCH` neighbours against that of independent ones.
    """
    batches = len(met) // BATCH
    if batches < 4:
        return len(met) / 2
    share = float(met.mean())
    if share in (0.0, 1.0):
        return float(len(met))
    means = met[: batches * BATCH].reshape(batches, BATCH).mean(axis=1)
    excess = float(means.var(ddof=1)) * BATCH / (share * (1 - share))
    return len(met) / max(1.0, excess)


@dataclass(frozen=True)
class Attainment:
    """Shares of requests that meet TTFT, TPOT, and both; `low` to `high` is the interval of the last.

    `ttft_s` and `tpot_s` are the percentiles at the target attainment.
    """

    requests: int
    ttft: float
    tpot: float
    both: float
    low: float
    high: float
    ttft_s: float
    tpot_s: float

    def missed(self, slo: Slo) -> str:
        """Which objective is further from its target: "TTFT" or "TPOT"."""
        return "TTFT" if self.ttft - self.tpot <= 0 else "TPOT"

    def describe(self, slo: Slo) -> str:
        """One line for people: shares and percentiles beside the objectives."""
        p = f"P{100 * slo.attainment:g}"
        return (
            f"TTFT {100 * self.ttft:.1f} % ({p} {seconds(self.ttft_s)} of {seconds(slo.ttft_s)}), "
            f"TPOT {100 * self.tpot:.1f} % ({p} {seconds(self.tpot_s)} of {seconds(slo.tpot_s)}), "
            f"both {100 * self.both:.1f} %"
        )


def attainment(outcome: Outcome, slo: Slo, z: float = 1.96) -> Attainment:
    """How a window of requests did. Under `separate`, `both` is the worse of the two shares."""
    ttft, tpot = outcome.ttft_s, outcome.tpot_s
    met_ttft, met_tpot = ttft <= slo.ttft_s, tpot <= slo.tpot_s
    met = met_ttft & met_tpot
    if slo.separate:
        met = met_ttft if met_ttft.mean() <= met_tpot.mean() else met_tpot
    share = float(met.mean())
    low, high = wilson(share, independent_requests(met), z)
    return Attainment(
        len(outcome),
        float(met_ttft.mean()),
        float(met_tpot.mean()),
        share,
        low,
        high,
        percentile(ttft, slo.attainment),
        percentile(tpot, slo.attainment),
    )


def percentile(values: NDArray[np.float64], share: float) -> float:
    """Linear interpolation between order statistics; infinite once a refused request takes part."""
    ordered = np.sort(values)
    position = share * (len(ordered) - 1)
    index = int(position)
    below, above = float(ordered[index]), float(ordered[min(index + 1, len(ordered) - 1)])
    weight = position - index
    return below if weight == 0 else below + (above - below) * weight


def seconds(value: float) -> str:
    """12.3 ms, 1.23 s."""
    if value == float("inf"):
        return "never"
    return f"{1000 * value:.3g} ms" if value < 1 else f"{value:.3g} s"
