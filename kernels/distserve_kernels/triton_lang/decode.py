"""Launches paged decode attention."""

from __future__ import annotations

import torch
from torch import Tensor

from distserve_kernels.triton_lang.kernels.decode import decode_reduce, decode_split
from distserve_kernels.triton_lang.launch import (
    FUSED,
    LOG2_E,
    NO_WINDOW,
    ceil_div,
    next_power_of_2,
    operand_dtype,
    packed_rows,
    padded,
)
from distserve_kernels.triton_lang.splits import MIN_SPLIT
from distserve_kernels.triton_lang.tiles import Tile

MOST_ROWS = 64  # query heads of one KV head that a program takes
REDUCE_SPLITS = 16  # partial results that the reduction reads at a time


def head_rows(group: int) -> int:
    """Rows of a program's tile for `group` query heads per KV head; a tensor core takes at least 16."""
    return min(max(16, next_power_of_2(group)), MOST_ROWS)


def head_blocks(group: int) -> int:
    """Programs that share the heads of one KV head."""
    return ceil_div(group, head_rows(group))


def paged_decode(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    sliding_window: int | None,
    tile: Tile,
    splits: int,
) -> Tensor:
    """See `AttentionBackend.decode`; pages in the layout `TOKENS`. `splits`: parts of each context, from
    `count_splits`. Needs no host synchronisation: the same launch serves any context lengths.
    """
    q = packed_rows(q)
    batch, q_heads, dim = q.shape
    page, kv_heads = key_pages.shape[1:3]
    out = torch.empty((batch, q_heads, dim), dtype=q.dtype, device=q.device)
    if not batch:
        return out
    group = q_heads // kv_heads
    window = NO_WINDOW if sliding_window is None else sliding_window
    partial, lse = out, out
    if splits > 1:
        partial = torch.empty((batch, q_heads, splits, dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((batch, q_heads, splits), dtype=torch.float32, device=q.device)
    tables = packed_rows(block_tables)
    decode_split[(kv_heads * head_blocks(group), batch, splits)](
        q,
        key_pages,
        value_pages,
        tables,
        context_lens,
        out,
        partial,
        lse,
        q.stride(0),
        q.stride(1),
        tables.stride(0),
        kv_heads * dim,
        splits,
        window,
        scale * LOG2_E,
        GROUP=group,
        HEAD_DIM=dim,
        PAGE=page,
        OPERAND=operand_dtype(q.dtype, decode_split),
        MIN_SPLIT=MIN_SPLIT,
        PARTIAL=splits > 1,
        BLOCK_M=head_rows(group),
        BLOCK_N=tile.n,
        BLOCK_D=padded(dim),
        num_warps=tile.warps,
        **FUSED,
        num_stages=tile.stages,
    )
    if splits > 1:
        decode_reduce[(q_heads, batch)](
            partial,
            lse,
            context_lens,
            out,
            splits,
            window,
            HEAD_DIM=dim,
            MIN_SPLIT=MIN_SPLIT,
            BLOCK_N=tile.n,
            BLOCK_D=padded(dim),
            BLOCK_S=REDUCE_SPLITS,
            num_warps=4,
            **FUSED,
        )
    return out
