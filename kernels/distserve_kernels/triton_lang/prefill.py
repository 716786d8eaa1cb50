"""Launches paged prefill attention."""

from __future__ import annotations

import torch
from torch import Tensor

from distserve_kernels.backend import PrefillMeta
from distserve_kernels.triton_lang.kernels.prefill import prefill
from distserve_kernels.triton_lang.launch import (
    FUSED,
    LOG2_E,
    NO_WINDOW,
    ceil_div,
    operand_dtype,
    packed_rows,
    padded,
)
from distserve_kernels.triton_lang.tiles import Tile


def paged_prefill(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    meta: PrefillMeta,
    scale: float,
    sliding_window: int | None,
    tile: Tile,
) -> Tensor:
    """See `AttentionBackend.prefill`; pages in the layout `TOKENS`, which hold the new tokens already."""
    if tile.m is None:
        raise ValueError(f"{tile}: a tile of prefill needs m")
    q = packed_rows(q)
    tokens, q_heads, dim = q.shape
    page, kv_heads = key_pages.shape[1:3]
    out = torch.empty((tokens, q_heads, dim), dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    group = q_heads // kv_heads
    heads = min(group, tile.m)
    tables = packed_rows(meta.block_tables)
    longest = max(meta.query_lens)
    tiles = ceil_div(longest, tile.m // heads)
    grid = (tiles * kv_heads * ceil_div(group, heads), len(meta.query_lens))
    prefill[grid](
        q,
        key_pages,
        value_pages,
        tables,
        meta.cu_query,
        meta.context_lens,
        out,
        q.stride(0),
        q.stride(1),
        tables.stride(0),
        kv_heads * dim,
        q_heads * dim,
        NO_WINDOW if sliding_window is None else sliding_window,
        scale * LOG2_E,
        GROUP=group,
        HEADS=heads,
        HEAD_DIM=dim,
        PAGE=page,
        OPERAND=operand_dtype(q.dtype, prefill),
        WINDOWED=sliding_window is not None,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_D=padded(dim),
        num_warps=tile.warps,
        **FUSED,
        num_stages=tile.stages,
    )
    return out
