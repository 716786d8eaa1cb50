"""Coefficients of a tensor-parallel degree that was not measured, from those that were.

Every term of a step either divides by tp (GEMMs, weight and KV reads), stays (launches, norms) or, for the
all-reduce bytes, goes as (tp - 1)/tp. All three lie in the span of {1, 1/tp}: T(tp) = q + p / tp.
Between two measured degrees the line in 1/tp through both is used, which is a mean of their coefficients
with positive weights. Beyond them q, p >= 0 are fitted to all measured degrees on relative error. From a
single degree q/p cannot be told, and `SERIAL_SHARE` is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distserve.core.parsing import ConfigError
from distserve_planner.coefficients import DecodePiece, Degree, HeadCost, PrefillPiece
from distserve_planner.least_squares import relative_nnls

# q / (q + p) of OPT-13B's prefill and decode times at tp = 1, 2, 4 on A100 (distserve.md coefficients).
SERIAL_SHARE = 0.2

Phase = Literal["prefill", "decode"]
Point = tuple[float, ...]  # features of a step: (1, t, t2, n) or (1, c, B)
PointsIn = Callable[[float, float], list[Point]]  # steps whose size (tokens, batch) lies in (low, high]


class Piece(NamedTuple):
    bound: float  # tokens or batch; inf if open
    coefficients: tuple[float, ...]


class Curve(NamedTuple):
    """One phase of one degree."""

    tp: int
    pieces: list[Piece]

    def at(self, size: float) -> tuple[float, ...]:
        return next(p.coefficients for p in self.pieces if size <= p.bound)


def predict_degree(degrees: Sequence[Degree], tp: int) -> Degree:
    """Degree `tp`, marked as predicted, in full or in the phase that the measured one lacks.

    Raises `ConfigError` if no degree was measured in a phase.
    """
    own = next((d for d in degrees if d.tp == tp), None)
    prefill = own.prefill if own and own.prefill else _prefill(degrees, tp)
    decode = own.decode if own and own.decode else _decode(degrees, tp)
    head = own.head if own and own.prefill else _head(degrees, tp)
    return Degree(tp, prefill, decode, head, predicted=True, note=_note(degrees, own, tp))


def _note(degrees: Sequence[Degree], own: Degree | None, tp: int) -> str:
    parts = []
    for phase in ("prefill", "decode"):
        if own and getattr(own, phase):
            continue
        measured = sorted(d.tp for d in degrees if getattr(d, phase))
        around = [
            max((m for m in measured if m < tp), default=0),
            min((m for m in measured if m > tp), default=0),
        ]
        used = around if all(around) else measured
        parts.append(f"{phase} from tp={', '.join(map(str, used))}")
    return f"tp={tp} predicted: {'; '.join(parts)}"


def _prefill(degrees: Sequence[Degree], tp: int) -> tuple[PrefillPiece, ...]:
    curves = [
        Curve(
            d.tp,
            [
                Piece(_bound(p.max_tokens), (p.base_s, p.per_token_s, p.per_token_sq_s, p.per_request_s))
                for p in d.prefill
            ],
        )
        for d in degrees
        if d.prefill
    ]
    pieces = _at_degree(curves, tp, _prefill_points, "prefill")
    return tuple(PrefillPiece(c[0], c[1], c[2], c[3], max_tokens=_limit(bound)) for bound, c in pieces)


def _decode(degrees: Sequence[Degree], tp: int) -> tuple[DecodePiece, ...]:
    curves = [
        Curve(
            d.tp,
            [
                Piece(_bound(p.max_batch), (p.base_s, p.per_context_token_s, p.per_request_s))
                for p in d.decode
            ],
        )
        for d in degrees
        if d.decode
    ]
    pieces = _at_degree(curves, tp, _decode_points, "decode")
    return tuple(DecodePiece(c[0], c[1], c[2], max_batch=_limit(bound)) for bound, c in pieces)


def _head(degrees: Sequence[Degree], tp: int) -> HeadCost:
    curves = [
        Curve(d.tp, [Piece(math.inf, (d.head.base_s, d.head.per_request_s))]) for d in degrees if d.prefill
    ]
    base, per_request = _at_degree(curves, tp, _head_points, "head")[0].coefficients
    return HeadCost(base, per_request)


def _at_degree(curves: list[Curve], tp: int, points: PointsIn, phase: str) -> list[Piece]:
    if not curves:
        raise ConfigError(f"tp={tp}: no degree has measured {phase} coefficients to predict it from")
    if len(curves) == 1:
        factor = _single_factor(curves[0].tp, tp)
        return [Piece(p.bound, tuple(factor * c for c in p.coefficients)) for p in curves[0].pieces]
    below = max((c for c in curves if c.tp < tp), key=lambda c: c.tp, default=None)
    above = min((c for c in curves if c.tp > tp), key=lambda c: c.tp, default=None)
    if below and above:
        return _between(below, above, tp)
    nearest = below or above
    assert nearest is not None
    return _beyond(curves, nearest, tp, points)


def _single_factor(measured: int, tp: int) -> float:
    def relative(degree: int) -> float:
        return SERIAL_SHARE + (1 - SERIAL_SHARE) / degree

    return relative(tp) / relative(measured)


def _between(below: Curve, above: Curve, tp: int) -> list[Piece]:
    weight = (1 / tp - 1 / above.tp) / (1 / below.tp - 1 / above.tp)
    bounds = sorted({p.bound for p in below.pieces} | {p.bound for p in above.pieces})
    return [
        Piece(
            bound,
            tuple(
                weight * low + (1 - weight) * high
                for low, high in zip(below.at(bound), above.at(bound), strict=True)
            ),
        )
        for bound in bounds
    ]


def _beyond(curves: list[Curve], nearest: Curve, tp: int, points: PointsIn) -> list[Piece]:
    pieces, low = [], 0.0
    for bound, _ in nearest.pieces:
        features = points(low, bound)
        rows, times = [], []
        for curve in curves:
            coefficients = np.array(curve.at(bound))
            for feature in features:
                base = np.array(feature)
                rows.append(np.concatenate([base, base / curve.tp]))
                times.append(float(coefficients @ base))
        pieces.append(Piece(bound, _fit_split(np.array(rows), np.array(times), tp)))
        low = bound
    return pieces


def _fit_split(rows: NDArray[np.float64], times: NDArray[np.float64], tp: int) -> tuple[float, ...]:
    """q + p / tp of every feature, q and p >= 0 fitted on relative error; times that are not positive
    (a fit outside its range) carry no information and are left out."""
    sound = times > 0
    if not sound.any():
        return (0.0,) * (rows.shape[1] // 2)
    stays, divides = np.split(relative_nnls(rows[sound], times[sound]), 2)
    return tuple(float(q + p / tp) for q, p in zip(stays, divides, strict=True))


def _prefill_points(low: float, high: float) -> list[Point]:
    found: list[Point] = [
        (1.0, float(n * length), float(n * length**2), float(n))
        for length, n in product((16, 64, 256, 512, 1024, 2048), (1, 2, 4))
        if low < n * length <= high
    ]
    return found or [(1.0, high, high * high, 1.0)]


def _decode_points(low: float, high: float) -> list[Point]:
    batches = [b for b in (1, 2, 4, 8, 16, 32, 64, 128, 256) if low < b <= high] or [int(high)]
    return [(1.0, float(b * context), float(b)) for b, context in product(batches, (64, 512, 1024, 2048))]


def _head_points(low: float, high: float) -> list[Point]:
    return [(1.0, 1.0), (1.0, 64.0)]


def _bound(limit: int | None) -> float:
    return math.inf if limit is None else float(limit)


def _limit(bound: float) -> int | None:
    return None if math.isinf(bound) else int(bound)
