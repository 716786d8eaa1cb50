"""The plainest `AttentionContext`: one sequence, K and V of all tokens so far in dense tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from distserve_kernels import ops


class DenseAttention:
    """Causal attention of one sequence that is fed in order, in one piece or in several."""

    def __init__(self) -> None:
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> K, V [tokens, kv_heads, D]

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
        if rotation is not None:
            ops.rotary(q, k, *rotation)
        if layer in self.cache:
            k, v = (torch.cat(pair) for pair in zip(self.cache[layer], (k, v), strict=True))
        self.cache[layer] = (k, v)
        group = q.shape[1] // k.shape[1]
        keys, values = (t.repeat_interleave(group, dim=1).float() for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
        age = torch.arange(len(k))[None, :] - torch.arange(len(k) - len(q), len(k))[:, None]
        hidden = age > 0
        if sliding_window is not None:
            hidden |= age <= -sliding_window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype).contiguous()

    def decode_rows(self) -> None:
        """Its tokens are not in pages."""
