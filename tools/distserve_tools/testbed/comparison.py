"""Tables' arithmetic: attainment by rate, noise of repeats, goodput, measured against predicted."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from distserve_planner.slo import Slo
from distserve_tools.testbed.runs import Run


@dataclass(frozen=True)
class Pair:
    """One system at one rate; attainment over all repeats, `spread` is their standard deviation."""

    rate_rps: float
    measured: float
    predicted: float | None
    repeats: int
    requests: int
    spread: float | None

    @property
    def error(self) -> float | None:
        """Predicted less measured, in points (0.01 of attainment)."""
        return None if self.predicted is None else 100 * (self.predicted - self.measured)


def pairs(runs: Iterable[Run], system: str, slo: Slo) -> list[Pair]:
    """By rising rate."""
    by_rate: dict[float, list[Run]] = {}
    for run in runs:
        if run.system == system:
            by_rate.setdefault(run.rate_rps, []).append(run)
    return [_pair(rate, by_rate[rate], slo) for rate in sorted(by_rate)]


def _pair(rate: float, runs: Sequence[Run], slo: Slo) -> Pair:
    shares = [run.attainment(slo) for run in runs]
    known = all(run.predicted is not None for run in runs)
    predicted = statistics.mean(run.predicted_attainment(slo) for run in runs) if known else None
    spread = statistics.stdev(shares) if len(shares) > 1 else None
    return Pair(
        rate, statistics.mean(shares), predicted, len(runs), sum(len(r.records) for r in runs), spread
    )


def goodput_rps(curve: Sequence[tuple[float, float]], target: float) -> float:
    """The highest rate with attainment of at least `target`, between measured rates by straight lines.

    curve: (rate, attainment) by rising rate. 0 if the first rate misses; the last rate if all meet it.
    """
    best = 0.0
    for (low, share), (high, after) in itertools.pairwise(curve):
        if share < target:
            return best
        best = high if after >= target else low + (high - low) * (share - target) / (share - after)
    if len(curve) == 1 and curve[0][1] >= target:
        best = curve[0][0]
    return best


@dataclass(frozen=True)
class LatencyError:
    """Paired by request: |predicted - measured| / measured, median over requests; and of the P90s, signed."""

    ttft_p50: float
    tpot_p50: float
    ttft_p90: float
    tpot_p90: float


def latency_error(runs: Iterable[Run]) -> LatencyError | None:
    """Over all requests of the runs that have a prediction; None without any."""
    measured: dict[str, list[float]] = {"ttft": [], "tpot": []}
    expected: dict[str, list[float]] = {"ttft": [], "tpot": []}
    for run in runs:
        if run.predicted is None:
            continue
        for i, record in enumerate(run.records):
            if record.ok and record.output_tokens > 1:
                measured["ttft"].append(record.ttft_s)
                measured["tpot"].append(record.tpot_s)
                expected["ttft"].append(float(run.predicted.ttft_s[i]))
                expected["tpot"].append(float(run.predicted.tpot_s[i]))
    if not measured["ttft"]:
        return None
    m = {name: np.array(values) for name, values in measured.items()}
    e = {name: np.array(values) for name, values in expected.items()}
    middle = {name: float(np.median(np.abs(e[name] - m[name]) / m[name])) for name in m}
    tail = {name: float(np.percentile(e[name], 90) / np.percentile(m[name], 90) - 1) for name in m}
    return LatencyError(middle["ttft"], middle["tpot"], tail["ttft"], tail["tpot"])


def winner(goodputs: Mapping[str, float], tie: float = 0.05) -> str:
    """The system with the highest goodput; several within `tie` of it are named together."""
    best = max(goodputs.values())
    if best <= 0:
        return "none"
    return " = ".join(name for name, value in goodputs.items() if value >= (1 - tie) * best)


def repeat_noise(runs: Sequence[Run], systems: Sequence[str], slo: Slo) -> float | None:
    """Standard deviation of attainment between repeats of a run, in points; root mean square over systems."""
    spreads = [
        pair.spread for system in systems for pair in pairs(runs, system, slo) if pair.spread is not None
    ]
    return 100 * float(np.sqrt(np.mean(np.square(spreads)))) if spreads else None
