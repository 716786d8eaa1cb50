"""Has the workload changed? Tests of two samples with a bound on false alarms per day.

A reference period is compared with the latest windows, over several lengths of "latest", so that a jump is
seen at once and a slow change in the end. Per comparison five tests: lengths in, lengths out and their ratio
(Kolmogorov-Smirnov; the ratio sees a change of their dependence), the rate (exact, and corrected for
burstiness), and queueing delay (rank test of bin means, upwards only: a shorter queue is no alarm).

With T tests an evaluation and E evaluations a day each test runs at level a / (T E), so at most `a` false
alarms a day are expected, however the tests depend on each other (union bound). Each level holds for lengths
that are independent, and for arrivals and queues whose bins are: bursts shorter than a few bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from distserve.core.parsing import ConfigError
from distserve_planner.watch.history import Floats, History

DAY_S = 86_400.0
LENGTH_TESTS = ("input length", "output length", "output / input")
TESTS = (*LENGTH_TESTS, "rate", "queueing delay")
_MOST = 4000  # lengths in one test; more are thinned evenly
_FEWEST = 20  # requests, below which lengths are not tested
_FEWEST_BINS = 4
_BINS_TO_JOIN = (1, 2, 4)  # bursts longer than a bin show in longer bins


@dataclass(frozen=True)
class DriftRule:
    """window_s: time between evaluations. scales: how many windows "latest" means. reference: windows of it
    that are kept. bins: per window, for rate and queue."""

    false_alarms_per_day: float = 0.05
    window_s: float = 60.0
    scales: tuple[int, ...] = (1, 5, 15)
    reference: int = 60
    bins: int = 4

    def __post_init__(self) -> None:
        for name in ("false_alarms_per_day", "window_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)}: must be above 0")
        if not self.scales or min(self.scales) < 1:
            raise ConfigError(f"scales={list(self.scales)}: whole numbers of windows, at least 1 each")
        if self.bins < 1 or self.reference < 2:
            raise ConfigError(f"bins={self.bins}, reference={self.reference}: at least 1 and 2")

    @property
    def level(self) -> float:
        """Of one test."""
        return self.false_alarms_per_day * self.window_s / DAY_S / (len(TESTS) * len(self.scales))


@dataclass(frozen=True)
class Evidence:
    """One test that rejects "nothing has changed": mean before and after, for people."""

    test: str
    p: float
    level: float
    before: float
    after: float
    latest_s: float

    def __str__(self) -> str:
        return (
            f"{self.test}: {self.before:.4g} before, {self.after:.4g} over the last {self.latest_s:g} s "
            f"(p = {self.p:.1e}, level {self.level:.1e})"
        )


def drift(history: History, reference: tuple[float, float], now_s: float, rule: DriftRule) -> list[Evidence]:
    """The tests that reject at their level; empty: no drift.

    reference: start and end of the reference period. What of it lies in a "latest" period is left out there.
    """
    found = []
    for scale in rule.scales:
        latest_s = scale * rule.window_s
        start, end = reference[0], min(reference[1], now_s - latest_s)
        if end - start < 2 * rule.window_s:
            continue
        before, after = history.between(start, end), history.between(now_s - latest_s, now_s)
        bin_s = rule.window_s / rule.bins
        sides = (_Side(before, start, end, bin_s), _Side(after, now_s - latest_s, now_s, bin_s))
        for test, p, old, new in _compare(*sides):
            if p < rule.level:
                found.append(Evidence(test, p, rule.level, old, new, latest_s))
    return found


class _Side:
    """One sample: its requests, and their counts and mean queueing delay per bin."""

    def __init__(self, history: History, start_s: float, end_s: float, bin_s: float) -> None:
        self.history, self.seconds = history, end_s - start_s
        number = max(1, int((end_s - start_s) / bin_s + 1e-6))
        edges = end_s - bin_s * np.arange(number, -1, -1)
        self.counts = np.histogram(history.arrival_s, edges)[0].astype(np.float64)
        known = ~np.isnan(history.queue_s)
        index = np.searchsorted(edges, history.arrival_s[known], side="right") - 1
        inside = (index >= 0) & (index < number)
        sums = np.bincount(index[inside], history.queue_s[known][inside], number)
        seen = np.bincount(index[inside], minlength=number)
        self.queue_means: Floats = sums[seen > 0] / seen[seen > 0]


def _compare(before: _Side, after: _Side) -> list[tuple[str, float, float, float]]:
    out = []
    old, new = before.history.served, after.history.served
    if min(len(old), len(new)) >= _FEWEST:
        columns = (
            (old.input_tokens, new.input_tokens),
            (old.output_tokens, new.output_tokens),
            (old.output_tokens / old.input_tokens, new.output_tokens / new.input_tokens),
        )
        for test, (one, other) in zip(LENGTH_TESTS, columns, strict=True):
            out.append((test, ks_p(one, other), float(one.mean()), float(other.mean())))
    rates = (before.counts.sum() / before.seconds, after.counts.sum() / after.seconds)
    out.append((TESTS[3], rate_p(before.counts, after.counts), float(rates[0]), float(rates[1])))
    one, other = before.queue_means, after.queue_means
    if min(len(one), len(other)) >= _FEWEST_BINS:
        p = float(stats.mannwhitneyu(other, one, alternative="greater", method="asymptotic").pvalue)
        out.append((TESTS[4], p if np.isfinite(p) else 1.0, float(one.mean()), float(other.mean())))
    return out


def ks_p(one: NDArray[np.generic], other: NDArray[np.generic]) -> float:
    """Two-sample Kolmogorov-Smirnov; ties make it conservative."""
    a, b = _thinned(one), _thinned(other)
    return float(stats.ks_2samp(a, b, method="asymp").pvalue)


def rate_p(before: Sequence[float] | Floats, after: Sequence[float] | Floats) -> float:
    """Two-sided p of equal rates from counts in bins of one length.

    The exact conditional test of two Poisson counts (Przyborowski and Wilenski 1940), and an F test of the
    deviance over the dispersion of the bins around their own side's mean (quasi-Poisson): the larger p of the
    two, so that bursts are not taken for a change.
    """
    x, y = np.asarray(before, np.float64), np.asarray(after, np.float64)
    total = x.sum() + y.sum()
    if total == 0:
        return 1.0
    share = len(y) / (len(x) + len(y))
    exact = float(stats.binomtest(round(y.sum()), round(total), share).pvalue)
    spread, freedom = _dispersion(x, y)
    deviance = 2 * (_term(x.sum(), (1 - share) * total) + _term(y.sum(), share * total))
    return max(exact, float(stats.f.sf(deviance / spread, 1, freedom)))


def _dispersion(x: Floats, y: Floats) -> tuple[float, int]:
    """Variance over mean of the bins, at least 1, and its degrees of freedom: the worst of some lengths."""
    worst = (1.0, max(1, len(x) + len(y) - 2))
    for join in _BINS_TO_JOIN:
        squares, freedom = 0.0, 0
        for side in (x, y):
            whole = side[len(side) % join :].reshape(-1, join).sum(axis=1)
            if len(whole) > 1 and whole.mean() > 0:
                squares += float(((whole - whole.mean()) ** 2).sum() / whole.mean())
                freedom += len(whole) - 1
        if freedom >= 2 * _FEWEST_BINS and squares / freedom > worst[0]:
            worst = (squares / freedom, freedom)
    return worst


def _term(seen: float, expected: float) -> float:
    return float(seen * log(seen / expected)) if seen > 0 else 0.0


def _thinned(values: NDArray[np.generic]) -> NDArray[np.generic]:
    step = -(-len(values) // _MOST)
    return values[::step]
