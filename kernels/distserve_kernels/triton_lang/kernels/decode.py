"""Paged decode attention with split KV (Flash-Decoding, Dao et al. 2023; online softmax of arXiv 2205.14135).

One program reads one split of one sequence's context for the query heads that share a KV head: they are the
rows of a matrix product, so that tensor cores serve also where each sequence has one query. (Hopper's
warp-group product takes 64 rows; with fewer it is `mma`, fast enough for what the memory delivers.) Splits
are what fills the chip when few sequences have long contexts; `decode_reduce` adds them up.
"""

import triton
import triton.language as tl

from distserve_kernels.triton_lang.kernels.paging import load_rows, token_slots


@triton.jit
def split_span(tokens, splits, BLOCK_N: tl.constexpr, MIN_SPLIT: tl.constexpr):
    """Tokens per split, a multiple of BLOCK_N and at least MIN_SPLIT: short contexts use fewer splits."""
    span = tl.maximum((tokens + splits - 1) // splits, MIN_SPLIT)
    return (span + BLOCK_N - 1) // BLOCK_N * BLOCK_N


# Values that vary while serving must not make another variant: it would be compiled in the middle of a step.
@triton.jit(do_not_specialize=["table_stride", "splits", "window"])
def decode_split(
    q,  # [B, q_heads, HEAD_DIM]
    keys,  # [num_blocks, PAGE, kv_heads, HEAD_DIM]
    values,
    tables,  # int32 [B, max_blocks]
    lengths,  # int32 [B]
    out,  # [B, q_heads, HEAD_DIM], written if not PARTIAL
    partial,  # fp32 [B, q_heads, splits, HEAD_DIM], written if PARTIAL: normalised within the split
    lse,  # fp32 [B, q_heads, splits]: log2 of the sum of exponentials
    q_stride,
    q_head_stride,
    table_stride,
    token_stride,  # kv_heads * HEAD_DIM
    splits,
    window,
    scale_log2,  # scale * log2(e)
    GROUP: tl.constexpr,  # query heads per KV head
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    OPERAND: tl.constexpr,  # dtype of the products' operands
    MIN_SPLIT: tl.constexpr,
    PARTIAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (kv_heads * ceil(GROUP / BLOCK_M), B, splits)."""
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    kv_head = tl.program_id(0) // HEAD_BLOCKS
    sequence = tl.program_id(1)
    split = tl.program_id(2)

    length = tl.load(lengths + sequence)
    first = tl.maximum(length - window, 0)
    base = first // BLOCK_N * BLOCK_N
    span = split_span(length - base, splits, BLOCK_N, MIN_SPLIT)
    start = base + split * span
    stop = tl.minimum(start + span, length)
    if PARTIAL:  # noqa: SIM102 - a constant, not to be joined to what only the device knows
        if start >= stop:
            return

    in_group = (tl.program_id(0) % HEAD_BLOCKS) * BLOCK_M + tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + in_group
    real = in_group < GROUP
    columns = tl.arange(0, BLOCK_D)
    query = load_rows(
        q + sequence.to(tl.int64) * q_stride, heads * q_head_stride, columns, real, False, HEAD_DIM, BLOCK_D
    ).to(OPERAND)
    table = tables + sequence.to(tl.int64) * table_stride
    keys += kv_head * HEAD_DIM
    values += kv_head * HEAD_DIM

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for tile in range(start, stop, BLOCK_N):
        positions = tile + tl.arange(0, BLOCK_N)
        live = (positions < stop) & (positions >= first)
        rows = token_slots(table, tile, positions, live, PAGE, BLOCK_N).to(tl.int64) * token_stride
        key = load_rows(keys, rows, columns, live, False, HEAD_DIM, BLOCK_D).to(OPERAND)
        scores = tl.dot(query, tl.trans(key), input_precision="tf32x3") * scale_log2
        scores = tl.where(live[None, :], scores, float("-inf"))
        # Every tile has a live token, so the maximum is finite.
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        value = load_rows(values, rows, columns, live, False, HEAD_DIM, BLOCK_D)
        weights_in = weights.to(value.dtype).to(OPERAND)
        acc = tl.dot(weights_in, value.to(OPERAND), acc * shrink[:, None], input_precision="tf32x3")
        total = total * shrink + tl.sum(weights, 1)
        top = higher

    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # a length of 0 gives zeros
    at = sequence.to(tl.int64) * (tl.num_programs(0) // HEAD_BLOCKS * GROUP) + heads
    if PARTIAL:
        at = at * splits + split
        tl.store(lse + at, top + tl.log2(total), mask=real)
        to = partial + at[:, None] * HEAD_DIM + columns[None, :]
        tl.store(to, acc, mask=real[:, None] & (columns < HEAD_DIM)[None, :])
    else:
        to = out + at[:, None] * HEAD_DIM + columns[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=real[:, None] & (columns < HEAD_DIM)[None, :])


@triton.jit(do_not_specialize=["splits", "window"])
def decode_reduce(
    partial,  # fp32 [B, q_heads, splits, HEAD_DIM]
    lse,  # fp32 [B, q_heads, splits]
    lengths,  # int32 [B]
    out,  # [B, q_heads, HEAD_DIM]
    splits,
    window,
    HEAD_DIM: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,  # as in decode_split
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Weighs the splits of one head by their share of the softmax's denominator. Grid (q_heads, B)."""
    sequence = tl.program_id(1)
    length = tl.load(lengths + sequence)
    base = tl.maximum(length - window, 0) // BLOCK_N * BLOCK_N
    span = split_span(length - base, splits, BLOCK_N, MIN_SPLIT)
    used = (length - base + span - 1) // span

    at = sequence.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    columns = tl.arange(0, BLOCK_D)
    inside = columns < HEAD_DIM
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for chunk in range(0, used, BLOCK_S):
        split = chunk + tl.arange(0, BLOCK_S)
        live = split < used
        size = tl.load(lse + at * splits + split, mask=live, other=float("-inf"))
        higher = tl.maximum(top, tl.max(size, 0))
        weights = tl.exp2(size - higher)
        rows = (at * splits + split) * HEAD_DIM
        part = tl.load(
            partial + rows[:, None] + columns[None, :], mask=live[:, None] & inside[None, :], other=0.0
        )
        shrink = tl.exp2(top - higher)
        acc = acc * shrink + tl.sum(part * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        top = higher
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out + at * HEAD_DIM + columns, acc.to(out.dtype.element_ty), mask=inside)
