"""Paged prefill attention of a ragged batch (FlashAttention-2, arXiv 2307.08691, over pages).

K and V are read from the pages only: the new tokens have been stored there before, so whole prompts and
chunks that attend to earlier pages are one case. The rows of a program's tile are (query token, query head)
pairs of one KV head, heads innermost: K and V are read once for all heads that share them, and a tile spans
few tokens, which keeps little above the causal diagonal.
"""

import triton
import triton.language as tl

from distserve_kernels.triton_lang.kernels.paging import load_rows, token_slots


@triton.jit
def attend(
    query, top, total, acc,  # the tile's state of the online softmax
    keys, values, table, token_stride, scale_log2,
    positions_q, window, begin, stop,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Takes the tokens [begin, stop) into account; without MASKED all queries see all of them."""
    columns = tl.arange(0, BLOCK_D)
    for tile in range(begin, stop, BLOCK_N):
        positions = tile + tl.arange(0, BLOCK_N)
        live = positions < stop
        rows = token_slots(table, tile, positions, live, PAGE, BLOCK_N).to(tl.int64) * token_stride
        key = load_rows(keys, rows, columns, live, not MASKED, HEAD_DIM, BLOCK_D).to(OPERAND)
        scores = tl.dot(query, tl.trans(key), input_precision="tf32x3") * scale_log2
        if MASKED:
            # This hides also what is not live, from every row that will be stored.
            distance = positions_q[:, None] - positions[None, :]
            far = distance.to(tl.uint32, bitcast=True)  # a negative distance is one, too
            seen = far < window.to(tl.uint32) if WINDOWED else distance >= 0
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        value = load_rows(values, rows, columns, live, not MASKED, HEAD_DIM, BLOCK_D)
        weights_in = weights.to(value.dtype).to(OPERAND)
        acc = tl.dot(weights_in, value.to(OPERAND), acc * shrink[:, None], input_precision="tf32x3")
        total = total * shrink + tl.sum(weights, 1)
        top = higher
    return top, total, acc


@triton.jit(do_not_specialize=["table_stride", "window"])  # they vary while serving
def prefill(
    q,  # [T, q_heads, HEAD_DIM]
    keys,  # [num_blocks, PAGE, kv_heads, HEAD_DIM]
    values,
    tables,  # int32 [n, max_blocks]
    cu_query,  # int32 [n + 1]: rows of q of each sequence
    lengths,  # int32 [n]: tokens in the pages, the queries' own included
    out,  # [T, q_heads, HEAD_DIM], contiguous
    q_stride,
    q_head_stride,
    table_stride,
    token_stride,  # kv_heads * HEAD_DIM
    out_stride,  # q_heads * HEAD_DIM
    window,
    scale_log2,  # scale * log2(e)
    GROUP: tl.constexpr,  # query heads per KV head
    HEADS: tl.constexpr,  # of these, heads in one tile
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    OPERAND: tl.constexpr,  # dtype of the products' operands
    WINDOWED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (ceil(longest / (BLOCK_M // HEADS)) * kv_heads * ceil(GROUP / HEADS), n).

    Tiles and heads share the first axis, as the others end at 65,535. Programs of one tile are neighbours.
    """
    TOKENS: tl.constexpr = BLOCK_M // HEADS
    HEAD_BLOCKS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    head_blocks = token_stride // HEAD_DIM * HEAD_BLOCKS
    head_block = tl.program_id(0) % head_blocks
    kv_head = head_block // HEAD_BLOCKS
    sequence = tl.program_id(1)
    # The last tile has most to do and starts first.
    tile_start = (tl.num_programs(0) // head_blocks - 1 - tl.program_id(0) // head_blocks) * TOKENS
    row0 = tl.load(cu_query + sequence)
    queries = tl.load(cu_query + sequence + 1) - row0
    if tile_start >= queries:
        return
    length = tl.load(lengths + sequence)
    start = length - queries

    # Where the tile's rows are: a 64-bit scalar and 32-bit offsets, which are half the registers.
    line = tl.arange(0, BLOCK_M)
    token = line // HEADS
    head = line % HEADS
    head0 = kv_head * GROUP + (head_block % HEAD_BLOCKS) * HEADS
    real = (line < TOKENS * HEADS) & (tile_start + token < queries) & (head0 + head < (kv_head + 1) * GROUP)
    row = (row0 + tile_start).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    query = load_rows(
        q + row * q_stride + head0 * q_head_stride,
        token * q_stride + head * q_head_stride,
        columns,
        real,
        False,
        HEAD_DIM,
        BLOCK_D,
    ).to(OPERAND)
    table = tables + sequence.to(tl.int64) * table_stride
    keys += kv_head * HEAD_DIM
    values += kv_head * HEAD_DIM
    positions = start + tile_start + token

    # Below every score, yet finite: with a window a row may see nothing of a tile, and nothing before it.
    top = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    stop = tl.minimum(start + tile_start + TOKENS, length)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(start + tile_start - window + 1, 0) // BLOCK_N * BLOCK_N
    else:
        whole = (start + tile_start + 1) // BLOCK_N * BLOCK_N
        top, total, acc = attend(
            query, top, total, acc, keys, values, table, token_stride, scale_log2, positions, window,
            0, whole, False, False, HEAD_DIM, PAGE, OPERAND, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        begin = whole
    top, total, acc = attend(
        query, top, total, acc, keys, values, table, token_stride, scale_log2, positions, window,
        begin, stop, True, WINDOWED, HEAD_DIM, PAGE, OPERAND, BLOCK_N, BLOCK_D,
    )  # fmt: skip

    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # only rows of the padding see nothing
    to = out + row * out_stride + head0 * HEAD_DIM
    to += (token * out_stride + head * HEAD_DIM)[:, None] + columns[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=real[:, None] & (columns < HEAD_DIM)[None, :])
