"""Rotary position embedding (RoFormer, arXiv 2104.09864) and the store of K and V, in one pass."""

import triton
import triton.language as tl


@triton.jit
def rotary_store(
    q,  # [T, Q_HEADS, HEAD_DIM], rotated in place
    k,  # [T, KV_HEADS, HEAD_DIM], rotated in place
    v,  # [T, KV_HEADS, HEAD_DIM]; unused without STORE
    cos,  # fp32 [T, HALF]
    sin,
    slots,  # int64 [T]: block * block_size + offset, negative: not stored; unused without STORE
    keys,  # pages [num_blocks, block_size, KV_HEADS, HEAD_DIM]; unused without STORE
    values,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    STORE: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,  # pairs are (i, i + HALF); channels from 2 * HALF on pass unchanged
    BLOCK_H: tl.constexpr,  # heads per program
    BLOCK_C: tl.constexpr,  # HALF, padded to a power of 2
    BLOCK_D: tl.constexpr,  # HEAD_DIM, padded to a power of 2
):
    """Grid (T, parts): programs of q heads, then of k heads, then (with STORE) of v heads."""
    Q_PARTS: tl.constexpr = (Q_HEADS + BLOCK_H - 1) // BLOCK_H
    KV_PARTS: tl.constexpr = (KV_HEADS + BLOCK_H - 1) // BLOCK_H
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    line = tl.arange(0, BLOCK_H)
    if part < Q_PARTS:
        rotate(
            q + token * q_stride, q_head_stride, part * BLOCK_H + line, Q_HEADS, cos, sin, token,
            q, -1, False, HEAD_DIM, HALF, BLOCK_C, BLOCK_D,
        )  # fmt: skip
    elif part < Q_PARTS + KV_PARTS:
        head = (part - Q_PARTS) * BLOCK_H + line
        slot = token
        if STORE:
            slot = tl.load(slots + token)
        rotate(
            k + token * k_stride, k_head_stride, head, KV_HEADS, cos, sin, token,
            keys + slot * (KV_HEADS * HEAD_DIM), slot, STORE, HEAD_DIM, HALF, BLOCK_C, BLOCK_D,
        )  # fmt: skip
    elif STORE:
        slot = tl.load(slots + token)
        if slot >= 0:
            head = (part - Q_PARTS - KV_PARTS) * BLOCK_H + line
            to = values + slot * (KV_HEADS * HEAD_DIM)
            copy_heads(v + token * v_stride, v_head_stride, to, head, KV_HEADS, 0, HEAD_DIM, BLOCK_D)


@triton.jit
def rotate(
    heads, head_stride, head, head_count, cos, sin, token,
    page_row, slot,
    STORE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rotates some heads of one token in place and, with STORE, copies them to their row in the pages."""
    pair = tl.arange(0, BLOCK_C)
    c = tl.load(cos + token * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    s = tl.load(sin + token * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    mask = (head < head_count)[:, None] & (pair < HALF)[None, :]
    at = (head * head_stride)[:, None] + pair[None, :]
    first = tl.load(heads + at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(heads + at + HALF, mask=mask, other=0.0).to(tl.float32)
    dtype = heads.dtype.element_ty
    rotated = (first * c - second * s).to(dtype)
    turned = (second * c + first * s).to(dtype)
    tl.store(heads + at, rotated, mask=mask)
    tl.store(heads + at + HALF, turned, mask=mask)
    if STORE:  # noqa: SIM102 - a constant, not to be joined to what only the device knows
        if slot >= 0:
            to = page_row + (head * HEAD_DIM)[:, None] + pair[None, :]
            tl.store(to, rotated, mask=mask)
            tl.store(to + HALF, turned, mask=mask)
            if 2 * HALF < HEAD_DIM:
                copy_heads(heads, head_stride, page_row, head, head_count, 2 * HALF, HEAD_DIM, BLOCK_D)


@triton.jit
def copy_heads(
    heads, head_stride, page_row, head, head_count, first,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Copies the channels from `first` on of some heads of one token to their row in the pages."""
    column = tl.arange(0, BLOCK_D)
    mask = (head < head_count)[:, None] & ((column >= first) & (column < HEAD_DIM))[None, :]
    row = tl.load(heads + (head * head_stride)[:, None] + column[None, :], mask=mask, other=0.0)
    tl.store(page_row + (head * HEAD_DIM)[:, None] + column[None, :], row, mask=mask)
