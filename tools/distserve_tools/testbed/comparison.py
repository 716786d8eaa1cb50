"""Tables' arithmetic: attainment by rate, noise of repeats, goodput, measured against predicted."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from distserve_planner.slo import Slo
from distserve_tools.testbed.prediction import Predicted
from distserve_tools.testbed.runs import Run

POINTS = 2.0  # a prediction may be off by so much, or by twice the noise of repeats


@dataclass(frozen=True)
class Pair:
    """One system at one rate; attainment over all repeats, `spread` is their standard deviation."""

    rate_rps: float
    measured: float
    predicted: float | None
    predicted_at_pace: float | None
    repeats: int
    requests: int
    spread: float | None

    @property
    def error(self) -> float | None:
        """Predicted less measured, in points (0.01 of attainment)."""
        return None if self.predicted is None else 100 * (self.predicted - self.measured)

    @property
    def error_at_pace(self) -> float | None:
        """The same with the paces that the engines had."""
        return None if self.predicted_at_pace is None else 100 * (self.predicted_at_pace - self.measured)


def pairs(runs: Iterable[Run], system: str, slo: Slo) -> list[Pair]:
    """By rising rate."""
    by_rate: dict[float, list[Run]] = {}
    for run in runs:
        if run.system == system:
            by_rate.setdefault(run.rate_rps, []).append(run)
    return [_pair(rate, by_rate[rate], slo) for rate in sorted(by_rate)]


def _pair(rate: float, runs: Sequence[Run], slo: Slo) -> Pair:
    shares = [run.attainment(slo) for run in runs]
    return Pair(
        rate,
        statistics.mean(shares),
        _attained((run.predicted for run in runs), slo),
        _attained((run.predicted_at_pace for run in runs), slo),
        len(runs),
        sum(len(r.records) for r in runs),
        statistics.stdev(shares) if len(shares) > 1 else None,
    )


def _attained(predictions: Iterable[Predicted | None], slo: Slo) -> float | None:
    """Mean over runs; None unless all have been predicted."""
    shares = [None if seen is None else float(seen.met(slo).mean()) for seen in predictions]
    return None if None in shares else statistics.mean(share for share in shares if share is not None)


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


def latency_error(runs: Iterable[Run], at_pace: bool = False) -> LatencyError | None:
    """Over all requests of the runs that have a prediction, with the terms or with the paces of the engines;
    None without any.
    """
    measured: dict[str, list[float]] = {"ttft": [], "tpot": []}
    expected: dict[str, list[float]] = {"ttft": [], "tpot": []}
    for run in runs:
        predicted = run.predicted_at_pace if at_pace else run.predicted
        if predicted is None:
            continue
        for i, record in enumerate(run.records):
            if record.ok and record.output_tokens > 1:
                measured["ttft"].append(record.ttft_s)
                measured["tpot"].append(record.tpot_s)
                expected["ttft"].append(float(predicted.ttft_s[i]))
                expected["tpot"].append(float(predicted.tpot_s[i]))
    if not measured["ttft"]:
        return None
    m = {name: np.array(values) for name, values in measured.items()}
    e = {name: np.array(values) for name, values in expected.items()}
    middle = {name: float(np.median(np.abs(e[name] - m[name]) / m[name])) for name in m}
    tail = {name: float(np.percentile(e[name], 90) / np.percentile(m[name], 90) - 1) for name in m}
    return LatencyError(middle["ttft"], middle["tpot"], tail["ttft"], tail["tpot"])


def best_systems(goodputs: Mapping[str, float], tie: float = 0.05) -> list[str]:
    """The system with the highest goodput and those within `tie` of it; none if that is 0."""
    best = max(goodputs.values())
    return [name for name, value in goodputs.items() if best > 0 and value >= (1 - tie) * best]


def winner(goodputs: Mapping[str, float]) -> str:
    """`best_systems` in a word."""
    return " = ".join(best_systems(goodputs)) or "none"


def repeat_noise(runs: Sequence[Run], systems: Sequence[str], slo: Slo) -> float | None:
    """Standard deviation of attainment between repeats of a run, in points; root mean square over systems."""
    spreads = [
        pair.spread for system in systems for pair in pairs(runs, system, slo) if pair.spread is not None
    ]
    return 100 * float(np.sqrt(np.mean(np.square(spreads)))) if spreads else None


def allowed_points(runs: Sequence[Run], systems: Sequence[str], slo: Slo) -> float:
    """How far a prediction may be off: 2 points, or twice the noise of repeats, where that is more."""
    return max(POINTS, 2 * (repeat_noise(runs, systems, slo) or 0.0))
