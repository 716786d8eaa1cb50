"""Fits find the coefficients that made the points, and say when they do not."""

from __future__ import annotations

import numpy as np
import pytest

from distserve.core.parsing import ConfigError
from distserve_planner.coefficients import Degree
from distserve_planner.fit import (
    DecodePoint,
    PiecePoint,
    PrefillPoint,
    fit_decode,
    fit_head,
    fit_prefill,
    measured_lm,
    poor_fits,
    with_pieces,
)
from distserve_planner.profile_file import Residual

LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)


def prefill_points(bend: int | None, noise: float = 0.0) -> list[PrefillPoint]:
    rng = np.random.default_rng(1)
    points = []
    for length in LENGTHS:
        for n in (1, 2, 4):
            t, t2 = n * length, n * length**2
            linear = 1e-5 * t if bend is None else max(1e-5 * bend, 1e-5 * t)
            seconds = 4e-3 + linear + 3e-9 * t2 + 2e-4 * n
            points.append(PrefillPoint(t, t2, n, seconds * (1 + noise * rng.standard_normal())))
    return points


def test_prefill_coefficients_are_recovered() -> None:
    fit = fit_prefill(prefill_points(None))
    (piece,) = fit.pieces
    found = (piece.base_s, piece.per_token_s, piece.per_token_sq_s, piece.per_request_s)
    assert found == pytest.approx((4e-3, 1e-5, 3e-9, 2e-4), rel=1e-6)
    assert fit.residual.p95 < 1e-6


def test_a_bend_from_memory_to_compute_bound_is_found() -> None:
    points = prefill_points(256)
    fit = fit_prefill(points)
    assert len(fit.pieces) == 2
    assert fit.pieces[0].max_tokens == 256
    degree = Degree(1, prefill=fit.pieces)
    for p in points:
        assert degree.prefill_seconds(p.tokens, p.sum_sq, p.requests) == pytest.approx(p.seconds, rel=1e-6)


def test_noise_does_not_invent_bends_and_shows_in_the_residual() -> None:
    fit = fit_prefill(prefill_points(None, noise=0.05))
    assert 0.01 < fit.residual.p50 < 0.06
    assert len(fit.pieces) <= 2
    assert all(p.per_token_s >= 0 and p.per_token_sq_s >= 0 for p in fit.pieces)


def test_decode_coefficients_are_recovered_with_their_bend() -> None:
    def seconds(batch: int, context: int) -> float:
        return 0.01 + 2e-4 * min(batch, 16) + 1e-3 * max(0, batch - 16) + 1e-7 * context

    points = [
        DecodePoint(b, b * c, seconds(b, b * c)) for b in (1, 2, 4, 8, 16, 32, 64, 128) for c in (64, 512)
    ]
    fit = fit_decode(points)
    assert [p.max_batch for p in fit.pieces] == [16, None]
    degree = Degree(1, decode=fit.pieces)
    assert degree.decode_seconds(100, 5000) == pytest.approx(seconds(100, 5000))
    assert degree.decode_seconds(9, 5000) == pytest.approx(seconds(9, 5000))


def test_lm_is_interpolated_between_measured_lengths() -> None:
    # 500, 900, 1000, 1000 tokens/s: 95 % of the best halfway between 128 and 256
    assert measured_lm([(64, 64 / 500), (128, 128 / 900), (256, 0.256), (512, 0.512)]) == 192
    assert measured_lm([(512, 0.5)]) == 512


def test_poor_fits_are_named() -> None:
    warnings = poor_fits([Residual(1, "prefill", 0.02, 0.1, 30), Residual(2, "decode", 0.2, 0.5, 30)])
    assert len(warnings) == 1
    assert "decode at tp=2 is off by 20%" in warnings[0]


def test_too_few_or_impossible_points_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 points measured"):
        fit_decode([DecodePoint(1, 10, 0.1), DecodePoint(2, 20, 0.1)])
    with pytest.raises(ConfigError, match="must be above 0"):
        fit_decode([DecodePoint(1, 10, 0.1), DecodePoint(2, 20, 0.0), DecodePoint(2, 20, 0.1)])


def test_the_head_is_told_from_pieces_that_sample_and_pieces_that_do_not() -> None:
    base_s, head_s = 4e-3, 6e-3
    pieces = [
        PiecePoint(n, (256 + n) ** 2 - 256**2, base_s + 1e-4 * n + head_s, base_s + 1e-4 * n)
        for n in (8, 16, 32, 64)
    ]
    pieces.append(PiecePoint(512, 1, 9.0, 2.0))  # long: one hiccup weighs more than the head
    decodes = [DecodePoint(b, b * c, 2e-3 + head_s + 1e-6 * b * c) for b in (1, 2, 4) for c in (64, 512)]
    head = fit_head(pieces, decodes)
    assert (head.base_s, head.per_request_s) == (pytest.approx(head_s), 0)
    prefill = fit_prefill(with_pieces([], pieces[:-1]), head=head)
    decode = fit_decode(decodes, head=head)
    degree = Degree(1, prefill.pieces, decode.pieces, head)
    assert degree.prefill[0].base_s == pytest.approx(base_s, rel=1e-3)
    for piece in pieces[:-1]:
        assert degree.prefill_seconds(piece.tokens, piece.sum_sq, 1) == pytest.approx(piece.seconds)
    for step in decodes:
        assert degree.decode_seconds(step.batch, step.context_tokens) == pytest.approx(step.seconds)
    assert max(prefill.residual.p95, decode.residual.p95) < 1e-3


@pytest.mark.parametrize(("sampled_s", "inner_s"), [(0.010, 0.012), (0.5, 0.01)])
def test_noise_does_not_make_a_head_below_nothing_or_above_a_whole_step(
    sampled_s: float, inner_s: float
) -> None:
    decodes = [DecodePoint(b, b * 64, 0.02 + 0.001 * b) for b in (1, 2, 4)]
    head = fit_head([PiecePoint(8, 64, sampled_s, inner_s)], decodes)
    assert 0 <= head.base_s < min(sampled_s, 0.021)
    assert fit_decode(decodes, head=head).residual.p95 < 0.01
    assert fit_head([], decodes).base_s == fit_head([], []).base_s == 0
