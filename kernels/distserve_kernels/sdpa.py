"""Paged attention by gathering blocks and torch's scaled_dot_product_attention.

Serves every shape on every device: the fallback where no compiler (CPU) or no attention kernel (CUDA) is at
hand.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from distserve_kernels.backend import PrefillMeta
from distserve_kernels.layout import PageLayout, default_layout
from distserve_kernels.reference import visible


def unsupported(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    """None: serves every shape."""
    return None


def make(device: torch.device) -> SdpaBackend:
    return SdpaBackend(default_layout(device))


class SdpaBackend:
    """`AttentionBackend` over torch operators only."""

    name = "sdpa"
    recordable = False
    whole_layers = False
    rotary_store = None

    def __init__(self, layout: PageLayout) -> None:
        self.layout = layout
        self.kv_head_axis = layout.kv_head_axis
        self.allocate = layout.allocate
        self.store = layout.write

    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        meta: PrefillMeta,
        scale: float,
        sliding_window: int | None = None,
    ) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        row = 0
        for i, (length, start) in enumerate(zip(meta.query_lens, meta.starts, strict=True)):
            rows = slice(row, row + length)
            keys, values = k[rows], v[rows]
            if start:
                keys, values = read_context(
                    self.layout, key_pages, value_pages, meta.block_tables[i], start + length
                )
            out[rows] = _attend(q[rows], keys, values, start, scale, sliding_window)
            row += length
        return out

    def decode(
        self,
        q: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        scale: float,
        sliding_window: int | None = None,
    ) -> Tensor:
        if not q.shape[0]:
            return torch.empty(q.shape, dtype=q.dtype, device=q.device)
        keys, values = self.layout.read(key_pages, value_pages, block_tables.long())
        position = torch.arange(keys.shape[1], device=q.device)
        length = context_lens.unsqueeze(1)
        seen = position < length
        if sliding_window is not None:
            seen &= position >= length - sliding_window
        seen |= length == 0  # a padded row must have something to look at; it is zeroed below
        out = scaled_dot_product_attention(
            q.unsqueeze(2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=seen[:, None, None],
            scale=scale,
            enable_gqa=True,
        ).squeeze(2)
        return out.masked_fill(length.unsqueeze(2) == 0, 0.0)


def read_context(
    layout: PageLayout, key_pages: Tensor, value_pages: Tensor, table: Tensor, length: int
) -> tuple[Tensor, Tensor]:
    """K and V [length, kv_heads, D] of one sequence."""
    blocks = -(-length // layout.block_size(value_pages))
    keys, values = layout.read(key_pages, value_pages, table[:blocks].long())
    return keys[:length], values[:length]


def _attend(q: Tensor, k: Tensor, v: Tensor, start: int, scale: float, sliding_window: int | None) -> Tensor:
    """Causal attention of one sequence, q [T, Hq, D], k and v [start + T, Hkv, D] -> [T, Hq, D]."""
    whole = start == 0 and (sliding_window is None or q.shape[0] <= sliding_window)
    mask = None if whole else visible(q.shape[0], k.shape[0], start, sliding_window, q.device)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=whole, scale=scale, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)
