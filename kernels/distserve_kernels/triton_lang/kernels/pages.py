"""Writing new K and V into pages, and moving blocks between pages and contiguous buffers."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])  # varies while serving
def store(
    k,  # [T, KV_HEADS, HEAD_DIM]
    v,
    keys,  # [num_blocks, block_size, KV_HEADS, HEAD_DIM]
    values,
    slots,  # int64 [T]: block * block_size + offset; negative: skipped
    rows,  # T * KV_HEADS
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """BLOCK_R heads, of one token or several, per program. Grid (ceil(rows / BLOCK_R),)."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    token = (row // KV_HEADS).to(tl.int64)
    head = row % KV_HEADS
    slot = tl.load(slots + token, mask=row < rows, other=-1)
    column = tl.arange(0, BLOCK_D)
    mask = (slot >= 0)[:, None] & (column < HEAD_DIM)[None, :]
    from_k = (token * k_stride + head * k_head_stride)[:, None] + column[None, :]
    from_v = (token * v_stride + head * v_head_stride)[:, None] + column[None, :]
    key = tl.load(k + from_k, mask=mask, other=0.0)
    value = tl.load(v + from_v, mask=mask, other=0.0)
    to = (slot * (KV_HEADS * HEAD_DIM) + head * HEAD_DIM)[:, None] + column[None, :]
    tl.store(keys + to, key, mask=mask)
    tl.store(values + to, value, mask=mask)


@triton.jit(do_not_specialize=["count"])  # varies while serving
def copy_blocks(
    pages,  # the first of several tensors [num_blocks, PAGE, kv_heads, D]
    members,  # int64 [members]: distance of each tensor from the first one, in elements
    blocks,  # int64 [n]: block ids
    buffer,  # [members, n, PAGE, heads, D] contiguous
    count,  # n
    block_stride,  # PAGE * kv_heads * D
    token_stride,  # kv_heads * D
    head_offset,  # first head * D
    SIZE: tl.constexpr,  # PAGE * ROW
    ROW: tl.constexpr,  # heads * D
    PACK: tl.constexpr,  # pages -> buffer, else buffer -> pages
    BLOCK: tl.constexpr,
):
    """One block's heads of one tensor, BLOCK elements per program. Grid (members * n, ceil(SIZE / BLOCK))."""
    unit = tl.program_id(0).to(tl.int64)
    # All distances are multiples of an allocation's alignment; saying so gives 16-byte accesses.
    distance = tl.multiple_of(tl.load(members + unit // count), 16)
    block = tl.load(blocks + unit % count)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < SIZE
    in_page = element // ROW * token_stride + element % ROW
    page = pages + distance + block * block_stride + head_offset + in_page
    packed = buffer + unit * SIZE + element
    if PACK:
        tl.store(packed, tl.load(page, mask=inside), mask=inside)
    else:
        tl.store(page, tl.load(packed, mask=inside), mask=inside)
