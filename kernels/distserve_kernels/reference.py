"""Paged attention in plain torch, one sequence at a time in fp32: right for every shape, and the twin of
every kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distserve_kernels.backend import PrefillMeta
from distserve_kernels.layout import PageLayout, default_layout


def unsupported(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    """None: serves every shape."""
    return None


def make(device: torch.device) -> ReferenceBackend:
    """The reference in the device's own page layout, so that it is a drop-in for its kernels."""
    return ReferenceBackend(default_layout(device))


def attention(
    q: Tensor, k: Tensor, v: Tensor, start: int, scale: float, sliding_window: int | None = None
) -> Tensor:
    """Causal attention of one sequence: q [T, Hq, D] at positions start.., k and v [L, Hkv, D] at 0.. ->
    [T, Hq, D].
    """
    group = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("thd,lhd->htl", q.float(), keys) * scale
    scores = scores.masked_fill(~visible(q.shape[0], k.shape[0], start, sliding_window, q.device), -torch.inf)
    return torch.einsum("htl,lhd->thd", scores.softmax(-1), values).to(q.dtype)


def visible(queries: int, keys: int, start: int, sliding_window: int | None, device: torch.device) -> Tensor:
    """Boolean [queries, keys]: may the query at position start + i see the key at position j?"""
    position = torch.arange(start, start + queries, device=device).unsqueeze(1)
    key = torch.arange(keys, device=device)
    seen = key <= position
    return seen if sliding_window is None else seen & (key > position - sliding_window)


class ReferenceBackend:
    """`AttentionBackend` by gathering each sequence's blocks."""

    name = "reference"
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
        for table, length, start in zip(meta.block_tables, meta.query_lens, meta.starts, strict=True):
            keys, values = self._context(key_pages, value_pages, table, start + length)
            part = q[row : row + length]
            out[row : row + length] = attention(part, keys, values, start, scale, sliding_window)
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
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        for i, length in enumerate(context_lens.tolist()):
            if length:
                keys, values = self._context(key_pages, value_pages, block_tables[i], length)
                out[i] = attention(q[i : i + 1], keys, values, length - 1, scale, sliding_window)[0]
        return out

    def _context(
        self, key_pages: Tensor, value_pages: Tensor, table: Tensor, length: int
    ) -> tuple[Tensor, Tensor]:
        blocks = -(-length // self.layout.block_size(value_pages))
        keys, values = self.layout.read(key_pages, value_pages, table[:blocks].long())
        return keys[:length], values[:length]
