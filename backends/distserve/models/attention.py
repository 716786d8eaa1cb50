"""What a model asks of whoever runs it: attention over the cached tokens of each sequence of the batch."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from distserve_kernels.decoder import DecodeRows


class AttentionContext(Protocol):
    """One step's batch: knows which rows belong to which sequence and where their K and V go."""

    def run(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        sliding_window: int | None,
        rotation: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Stores k, v of the new tokens and attends, causally, to them and to what was stored before.

        With `rotation` (cos and sin of the tokens' positions, fp32 [T, half]; see `ops.rotary`) q and k are
        rotated before, in place.

        `layer` counts from 0 on this rank (its index in the rank's KV cache). q [T, q_heads, D], k and v
        [T, kv_heads, D], all heads of this rank only; rows may be strided (slices of one qkv tensor).
        Scores are `scale * q k`. With `sliding_window` w a token at position p sees positions p - w + 1 ..
        p. Returns [T, q_heads, D], contiguous.
        """
        ...

    def decode_rows(self) -> DecodeRows | None:
        """The batch for a call that does all layers at once; None if there is more in it than one token of
        each sequence, or if the pages are not laid out for that.
        """
        ...
