"""Coefficients of the latency model: appendix A of the paper with the model's dimensions folded in.

All times are seconds of the **whole model** on one pipeline stage (pp = 1) with tp devices:

    prefill = base + per_token * t + per_token_sq * t2 + per_request * n       (C3, C1 (4h^2+2hm), C2 3h/b)
    decode  = base + per_context_token * c + per_request * B                   (C4 (4h^2+2hm), C5 3h)

t: prompt tokens of the batch, t2: sum of squared prompt lengths, n: prompts, B: requests in the step,
c: context tokens of the step, the new ones included. Appendix A has no per-request term; the authors'
code has it for decode. Piecewise: by tokens (prefill) and by batch (decode), since a device changes from
memory bound to compute bound in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distserve.core.parsing import ConfigError


@dataclass(frozen=True, slots=True)
class PrefillPiece:
    """Prefill seconds for batches of at most `max_tokens` prompt tokens (None: any)."""

    base_s: float
    per_token_s: float
    per_token_sq_s: float = 0.0
    per_request_s: float = 0.0
    max_tokens: int | None = None

    def seconds(self, tokens: float, sum_sq: float, requests: float) -> float:
        return (
            self.base_s
            + self.per_token_s * tokens
            + self.per_token_sq_s * sum_sq
            + self.per_request_s * requests
        )


@dataclass(frozen=True, slots=True)
class DecodePiece:
    """Seconds of one decode step for at most `max_batch` requests (None: any)."""

    base_s: float
    per_context_token_s: float
    per_request_s: float = 0.0
    max_batch: int | None = None

    def seconds(self, batch: float, context_tokens: float) -> float:
        return self.base_s + self.per_context_token_s * context_tokens + self.per_request_s * batch


@dataclass(frozen=True, slots=True)
class HeadCost:
    """Final norm, LM head and sampling: on the last stage only, not divided by pp.

    Comes on top of the pieces; zero where a fit has it folded in.
    """

    base_s: float = 0.0
    per_request_s: float = 0.0

    def seconds(self, requests: float) -> float:
        return self.base_s + self.per_request_s * requests


@dataclass(frozen=True)
class Degree:
    """Coefficients for one tensor-parallel degree. `prefill` or `decode` may be empty if not measured."""

    tp: int
    prefill: tuple[PrefillPiece, ...] = ()
    decode: tuple[DecodePiece, ...] = ()
    head: HeadCost = HeadCost()
    predicted: bool = False
    note: str | None = None

    def __post_init__(self) -> None:
        if self.tp < 1:
            raise ConfigError(f"tp={self.tp}: must be at least 1")
        _check_bounds("prefill", "max_tokens", [p.max_tokens for p in self.prefill])
        _check_bounds("decode", "max_batch", [p.max_batch for p in self.decode])

    def prefill_seconds(self, tokens: float, sum_sq: float, requests: float) -> float:
        """Whole model, pp = 1, without per-iteration overhead."""
        piece = self.prefill_piece(tokens)
        return piece.seconds(tokens, sum_sq, requests) + self.head.seconds(requests)

    def decode_seconds(self, batch: int, context_tokens: float) -> float:
        """Whole model, pp = 1, without per-iteration overhead."""
        return self.decode_piece(batch).seconds(batch, context_tokens) + self.head.seconds(batch)

    def prefill_piece(self, tokens: float) -> PrefillPiece:
        for piece in self.prefill:
            if piece.max_tokens is None or tokens <= piece.max_tokens:
                return piece
        raise ConfigError(f"tp={self.tp}: no prefill coefficients")

    def decode_piece(self, batch: int) -> DecodePiece:
        for piece in self.decode:
            if piece.max_batch is None or batch <= piece.max_batch:
                return piece
        raise ConfigError(f"tp={self.tp}: no decode coefficients")


def _check_bounds(phase: str, field: str, bounds: Sequence[int | None]) -> None:
    if not bounds:
        return
    if bounds[-1] is not None:
        raise ConfigError(f"{phase}[-1].{field}={bounds[-1]}: the last piece must be open (leave it out)")
    inner = [b for b in bounds[:-1] if b is not None]
    if len(inner) != len(bounds) - 1 or inner != sorted(set(inner)):
        raise ConfigError(f"{phase}.{field}={list(bounds)}: bounds must rise, only the last is left out")
