"""Times of one instance (tp, pp), precomputed for the simulator, which asks millions of times."""

from __future__ import annotations

import math
from dataclasses import dataclass

from distserve.core.parsing import ConfigError
from distserve.core.shapes import layer_range
from distserve_planner.cluster import Link
from distserve_planner.coefficients import DecodePiece, Degree, PrefillPiece

TABLE_BATCH = 256  # decode coefficients are tabulated up to this batch first, and on demand beyond


@dataclass(frozen=True, slots=True)
class Overhead:
    """What an iteration costs beyond the model, on the first stage: scheduling, launching, messages.

    `prefill_stage_s` is added to every stage of a prefill (the authors add pp ms, so that a prompt pays
    pp^2 ms; 0 elsewhere).
    """

    iteration_s: float = 0.0
    per_context_token_s: float = 0.0
    prefill_stage_s: float = 0.0

    @classmethod
    def simdistserve(cls, pp: int) -> Overhead:
        """The authors' simulator: 2 ms + 0.1 us per context token an iteration, pp ms on a prefill stage."""
        return cls(2e-3, 1e-7, pp * 1e-3)


class InstanceLatency:
    """Seconds of the stages of one instance. Plain floats in, plain floats out; not to be changed.

    A stage time is the slowest stage's, which sets the throughput; `*_total_s` is one batch's way through
    all stages with the hops between them. Context counts include the token that the step computes.
    """

    __slots__ = (
        "_batches", "_fixed", "_head_base", "_head_request", "_hop_latency", "_hop_token", "_kv_token_bytes",
        "_over", "_over_token", "_pieces", "_prefill", "_prefill_extra", "_slope", "_total_factor",
        "decode_base", "degree", "lm_tokens", "pp", "predicted", "tp",
    )  # fmt: skip

    def __init__(
        self,
        degree: Degree,
        *,
        pp: int,
        num_layers: int,
        overhead: Overhead,
        hop_bytes_per_token: float,
        stage_link: Link | None,
        kv_bytes_per_token: int,
        lm_tokens: int,
    ) -> None:
        """hop_bytes_per_token: activation bytes that cross a stage boundary for one token, all copies."""
        share = len(layer_range(num_layers, pp, 0)) / num_layers
        if pp > 1 and stage_link is None:
            raise ConfigError(f"pp={pp}: stage_link is needed to cost the hops between stages")
        self.degree = degree
        self.tp, self.pp, self.predicted, self.lm_tokens = degree.tp, pp, degree.predicted, lm_tokens
        self._prefill = tuple(_prefill_row(p, share) for p in degree.prefill)
        self._pieces = tuple(_scaled_decode(p, share) for p in degree.decode)
        self._head_base, self._head_request = degree.head.base_s, degree.head.per_request_s
        self._over, self._over_token = overhead.iteration_s, overhead.per_context_token_s
        self._prefill_extra = overhead.prefill_stage_s
        self._total_factor = 1.0 / share  # the sum over stages, when they differ in layers
        hops = stage_link if pp > 1 else None
        self._hop_latency = hops.latency_s if hops else 0.0
        self._hop_token = hop_bytes_per_token / hops.bandwidth_bytes_s if hops else 0.0
        self._kv_token_bytes = kv_bytes_per_token
        self._fixed: list[float] = []
        self._slope: list[float] = []
        self._batches = 0
        self._grow(TABLE_BATCH)

    def overhead_s(self, context_tokens: float) -> float:
        """Per-iteration overhead, which stage and total times include once."""
        return self._over + self._over_token * context_tokens

    def prefill_stage_s(
        self, sum_tokens: float, sum_sq_tokens: float, num_requests: float, ends: float | None = None
    ) -> float:
        """Slowest stage of one prefill batch: its prompt tokens, their squares, its prompts.

        ends: how many of the prompts are complete with it (all). Pieces of others don't need the head.
        """
        layers = self._prefill_layers(sum_tokens, sum_sq_tokens, num_requests)
        return layers + self._extra(num_requests if ends is None else ends, sum_tokens)

    def prefill_total_s(
        self, sum_tokens: float, sum_sq_tokens: float, num_requests: float, ends: float | None = None
    ) -> float:
        """One prefill batch through all stages, hops included."""
        layers = self._prefill_layers(sum_tokens, sum_sq_tokens, num_requests) - self._prefill_extra
        samples = num_requests if ends is None else ends
        return (
            layers * self._total_factor
            + self.pp * self._prefill_extra
            + self.overhead_s(sum_tokens)
            + self._head_s(samples)
            + (self.pp - 1) * self.hop_s(sum_tokens)
        )

    def decode_stage_s(self, batch: int, context_tokens: float) -> float:
        """Slowest stage of one decode step."""
        if batch >= self._batches:
            self._grow(batch)
        return self._fixed[batch] + self._slope[batch] * context_tokens

    def decode_span_s(self, batch: int, context_tokens: float, steps: int) -> float:
        """`steps` decode steps, the context growing by one token per request and step (a closed form).

        k F + S (k c + B k (k - 1) / 2), with F and S the fixed part and the context slope for B requests.
        """
        if batch >= self._batches:
            self._grow(batch)
        context = steps * context_tokens + batch * (steps * (steps - 1) // 2)
        return steps * self._fixed[batch] + self._slope[batch] * context

    def decode_steps_within(self, batch: int, context_tokens: float, seconds: float) -> int:
        """Whole steps that end within `seconds`: the largest k with decode_span_s(.., k) <= seconds."""
        if batch >= self._batches:
            self._grow(batch)
        half = 0.5 * self._slope[batch] * batch
        first = self._fixed[batch] + self._slope[batch] * context_tokens
        linear = first - half
        if seconds < first:
            return 0
        if half > 0:
            root = (math.sqrt(linear * linear + 4 * half * seconds) - linear) / (2 * half)
        else:
            root = seconds / first
        steps = int(root)
        if self.decode_span_s(batch, context_tokens, steps + 1) <= seconds:
            return steps + 1
        return steps if self.decode_span_s(batch, context_tokens, steps) <= seconds else steps - 1

    def decode_total_s(self, batch: int, context_tokens: float) -> float:
        """One decode step of one micro-batch through all stages, hops included."""
        piece = self._piece(batch)
        return (
            piece.seconds(batch, context_tokens) * self._total_factor
            + self.overhead_s(context_tokens)
            + self._head_s(batch)
            + (self.pp - 1) * self.hop_s(batch)
        )

    def mixed_stage_s(
        self,
        prefill_tokens: float,
        sum_sq: float,
        batch: int,
        context_tokens: float,
        num_prefills: float = 1,
        ends: float | None = None,
    ) -> float:
        """Slowest stage of a step that computes prompt chunks beside `batch` decoding requests.

        The GEMMs see all tokens at once and read the weights once: the prefill curve at prompt plus decode
        tokens, but no less than the decode step without context, plus the decode's attention. A chunk of n
        tokens after s computed ones adds (s + n)^2 - s^2 to `sum_sq`, so that a prompt's chunks sum to its
        length squared. Extension of appendix A for chunked prefill (Sarathi-Serve, OSDI'24).
        """
        if not prefill_tokens:
            return self.decode_stage_s(batch, context_tokens)
        if not batch:
            return self.prefill_stage_s(prefill_tokens, sum_sq, num_prefills, ends)
        layers = self._prefill_layers(prefill_tokens + batch, sum_sq, num_prefills)
        piece = self._piece(batch)
        alone = piece.base_s + piece.per_request_s * batch
        attention = piece.per_context_token_s * context_tokens
        samples = batch + (num_prefills if ends is None else ends)
        extra = self._extra(samples, prefill_tokens + context_tokens)
        return (layers if layers > alone else alone) + attention + extra

    def hop_s(self, tokens: float) -> float:
        """Activations of `tokens` tokens to the next stage; 0 for pp = 1."""
        return self._hop_latency + self._hop_token * tokens

    def transfer_s(self, tokens: float, link: Link, lanes: int = 1) -> float:
        """KV of `tokens` tokens to a decode instance over `lanes` such links at once, undisturbed."""
        return link.latency_s + self._kv_token_bytes * tokens / (link.bandwidth_bytes_s * lanes)

    def _prefill_layers(self, tokens: float, sum_sq: float, requests: float) -> float:
        for limit, base, per_token, per_sq, per_request in self._prefill:
            if tokens <= limit:
                return (
                    base + per_token * tokens + per_sq * sum_sq + per_request * requests + self._prefill_extra
                )
        raise ConfigError(f"tp={self.tp}: no prefill coefficients")

    def _extra(self, samples: float, tokens: float) -> float:
        """Beyond the layers, on the stage that has most of it: overhead first, the head last."""
        over = self._over + self._over_token * tokens
        head = self._head_s(samples)
        if self.pp == 1:
            return over + head
        return over if over > head else head

    def _head_s(self, samples: float) -> float:
        """Of a step that samples so many tokens. Below 1: of the mean of steps that do and that don't."""
        return (self._head_base if samples >= 1 else samples * self._head_base) + self._head_request * samples

    def _piece(self, batch: int) -> DecodePiece:
        for piece in self._pieces:
            if piece.max_batch is None or batch <= piece.max_batch:
                return piece
        raise ConfigError(f"tp={self.tp}: no decode coefficients")

    def _grow(self, batch: int) -> None:
        """Tabulates fixed part and context slope up to at least `batch`.

        With pp > 1 the overhead's context slope is kept beside the larger of head and constant overhead.
        """
        if not self._pieces:
            return
        for size in range(self._batches, max(batch, 2 * self._batches) + 1):
            piece = self._piece(size)
            self._fixed.append(piece.base_s + piece.per_request_s * size + self._extra(size, 0))
            self._slope.append(piece.per_context_token_s + self._over_token)
        self._batches = len(self._fixed)


def _prefill_row(piece: PrefillPiece, share: float) -> tuple[float, float, float, float, float]:
    limit = math.inf if piece.max_tokens is None else float(piece.max_tokens)
    return (
        limit, piece.base_s * share, piece.per_token_s * share, piece.per_token_sq_s * share,
        piece.per_request_s * share,
    )  # fmt: skip


def _scaled_decode(piece: DecodePiece, share: float) -> DecodePiece:
    return DecodePiece(
        piece.base_s * share, piece.per_context_token_s * share, piece.per_request_s * share, piece.max_batch
    )
