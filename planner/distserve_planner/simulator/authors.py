"""Constants and closed forms of the authors' event model (see `distserve_planner.simdistserve`)."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from distserve_planner.coefficients import Degree

ITERATION_S = 2e-3
ITERATION_PER_TOKEN_S = 1e-7
PREFILL_STAGE_S = 1e-3  # times pp
DECODE_TOKENS = 50_000


@dataclass(frozen=True)
class AuthorsPhase:
    """Shape and times of an instance under these rules. kv_tokens is the budget of a prefill batch."""

    degree: Degree
    pp: int
    kv_tokens: int

    def stage_s(self, size: int, first: bool) -> tuple[float, float]:
        """Seconds of a decode stage as (fixed, per context token), contexts without the new token."""
        piece = self.degree.decode_piece(size)
        slope = piece.per_context_token_s / self.pp
        fixed = (piece.base_s + (piece.per_context_token_s + piece.per_request_s) * size) / self.pp
        if first:
            return fixed + ITERATION_S, slope + ITERATION_PER_TOKEN_S
        return fixed, slope


def span_s(rounds: int, fixed: float, slope: float, context: int, size: int) -> float:
    """Rounds of one batch whose context grows by `size` each."""
    return rounds * (fixed + slope * (context + size * (rounds - 1) / 2))


def whole_rounds(seconds: float, fixed: float, slope: float, context: int, size: int) -> int:
    """Rounds that end within `seconds`."""
    half = slope * size / 2
    linear = fixed + slope * context - half
    rounds = int(
        (sqrt(linear * linear + 4 * half * seconds) - linear) / (2 * half) if half > 0 else seconds / linear
    )
    if span_s(rounds + 1, fixed, slope, context, size) <= seconds:
        return rounds + 1
    return rounds - 1 if rounds and span_s(rounds, fixed, slope, context, size) > seconds else rounds


def prefill_times(phase: AuthorsPhase, arrival: list[float], inputs: list[int]) -> list[float]:
    """When each prompt's prefill ends: everything that waits goes in one batch, up to the budget.

    Raises `ValueError` for a prompt above the budget, on which the original spins for ever.
    """
    pp, budget = phase.pp, phase.kv_tokens
    piece = phase.degree.prefill_piece(1)
    base, token, square = piece.base_s / pp, piece.per_token_s / pp, piece.per_token_sq_s / pp
    free = [0.0] * pp
    ends = [0.0] * len(arrival)
    first, total = 0, len(arrival)
    while first < total:
        start = max(arrival[first], free[0])
        tokens = squares = 0
        last = first
        while last < total and arrival[last] <= start and tokens + inputs[last] <= budget:
            tokens += inputs[last]
            squares += inputs[last] * inputs[last]
            last += 1
        if last == first:
            raise ValueError(f"a prompt of {inputs[first]} tokens exceeds the budget of {budget}")
        took = base + token * tokens + square * squares + PREFILL_STAGE_S * pp
        leaves = start + took + ITERATION_S + ITERATION_PER_TOKEN_S * tokens
        free[0] = leaves
        for stage in range(1, pp):
            leaves = max(leaves, free[stage]) + took
            free[stage] = leaves
        ends[first:last] = [leaves] * (last - first)
        first = last
    return ends
