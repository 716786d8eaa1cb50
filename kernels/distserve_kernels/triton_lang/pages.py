"""Launches the kernels that move K and V in and out of pages (layout `TOKENS`)."""

from __future__ import annotations

from torch import Tensor

from distserve_kernels.triton_lang.kernels.pages import copy_blocks
from distserve_kernels.triton_lang.kernels.pages import store as store_kernel
from distserve_kernels.triton_lang.launch import FUSED, ceil_div, packed_rows, padded
from distserve_kernels.triton_lang.rows import copy_warps

STORE_ELEMENTS = 1024  # of K, and of V, of a program of `store`
COPY_BYTES = 8192  # of a program of `copy_blocks`


def store(k: Tensor, v: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor) -> None:
    """See `AttentionBackend.store`."""
    k, v = packed_rows(k), packed_rows(v)
    tokens, kv_heads, dim = k.shape
    if not tokens:
        return
    rows, block = tokens * kv_heads, STORE_ELEMENTS // padded(dim)  # for any number of tokens one variant
    store_kernel[(ceil_div(rows, block),)](
        k,
        v,
        key_pages,
        value_pages,
        slots,
        rows,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        KV_HEADS=kv_heads,
        HEAD_DIM=dim,
        BLOCK_R=block,
        BLOCK_D=padded(dim),
        num_warps=copy_warps(STORE_ELEMENTS * k.element_size()),
        **FUSED,
    )


def copy(
    pages: Tensor, distances: Tensor, blocks: Tensor, heads: range, buffer: Tensor, *, pack: bool
) -> None:
    """Blocks of several page tensors to a contiguous buffer (`pack`), or back. See `page_copy`.

    `pages` [num_blocks, block_size, kv_heads, D]: the first tensor; `distances` int64 [m]: elements from it
    to each of the tensors; `blocks` int64 [n]; `buffer` [m, n, block_size, len(heads), D].
    """
    _, page, kv_heads, dim = pages.shape
    count, row = blocks.shape[0], len(heads) * dim
    units = distances.shape[0] * count
    if not units or not row:
        return
    size, block = page * row, COPY_BYTES // pages.element_size()
    copy_blocks[(units, ceil_div(size, block))](
        pages,
        distances,
        blocks,
        buffer,
        count,
        page * kv_heads * dim,
        kv_heads * dim,
        heads.start * dim,
        SIZE=size,
        ROW=row,
        PACK=pack,
        BLOCK=block,
        num_warps=4,
        **FUSED,
    )
