"""Fits coefficients to measured steps: least squares on relative error, as the paper's authors do.

Coefficients are kept at or above zero (non-negative least squares), and the linear part may bend at a few
sizes: one line over memory-bound and compute-bound steps fits neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distserve.core.parsing import ConfigError
from distserve_planner.coefficients import DecodePiece, HeadCost, PrefillPiece
from distserve_planner.least_squares import relative_nnls
from distserve_planner.profile_file import Residual

POOR_P50, POOR_P95 = 0.10, 0.30  # above these a fit is called poor
_WORTH = 0.85  # a further bend must bring the squared error below this share
_CLOSE = 0.005  # root mean square relative error at which no bend is looked for
_MOST_BENDS = 3
_POINTS_PER_BEND = 3
_SHORT_PIECE = 64  # tokens; in longer ones the head is lost in the noise
_HEAD_AT_MOST = 0.9  # of the fastest step, whatever the noise says

NO_HEAD = HeadCost()

Floats = NDArray[np.float64]


class PrefillPoint(NamedTuple):
    """One measured prefill batch: prompt tokens, their squares summed, prompts, seconds."""

    tokens: int
    sum_sq: int
    requests: int
    seconds: float


class PiecePoint(NamedTuple):
    """A measured piece of a prompt: tokens, what it adds to the squares, seconds where a token is sampled
    from its last one, and where not: without the head.
    """

    tokens: int
    sum_sq: int
    seconds: float
    inner_s: float


class DecodePoint(NamedTuple):
    """One measured decode step: requests, context tokens in all (new ones included), seconds."""

    batch: int
    context_tokens: int
    seconds: float


@dataclass(frozen=True)
class PrefillFit:
    pieces: tuple[PrefillPiece, ...]
    residual: Residual


@dataclass(frozen=True)
class DecodeFit:
    pieces: tuple[DecodePiece, ...]
    residual: Residual


def fit_head(pieces: Sequence[PiecePoint], decodes: Sequence[DecodePoint]) -> HeadCost:
    """What a step takes longer because it samples: the median over short pieces; nothing without any."""
    differences = [p.seconds - p.inner_s for p in pieces if p.tokens <= _SHORT_PIECE]
    if not differences:
        return NO_HEAD
    fastest = min([p.seconds for p in pieces] + [d.seconds for d in decodes])
    return HeadCost(min(max(0.0, float(np.median(differences))), _HEAD_AT_MOST * fastest))


def with_pieces(points: Sequence[PrefillPoint], pieces: Sequence[PiecePoint]) -> list[PrefillPoint]:
    """Both as prompts to fit: a piece that samples is like a prompt with tokens before it."""
    return [*points, *(PrefillPoint(p.tokens, p.sum_sq, 1, p.seconds) for p in pieces)]


def fit_prefill(points: Sequence[PrefillPoint], tp: int = 1, head: HeadCost = NO_HEAD) -> PrefillFit:
    """Fits base, per token (bending), per squared token and per prompt, beside the head. At least 4 points.

    Raises `ConfigError` for too few points or times that are not positive.
    """
    data = _checked(points, "prefill", 4)
    tokens, squares, requests, seconds = data.T
    head_s = head.base_s + head.per_request_s * requests
    others = np.stack([np.ones_like(tokens), squares, requests], axis=1)
    line = _best_line(tokens, others, seconds - head_s)
    base, square, request = line.others
    pieces = tuple(
        PrefillPiece(base + start, slope, square, request, bound) for start, slope, bound in line.segments()
    )
    return PrefillFit(pieces, residual(tp, "prefill", line.predicted + head_s, seconds))


def fit_decode(points: Sequence[DecodePoint], tp: int = 1, head: HeadCost = NO_HEAD) -> DecodeFit:
    """Fits base, per request (bending) and per context token, beside the head. At least 3 points.

    Raises `ConfigError` as `fit_prefill` does.
    """
    data = _checked(points, "decode", 3)
    batch, context, seconds = data.T
    head_s = head.base_s + head.per_request_s * batch
    line = _best_line(batch, np.stack([np.ones_like(batch), context], axis=1), seconds - head_s)
    base, slope_context = line.others
    pieces = tuple(
        DecodePiece(base + start, slope_context, slope, bound) for start, slope, bound in line.segments()
    )
    return DecodeFit(pieces, residual(tp, "decode", line.predicted + head_s, seconds))


def measured_lm(lengths_seconds: Sequence[tuple[int, float]]) -> int:
    """`Lm`: shortest single prompt with 95 % of the best measured tokens/s (paper, section 4.3).

    Between measured lengths the rate is taken as linear. Raises `ConfigError` without points.
    """
    if not lengths_seconds:
        raise ConfigError("Lm: no prefill of a single prompt was measured")
    points = sorted(lengths_seconds)
    rates = [(length, length / seconds) for length, seconds in points]
    wanted = 0.95 * max(rate for _, rate in rates)
    if rates[0][1] >= wanted:
        return rates[0][0]
    for (low, low_rate), (high, high_rate) in pairwise(rates):
        if high_rate >= wanted:
            return round(low + (high - low) * (wanted - low_rate) / (high_rate - low_rate))
    raise AssertionError("the best rate is among the points")


def poor_fits(residuals: Sequence[Residual]) -> list[str]:
    """A warning for every fit whose relative error is above `POOR_P50` or `POOR_P95`."""
    return [
        f"poor fit: {r.phase} at tp={r.tp} is off by {r.p50:.0%} (median), {r.p95:.0%} (p95) over "
        f"{r.points} points; measure on an idle machine, or with more repetitions"
        for r in residuals
        if r.p50 > POOR_P50 or r.p95 > POOR_P95
    ]


@dataclass(frozen=True)
class _Line:
    """A fit: other coefficients, and slopes between knots (the last one open)."""

    knots: tuple[float, ...]
    slopes: tuple[float, ...]
    others: tuple[float, ...]
    predicted: Floats
    error: float

    def segments(self) -> list[tuple[float, float, int | None]]:
        """(offset, slope, upper bound): the value at x is offset + slope x."""
        found: list[tuple[float, float, int | None]] = []
        height = low = 0.0
        for slope, bound in zip(self.slopes, [*self.knots, None], strict=True):
            found.append((height - slope * low, slope, None if bound is None else int(bound)))
            if bound is not None:
                height, low = height + slope * (bound - low), bound
        return found


def _best_line(size: Floats, others: Floats, seconds: Floats) -> _Line:
    """Adds bends one by one, each where it helps most, while each is worth it."""
    best = _fit_line(size, others, seconds, ())
    candidates = [float(v) for v in np.unique(size)[:-1]]
    while len(best.knots) < _MOST_BENDS and best.error > len(seconds) * _CLOSE**2:
        tries = [
            _fit_line(size, others, seconds, tuple(sorted({*best.knots, knot})))
            for knot in candidates
            if knot not in best.knots and _supported(size, (*best.knots, knot))
        ]
        better = min(tries, key=lambda line: line.error, default=best)
        if better.error >= _WORTH * best.error:
            break
        best = better
    return best


def _supported(size: Floats, knots: Sequence[float]) -> bool:
    """Each piece between the knots has points enough to tell its slope."""
    edges = [-np.inf, *sorted(knots), np.inf]
    return all(
        int(np.sum((size > low) & (size <= high))) >= _POINTS_PER_BEND for low, high in pairwise(edges)
    )


def _fit_line(size: Floats, others: Floats, seconds: Floats, knots: tuple[float, ...]) -> _Line:
    edges = [0.0, *knots, np.inf]
    parts = [np.clip(size, low, high) - low for low, high in pairwise(edges)]
    features = np.concatenate([np.stack(parts, axis=1), others], axis=1)
    solution = relative_nnls(features, seconds)
    predicted: Floats = features @ solution
    count = len(parts)
    return _Line(
        knots,
        tuple(float(v) for v in solution[:count]),
        tuple(float(v) for v in solution[count:]),
        predicted,
        float(np.sum((predicted / seconds - 1) ** 2)),
    )


def _checked(points: Sequence[tuple[float, ...]], phase: str, fewest: int) -> Floats:
    if len(points) < fewest:
        raise ConfigError(f"{phase}: {len(points)} points measured; a fit needs at least {fewest}")
    data = np.array(points, dtype=np.float64)
    if not (data[:, -1] > 0).all():
        raise ConfigError(f"{phase}: a measured time of {data[:, -1].min():g} s; all must be above 0")
    return data


def residual(tp: int, phase: str, predicted: Floats, seconds: Floats) -> Residual:
    """Relative errors of a fit: median and 95th percentile."""
    error = np.abs(predicted / seconds - 1)
    p50, p95 = (float(v) for v in np.percentile(error, [50, 95]))
    return Residual(tp, phase, round(p50, 4), round(p95, 4), len(seconds))
